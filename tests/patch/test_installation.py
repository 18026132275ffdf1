"""Apply, revert, status and the verifier's command, on copies of the installed files in the layouts users have."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import verify_patch
from epochless_vllm.durable import CRASH_EXIT_CODE
from epochless_vllm.errors import PatchError
from epochless_vllm.patch.diff import blob_id
from epochless_vllm.patch.installation import apply_patch, patch_status, revert_patch, verify_tree
from epochless_vllm.patch.pin import DATA, PIN_SHA256, load_series
from epochless_vllm.patch.tree import find_installed_tree, is_pinned_version
from tests.patch.conftest import REPOSITORY
from tests.patch.mutants import judge
from tests.patch.trees import LAYOUTS, edit_file, make_checkout, replace_file, set_version

PIN = load_series().pin
PATHS = list(PIN.files)


def contents(root: Path) -> dict[str, bytes]:
    return {path: (root / path).read_bytes() for path in PATHS}


def state(root: Path) -> str:
    """Return the state all tools agree on; a refusal as its step."""
    verdict = judge(DATA, root, PIN_SHA256)
    if verdict.state != "refused":
        assert patch_status(root).state == verdict.state
    return verdict.step or verdict.state


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_apply_and_revert_go_round_on_every_layout(layout, tree: Path):
    layout(tree)
    before = contents(tree)
    assert state(tree) == "unpatched"
    assert apply_patch(tree).state == state(tree) == "patched"
    assert {path: blob_id(content) for path, content in contents(tree).items()} == {
        path: after for path, (_, after) in PIN.files.items()
    }
    assert revert_patch(tree).state == state(tree) == "unpatched"
    assert contents(tree) == before


def test_applying_or_reverting_twice_touches_nothing(tree: Path):
    for change in (apply_patch, revert_patch):
        change(tree)
        stamps = [(tree / path).stat() for path in PATHS]
        change(tree)
        assert [(tree / path).stat() for path in PATHS] == stamps


def test_nothing_but_the_touched_files_is_left_changed(tree: Path):
    def listing() -> list[str]:
        return sorted(str(place) for place in tree.rglob("*"))

    (tree / "vllm/untouched.py").write_text("x = 1\n")
    before = listing()
    apply_patch(tree)
    assert listing() == before
    assert (tree / "vllm/untouched.py").read_text() == "x = 1\n"


def test_the_mode_of_a_file_is_kept_and_its_compiled_form_dropped(tree: Path):
    target = tree / PATHS[0]
    target.chmod(0o640)
    cache = target.parent / "__pycache__"
    cache.mkdir()
    stale, other = cache / f"{target.stem}.cpython-311.pyc", cache / f"{target.stem}_x.cpython-311.pyc"
    stale.write_bytes(b"old")
    other.write_bytes(b"other")
    umask = os.umask(0o077)
    try:
        apply_patch(tree)
    finally:
        os.umask(umask)
    assert target.stat().st_mode & 0o777 == 0o640
    assert (stale.exists(), other.exists()) == (False, True)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("path", [PATHS[0], PATHS[-1]])
def test_a_locally_edited_file_is_refused_and_nothing_is_written(path: str, patched: bool, tree: Path):
    if patched:
        apply_patch(tree)
    edit_file(path, tree)
    before = contents(tree)
    assert state(tree) == "preimages"
    assert patch_status(tree).foreign == (path,)
    for change in (apply_patch, revert_patch, verify_tree):
        with pytest.raises(PatchError, match="edited locally") as caught:
            change(tree)
        assert caught.value.fields["files"] == [path]
        assert path in str(caught.value)
    assert contents(tree) == before


@pytest.mark.parametrize("version", ["0.25.2", "0.32.0+cpu", "0.25.10", "1"])
def test_a_foreign_version_is_refused_even_with_the_same_files(version: str, tree: Path):
    set_version(f"__version__ = version = '{version}'", tree)
    assert state(tree) == "preimages"
    assert patch_status(tree).state == "foreign"
    for change in (apply_patch, revert_patch, verify_tree):
        with pytest.raises(PatchError, match=re.escape(f"foreign version: this is vLLM {version}")):
            change(tree)


@pytest.mark.parametrize("version", ["0.25.1", "0.25.1+cpu", "0.25.2.dev0+g752a3a504.d20260720"])
def test_builds_of_the_pinned_release_are_accepted(version: str, tree: Path):
    set_version(f'__version__ = version = "{version}"', tree)
    assert is_pinned_version(version)
    assert state(tree) == "unpatched"


def test_a_version_file_that_names_no_version_is_refused(tree: Path):
    set_version("version = get_version()", tree)
    assert state(tree) == "preimages"


def test_a_checkout_of_another_commit_is_told_from_an_edited_one(tree: Path):
    path = PATHS[0]
    edited = (tree / path).read_bytes() + b"# mine\n"
    make_checkout(tree)
    (tree / path).write_bytes(edited)
    with pytest.raises(PatchError, match="edited locally"):
        apply_patch(tree)
    subprocess.run(
        ["git", "-C", str(tree), "-c", "user.name=x", "-c", "user.email=x@example.invalid", "commit", "-qam", "other"],
        check=True,
    )
    with pytest.raises(PatchError, match="checkout is of another version"):
        apply_patch(tree)
    head = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert patch_status(tree).describe()["commit"] == head.stdout.strip()


@pytest.mark.parametrize("kind", ["missing", "link", "linked folder", "folder"])
def test_a_touched_file_must_be_a_plain_file_of_the_tree(kind: str, tree: Path):
    replace_file(kind, tree)
    assert state(tree) == "preimages"
    with pytest.raises(PatchError, match="symbolic link" if "link" in kind else "missing, or not a plain file"):
        apply_patch(tree)


def change_in_a_process_that_stops(root: Path, verb: str, point: str) -> int:
    script = (
        "import sys; from pathlib import Path; from epochless_vllm.patch import installation;"
        "getattr(installation, sys.argv[1])(Path(sys.argv[2]))"
    )
    environment = {**os.environ, "EPOCHLESS_CRASH_AT": point, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, "-c", script, verb, str(root)], env=environment, check=False).returncode


@pytest.mark.parametrize("count", [1, 9, len(PATHS) - 1])
@pytest.mark.parametrize("verb", ["apply_patch", "revert_patch"])
def test_an_interrupted_change_is_recognised_and_can_be_finished_or_undone(verb: str, count: int, tree: Path):
    originals = contents(tree)
    if verb == "revert_patch":
        apply_patch(tree)
    assert change_in_a_process_that_stops(tree, verb, f"patch.file_replaced:{count}") == CRASH_EXIT_CODE
    status = patch_status(tree)
    assert status.state == "interrupted"
    assert len(status.patched if verb == "apply_patch" else status.unpatched) == count
    verdict = judge(DATA, tree, PIN_SHA256)
    assert (verdict.step, "half patched" in verdict.message) == ("preimages", True)
    abandoned = tree / "vllm/.outputs.py.4242.tmp"
    abandoned.write_bytes(b"half a file")
    half = contents(tree)
    assert apply_patch(tree).state == state(tree) == "patched"
    patched = contents(tree)
    for path, content in half.items():
        (tree / path).write_bytes(content)
    assert revert_patch(tree).state == state(tree) == "unpatched"
    assert contents(tree) == originals
    assert not abandoned.exists() or patched["vllm/outputs.py"] == half["vllm/outputs.py"]


def run_verifier(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = verify_patch.main([str(argument) for argument in arguments])
    return status, capsys.readouterr().out


def test_the_command_prints_numbered_steps_and_the_verdict(tree: Path, capsys: pytest.CaptureFixture[str]):
    status, output = run_verifier(capsys, "--tree", tree)
    lines = output.splitlines()
    assert (status, lines[:-1]) == (0, [f"{n} {name} ok" for n, name in enumerate(verify_patch.STEPS, 1)])
    assert lines[-1] == f"{tree}: verified, unpatched"
    apply_patch(tree)
    assert run_verifier(capsys, "--site-packages", tree)[1].splitlines()[-1] == f"{tree}: verified, patched"


def test_the_command_exits_one_at_the_step_that_fails(tree: Path, capsys: pytest.CaptureFixture[str]):
    (tree / PATHS[0]).write_bytes(b"# mine\n")
    status, output = run_verifier(capsys, "--tree", tree)
    assert (status, output.splitlines()[-1]) == (1, f"{tree}: refused")
    assert output.splitlines()[-2].startswith("5 preimages REFUSED: neither the original nor the patched file")
    status, output = run_verifier(capsys, "--tree", tree, "--json")
    answer = json.loads(output)
    assert (status, answer["verdict"], answer["steps"][-1]["holds"]) == (1, "refused", False)
    assert PATHS[0] in answer["message"]


@pytest.mark.parametrize("expected", ["patched", "unpatched"])
def test_the_command_can_expect_a_state(expected: str, tree: Path, capsys: pytest.CaptureFixture[str]):
    status, output = run_verifier(capsys, "--tree", tree, "--expect", expected, "--json")
    assert status == (1 if expected == "patched" else 0)
    assert json.loads(output)["verdict"] == ("refused" if expected == "patched" else "unpatched")


@pytest.mark.parametrize("arguments", [["--tree", "/nonexistent"], ["--tree", "a", "--site-packages", "b"], ["--what"]])
def test_wrong_usage_exits_two(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        verify_patch.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err


def test_the_installed_vllm_is_found_without_importing_it(installed: Path, capsys: pytest.CaptureFixture[str]):
    imported = "vllm" in sys.modules
    assert find_installed_tree() == installed
    status, output = run_verifier(capsys, "--json")
    assert (status, json.loads(output)["root"]) == (0, str(installed))
    assert ("vllm" in sys.modules) == imported
