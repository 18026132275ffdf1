"""Every class of hunk, header and description, damaged: refused at its step, for its reason, by both verifiers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import verify_patch
from epochless_vllm.errors import PatchError
from epochless_vllm.patch import diff as package_diff
from epochless_vllm.patch.diff import blob_id
from tests.patch.conftest import REPOSITORY
from tests.patch.mutants import Edit, judge, write_series

NAME = "slot-layout.patch"
SOURCE = (REPOSITORY / "patches" / NAME).read_bytes()
PATH = b"vllm/lora/model_manager.py"
INDEX = re.search(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40}) 100644\n", SOURCE)
HUNKS = re.findall(rb"@@ [^\n]*\n(?:[-+ ][^\n]*\n)+", SOURCE)
assert INDEX is not None
assert len(HUNKS) == 2


def swap(old: bytes, new: bytes) -> Edit:
    def edit(raw: bytes) -> bytes:
        assert raw.count(old) >= 1, old
        return raw.replace(old, new, 1)

    return edit


def after_diff_line(inserted: bytes) -> Edit:
    return lambda raw: raw.replace(b"\nindex ", b"\n" + inserted + b"\nindex ", 1)


def move(shift_old: int, shift_new: int) -> Edit:
    """Shift the line numbers of every hunk."""

    def edit(raw: bytes) -> bytes:
        def renumber(match: re.Match[bytes]) -> bytes:
            old, new = int(match[1]) + shift_old, int(match[3]) + shift_new
            return b"@@ -%d,%b +%d,%b @@" % (old, match[2], new, match[4])

        return re.sub(rb"@@ -(\d+),(\d+) \+(\d+),(\d+) @@", renumber, raw)

    return edit


ADDED = b"+        self._last_slot_layout: list[int | None] | None = None\n"
CONTEXT = b"         self._last_mapping: LoRAMapping | None = None\n"
REMOVED = b"-        if self._last_mapping != mapping:\n"
HEADER = re.match(rb"@@ [^\n]*\n", HUNKS[0])
assert HEADER is not None
NO_CHANGE = HUNKS[0].replace(ADDED, b"").replace(b",7 @@", b",6 @@")

DAMAGE: dict[str, tuple[Edit, str, str]] = {
    # hunks
    "a changed context line": (swap(CONTEXT, CONTEXT.replace(b"None", b"none")), "apply", "does not apply"),
    "a changed removed line": (swap(REMOVED, REMOVED.replace(b"!=", b"==")), "apply", "does not apply"),
    "a changed added line": (swap(ADDED, ADDED.replace(b"None\n", b"None  # x\n")), "index", "gives"),
    "a hunk one line off": (move(1, 1), "apply", "does not apply"),
    "a hunk past the end of the file": (move(900_000, 900_000), "apply", "does not apply"),
    "a hunk whose numbers disagree": (move(0, 1), "form", "line numbers that disagree"),
    "a hunk with a line too many": (swap(ADDED, ADDED + b"+\n"), "form", "does not have the lines it says"),
    "a hunk with a line too few": (swap(ADDED, b""), "form", "does not have the lines it says"),
    "a hunk that changes nothing": (swap(HUNKS[0], NO_CHANGE), "form", "changes nothing"),
    "a hunk left out": (swap(HUNKS[1], b""), "index", "gives"),
    "every hunk left out": (
        lambda raw: raw.replace(HUNKS[0], b"").replace(HUNKS[1], b""),
        "form",
        "not a change of a plain",
    ),
    "hunks out of order": (
        lambda raw: raw.replace(HUNKS[0] + HUNKS[1], HUNKS[1] + HUNKS[0]),
        "form",
        "gives line numbers that disagree",
    ),
    "a hunk twice": (swap(HUNKS[0], HUNKS[0] * 2), "form", "overlaps the hunk before it"),
    "a hunk without context": (swap(HEADER[0], b"@@ -1,0 +1,7 @@\n"), "form", "malformed hunk header"),
    "a hunk header without counts": (swap(HEADER[0], b"@@ -116 +116 @@\n"), "form", "malformed hunk header"),
    "a hunk without a final newline": (
        lambda raw: raw + b"\\ No newline at end of file\n",
        "form",
        "without a final newline",
    ),
    "a line outside a hunk": (lambda raw: raw + b"more\n", "form", "not a change of a plain file"),
    "an empty line in a hunk": (swap(ADDED, ADDED + b"\n"), "form", "does not have the lines it says"),
    "a patch that ends inside a line": (lambda raw: raw[:-1], "form", "ends inside a line"),
    "a patch that ends inside a hunk": (
        lambda raw: raw[: raw.rindex(b"\n", 0, -1) + 1],
        "form",
        "does not have the lines it says",
    ),
    # bytes
    "a NUL byte": (swap(ADDED, ADDED[:-1] + b"\0\n"), "form", "NUL byte"),
    "a carriage return": (swap(ADDED, ADDED[:-1] + b"\r\n"), "form", "carriage return"),
    "a binary hunk": (after_diff_line(b"GIT binary patch"), "form", "binary hunk"),
    "a binary difference": (after_diff_line(b"Binary files a/x and b/x differ"), "form", "binary hunk"),
    # headers
    "a mode change": (after_diff_line(b"old mode 100644\nnew mode 100755"), "form", "changes the mode"),
    "a new file": (after_diff_line(b"new file mode 100644"), "form", "creates a file"),
    "a file from nothing": (swap(b"--- a/" + PATH, b"--- /dev/null"), "form", "creates a file"),
    "a deleted file": (after_diff_line(b"deleted file mode 100644"), "form", "deletes a file"),
    "a file to nothing": (swap(b"+++ b/" + PATH, b"+++ /dev/null"), "form", "deletes a file"),
    "a rename": (after_diff_line(b"similarity index 90%\nrename from a\nrename to b"), "form", "renames or rewrites"),
    "a rename by two paths": (swap(b" b/" + PATH, b" b/vllm/outputs.py"), "form", "two paths differ"),
    "a copy": (after_diff_line(b"copy from a\ncopy to b"), "form", "copies a file"),
    "a symbolic link": (swap(b" 100644\n", b" 120000\n"), "form", "symbolic link"),
    "an executable file": (swap(b" 100644\n", b" 100755\n"), "form", "mode is not 100644"),
    "an abbreviated blob id": (swap(INDEX[1], INDEX[1][:12]), "form", "two full blob ids"),
    "no index line": (swap(INDEX[0], b""), "form", "not a change of a plain file"),
    "no --- line": (swap(b"--- a/" + PATH + b"\n", b""), "form", "not a change of a plain file"),
    "another +++ line": (swap(b"+++ b/" + PATH, b"+++ b/vllm/outputs.py"), "form", "not a change of a plain file"),
    "index ids exchanged": (swap(INDEX[1] + b".." + INDEX[2], INDEX[2] + b".." + INDEX[1]), "index", "starts from"),
    "another blob before": (swap(INDEX[1], b"0" * 40), "index", "starts from"),
    "another blob after": (swap(INDEX[2], b"0" * 40), "index", "gives"),
    # paths
    "a path above the tree": (lambda raw: raw.replace(PATH, b"vllm/../../x.py"), "form", "leaves the tree"),
    "an absolute path": (lambda raw: raw.replace(b"/" + PATH, b"//etc/x.py"), "form", "leaves the tree"),
    "a quoted path": (lambda raw: raw.replace(b"a/" + PATH, b'"a/' + PATH + b'"'), "form", "or are quoted"),
    "a path outside vllm": (lambda raw: raw.replace(PATH, b"torch/x.py"), "form", "not a Python file of vllm"),
    "a file that is not Python": (lambda raw: raw.replace(PATH, b"vllm/x.so"), "form", "not a Python file of vllm"),
    "a path of other characters": (lambda raw: raw.replace(PATH, b"vllm/\xc3\xa9.py"), "form", "not a Python file"),
    "a file that is not allowed": (
        lambda raw: raw.replace(PATH, b"vllm/envs.py"),
        "allowlist",
        "touched but not allowed",
    ),
    "a file twice": (
        lambda raw: raw + raw[raw.index(b"diff --git") :],
        "form",
        "changes vllm/lora/model_manager.py twice",
    ),
    # description
    "no subject": (swap(b"Subject: ", b"Topic: "), "form", "'Subject:'"),
    "no reason": (swap(b"\nWhy: ", b"\nBecause: "), "form", "'Why:'"),
    "two reasons": (swap(b"\nWhy: ", b"\nWhy: x\nWhy: "), "form", "'Why:'"),
    "no upstream status": (swap(b"\nUpstream: ", b"\nElsewhere: "), "form", "'Upstream:'"),
    "no end of life": (swap(b"\nDies when: ", b"\nStays: "), "form", "'Dies when:'"),
    "an empty end of life": (lambda raw: re.sub(rb"\nDies when: .*", b"\nDies when: ", raw), "form", "'Dies when:'"),
    "another seam": (swap(b"\nSeam: slot-layout", b"\nSeam: other"), "form", "'Seam:' is not the name"),
    "a change hidden in the description": (
        swap(b"\nSeam: ", b"\n--- a/vllm/envs.py\nSeam: "),
        "form",
        "reads as a change",
    ),
    "nothing but a description": (lambda raw: raw[: raw.index(b"diff --git")], "form", "changes nothing"),
    "nothing at all": (lambda raw: b"\n", "form", "'Subject:'"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_patch_is_refused_with_its_own_message(name: str, patches: Path, original: Path, tmp_path: Path):
    edit, step, message = DAMAGE[name]
    digest = write_series(patches, tmp_path, edit_patch={NAME: edit})
    verdict = judge(tmp_path, original, digest)
    assert verdict.step == step, verdict
    assert message in verdict.message
    assert NAME in verdict.message or step == "allowlist"


@pytest.mark.parametrize(("start", "overlaps"), [(2, True), (3, False)])
def test_hunks_whose_numbers_agree_may_touch_and_not_overlap(start: int, overlaps: bool):
    second = b"@@ -%d,2 +%d,3 @@\n b\n+m\n c\n" % (start, start + 1)
    raw = SOURCE[: SOURCE.index(b"@@ ")] + b"@@ -1,2 +1,3 @@\n a\n+n\n b\n" + second
    if overlaps:
        with pytest.raises(PatchError, match="overlapping hunks"):
            package_diff.parse_patch(NAME, raw)
        with pytest.raises(verify_patch.Refused, match="overlaps the hunk before it"):
            verify_patch.parse_patch(NAME, raw)
    else:
        assert len(package_diff.parse_patch(NAME, raw)[0].hunks) == 2
        verify_patch.parse_patch(NAME, raw)


def broken_result(original: Path) -> tuple[Edit, Callable[[Any], Any]]:
    """Return edits of patch and pin that every index line and digest agrees with: only a compiler can object."""
    broken = (original / PATH.decode()).read_bytes()
    edited = SOURCE.replace(ADDED, b"+        return = 1\n")
    for hunk in verify_patch.parse_patch(NAME, edited)[0].hunks[::-1]:
        lines = broken.split(b"\n")
        lines[hunk.old_start - 1 : hunk.old_start - 1 + len(hunk.old)] = hunk.new
        broken = b"\n".join(lines)
    edited = edited.replace(INDEX[2], blob_id(broken).encode())

    def edit_pin(pin: Any) -> Any:
        for row in pin["files"]:
            if row["path"] == PATH.decode():
                row["after"] = blob_id(broken)
        return pin

    return lambda raw: edited, edit_pin


def test_a_result_that_does_not_compile_is_refused(patches: Path, original: Path, tmp_path: Path):
    edit_patch, edit_pin = broken_result(original)
    digest = write_series(patches, tmp_path, edit_patch={NAME: edit_patch}, edit_pin=edit_pin)
    verdict = judge(tmp_path, original, digest)
    assert (verdict.step, PATH.decode() in verdict.message) == ("syntax", True)


def read_both(raw: bytes) -> object:
    """Return the changes both readers find, or None if both refuse."""
    try:
        one = [
            (c.path, c.before, c.after, [(h.old_start, tuple(h.old), h.new_start, tuple(h.new)) for h in c.hunks])
            for c in verify_patch.parse_patch(NAME, raw)
        ]
    except verify_patch.Refused:
        one = None
    try:
        other = [
            (c.path, c.before, c.after, [(h.old_start, h.old, h.new_start, h.new) for h in c.hunks])
            for c in package_diff.parse_patch(NAME, raw)
        ]
    except PatchError:
        other = None
    assert one == other
    return one


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
@example(b"")
@example(b"diff --git ")
@example(b"\ndiff --git a/ b/\n")
def test_arbitrary_bytes_are_no_patch_and_no_other_error(raw: bytes):
    assert read_both(raw) is None


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, len(SOURCE) - 1), st.integers(0, 30), st.binary(max_size=6) | st.sampled_from([b"\n", b"-", b" "])
)
def test_a_spliced_patch_is_read_alike_by_both(start: int, length: int, inserted: bytes):
    read_both(SOURCE[:start] + inserted + SOURCE[start + length :])


LINES = SOURCE.splitlines(keepends=True)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(set(LINES))), max_size=6), st.integers(0, len(LINES)), st.integers(0, len(LINES))
)
def test_a_patch_of_shuffled_lines_is_read_alike_by_both(inserted: list[bytes], start: int, end: int):
    read_both(b"".join(LINES[:start] + inserted + LINES[end:]))


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=60).map(lambda raw: raw + b"\n"), data=st.data())
def test_applied_hunks_give_the_file_the_change_was_made_from(content: bytes, data: st.DataObject):
    """The oracle rebuilds old and new side by side, line by line; it shares nothing with the appliers."""
    lines = content[:-1].split(b"\n")
    replaced = data.draw(
        st.lists(
            st.none() | st.lists(st.sampled_from([b"x", b"yy"]), max_size=2), min_size=len(lines), max_size=len(lines)
        )
    )
    new: list[bytes] = []
    hunks = []
    for number, (line, change) in enumerate(zip(lines, replaced, strict=True)):
        if change is not None:
            hunks.append((number + 1, [line], len(new) + 1, change))
        new += [line] if change is None else change
    if not new:
        return
    expected = b"\n".join(new) + b"\n"
    assert verify_patch.apply_hunks(content, [verify_patch.Hunk(*hunk) for hunk in hunks]) == expected
    change = package_diff.Change(
        "vllm/a.py",
        blob_id(content),
        blob_id(expected),
        tuple(package_diff.Hunk(a, tuple(b), c, tuple(d)) for a, b, c, d in hunks),
    )
    assert package_diff.apply_change("p", change, content) == expected
    assert package_diff.apply_change("p", change.inverse(), expected) == content


def test_git_applies_the_series_to_the_same_bytes(patches: Path, tree: Path):
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    pin = verify_patch.parse_pin((patches / "pin.json").read_bytes())
    for name in pin.series:
        subprocess.run(["git", "-C", str(tree), "apply", "--whitespace=error", str(patches / name)], check=True)
    assert {path: blob_id((tree / path).read_bytes()) for path in pin.files} == {
        path: after for path, (_, after) in pin.files.items()
    }


def test_the_verifier_needs_nothing_but_the_standard_library(original: Path):
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse((REPOSITORY / "verify_patch.py").read_bytes()))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [])
        + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
    }
    assert imported <= set(sys.stdlib_module_names)
    command = [sys.executable, "-I", "-S", str(REPOSITORY / "verify_patch.py"), "--site-packages", str(original)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.splitlines()[-1].endswith("verified, unpatched")


def test_the_package_ships_the_repository_s_series_and_verifier(patches: Path):
    shipped = {place.name: place.read_bytes() for place in package_diff_data().iterdir() if place.is_file()}
    sources = [*patches.glob("*.patch"), patches / "pin.json", REPOSITORY / "verify_patch.py"]
    assert shipped == {place.name: place.read_bytes() for place in sources}


def package_diff_data() -> Path:
    from epochless_vllm.patch.pin import DATA

    return DATA


def test_both_verifiers_embed_the_same_pin():
    from epochless_vllm.patch import pin as package_pin

    assert (package_pin.PIN_SHA256, package_pin.UPSTREAM, package_pin.FORMAT) == (
        verify_patch.PIN_SHA256,
        verify_patch.UPSTREAM,
        verify_patch.FORMAT,
    )
