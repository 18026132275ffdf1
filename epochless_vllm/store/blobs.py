"""The tensor bytes of a revision: written while they are hashed, and hashed again on every read.

A stored file has one possible sequence of bytes for a given manifest: tensors in canonical order behind the header
that follows from it. Holds one chunk while writing, the whole file once while reading. Knows no directories.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from epochless_vllm.durable import flushing
from epochless_vllm.errors import DigestMismatchError, InspectError, StoreError
from epochless_vllm.protocol.digests import Digest, digest_from_bytes
from epochless_vllm.protocol.manifest import Manifest, TensorEntry
from epochless_vllm.store.finite import find_non_finite
from epochless_vllm.store.incoming import storage_errors
from epochless_vllm.store.safetensors import ITEM_BYTES, TensorRecord, encode_header, lay_out

CHUNK_BYTES = 1 << 20  # copying is fastest while a chunk stays in the second-level cache
ALIGNMENT = 64  # bytes, of each tensor in memory: a cache line
B_SUFFIX = ".lora_B.weight"
MAX_BUFFERS = 1024  # of one call: IOV_MAX of Linux

ReadInto = Callable[[memoryview], int]
"""Fills the front of a buffer with the next bytes of a source and returns their count; 0 at its end."""


class Watcher(Protocol):
    """Sees each byte of an adapter on its way into the store, so that nobody reads it again for that."""

    def update(self, record: TensorRecord, piece: memoryview) -> None:
        """Take the next bytes of a tensor, whole elements; ``piece`` is valid during the call only."""


def copy_tensors(
    read_into: ReadInto, records: Sequence[TensorRecord], target: io.FileIO, *, watcher: Watcher | None = None
) -> list[TensorEntry]:
    """Write the canonical file of a source's tensors, and return what was written.

    Each byte is read once; the digest is of the bytes that were written, whatever the source holds by then.

    Args:
        read_into: the source, at its first byte of data.
        records: its tensors in the order of their data.
        target: an empty file open for writing.

    Raises:
        InspectError: the source ends early, goes on, or holds a value that is not finite.
        StoreError: the file cannot be written.
    """
    layout = lay_out([(record.name, record.dtype, record.shape) for record in records])
    header = encode_header(layout)
    begins = {record.name: len(header) + record.begin for record in layout}
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(record.byte_length for record in records))))
    _write(target, memoryview(header), 0)
    entries = []
    with flushing(target) as flush:
        for record in records:
            sha256 = _copy_one(read_into, record, buffer, target, begins[record.name], watcher, flush)
            entries.append(TensorEntry(record.name, record.dtype, record.shape, record.byte_length, sha256))
    if read_into(buffer[:1]):
        raise InspectError("safetensors: bytes after the last tensor; write the file again", reason="trailing_bytes")
    return entries


def create_file(path: Path) -> io.FileIO:
    """Return a new read-only file, open for its one writing.

    Raises:
        StoreError: it cannot be made.
    """
    with storage_errors(path, "create"):
        return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400), "wb")


def read_tensors(path: Path, manifest: Manifest) -> dict[str, memoryview]:
    """Return each tensor's raw bytes in private memory, writable, after hashing them there.

    B factors lie in memory of their own: who keeps an A does not keep the B beside it.

    Raises:
        DigestMismatchError: the file is not the one the manifest determines.
        StoreError: the file is missing or cannot be read.
    """
    layout = lay_out([(entry.name, entry.dtype, entry.shape) for entry in manifest.tensors])
    expected = {entry.name: entry.sha256 for entry in manifest.tensors}
    header = encode_header(layout)
    size = len(header) + layout[-1].end
    try:
        with io.FileIO(str(path), "rb", opener=_open_strictly) as file:
            actual_size = os.fstat(file.fileno()).st_size
            if actual_size != size:
                raise _mismatch(path, f"{size} bytes", f"{actual_size} bytes")
            if file.read(len(header)) != header:
                raise _mismatch(path, "the header of its manifest", "another header")
            tensors = dict(_allocate_tensors(layout))
            views = [(record.name, tensors[record.name]) for record in layout]
            offset = len(header)
            for begin in range(0, len(views), MAX_BUFFERS):
                group = views[begin : begin + MAX_BUFFERS]
                _read_into_all(file.fileno(), [view for _, view in group], offset)
                offset += sum(len(view) for _, view in group)
                for name, view in group:
                    actual = digest_from_bytes(hashlib.sha256(view).digest())
                    if actual != expected[name]:
                        raise _mismatch(path, expected[name], actual, tensor=name)
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}; add the adapter again", path=str(path)) from error
    return tensors


def _open_strictly(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _allocate_tensors(layout: Sequence[TensorRecord]) -> Iterator[tuple[str, memoryview]]:
    for is_b in (False, True):
        ends = [0]
        records = [record for record in layout if record.name.endswith(B_SUFFIX) == is_b]
        for record in records:
            ends.append(ends[-1] + -(-record.byte_length // ALIGNMENT) * ALIGNMENT)
        # Small pages: where memory is in pieces, the kernel may stop for a tenth of a second to make huge ones.
        whole = memoryview(mmap.mmap(-1, max(ends[-1], 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for begin, record in zip(ends, records, strict=False):  # the last end begins nothing
            yield record.name, whole[begin : begin + record.byte_length]


def _copy_one(
    read_into: ReadInto,
    record: TensorRecord,
    buffer: memoryview,
    target: io.FileIO,
    offset: int,
    watcher: Watcher | None,
    flush: Callable[[int], None],
) -> Digest:
    hasher = hashlib.sha256()
    width = ITEM_BYTES[record.dtype]
    done = 0
    while done < record.byte_length:
        piece = buffer[: min(len(buffer), record.byte_length - done)]
        _fill(read_into, piece, record.name)
        hasher.update(piece)
        index = find_non_finite(record.dtype, piece)
        if index is not None:
            element = done // width + index
            raise InspectError(
                f"tensor {record.name[:200]}: element {element} is not finite; the trainer diverged, or wrote the file "
                "while it was read",
                reason="not_finite",
                tensor=record.name[:200],
                index=element,
            )
        if watcher is not None:
            watcher.update(record, piece)
        _write(target, piece, offset + done)
        flush(len(piece))
        done += len(piece)
    return digest_from_bytes(hasher.digest())


def _fill(read_into: ReadInto, view: memoryview, name: str) -> None:
    filled = 0
    while filled < len(view):
        count = read_into(view[filled:])
        if not count:
            raise InspectError(f"safetensors: ends inside tensor {name[:200]}", reason="truncated", tensor=name[:200])
        filled += count


def _write(target: io.FileIO, view: memoryview, offset: int) -> None:
    with storage_errors(Path(str(target.name)), "write"):
        while view:
            count = os.pwrite(target.fileno(), view, offset)
            view, offset = view[count:], offset + count


def _read_into_all(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill buffers from a file, one after another; what the file lacks stays as it is, and the digests will say so.

    In few calls: each hands the interpreter to a thread that may be in the middle of a step.
    """
    left = [view for view in views if view]
    while left:
        count = os.preadv(descriptor, left, offset)
        if not count:
            return
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _mismatch(path: Path, expected: str, actual: str, *, tensor: str | None = None) -> DigestMismatchError:
    subject = f"{path.parent.name}/{path.name}" + (f" tensor {tensor}" if tensor else "")
    return DigestMismatchError(
        f"{subject}: expected {expected}, got {actual}; publish the adapter again to replace it",
        expected=expected,
        actual=actual,
        subject=subject,
    )
