"""A strict reader of unified diffs, and their application to bytes.

Promises that a patch it accepts only changes existing plain files of the package vllm, and that a change applies at
exactly the lines it names or not at all. Knows no file system.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from epochless_vllm.errors import PatchError

REQUIRED_SECTIONS = ("Subject", "Why", "Upstream", "Dies when", "Seam")


@dataclass(frozen=True)
class Hunk:
    """The lines ``old`` from 1-based line ``old_start`` become ``new`` from ``new_start``."""

    old_start: int
    old: tuple[bytes, ...]
    new_start: int
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class Change:
    """What one patch does to one file; ``before`` and ``after`` are git blob ids."""

    path: str
    before: str
    after: str
    hunks: tuple[Hunk, ...]

    def inverse(self) -> Change:
        """Return the change that takes this one back."""
        hunks = tuple(Hunk(hunk.new_start, hunk.new, hunk.old_start, hunk.old) for hunk in self.hunks)
        return Change(self.path, self.after, self.before, hunks)


def blob_id(content: bytes) -> str:
    """Return git's name for a file with this content: 40 hexadecimal digits."""
    hasher = hashlib.sha1(b"blob ", usedforsecurity=False)
    hasher.update(str(len(content)).encode() + b"\0" + content)
    return hasher.hexdigest()


def parse_patch(name: str, raw: bytes) -> list[Change]:
    """Return the changes of the patch file ``name``.

    Raises:
        PatchError: at step ``form``, for any bytes that are not a described, strict unified diff of plain files.
    """
    reader = _Reader(name, raw)
    reader.read_description()
    changes: dict[str, Change] = {}
    while not reader.at_end():
        change = reader.read_change()
        if change.path in changes:
            raise reader.error(f"changes {change.path} twice")
        changes[change.path] = change
    if not changes:
        raise reader.error("changes nothing")
    return list(changes.values())


def apply_change(name: str, change: Change, content: bytes) -> bytes:
    """Return ``content`` after the change.

    Raises:
        PatchError: at step ``apply`` when a line of context differs, ``index`` when a blob id does.
    """
    subject = f"{name}: {change.path}"
    if blob_id(content) != change.before:
        raise _refuse("index", f"{subject}: starts from another blob than its index line names")
    lines = content.split(b"\n")
    if lines.pop():
        raise _refuse("apply", f"{subject}: the file does not end in a newline")
    for hunk in reversed(change.hunks):
        window = slice(hunk.old_start - 1, hunk.old_start - 1 + len(hunk.old))
        if tuple(lines[window]) != hunk.old:
            raise _refuse("apply", f"{subject}: the hunk at line {hunk.old_start} does not apply")
        lines[window] = hunk.new
    result = b"".join(line + b"\n" for line in lines)
    if blob_id(result) != change.after:
        raise _refuse("index", f"{subject}: gives another blob than its index line names")
    return result


_PATH = re.compile(rb"vllm(/[A-Za-z0-9_]+)+\.py")
_INDEX = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40}) ([0-7]{6})")
_RANGES = re.compile(rb"@@ -([1-9][0-9]{0,6}),([1-9][0-9]{0,6}) \+([1-9][0-9]{0,6}),([1-9][0-9]{0,6}) @@( .*)?")
# Starts of lines that would make a patch do more than change lines, wherever they stand outside a hunk.
_UNWANTED = {
    b"old mode ": "changes the mode of a file",
    b"new mode ": "changes the mode of a file",
    b"new file mode ": "creates a file",
    b"--- /dev/null": "creates a file",
    b"deleted file mode ": "deletes a file",
    b"+++ /dev/null": "deletes a file",
    b"similarity index ": "renames a file",
    b"dissimilarity index ": "rewrites a file",
    b"rename from ": "renames a file",
    b"rename to ": "renames a file",
    b"copy from ": "copies a file",
    b"copy to ": "copies a file",
    b"GIT binary patch": "has a binary hunk",
    b"Binary files ": "has a binary hunk",
    b"\\ No newline": "leaves a file without a final newline",
}


def _refuse(step: str, reason: str) -> PatchError:
    return PatchError(f"patch refused at step {step}: {reason}", step=step, reason=reason)


class _Reader:
    """The lines of one patch and a position in them."""

    def __init__(self, name: str, raw: bytes) -> None:
        self.name = name
        self.position = 0
        if b"\0" in raw or b"\r" in raw:
            raise self.error("has a NUL byte or a carriage return")
        self.lines = raw.split(b"\n")
        if self.lines.pop():
            raise self.error("does not end in a newline")

    def error(self, reason: str) -> PatchError:
        return _refuse("form", f"{self.name}: {reason}")

    def at_end(self) -> bool:
        return self.position >= len(self.lines)

    def take(self) -> bytes:
        if self.at_end():
            raise self.error("ends in the middle of a change")
        self.position += 1
        line = self.lines[self.position - 1]
        for start, what in _UNWANTED.items():
            if line.startswith(start):
                raise self.error(what)
        return line

    def read_description(self) -> None:
        found: dict[bytes, list[bytes]] = {section.encode(): [] for section in REQUIRED_SECTIONS}
        while not self.at_end() and not self.lines[self.position].startswith(b"diff --git "):
            line = self.take()
            if line.split(b" ")[0] in (b"---", b"+++", b"***", b"@@", b"index", b"Index:", b"diff") and b" " in line:
                raise self.error("has a line in its description that reads as a change")
            section, colon, text = line.partition(b": ")
            if colon and section in found:
                found[section].append(text)
        for section, texts in found.items():
            if len(texts) != 1 or not texts[0]:
                raise self.error(f"needs exactly one '{section.decode()}:' in its description")
        if found[b"Seam"][0] + b".patch" != self.name.encode():
            raise self.error("is not named after its seam")

    def read_change(self) -> Change:
        names = self.take().removeprefix(b"diff --git ").split(b" ")
        if len(names) != 2 or (names[0][:2], names[1][:2]) != (b"a/", b"b/") or names[0][2:] != names[1][2:]:
            raise self.error("has a change whose two paths differ, or are quoted, or a line outside a change")
        path = names[0][2:]
        if {b"", b".", b".."} & set(path.split(b"/")):
            raise self.error("has a path that leaves the tree")
        if _PATH.fullmatch(path) is None:
            raise self.error(f"touches {path[:80]!r}, not a Python file of vllm")
        index = _INDEX.fullmatch(self.take())
        if index is None:
            raise self.error(f"has no index line with two full blob ids and a mode for {path.decode()}")
        if index[3] != b"100644":
            kind = "a symbolic link" if index[3] == b"120000" else f"a file of mode {index[3].decode()}"
            raise self.error(f"touches {kind}: {path.decode()}")
        if (self.take(), self.take()) != (b"--- a/" + path, b"+++ b/" + path):
            raise self.error(f"has other --- and +++ lines than {path.decode()}")
        hunks = self.read_hunks()
        return Change(path.decode(), index[1].decode(), index[2].decode(), hunks)

    def read_hunks(self) -> tuple[Hunk, ...]:
        hunks: list[Hunk] = []
        shift, end = 0, 0
        while not self.at_end() and not self.lines[self.position].startswith(b"diff --git "):
            ranges = _RANGES.fullmatch(self.take())
            if ranges is None:
                raise self.error("has a malformed hunk header, or a line outside a change")
            old_start, old_count, new_start, new_count = (int(ranges[n]) for n in (1, 2, 3, 4))
            old, new = self.read_body(old_count, new_count)
            if old_start <= end or new_start != old_start + shift:
                raise self.error(f"has overlapping hunks, or line numbers that disagree, at line {old_start}")
            hunks.append(Hunk(old_start, old, new_start, new))
            shift, end = shift + new_count - old_count, old_start + old_count - 1
        if not hunks:
            raise self.error("has a change without a hunk")
        return tuple(hunks)

    def read_body(self, old_count: int, new_count: int) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        old: list[bytes] = []
        new: list[bytes] = []
        while len(old) < old_count or len(new) < new_count:
            if self.at_end():
                raise self.error("ends in the middle of a hunk")
            kind, text = self.lines[self.position][:1], self.lines[self.position][1:]
            self.position += 1
            if kind not in (b" ", b"-", b"+"):
                raise self.error("has a hunk with fewer lines than it says")
            old += [text] * (kind != b"+")
            new += [text] * (kind != b"-")
        if (len(old), len(new)) != (old_count, new_count):
            raise self.error("has a hunk with other lines than it says")
        if old == new:
            raise self.error("has a hunk that changes nothing")
        return tuple(old), tuple(new)
