"""The pin of the patch: which vLLM, which patches in which order, and every touched file before and after.

``data/`` holds the series, pin.json and verify_patch.py as the package ships them. Promises that a returned series is
the pinned one byte for byte and well formed. Knows no tree: see tree.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epochless_vllm.errors import PatchError
from epochless_vllm.patch.diff import Change, parse_patch

DATA = Path(__file__).parent / "data"
PIN_SHA256 = "2269231ac97155d85d5f756c4a414c8c8aa87a8ab3bfe8389e4d5c481e518de1"
FORMAT = "epochless/vllm-patch/v1"
UPSTREAM = {
    "commit": "752a3a504485790a2e8491cacbb35c137339ad34",
    "tag": "v0.25.1",
    "url": "https://github.com/vllm-project/vllm",
    "version": "0.25.1",
}
MAX_FILE_BYTES = 4 << 20  # the largest touched file has 330 kB; a bound keeps hostile input cheap


@dataclass(frozen=True)
class Pin:
    """A parsed pin.json. ``series`` maps a patch file to its sha256, in order; ``files`` a path to its two blob ids."""

    allow: tuple[str, ...]
    series: dict[str, str]
    files: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Series:
    """A pin with the changes of all its patches in order, each with the name of its patch."""

    pin: Pin
    changes: tuple[tuple[str, Change], ...]


def refuse(step: str, reason: str, **fields: Any) -> PatchError:
    """Return the error of one step; the fields name what was found."""
    return PatchError(f"patch refused at step {step}: {reason}", step=step, reason=reason, **fields)


def read_plain_file(root: Path, path: str, step: str) -> bytes:
    """Return the bytes of the file ``path`` below ``root``.

    Raises:
        PatchError: it is missing, too long, not a plain file, or reached through a symbolic link.
    """
    place = root
    for part in path.split("/"):
        place /= part
        if place.is_symlink():
            raise refuse(step, f"{path}: {part} is a symbolic link; copy the package instead of linking it", path=path)
    if not place.is_file():
        raise refuse(step, f"{path}: missing, or not a plain file", path=path)
    try:
        content = place.read_bytes()
    except OSError as error:
        raise refuse(step, f"{path}: cannot be read: {error.strerror}", path=path) from error
    if len(content) > MAX_FILE_BYTES:
        raise refuse(step, f"{path}: longer than {MAX_FILE_BYTES} bytes", path=path)
    return content


def parse_pin(raw: bytes) -> Pin:
    """Return the pin these bytes encode.

    Raises:
        PatchError: at step ``manifest``, for any bytes that are not exactly a pin of this format and upstream.
    """
    try:
        pin = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise refuse("manifest", f"pin.json is not JSON: {error}") from None
    match pin:
        case {"format": str(), "upstream": dict(), "allow": [*_], "series": [*_], "files": [*_]} if len(pin) == 5:
            pass
        case _:
            raise refuse("manifest", "pin.json is not an object of allow, files, format, series and upstream")
    if pin["format"] != FORMAT:
        raise refuse("manifest", f"pin.json has format {pin['format']!r}; this release reads {FORMAT!r}")
    for key in sorted({*UPSTREAM, *pin["upstream"]}):
        if pin["upstream"].get(key) != UPSTREAM.get(key):
            raise refuse("manifest", f"pin.json names another upstream.{key}; this release is made for {UPSTREAM}")
    allow = _column([{"path": path} for path in pin["allow"]], "allow", "path", _PATH)
    if allow != sorted(allow):
        raise refuse("manifest", "pin.json does not sort the allowed paths")
    names = _column(pin["series"], "series", "file", _PATCH_NAME, other="sha256")
    digests = _column(pin["series"], "series", "sha256", _SHA256, other="file", unique=False)
    paths = _column(pin["files"], "files", "path", _PATH, other="before after")
    before = _column(pin["files"], "files", "before", _BLOB_ID, other="path after", unique=False)
    after = _column(pin["files"], "files", "after", _BLOB_ID, other="path before", unique=False)
    pinned = {path: (old, new) for path, old, new in zip(paths, before, after, strict=True)}
    return Pin(tuple(allow), dict(zip(names, digests, strict=True)), pinned)


def load_series(directory: Path = DATA, *, pin_sha256: str = PIN_SHA256) -> Series:
    """Return the series of ``directory`` after checking it against ``pin_sha256``.

    Raises:
        PatchError: at step ``pin``, ``manifest``, ``form`` or ``allowlist``.
    """
    raw = read_plain_file(directory, "pin.json", "pin")
    actual = hashlib.sha256(raw).hexdigest()
    if actual != pin_sha256:
        raise refuse("pin", f"pin.json has sha256 {actual}, not {pin_sha256}; reinstall epochless-vllm")
    pin = parse_pin(raw)
    stray = sorted({place.name for place in directory.glob("*.patch")} - set(pin.series))
    if stray:
        raise refuse("manifest", f"{', '.join(stray)}: not in the series of pin.json")
    patches = {}
    for name, expected in pin.series.items():
        patches[name] = read_plain_file(directory, name, "manifest")
        if (actual := hashlib.sha256(patches[name]).hexdigest()) != expected:
            raise refuse("manifest", f"{name} has sha256 {actual}, not {expected}; reinstall epochless-vllm")
    changes = tuple((name, change) for name, raw in patches.items() for change in parse_patch(name, raw))
    touched = {change.path for _, change in changes}
    for difference, what in (
        (touched - set(pin.allow), "touched but not allowed"),
        (set(pin.allow) - touched, "allowed but not touched"),
        (touched ^ set(pin.files), "touched or pinned, not both"),
    ):
        if difference:
            raise refuse("allowlist", f"{what}: {', '.join(sorted(difference))}")
    return Series(pin, changes)


_PATH = re.compile(r"vllm(/[A-Za-z0-9_]+)+\.py")
_PATCH_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\.patch")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOB_ID = re.compile(r"[0-9a-f]{40}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise refuse("manifest", "pin.json has an object with the same key twice")
    return dict(pairs)


def _column(
    table: list[Any], name: str, key: str, pattern: re.Pattern[str], *, other: str = "", unique: bool = True
) -> list[str]:
    """Return the values of ``key`` in a list of objects with exactly the keys ``key`` and ``other``."""
    values: list[str] = []
    for row in table:
        if not isinstance(row, dict) or set(row) != {key, *other.split()}:
            raise refuse("manifest", f"pin.json: a row of {name} does not have exactly its keys")
        if not isinstance(row[key], str) or pattern.fullmatch(row[key]) is None:
            raise refuse("manifest", f"pin.json: a {key} of {name} is malformed")
        values.append(row[key])
    if not values or (unique and len(set(values)) != len(values)):
        raise refuse("manifest", f"pin.json: {name} is empty or repeats a {key}")
    return values
