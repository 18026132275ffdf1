"""The manifest determines the revision_id: frozen vectors, the recipe by hand, and every contradiction refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import EncodingError
from epochless_vllm.protocol.digests import Digest
from epochless_vllm.protocol.manifest import (
    DTYPE_BYTES,
    MAX_DIMENSION,
    RECIPE,
    Manifest,
    TensorEntry,
    decode_manifest,
    manifest_from_parts,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "manifests.json").read_text())

ZERO = Digest("sha256:" + "0" * 64)


def entry(
    name: str = "a",
    dtype: str = "F32",
    shape: tuple[int, ...] = (2, 3),
    length: int | None = None,
    sha256: Digest = ZERO,
) -> TensorEntry:
    size = math.prod(shape) * DTYPE_BYTES.get(dtype, 1)
    return TensorEntry(name, dtype, shape, size if length is None else length, sha256)


def id_by_hand(config: dict[str, Any], tensors: list[dict[str, Any]]) -> str:
    """The recipe, written a second time: sorted entries, compact JSON, tag and length before the hash."""
    document = {"config": config, "recipe": RECIPE, "tensors": sorted(tensors, key=lambda item: item["name"].encode())}
    payload = json.dumps(document, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    return "sha256:" + hashlib.sha256(RECIPE.encode() + b"\0" + len(payload).to_bytes(8, "big") + payload).hexdigest()


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=[vector["what"] for vector in VECTORS["vectors"]])
def test_revision_id_of_the_vector_has_not_changed(vector: dict[str, Any]) -> None:
    entries = [
        TensorEntry(
            tensor["name"],
            tensor["dtype"],
            tuple(tensor["shape"]),
            len(bytes.fromhex(tensor["hex"])),
            Digest("sha256:" + hashlib.sha256(bytes.fromhex(tensor["hex"])).hexdigest()),
        )
        for tensor in vector["tensors"]
    ]
    manifest = manifest_from_parts(vector["config"], entries)
    assert manifest.encode().decode() == vector["canonical"]
    assert manifest.revision_id == vector["revision_id"]
    assert decode_manifest(vector["canonical"].encode()) == manifest


def test_recipe_is_the_one_the_vectors_were_made_by() -> None:
    assert VECTORS["recipe"] == RECIPE
    assert len({vector["revision_id"] for vector in VECTORS["vectors"]}) == len(VECTORS["vectors"])


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
entries = st.builds(
    entry,
    names,
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
    st.none(),
    st.binary(min_size=32, max_size=32).map(lambda raw: Digest(f"sha256:{raw.hex()}")),
)
ascii_text = st.text(st.characters(max_codepoint=127), max_size=6)
configs = st.dictionaries(ascii_text, st.integers(-9, 9) | st.text("ab1."), max_size=3)
manifests = st.tuples(configs, st.lists(entries, max_size=4, unique_by=lambda item: item.name))


@given(manifests, st.randoms())
def test_revision_id_is_the_recipe_and_ignores_order(
    parts: tuple[dict[str, Any], list[TensorEntry]], random: Any
) -> None:
    config, tensors = parts
    manifest = manifest_from_parts(config, tensors)
    shuffled = random.sample(tensors, len(tensors))
    assert manifest_from_parts(dict(reversed(config.items())), shuffled) == manifest
    assert manifest.revision_id == id_by_hand(config, [item.encode() for item in shuffled])
    assert decode_manifest(manifest.encode()) == manifest
    assert manifest.byte_length == sum(item.byte_length for item in tensors)


@given(manifests, manifests)
def test_different_manifests_have_different_ids(one: Any, other: Any) -> None:
    first, second = manifest_from_parts(*one), manifest_from_parts(*other)
    assert (first == second) == (first.revision_id == second.revision_id)


def test_each_field_of_an_entry_and_each_key_of_the_config_enters_the_id() -> None:
    variants = [
        manifest_from_parts(config, tensors)
        for config, tensors in (
            ({"alpha": "8"}, [entry()]),
            ({"alpha": "9"}, [entry()]),
            ({"alphb": "8"}, [entry()]),
            ({}, [entry()]),
            ({"alpha": "8"}, []),
            ({"alpha": "8"}, [entry("b")]),
            ({"alpha": "8"}, [entry(shape=(3, 2))]),
            ({"alpha": "8"}, [entry(shape=(6,))]),
            ({"alpha": "8"}, [entry(dtype="F64")]),
            ({"alpha": "8"}, [entry(), entry("b")]),
            ({"alpha": "8"}, [TensorEntry("a", "F32", (2, 3), 24, Digest("sha256:" + "1" * 64))]),
        )
    ]
    for one, other in itertools.combinations(variants, 2):
        assert one.revision_id != other.revision_id


@pytest.mark.parametrize(
    ("reason", "tensors"),
    [
        ("duplicate_tensor", [entry(), entry()]),
        ("duplicate_tensor", [entry("b"), entry(), entry("b", shape=(1,))]),
        ("dtype", [entry(dtype="I8")]),
        ("dtype", [entry(dtype="f32")]),
        ("dimension", [entry(shape=(0,))]),
        ("dimension", [entry(shape=(-2, -3))]),
        ("dimension", [entry(shape=(MAX_DIMENSION,))]),
        ("byte_length", [entry(length=23)]),
        ("byte_length", [entry(length=0)]),
        ("byte_length", [entry(shape=(1 << 39, 1 << 39), length=0)]),
    ],
)
def test_entry_that_contradicts_itself_is_refused(reason: str, tensors: list[TensorEntry]) -> None:
    with pytest.raises(EncodingError) as caught:
        manifest_from_parts({}, tensors)
    assert caught.value.fields["reason"] == reason


SOUND = manifest_from_parts({"lora_alpha": "8"}, [entry("a"), entry("b")])


def document(**changes: Any) -> dict[str, Any]:
    return {**json.loads(SOUND.encode()), **changes}


def with_tensor(**changes: Any) -> dict[str, Any]:
    first, second = document()["tensors"]
    return document(tensors=[{**first, **changes}, second])


@pytest.mark.parametrize(
    ("reason", "value"),
    [
        ("manifest_keys", {}),
        ("manifest_keys", []),
        ("manifest_keys", document(extra=1)),
        ("recipe", document(recipe="epochless/manifest/v2")),
        ("recipe", document(recipe=None)),
        ("manifest_types", document(config=[])),
        ("manifest_types", document(tensors={})),
        ("entry_keys", document(tensors=[1])),
        ("entry_keys", with_tensor(extra=1)),
        ("entry_types", with_tensor(shape=6)),
        ("entry_types", with_tensor(shape=[True, 6])),
        ("entry_types", with_tensor(shape=["2", "3"])),
        ("entry_types", with_tensor(byte_length=None)),
        ("entry_types", with_tensor(name=5)),
        ("entry_types", with_tensor(dtype=None)),
        ("digest", with_tensor(sha256="0" * 64)),
        ("digest", with_tensor(sha256=None)),
        ("byte_length", with_tensor(byte_length=25)),
        ("dtype", with_tensor(dtype="F33")),
        ("duplicate_tensor", with_tensor(name="b")),
        ("order", document(tensors=document()["tensors"][::-1])),
    ],
)
def test_bytes_that_are_no_manifest_are_refused_with_their_own_reason(reason: str, value: Any) -> None:
    payload = json.dumps(value, separators=(",", ":"), sort_keys=True).encode()
    with pytest.raises(EncodingError) as caught:
        decode_manifest(payload)
    assert caught.value.fields["reason"] == reason


@pytest.mark.parametrize("payload", [b"", b"\xff", b" " + SOUND.encode(), SOUND.encode() + b"\n", b"[" * 99])
def test_bytes_that_are_not_canonical_are_no_manifest(payload: bytes) -> None:
    with pytest.raises(EncodingError):
        decode_manifest(payload)


def test_changing_any_byte_is_refused_or_changes_the_revision_id() -> None:
    original = SOUND.encode()
    for position in range(len(original)):
        for byte in range(32, 127):
            if byte != original[position]:
                changed = bytearray(original)
                changed[position] = byte
                try:
                    manifest = decode_manifest(bytes(changed))
                except EncodingError:
                    continue
                assert isinstance(manifest, Manifest)
                assert manifest.encode() == bytes(changed)
                assert manifest.revision_id != SOUND.revision_id
