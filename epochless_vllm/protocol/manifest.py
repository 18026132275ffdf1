"""The manifest of an adapter and the revision_id it determines.

A revision_id depends on what the adapter computes and on nothing else: the configuration fields that change the
mathematics, and each tensor's name, dtype, shape and bytes. File names, header order and key order do not enter.
Knows no files: see store/adapters.py for those.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NewType

from epochless_vllm.errors import EncodingError
from epochless_vllm.protocol.canonical import decode_canonical, encode_canonical
from epochless_vllm.protocol.digests import Digest, digest, parse_digest

RevisionId = NewType("RevisionId", str)
"""The digest of a canonical manifest: ``sha256:`` and 64 lowercase hexadecimal digits."""

RECIPE = "epochless/manifest/v1"
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
MAX_DIMENSION = 1 << 40  # far above any tensor; keeps every product within exact JSON integers when checked


@dataclass(frozen=True, order=True)
class TensorEntry:
    """One tensor of an adapter file; ``sha256`` covers its raw little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    byte_length: int
    sha256: Digest

    def encode(self) -> dict[str, Any]:
        return {
            "byte_length": self.byte_length,
            "dtype": self.dtype,
            "name": self.name,
            "sha256": self.sha256,
            "shape": list(self.shape),
        }


@dataclass(frozen=True)
class Manifest:
    """What an adapter is. ``config`` holds only fields that change the mathematics, floats as exact strings."""

    config: tuple[tuple[str, Any], ...]
    tensors: tuple[TensorEntry, ...]

    def encode(self) -> bytes:
        """Return the canonical bytes; tensors are in order of their names' UTF-8 bytes."""
        return self._payload

    @cached_property
    def _payload(self) -> bytes:
        return encode_canonical(
            {
                "config": dict(self.config),
                "recipe": RECIPE,
                "tensors": [entry.encode() for entry in self.tensors],
            }
        )

    @cached_property
    def revision_id(self) -> RevisionId:
        return RevisionId(digest(RECIPE, self.encode()))

    @property
    def byte_length(self) -> int:
        """Sum of the tensors' bytes."""
        return sum(entry.byte_length for entry in self.tensors)


def manifest_from_parts(config: dict[str, Any], tensors: list[TensorEntry]) -> Manifest:
    """Return the manifest of a configuration and its tensors, in canonical order.

    Raises:
        EncodingError: a tensor is named twice, or an entry contradicts itself.
    """
    ordered = sorted(tensors, key=lambda entry: entry.name.encode("utf-8"))
    for before, after in itertools.pairwise(ordered):
        if before.name == after.name:
            raise EncodingError(f"tensor {after.name} is named twice", reason="duplicate_tensor")
    for entry in ordered:
        _check_entry(entry)
    return Manifest(config=tuple(sorted(config.items())), tensors=tuple(ordered))


def decode_manifest(payload: bytes) -> Manifest:
    """Return the manifest of canonical bytes, strictly.

    Raises:
        EncodingError: the bytes are not a canonical manifest of this recipe.
    """
    value = decode_canonical(payload)
    if not isinstance(value, dict) or set(value) != {"config", "recipe", "tensors"}:
        raise EncodingError("not a manifest: wrong keys", reason="manifest_keys")
    if value["recipe"] != RECIPE:
        raise EncodingError(f"manifest of recipe {value['recipe']!r}; this reader knows {RECIPE}", reason="recipe")
    if not isinstance(value["config"], dict) or not isinstance(value["tensors"], list):
        raise EncodingError("not a manifest: wrong types", reason="manifest_types")
    manifest = manifest_from_parts(value["config"], [_decode_entry(item) for item in value["tensors"]])
    if manifest.encode() != payload:
        raise EncodingError("manifest tensors are out of order", reason="order")
    return manifest


def _decode_entry(value: Any) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"byte_length", "dtype", "name", "sha256", "shape"}:
        raise EncodingError("not a tensor entry: wrong keys", reason="entry_keys")
    shape, length = value["shape"], value["byte_length"]
    if not isinstance(shape, list) or not all(type(size) is int for size in [*shape, length]):
        raise EncodingError("not a tensor entry: sizes must be integers", reason="entry_types")
    if not isinstance(value["name"], str) or not isinstance(value["dtype"], str):
        raise EncodingError("not a tensor entry: name and dtype must be text", reason="entry_types")
    return TensorEntry(value["name"], value["dtype"], tuple(shape), length, parse_digest(value["sha256"]))


def _check_entry(entry: TensorEntry) -> None:
    if entry.dtype not in DTYPE_BYTES:
        raise EncodingError(f"{entry.name}: dtype {entry.dtype} is not supported", reason="dtype")
    size = DTYPE_BYTES[entry.dtype]
    for dimension in entry.shape:
        if not 0 < dimension < MAX_DIMENSION:
            raise EncodingError(f"{entry.name}: dimension {dimension} is out of range", reason="dimension")
        size *= dimension
    if size != entry.byte_length:
        raise EncodingError(
            f"{entry.name}: {entry.byte_length} bytes do not hold shape {entry.shape} of {entry.dtype}",
            reason="byte_length",
        )
