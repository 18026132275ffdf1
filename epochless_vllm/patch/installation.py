"""Apply, revert and verify: the whole series on a whole tree.

Everything is worked out and checked in memory first; only then are files replaced, one by one, each atomically.
Because a half-replaced tree holds nothing but pinned originals and pinned results, applying or reverting again
finishes an interrupted run. Two processes changing one tree in opposite directions is the only thing not provided for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from epochless_vllm.patch.diff import Change, apply_change, blob_id
from epochless_vllm.patch.pin import DATA, PIN_SHA256, Pin, Series, load_series, refuse
from epochless_vllm.patch.tree import TreeStatus, read_contents, read_status, replace_files, require_known


def patch_status(root: Path, directory: Path = DATA, *, pin_sha256: str = PIN_SHA256) -> TreeStatus:
    """Return the status of the tree at ``root``; 20 ms, so that a server can ask at every start.

    Raises:
        PatchError: the shipped series is damaged, or a touched file is missing or a symbolic link.
    """
    pin = load_series(directory, pin_sha256=pin_sha256).pin
    return read_status(root, pin, read_contents(root, pin))


def verify_tree(root: Path, directory: Path = DATA, *, pin_sha256: str = PIN_SHA256) -> TreeStatus:
    """Return the status of a tree that is wholly patched or wholly unpatched, after every check of verify_patch.py.

    Raises:
        PatchError: with ``step``, the first check that failed.
    """
    series = load_series(directory, pin_sha256=pin_sha256)
    contents = read_contents(root, series.pin)
    status = read_status(root, series.pin, contents)
    require_known(status)
    if status.state == "interrupted":
        raise refuse("preimages", f"half patched: {status.reason}")
    compute(series, contents)
    return status


def apply_patch(root: Path, directory: Path = DATA, *, pin_sha256: str = PIN_SHA256) -> TreeStatus:
    """Patch the tree at ``root``; do nothing if it is patched, finish if it is half patched. Return its new status.

    Raises:
        PatchError: a foreign version, an edited file or a damaged series; nothing was changed.
        StoreError: the disk refused half way; apply again or revert.
    """
    return _replace(root, load_series(directory, pin_sha256=pin_sha256), patched=True)


def revert_patch(root: Path, directory: Path = DATA, *, pin_sha256: str = PIN_SHA256) -> TreeStatus:
    """Give the tree at ``root`` its original bytes; do nothing if it has them. Return its new status.

    Raises:
        PatchError: a foreign version, an edited file or a damaged series; nothing was changed.
        StoreError: the disk refused half way; revert again or apply.
    """
    return _replace(root, load_series(directory, pin_sha256=pin_sha256), patched=False)


def compute(series: Series, contents: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return (original, patched) content of each file, from ``contents`` in which each file is either.

    Raises:
        PatchError: at step ``apply``, ``index``, ``postimages`` or ``syntax``.
    """
    blobs = {path: blob_id(content) for path, content in contents.items()}
    patched = {path for path, (_, after) in series.pin.files.items() if blobs[path] == after}
    inverse = [(name, change.inverse()) for name, change in reversed(series.changes)]
    originals = _run(contents, inverse, only=patched)
    results = _run(originals, series.changes)
    _check_blobs(series.pin, _run(results, inverse), results)
    for path, content in results.items():
        _check_syntax(path, content)
    return originals, results


def _replace(root: Path, series: Series, *, patched: bool) -> TreeStatus:
    contents = read_contents(root, series.pin)
    require_known(read_status(root, series.pin, contents))
    originals, results = compute(series, contents)
    wanted = results if patched else originals
    replace_files(root, {path: content for path, content in wanted.items() if content != contents[path]})
    held = read_contents(root, series.pin)
    status = read_status(root, series.pin, held)
    if held != wanted:
        raise refuse("postimages", f"the files were changed again while they were written: {status.reason}")
    return status


def _run(
    contents: Mapping[str, bytes], changes: Iterable[tuple[str, Change]], *, only: set[str] | None = None
) -> dict[str, bytes]:
    scratch = dict(contents)
    for name, change in changes:
        if only is None or change.path in only:
            scratch[change.path] = apply_change(name, change, scratch[change.path])
    return scratch


def _check_blobs(pin: Pin, originals: Mapping[str, bytes], results: Mapping[str, bytes]) -> None:
    for path, pinned in pin.files.items():
        if (blob_id(originals[path]), blob_id(results[path])) != pinned:
            raise refuse("postimages", f"{path}: not the pinned original and result", path=path)


def _check_syntax(path: str, content: bytes) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(content, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise refuse("syntax", f"{path}: does not compile: {error}", path=path) from None
