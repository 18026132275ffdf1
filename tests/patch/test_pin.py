"""Every field of pin.json, damaged: refused at its step, for its reason, by both verifiers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import verify_patch
from epochless_vllm.errors import PatchError
from epochless_vllm.patch import pin as package_pin
from tests.patch.conftest import REPOSITORY
from tests.patch.mutants import judge, write_series

PIN = json.loads((REPOSITORY / "patches" / "pin.json").read_bytes())
FIRST, LAST = PIN["series"][0]["file"], PIN["series"][-1]["file"]


def change(*keys: str | int, to: Any) -> Callable[[Any], Any]:
    """Return an edit that sets one place of the pin."""

    def edit(pin: Any) -> Any:
        place = pin
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to(place[keys[-1]]) if callable(to) else to
        return pin

    return edit


def drop(*keys: str | int) -> Callable[[Any], Any]:
    def edit(pin: Any) -> Any:
        place = pin
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]
        return pin

    return edit


def swap_shared_order(pin: Any) -> Any:
    """Exchange the two patches that change the same file."""
    names = [entry["file"] for entry in pin["series"]]
    one, other = names.index("choice-labels.patch"), names.index("token-choices.patch")
    pin["series"][one], pin["series"][other] = pin["series"][other], pin["series"][one]
    return pin


BLOB = "0123456789abcdef0123456789abcdef01234567"
DAMAGE = {
    "no object": (lambda pin: [pin], "manifest", "not an object with exactly the keys"),
    "another format": (change("format", to="epochless/vllm-patch/v2"), "manifest", "format is not"),
    "a key too many": (lambda pin: {**pin, "extra": 1}, "manifest", "exactly the keys"),
    **{f"without {key}": (drop(key), "manifest", "exactly the keys") for key in PIN},
    **{
        f"another upstream {key}": (change("upstream", key, to="x"), "manifest", f"upstream.{key} is not")
        for key in PIN["upstream"]
    },
    **{
        f"no upstream {key}": (drop("upstream", key), "manifest", "upstream does not have exactly")
        for key in PIN["upstream"]
    },
    "an empty allowlist": (change("allow", to=[]), "manifest", "allow is not a list with entries"),
    "an allowlist that is no list": (change("allow", to="vllm/outputs.py"), "manifest", "allow is not a list"),
    "an allowed path above the tree": (change("allow", 0, to="vllm/../x.py"), "manifest", "allow has a path outside"),
    "an allowed file that is not Python": (change("allow", 0, to="vllm/a.so"), "manifest", "allow has a path outside"),
    "an allowlist out of order": (change("allow", to=lambda paths: paths[::-1]), "manifest", "allow is not sorted"),
    "an allowed path twice": (change("allow", to=lambda paths: [paths[0], *paths]), "manifest", "lists a path twice"),
    "a touched path not allowed": (change("allow", to=lambda paths: paths[1:]), "allowlist", "touched but not allowed"),
    "an untouched path allowed": (
        change("allow", to=lambda paths: sorted([*paths, "vllm/zz.py"])),
        "allowlist",
        "allowed but not touched: vllm/zz.py",
    ),
    "an empty series": (change("series", to=[]), "manifest", "series is not a list with entries"),
    "a row of the series with a key too many": (
        change("series", 0, to=lambda row: {**row, "x": 1}),
        "manifest",
        "series has a row without its keys",
    ),
    "a patch name with a folder": (
        change("series", 0, "file", to="../a.patch"),
        "manifest",
        "series has a malformed file",
    ),
    "a patch listed twice": (change("series", 0, "file", to=LAST), "manifest", "series lists an entry twice"),
    "a patch that is missing": (
        change("series", to=lambda rows: [*rows, {**rows[0], "file": "a.patch"}]),
        "manifest",
        "a.patch: missing",
    ),
    "a patch that is not listed": (drop("series", 0), "manifest", f"not in the series of pin.json: {FIRST}"),
    "a malformed sha256": (change("series", 0, "sha256", to="ABC"), "manifest", "series has a malformed sha256"),
    "another sha256": (change("series", 0, "sha256", to="0" * 64), "manifest", f"{FIRST} has sha256"),
    "patches in another order": (swap_shared_order, "index", "token-choices.patch: vllm/entrypoints"),
    "no files": (change("files", to={}), "manifest", "files is not a list with entries"),
    "a row of files without a key": (drop("files", 0, "after"), "manifest", "files has a row without its keys"),
    "a malformed path": (change("files", 0, "path", to="/etc/x.py"), "manifest", "files has a malformed path"),
    "a malformed original": (change("files", 0, "before", to=BLOB[:-1]), "manifest", "files has a malformed before"),
    "a malformed result": (change("files", 0, "after", to=BLOB.upper()), "manifest", "files has a malformed after"),
    "a file listed twice": (
        change("files", 0, to=lambda row: PIN["files"][1]),
        "manifest",
        "files lists an entry twice",
    ),
    "a file too few": (drop("files", 0), "allowlist", "files of pin.json are not the paths"),
    "another original": (change("files", 0, "before", to=BLOB), "preimages", "neither the original nor the patched"),
    "another result": (
        change("files", 0, "after", to=BLOB),
        "postimages",
        f"pin.json says {PIN['files'][0]['before']} and {BLOB}",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_field_is_refused_with_its_own_message(name: str, patches: Path, original: Path, tmp_path: Path):
    edit, step, message = DAMAGE[name]
    digest = write_series(patches, tmp_path, edit_pin=edit)
    verdict = judge(tmp_path, original, digest)
    assert verdict.step == step
    assert message in verdict.message


def leaves(value: Any, *keys: str | int) -> Iterator[tuple[str | int, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*keys, key)
        yield from leaves(child, *keys, key)


@pytest.mark.parametrize("value", [None, 0, True, "", "x", [], {}, ["x"], {"x": "y"}])
def test_no_place_of_the_pin_takes_another_value(value: Any, patches: Path, original: Path, tmp_path: Path):
    for keys in leaves(PIN):
        digest = write_series(patches, tmp_path, edit_pin=change(*keys, to=copy.deepcopy(value)))
        assert judge(tmp_path, original, digest).state == "refused", keys


def test_a_pin_of_another_digest_is_refused_before_it_is_read(patches: Path, original: Path, tmp_path: Path):
    write_series(patches, tmp_path, raw_pin=(patches / "pin.json").read_bytes() + b" ")
    verdict = judge(tmp_path, original, verify_patch.PIN_SHA256)
    assert verdict.step == "pin"
    assert f"expected {verify_patch.PIN_SHA256}" in verdict.message


@pytest.mark.parametrize("kind", ["missing", "directory", "link", "long"])
def test_a_pin_that_is_no_plain_file_is_refused(kind: str, patches: Path, original: Path, tmp_path: Path):
    place = tmp_path / "pin.json"
    if kind == "directory":
        place.mkdir()
    elif kind == "link":
        place.symlink_to(patches / "pin.json")
    elif kind == "long":
        place.write_bytes(b" " * (verify_patch.MAX_BYTES + 1))
    assert judge(tmp_path, original, verify_patch.PIN_SHA256).step == "pin"


def test_a_key_given_twice_is_refused(patches: Path, original: Path, tmp_path: Path):
    raw = (patches / "pin.json").read_bytes().replace(b'"format"', b'"format": "x", "format"', 1)
    verdict = judge(tmp_path, original, write_series(patches, tmp_path, raw_pin=raw))
    assert (verdict.step, "same key twice" in verdict.message) == ("manifest", True)


def read_both(raw: bytes) -> object:
    """Return what both readers make of a pin, or None if both refuse it."""
    try:
        one = verify_patch.parse_pin(raw)
    except verify_patch.Refused:
        one = None
    try:
        other = package_pin.parse_pin(raw)
    except PatchError:
        other = None
    if one is not None and other is not None:
        assert (tuple(one.allow), one.series, one.files) == (other.allow, other.series, other.files)
    assert (one is None) == (other is None)
    return one


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
@example(b"[" * 100_000)
@example(b"9" * 10_000)
@example(b'{"format": NaN}')
@example(b"\xff\xfe{}")
def test_arbitrary_bytes_are_no_pin_and_no_other_error(raw: bytes):
    assert read_both(raw) is None


SOURCE = (REPOSITORY / "patches" / "pin.json").read_bytes()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(SOURCE) - 1), st.integers(0, 40), st.binary(max_size=8))
def test_a_spliced_pin_is_read_alike_by_both(start: int, length: int, inserted: bytes):
    read_both(SOURCE[:start] + inserted + SOURCE[start + length :])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*PIN, "file", "path"]), inner),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({key: json_values | st.just(value) for key, value in PIN.items()}))
def test_a_pin_of_other_values_is_read_alike_by_both(pin: dict[str, Any]):
    assert (read_both(json.dumps(pin).encode()) is not None) == (pin == PIN)
