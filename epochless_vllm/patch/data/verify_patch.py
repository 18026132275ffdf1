#!/usr/bin/env python3
"""Verify the Epochless patch of vLLM, and a vLLM tree against it. Standard library only, imports nothing of ours.

    python verify_patch.py                        the vLLM installed for this interpreter
    python verify_patch.py --site-packages PATH   an installed wheel, or one unpacked
    python verify_patch.py --tree PATH            a git checkout or an unpacked sdist

Trust this file and the rest follows. Nothing is written, and no code of vLLM or of the patch is run:

    1 pin         pin.json has the sha256 this file embeds
    2 manifest    pin.json has the one schema and upstream; each listed patch has its sha256 and no other lies there
    3 form        each patch is described and is a strict unified diff of existing plain files: no traversal, symbolic
                  link, mode change, rename, creation, deletion or binary hunk
    4 allowlist   the patches touch exactly the allowed paths
    5 preimages   the files of the tree are the pinned originals, or all of them the pinned results
    6 apply       the series applies to a scratch copy in memory: exact context at the exact line, no fuzz, no offset
    7 index       the index lines of each patch name the blobs before and after it
    8 postimages  the scratch copy has the pinned results, and taking the series back gives the originals
    9 syntax      each result compiles

Exit: 0 verified, patched or not yet (the last line says which); 1 refused, malformed input of any kind too; 2 usage.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PIN_SHA256 = "2269231ac97155d85d5f756c4a414c8c8aa87a8ab3bfe8389e4d5c481e518de1"
FORMAT = "epochless/vllm-patch/v1"
UPSTREAM = {
    "commit": "752a3a504485790a2e8491cacbb35c137339ad34",
    "tag": "v0.25.1",
    "url": "https://github.com/vllm-project/vllm",
    "version": "0.25.1",
}
STEPS = ("pin", "manifest", "form", "allowlist", "preimages", "apply", "index", "postimages", "syntax")
MAX_BYTES = 4 << 20  # the largest file touched has 330 kB; a bound keeps hostile input cheap

PATH = re.compile(r"vllm(/[A-Za-z0-9_]+)+\.py")
CHANGE = re.compile(
    rb"diff --git a/(\S+) b/\1\nindex ([0-9a-f]{40})\.\.([0-9a-f]{40}) 100644\n--- a/\1\n\+\+\+ b/\1\n"
    rb"((?:@@ [^\n]*\n(?:[-+ ][^\n]*\n)+)+)"
)
HUNK = re.compile(rb"@@ -([1-9]\d{0,6}),([1-9]\d{0,6}) \+([1-9]\d{0,6}),([1-9]\d{0,6}) @@(?: .*)?")
VERSION = re.compile(rb"^__version__(?: = version)? = ['\"]([^'\"]+)", re.MULTILINE)
SECTIONS = (b"Subject: ", b"Why: ", b"Upstream: ", b"Dies when: ", b"Seam: ")
OTHER_DIFF = rb"^(---|\+\+\+|\*\*\*|@@|index|Index:|diff) "  # would start a change for another patch tool
REFUSED_FORMS = {
    rb"\0": "has a NUL byte",
    rb"\r": "has a carriage return",
    rb"[^\n]\Z": "ends inside a line",
    rb"^GIT binary patch$|^Binary files ": "has a binary hunk",
    rb"^index .* 120000$": "touches a symbolic link",
    rb"^index .* (?!100644$)\d+$": "touches a file whose mode is not 100644",
    rb"^index (?![0-9a-f]{40}\.\.[0-9a-f]{40} 100644$)": "has an index line without two full blob ids and a mode",
    rb"^(old|new) mode ": "changes the mode of a file",
    rb"^new file mode |^--- /dev/null$": "creates a file",
    rb"^deleted file mode |^\+\+\+ /dev/null$": "deletes a file",
    rb"^(dis)?similarity index |^rename (from|to) ": "renames or rewrites a file",
    rb"^copy (from|to) ": "copies a file",
    rb"^diff --git [^\n]*/\.{0,2}/": "has a path that leaves the tree",
    rb"^diff --git (?!a/(\S+) b/\1$)": "has a change whose two paths differ, or are quoted",
    rb"^\\ No newline": "touches a file without a final newline",
}


class Refused(Exception):  # noqa: N818  a verdict, not a fault
    """The only exception for anything wrong with the pin, the patches or the tree; ``step`` says where it was found."""

    step = ""


class Pin(NamedTuple):
    """A parsed pin.json: allowed paths, patch file -> sha256 in order, path -> blob ids (before, after)."""

    allow: list[str]
    series: dict[str, str]
    files: dict[str, tuple[str, str]]


class Hunk(NamedTuple):
    """Lines ``old`` at 1-based line ``old_start`` become ``new`` at ``new_start``."""

    old_start: int
    old: list[bytes]
    new_start: int
    new: list[bytes]


class Change(NamedTuple):
    """What one patch does to one file, with the blob ids of its index line."""

    path: str
    before: str
    after: str
    hunks: list[Hunk]

    def inverse(self) -> Change:
        return Change(self.path, self.after, self.before, [Hunk(*hunk[2:], *hunk[:2]) for hunk in self.hunks])


@contextmanager
def at(step: str, subject: str = "") -> Iterator[None]:
    """Say at which step, and about what, a refusal inside the block was made; the innermost step stands."""
    try:
        yield
    except Refused as refusal:
        outer = Refused(f"{subject}: {refusal}" if subject else str(refusal))
        outer.step = refusal.step or step
        raise outer from None


def need(condition: object, message: str) -> None:
    if not condition:
        raise Refused(message)


def blob_id(content: bytes) -> str:
    """Return git's name of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def read_plain_file(root: Path, path: str) -> bytes:
    """Return the bytes of a file below ``root``, refusing symbolic links on the way."""
    place = root
    for part in path.split("/"):
        place = place / part
        need(not place.is_symlink(), f"{path}: {part} is a symbolic link")
    need(place.is_file(), f"{path}: missing, or not a plain file")
    need(place.stat().st_size <= MAX_BYTES, f"{path}: too long")
    try:
        return place.read_bytes()
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from None


def parse_pin(raw: bytes) -> Pin:
    """Return the pin, or raise Refused for any bytes that are not exactly one of this format and upstream."""

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len({key for key, _ in pairs}) == len(pairs), "an object has the same key twice")
        return dict(pairs)

    def table(name: str, **keys: str) -> list[list[str]]:
        need(isinstance(pin[name], list) and pin[name], f"{name} is not a list with entries")
        for row in pin[name]:
            need(isinstance(row, dict) and set(row) == set(keys), f"{name} has a row without its keys, or with others")
            for key, pattern in keys.items():
                need(isinstance(row[key], str) and re.fullmatch(pattern, row[key]), f"{name} has a malformed {key}")
        rows = [[row[key] for key in keys] for row in pin[name]]
        need(len({row[0] for row in rows}) == len(rows), f"{name} lists an entry twice")
        return rows

    try:
        pin = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise Refused(f"not JSON: {str(error)[:80]}") from None
    keys = {"format", "upstream", "allow", "series", "files"}
    need(isinstance(pin, dict) and set(pin) == keys, f"not an object with exactly the keys {', '.join(sorted(keys))}")
    need(pin["format"] == FORMAT, f"format is not {FORMAT}")
    upstream, allow = pin["upstream"], pin["allow"]
    need(isinstance(upstream, dict) and set(upstream) == set(UPSTREAM), "upstream does not have exactly its keys")
    for key, value in UPSTREAM.items():
        need(upstream[key] == value, f"upstream.{key} is not {value}")
    need(isinstance(allow, list) and allow, "allow is not a list with entries")
    need(all(isinstance(path, str) and PATH.fullmatch(path) for path in allow), "allow has a path outside vllm/**.py")
    need(allow == sorted(set(allow)), "allow is not sorted, or lists a path twice")
    series = table("series", file=r"[a-z0-9]+(-[a-z0-9]+)*\.patch", sha256="[0-9a-f]{64}")
    files = table("files", path=PATH.pattern, before="[0-9a-f]{40}", after="[0-9a-f]{40}")
    return Pin(allow, dict(series), {path: (before, after) for path, before, after in files})


def parse_patch(name: str, raw: bytes) -> list[Change]:
    """Return the changes of a patch, or raise Refused for any bytes that are not a described, strict unified diff."""
    for pattern, message in REFUSED_FORMS.items():
        need(not re.search(pattern, raw, re.MULTILINE), message)
    start = raw.find(b"\ndiff --git ") + 1 or len(raw)
    lines = raw[:start].split(b"\n")
    for section in SECTIONS:
        found = [line for line in lines if line.startswith(section)]
        need(len(found) == 1 and found[0] != section, f"the description needs exactly one '{section.decode().strip()}'")
    need(b"Seam: " + name.removesuffix(".patch").encode() in lines, "'Seam:' is not the name of the file")
    need(not re.search(OTHER_DIFF, raw[:start], re.MULTILINE), "the description has a line that reads as a change")
    changes: dict[str, Change] = {}
    while start < len(raw):
        match = CHANGE.match(raw, start)
        if match is None:
            raise Refused(f"not a change of a plain file, in this form: {raw[start : start + 60]!r}")
        path, start = match[1].decode("ascii", "replace"), match.end()
        need(PATH.fullmatch(path), f"touches {path[:80]!r}, not a Python file of vllm")
        need(path not in changes, f"changes {path} twice")
        hunks = parse_hunks(match[4].split(b"\n")[:-1])
        changes[path] = Change(path, match[2].decode(), match[3].decode(), hunks)
    need(changes, "changes nothing")
    return list(changes.values())


def parse_hunks(lines: Sequence[bytes]) -> list[Hunk]:
    """Return the hunks of one file; each header must account for every line, in order and without overlap."""
    starts = [number for number, line in enumerate(lines) if line.startswith(b"@")]
    hunks: list[Hunk] = []
    end = shift = 0
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        match = HUNK.fullmatch(lines[start])
        if match is None:
            raise Refused(f"malformed hunk header {lines[start][:60]!r}")
        old = [line[1:] for line in lines[start + 1 : stop] if not line.startswith(b"+")]
        new = [line[1:] for line in lines[start + 1 : stop] if not line.startswith(b"-")]
        need((len(old), len(new)) == (int(match[2]), int(match[4])), f"{match[0]!r} does not have the lines it says")
        need(old != new, f"{match[0]!r} changes nothing")
        need(int(match[1]) > end, f"{match[0]!r} overlaps the hunk before it")
        need(int(match[3]) == int(match[1]) + shift, f"{match[0]!r} gives line numbers that disagree")
        hunks.append(Hunk(int(match[1]), old, int(match[3]), new))
        end = int(match[1]) + len(old) - 1
        shift += len(new) - len(old)
    return hunks


def read_tree(root: Path, pin: Pin) -> tuple[str, dict[str, bytes]]:
    """Return "unpatched" or "patched", and the content of each touched file."""
    if (root / "vllm" / "_version.py").is_file():  # a checkout has none
        match = VERSION.search(read_plain_file(root, "vllm/_version.py"))
        found = match[1].decode("utf-8", "replace") if match else "of an unknown version"
        known = found.split("+")[0] == UPSTREAM["version"] or f"g{UPSTREAM['commit'][:9]}" in found
        need(known, f"foreign version: this is vLLM {found}, the patch is for {UPSTREAM['version']}")
    contents = {path: read_plain_file(root, path) for path in pin.files}
    ids = {path: blob_id(content) for path, content in contents.items()}
    foreign = sorted(path for path, pinned in pin.files.items() if ids[path] not in pinned)
    need(not foreign, f"neither the original nor the patched file (edited? other version?): {', '.join(foreign)}")
    patched = sum(ids[path] == after for path, (_, after) in pin.files.items())
    need(patched in (0, len(ids)), f"half patched: {patched} of {len(ids)} files; run 'epochless patch apply' again")
    return ("patched" if patched else "unpatched"), contents


def apply_hunks(content: bytes, hunks: Sequence[Hunk]) -> bytes:
    """Return ``content`` with the hunks applied, each at exactly its own line; refuse if any context differs."""
    need(content.endswith(b"\n"), "the file does not end in a newline")
    lines = content[:-1].split(b"\n")
    result: list[bytes] = []
    done = 0
    for hunk in hunks:
        begin = hunk.old_start - 1
        end = begin + len(hunk.old)
        need(lines[begin:end] == hunk.old, f"the hunk at line {hunk.old_start} does not apply")
        result += lines[done:begin] + hunk.new
        done = end
    return b"\n".join(result + lines[done:]) + b"\n"


def run_series(contents: Mapping[str, bytes], series: Sequence[tuple[str, Change]]) -> dict[str, bytes]:
    """Return a copy of ``contents`` after the changes, with every index line checked."""
    scratch = dict(contents)
    for name, (path, before, after, hunks) in series:
        with at("index", f"{name}: {path}"):
            need(blob_id(scratch[path]) == before, f"starts from {blob_id(scratch[path])}, index says {before}")
        with at("apply", f"{name}: {path}"):
            scratch[path] = apply_hunks(scratch[path], hunks)
        with at("index", f"{name}: {path}"):
            need(blob_id(scratch[path]) == after, f"gives {blob_id(scratch[path])}, index says {after}")
    return scratch


def verify(directory: Path, root: Path, *, pin_sha256: str = PIN_SHA256) -> str:
    """Return "unpatched" or "patched" for the tree at ``root``, or raise Refused at the first step that fails."""
    with at("pin"):  # (1)
        raw = read_plain_file(directory, "pin.json")
        actual = hashlib.sha256(raw).hexdigest()
        need(actual == pin_sha256, f"pin.json has sha256 {actual}, expected {pin_sha256}")
    with at("manifest"):  # (2)
        with at("manifest", "pin.json"):
            pin = parse_pin(raw)
        stray = {entry.name for entry in directory.glob("*.patch")} - set(pin.series)
        need(not stray, f"not in the series of pin.json: {', '.join(sorted(stray))}")
        patches = {name: read_plain_file(directory, name) for name in pin.series}
        for name, digest in pin.series.items():
            actual = hashlib.sha256(patches[name]).hexdigest()
            need(actual == digest, f"{name} has sha256 {actual}, pin.json says {digest}")
    series: list[tuple[str, Change]] = []
    for name, patch in patches.items():  # (3)
        with at("form", name):
            series += [(name, change) for change in parse_patch(name, patch)]
    with at("allowlist"):  # (4)
        allowed, touched = set(pin.allow), {change.path for _, change in series}
        need(touched <= allowed, f"touched but not allowed: {', '.join(sorted(touched - allowed))}")
        need(allowed <= touched, f"allowed but not touched: {', '.join(sorted(allowed - touched))}")
        need(touched == set(pin.files), "the files of pin.json are not the paths the patches touch")
    with at("preimages"):  # (5)
        state, contents = read_tree(root, pin)
    inverse = [(name, change.inverse()) for name, change in reversed(series)]
    originals = run_series(contents, inverse) if state == "patched" else contents  # (6) (7)
    results = run_series(originals, series)
    taken_back = run_series(results, inverse)
    with at("postimages"):  # (8)
        for path, pinned in pin.files.items():
            ids = (blob_id(taken_back[path]), blob_id(results[path]))
            need(ids == pinned, f"{path}: blobs {ids[0]} and {ids[1]}, pin.json says {pinned[0]} and {pinned[1]}")
    with at("syntax"), warnings.catch_warnings():  # (9)
        warnings.simplefilter("ignore")
        for path, content in results.items():
            try:
                compile(content, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise Refused(f"{path}: does not compile: {error}") from None
    return state


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="verify_patch.py", description="Verify the Epochless patch of vLLM.")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--tree", type=Path, metavar="PATH", help="a git checkout or an unpacked sdist of vLLM")
    target.add_argument("--site-packages", type=Path, metavar="PATH", help="the directory that holds the package vllm")
    parser.add_argument("--expect", choices=("patched", "unpatched"), help="refuse the other state")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args(arguments)
    root = options.tree or options.site_packages
    if root is None and (spec := importlib.util.find_spec("vllm")) and spec.origin:  # found, not imported
        root = Path(spec.origin).parent.parent
    if root is None or not (root / "vllm").is_dir():
        parser.error(f"there is no package vllm in {root or 'this environment'}; give --tree or --site-packages")
    here = Path(__file__).resolve().parent
    failed, message = "", ""
    try:
        verdict = verify(here / "patches" if (here / "patches").is_dir() else here, root)
        with at("preimages"):
            need(options.expect in (None, verdict), f"the tree is {verdict}, expected {options.expect}")
    except Refused as refusal:
        verdict, failed, message = "refused", refusal.step, str(refusal)
    reached = list(enumerate(STEPS[: STEPS.index(failed) + 1] if failed else STEPS, 1))
    if options.json:
        steps = [{"number": number, "name": name, "holds": name != failed} for number, name in reached]
        print(json.dumps({"verdict": verdict, "root": str(root), "steps": steps, "message": message}, indent=2))
    else:
        for number, name in reached:
            print(number, name, f"REFUSED: {message}" if name == failed else "ok")
        print(f"{root}: {'' if failed else 'verified, '}{verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
