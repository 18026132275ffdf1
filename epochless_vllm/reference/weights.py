"""Tensors of safetensors files as float32 arrays: shards found, headers inspected, data converted chunk by chunk.

Memory is the arrays and one chunk. BF16, F16 and F32 convert exactly; ``Rounding`` then repeats the cast of a server
that loads weights in a narrower dtype. Hostile files surface as InspectError or ModelRefusedError. Knows no model.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.errors import InspectError, ModelRefusedError
from epochless_vllm.reference.rounding import Rounder, Rounding
from epochless_vllm.store.documents import MAX_BYTES, parse_document
from epochless_vllm.store.safetensors import ITEM_BYTES, TensorRecord, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CHUNK_BYTES = 1 << 20
DTYPES = ("F32", "F16", "BF16")

Array = NDArray[np.float32]


@dataclass(frozen=True)
class LocatedTensor:
    """Where a tensor's bytes are: a file and an offset into it."""

    path: Path
    record: TensorRecord
    offset: int


def locate_tensors(directory: Path | str) -> dict[str, LocatedTensor]:
    """Return every tensor of a model directory by name, from the headers alone.

    The index decides which files count if there is one; else ``model.safetensors``; else every safetensors file.

    Raises:
        ModelRefusedError: no safetensors file, an index that does not describe its shards, or a tensor given twice.
        InspectError: a file is not well formed.
    """
    folder = Path(directory)
    index = _read_index(folder)
    names = sorted(set(index.values())) if index is not None else _unindexed(folder)
    found: dict[str, LocatedTensor] = {}
    for name in names:
        for tensor in _inspect(folder / name):
            previous = found.setdefault(tensor.record.name, tensor)
            if previous is not tensor:
                _refuse("duplicate_tensor", f"{tensor.record.name} is in {previous.path.name} and in {name}")
    if index is not None:
        actual = {name: tensor.path.name for name, tensor in found.items()}
        astray = {name for name, _ in set(index.items()) ^ set(actual.items())}
        if astray:
            _refuse(INDEX_NAME, f"{INDEX_NAME} and the shards disagree on {len(astray)} tensors, first {min(astray)}")
    return found


def read_tensor(tensor: LocatedTensor, rounding: Rounding = "float32") -> Array:
    """Return a located tensor as float32.

    Raises:
        ModelRefusedError: its dtype is not one of DTYPES, or the file cannot be read any more.
    """
    if tensor.record.dtype not in DTYPES:
        _refuse("dtype", f"{tensor.record.name}: dtype {tensor.record.dtype} is not computed; known are {DTYPES}")
    try:
        with tensor.path.open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            return _convert(tensor.record.shape, tensor.record.dtype, file.readinto, rounding, tensor.record.name)
    except OSError as error:
        _refuse("unreadable", f"{tensor.path}: {error.strerror}")


def tensor_from_bytes(payload: memoryview, dtype: str, shape: tuple[int, ...], rounding: Rounding = "float32") -> Array:
    """Return the float32 array of a tensor's raw bytes, whose length must be that of its shape."""
    return _convert(shape, dtype, io.BytesIO(payload).readinto, rounding, "tensor")


def _convert(
    shape: tuple[int, ...], dtype: str, read_into: Callable[[memoryview], int | None], rounding: Rounding, name: str
) -> Array:
    out: Array = np.empty(shape, np.float32)
    flat = out.reshape(-1)
    width = ITEM_BYTES[dtype]
    chunk = bytearray(min(CHUNK_BYTES, flat.size * width))
    rounder = Rounder(rounding)
    for begin in range(0, flat.size, CHUNK_BYTES // width):
        piece = flat[begin : begin + CHUNK_BYTES // width]
        _fill(read_into, memoryview(chunk)[: piece.size * width], name)
        if dtype == "BF16":
            piece.view(np.uint32)[...] = np.frombuffer(chunk, "<u2", piece.size)
            piece.view(np.uint32)[...] <<= np.uint32(16)
        else:
            piece[...] = np.frombuffer(chunk, "<f4" if dtype == "F32" else "<f2", piece.size)
        rounder.round(piece)
    return out


def _fill(read_into: Callable[[memoryview], int | None], view: memoryview, name: str) -> None:
    filled = 0
    while filled < len(view):
        count = read_into(view[filled:])
        if not count:
            raise InspectError(f"{name[:200]}: the file ends inside it; write the file again", reason="truncated")
        filled += count


def _inspect(path: Path) -> list[LocatedTensor]:
    try:
        with path.open("rb", buffering=0) as file:
            records, data_begin = read_header(file.read, os.fstat(file.fileno()).st_size)
    except OSError as error:
        _refuse("unreadable", f"{path}: {error.strerror}")
    return [LocatedTensor(path, record, data_begin + record.begin) for record in records]


def _read_index(folder: Path) -> Mapping[str, str] | None:
    try:
        with (folder / INDEX_NAME).open("rb") as file:
            document: Mapping[str, Any] = parse_document(file.read(MAX_BYTES + 1), subject=INDEX_NAME)
    except FileNotFoundError:  # a model in one file has no index
        return None
    except OSError as error:
        _refuse("unreadable", f"{folder / INDEX_NAME}: {error.strerror}")
    index = document.get("weight_map")
    if not isinstance(index, dict) or not index:
        _refuse(INDEX_NAME, f"{INDEX_NAME} has no weight_map")
    for name, shard in index.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or "/" in shard or "\0" in shard:
            _refuse(INDEX_NAME, f"{INDEX_NAME} sends {name[:80]!a} to {str(shard)[:80]!a}, which is no shard beside it")
    return index


def _unindexed(folder: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".safetensors"))
    except OSError as error:
        _refuse("directory", f"{folder}: {error.strerror}")
    if not names:
        _refuse("weights", f"{folder} has no safetensors file; pickles are not read")
    return [SINGLE_NAME] if SINGLE_NAME in names else names


def _refuse(field: str, detail: str) -> NoReturn:
    raise ModelRefusedError(f"weights: {detail}; check the model directory", field=field)
