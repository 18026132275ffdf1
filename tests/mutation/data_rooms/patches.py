"""Damaged pins, patches and trees: those of tests/patch, judged by both verifiers on the layouts users have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from epochless_vllm.errors import PatchError
from epochless_vllm.patch.installation import apply_patch, revert_patch
from epochless_vllm.patch.pin import DATA, PIN_SHA256
from tests.mutation.data import Checker, DataMutant, DataRoom, Refusal
from tests.mutation.mutants import ROOT
from tests.patch import test_form, test_pin
from tests.patch.mutants import Verdict, judge_alone, judge_packaged, write_series
from tests.patch.trees import DAMAGE, LAYOUTS, copy_originals, installed_root

PATCHES, SERIES_FILE = ROOT / "patches", f"patches/{test_form.NAME}"
JUDGES = {"verify_patch.py": judge_alone, "epochless patch verify": judge_packaged}

# Given the original tree: what becomes of the series, as arguments of write_series.
Edits = Callable[[Path], dict[str, Any]]


def _prepare(files: Path) -> None:
    installed = installed_root()
    if installed is None:
        raise SystemExit("vLLM is not installed; run make setup")
    for name, make_layout in LAYOUTS.items():
        make_layout(copy_originals(installed, files / name))


def _refusal_of(verdict: Verdict) -> Refusal | None:
    return Refusal(verdict.step, verdict.message) if verdict.state == "refused" else None


def _judge(judge: Callable[..., Verdict], layout: str, edits: Edits, files: Path, place: Path) -> Refusal | None:
    digest = write_series(PATCHES, place, **edits(files / "wheel"))
    return _refusal_of(judge(place, files / layout, digest))


CHECKERS: dict[str, Checker] = {
    f"{name}, {layout}": partial(_judge, judge, layout) for name, judge in JUDGES.items() for layout in LAYOUTS
}


def _mutant(name: str, damages: str, edits: Edits, step: str, words: str) -> DataMutant:
    # The two stop at the same step, each in words of its own.
    wanted = {
        f"{judge}, {layout}": Refusal(step, words if judge == "verify_patch.py" else "")
        for judge in JUDGES
        for layout in LAYOUTS
    }
    return DataMutant(name, damages, edits, wanted)


def _of_pin(edit: Callable[[Any], Any], _: Path) -> dict[str, Any]:
    return {"edit_pin": edit}


def _of_patch(edit: Callable[[bytes], bytes], _: Path) -> dict[str, Any]:
    return {"edit_patch": {test_form.NAME: edit}}


def _of_result(original: Path) -> dict[str, Any]:
    edit_patch, edit_pin = test_form.broken_result(original)
    return {"edit_patch": {test_form.NAME: edit_patch}, "edit_pin": edit_pin}


# Trees


class Tree(NamedTuple):
    """A copy of a tree, and what is done to it."""

    layout: str
    act: Callable[[Path], object]


def _copy(tree: Tree, files: Path, place: Path) -> Path:
    root = Path(shutil.copytree(files / tree.layout, place / "tree"))
    tree.act(root)
    return root


def _judge_tree(judge: Callable[..., Verdict], tree: Tree, files: Path, place: Path) -> Refusal | None:
    return _refusal_of(judge(DATA, _copy(tree, files, place), PIN_SHA256))


def _change_tree(change: Callable[[Path], object], tree: Tree, files: Path, place: Path) -> Refusal | None:
    root = _copy(tree, files, place)
    try:
        change(root)
    except PatchError as error:
        return Refusal(error.fields["step"], error.message)
    return None


TREE_CHECKERS: dict[str, Checker] = {
    "epochless patch apply": partial(_change_tree, apply_patch),
    "epochless patch revert": partial(_change_tree, revert_patch),
    **{name: partial(_judge_tree, judge) for name, judge in JUDGES.items()},
}


def _of_tree(name: str, layout: str, words: str) -> DataMutant:
    # What was interrupted, apply and revert finish.
    checkers = JUDGES if name == "half patched" else TREE_CHECKERS
    wanted = {checker: Refusal("preimages", words if checker == "verify_patch.py" else "") for checker in checkers}
    return DataMutant(f"{name}, {layout}", layout, Tree(layout, DAMAGE[name][0]), wanted)


UNDAMAGED: dict[str, Edits] = {"the series as it is": lambda _: {}}

ROOMS = (
    DataRoom(
        "data: pin of the patch",
        CHECKERS,
        UNDAMAGED,
        tuple(
            _mutant(name, "patches/pin.json", partial(_of_pin, edit), step, words)
            for name, (edit, step, words) in test_pin.DAMAGE.items()
        ),
        prepare=_prepare,
    ),
    DataRoom(
        "data: patches",
        CHECKERS,
        UNDAMAGED,
        (
            *(
                _mutant(name, SERIES_FILE, partial(_of_patch, edit), step, words)
                for name, (edit, step, words) in test_form.DAMAGE.items()
            ),
            _mutant("a result that does not compile", SERIES_FILE, _of_result, "syntax", test_form.PATH.decode()),
        ),
        prepare=_prepare,
    ),
    DataRoom(
        "data: patched trees",
        TREE_CHECKERS,
        {
            f"{layout}, {state}": Tree(layout, act)
            for layout in LAYOUTS
            for state, act in (("unpatched", lambda _: None), ("patched", apply_patch))
        },
        tuple(
            _of_tree(name, layout, words)
            for layout in LAYOUTS
            for name, (_, words) in DAMAGE.items()
            if layout != "checkout" or "version" not in name  # a checkout has no file of its version
        ),
        prepare=_prepare,
    ),
)
