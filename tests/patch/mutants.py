"""Damaged copies of the series, re-pinned so that only the damage itself can be what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import verify_patch
from epochless_vllm.errors import PatchError
from epochless_vllm.patch.installation import verify_tree

Edit = Callable[[bytes], bytes]


class Verdict(NamedTuple):
    """``state`` of the tree, or ``step`` and ``message`` of the refusal."""

    state: str
    step: str
    message: str


def write_series(
    source: Path,
    target: Path,
    *,
    edit_pin: Callable[[Any], Any] | None = None,
    edit_patch: dict[str, Edit] | None = None,
    raw_pin: bytes | None = None,
) -> str:
    """Write an edited copy of a series and return the sha256 of its pin.

    The digests of edited patches are set to what they are now before ``edit_pin`` sees the decoded pin.
    """
    target.mkdir(parents=True, exist_ok=True)
    pin = json.loads((source / "pin.json").read_bytes())
    for entry in pin["series"]:
        raw = (source / entry["file"]).read_bytes()
        if edit_patch is not None and entry["file"] in edit_patch:
            edited = edit_patch[entry["file"]](raw)
            assert edited != raw, "the edit changed nothing"
            raw = edited
            entry["sha256"] = hashlib.sha256(raw).hexdigest()
        (target / entry["file"]).write_bytes(raw)
    if edit_pin is not None:
        pin = edit_pin(pin)
    content = raw_pin if raw_pin is not None else json.dumps(pin).encode()
    (target / "pin.json").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def judge_alone(directory: Path, root: Path, pin_sha256: str) -> Verdict:
    """Return the verdict of verify_patch.py."""
    try:
        return Verdict(verify_patch.verify(directory, root, pin_sha256=pin_sha256), "", "")
    except verify_patch.Refused as refusal:
        return Verdict("refused", refusal.step, str(refusal))


def judge_packaged(directory: Path, root: Path, pin_sha256: str) -> Verdict:
    """Return the verdict of the package's own verifier."""
    try:
        return Verdict(verify_tree(root, directory, pin_sha256=pin_sha256).state, "", "")
    except PatchError as error:
        return Verdict("refused", error.fields["step"], error.fields["reason"])


def judge(directory: Path, root: Path, pin_sha256: str) -> Verdict:
    """Return the verdict of verify_patch.py, after checking that the package comes to the same."""
    verdict, other = judge_alone(directory, root, pin_sha256), judge_packaged(directory, root, pin_sha256)
    assert other[:2] == verdict[:2], (verdict, other)
    return verdict
