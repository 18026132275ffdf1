"""The tensor bytes of a revision: written while they are hashed, and hashed again on every read.

A stored file has one possible sequence of bytes for a given manifest: tensors in canonical order behind the header
that follows from it. Hashes beside reading and writing, see beside.py. Holds a few chunks while writing, the
whole file once while reading. Knows no directories.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from epochless_vllm.durable import flushing
from epochless_vllm.errors import DigestMismatchError, InspectError, StoreError
from epochless_vllm.protocol.digests import Digest, digest_from_bytes
from epochless_vllm.protocol.manifest import Manifest, TensorEntry
from epochless_vllm.store.beside import Helper
from epochless_vllm.store.finite import FindNonFinite, find_non_finite
from epochless_vllm.store.incoming import storage_errors
from epochless_vllm.store.safetensors import ITEM_BYTES, TensorRecord, encode_header, lay_out

CHUNK_BYTES = 1 << 19  # copying is fastest while a chunk stays in the second-level cache
CHUNKS = 4  # of them are being hashed, or filled, at a time
ALIGNMENT = 64  # bytes, of each tensor in memory: a cache line
B_SUFFIX = ".lora_B.weight"
MAX_BUFFERS = 1024  # of one call: IOV_MAX of Linux
MADV_POPULATE_WRITE = 23  # of Linux; the module mmap of Python does not name it, and holds the interpreter meanwhile
READ_BYTES = 2 << 20  # read in one call, then hashed while the next are read

ReadInto = Callable[[memoryview], int]
"""Fills the front of a buffer with the next bytes of a source and returns their count; 0 at its end."""
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_Cut = tuple[TensorRecord, int, int]  # a tensor, where in it, and how many bytes there
_Piece = tuple[TensorRecord, int, memoryview]  # the same, and the bytes


class Watcher(Protocol):
    """Sees each byte of an adapter on its way into the store, so that nobody reads it again for that."""

    def update(self, record: TensorRecord, piece: memoryview) -> None:
        """Take the next bytes of a tensor, whole elements; ``piece`` is valid during the call only.

        Called in order, maybe in a thread beside the one that copies.
        """


def copy_tensors(
    read_into: ReadInto,
    records: Sequence[TensorRecord],
    target: io.FileIO,
    *,
    watcher: Watcher | None = None,
    find: FindNonFinite = find_non_finite,
) -> list[TensorEntry]:
    """Write the canonical file of a source's tensors, and return what was written.

    Each byte is read once; the digest is of the bytes that were written, whatever the source holds by then.

    Args:
        read_into: the source, at its first byte of data.
        records: its tensors in the order of their data.
        target: an empty file open for writing.
        find: finds the values that are not finite.

    Raises:
        InspectError: the source ends early, goes on, or holds a value that is not finite.
        StoreError: the file cannot be written.
    """
    layout = lay_out([(record.name, record.dtype, record.shape) for record in records])
    header = encode_header(layout)
    begins = {record.name: len(header) + record.begin for record in layout}
    hashers = {record.name: hashlib.sha256() for record in records}

    def hash_all(pieces: Sequence[_Piece]) -> None:
        for record, _, view in pieces:
            hashers[record.name].update(view)
            if watcher is not None:
                watcher.update(record, view)

    size = min(CHUNK_BYTES, sum(record.byte_length for record in records))
    buffers = [memoryview(bytearray(size)) for _ in range(CHUNKS)]
    write_whole(target, memoryview(header), 0)
    with flushing(target) as flush, Helper() as helper:
        for number, chunk in enumerate(_cut(records, size)):
            buffer = buffers[number % CHUNKS]
            _fill(read_into, buffer, chunk)
            pieces = list(_place(chunk, buffer))
            helper.give(partial(hash_all, pieces))
            for record, offset, view in pieces:
                _require_finite(record, offset, find(record.dtype, view))
            for begin, view in _join([(begins[record.name] + offset, view) for record, offset, view in pieces], buffer):
                write_whole(target, view, begin)
                flush(len(view))
            helper.wait(CHUNKS - 1)
    if read_into(buffers[0][:1]):
        raise InspectError("safetensors: bytes after the last tensor; write the file again", reason="trailing_bytes")
    return [
        TensorEntry(
            record.name,
            record.dtype,
            record.shape,
            record.byte_length,
            digest_from_bytes(hashers[record.name].digest()),
        )
        for record in records
    ]


def is_canonical(records: Sequence[TensorRecord]) -> bool:
    """Return whether ``copy_tensors`` writes its file from front to back: the source's order is that of the store."""
    layout = lay_out([(record.name, record.dtype, record.shape) for record in records])
    return [record.name for record in layout] == [record.name for record in records]


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
        with io.FileIO(str(path), "rb", opener=open_strictly) as file:
            actual_size = os.fstat(file.fileno()).st_size
            if actual_size != size:
                raise mismatch(path, f"{size} bytes", f"{actual_size} bytes")
            if file.read(len(header)) != header:
                raise mismatch(path, "the header of its manifest", "another header")
            memory = TensorMemory(layout)
            tensors = memory.views
            offset = len(header)
            with Helper() as helper:
                for group in group_views([(record.name, tensors[record.name]) for record in layout]):
                    memory.take_pages([name for name, _ in group])
                    read_into_all(file.fileno(), [view for _, view in group], offset)
                    offset += sum(len(view) for _, view in group)
                    helper.give(partial(_require_digests, path, group, expected))
    except OSError as error:
        raise StoreError(f"{path}: cannot read: {error.strerror}; add the adapter again", path=str(path)) from error
    return tensors


def group_views(views: Sequence[tuple[str, memoryview]]) -> Iterator[list[tuple[str, memoryview]]]:
    """Yield the views in order, in lists of READ_BYTES or a little more."""
    group: list[tuple[str, memoryview]] = []
    size = 0
    for name, view in views:
        group.append((name, view))
        size += len(view)
        if size >= READ_BYTES or len(group) == MAX_BUFFERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _require_digests(path: Path, group: Sequence[tuple[str, memoryview]], expected: Mapping[str, Digest]) -> None:
    for name, view in group:
        actual = digest_from_bytes(hashlib.sha256(view).digest())
        if actual != expected[name]:
            raise mismatch(path, expected[name], actual, tensor=name)


def open_strictly(path: str, flags: int) -> int:
    """Open a file of the store, and no link in its place: an ``opener``."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


class TensorMemory:
    """Private memory for tensors, each aligned, the B factors apart from the others.

    Attributes:
        views: of each tensor, by name.
    """

    def __init__(self, layout: Sequence[TensorRecord]) -> None:
        """Map memory, of which nothing is taken yet.

        Raises:
            OSError: the address space has no room.
        """
        self.views: dict[str, memoryview] = {}
        self._places: dict[str, tuple[mmap.mmap, int, int]] = {}
        for is_b in (False, True):
            ends = [0]
            records = [record for record in layout if record.name.endswith(B_SUFFIX) == is_b]
            for record in records:
                ends.append(ends[-1] + -(-record.byte_length // ALIGNMENT) * ALIGNMENT)
            # Small pages: where memory is in pieces, the kernel may stop for a tenth of a second to make huge ones.
            memory = mmap.mmap(-1, max(ends[-1], 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for begin, record in zip(ends, records, strict=False):  # the last end begins nothing
                end = begin + record.byte_length
                self.views[record.name] = memoryview(memory)[begin:end]
                self._places[record.name] = memory, begin, end

    def take_pages(self, names: Sequence[str]) -> None:
        """Take the pages of tensors that are about to be filled: at once, which costs a third less than one by one."""
        spans: dict[mmap.mmap, tuple[int, int]] = {}
        for name in names:
            memory, begin, end = self._places[name]
            first, last = spans.get(memory, (begin, end))
            spans[memory] = min(first, begin), max(last, end)
        for memory, (first, last) in spans.items():
            first -= first % mmap.PAGESIZE
            # Of Linux before 5.14, or without memory, it does nothing: then writing takes the pages, or fails.
            _madvise(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first, last - first, MADV_POPULATE_WRITE)


def _cut(records: Sequence[TensorRecord], size: int) -> Iterator[list[_Cut]]:
    """Yield cuts of the tensors in order, in lists of at most ``size`` bytes; elements stay whole."""
    chunk: list[_Cut] = []
    room = size
    for record in records:
        width, done = ITEM_BYTES[record.dtype], 0
        while done < record.byte_length:
            count = min(record.byte_length - done, room // width * width)
            if not count:
                yield chunk
                chunk, room = [], size
                continue
            chunk.append((record, done, count))
            done, room = done + count, room - count
    if chunk:
        yield chunk


def _place(chunk: Sequence[_Cut], buffer: memoryview) -> Iterator[_Piece]:
    begin = 0
    for record, offset, count in chunk:
        yield record, offset, buffer[begin : begin + count]
        begin += count


def _join(pieces: Sequence[tuple[int, memoryview]], buffer: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset in the file, bytes) of pieces that lie one after another in a buffer, those together that do so
    in the file, too: a write for each tensor would cost more than its bytes."""
    begin = end = 0
    for number, (offset, view) in enumerate(pieces):
        end += len(view)
        if number + 1 == len(pieces) or pieces[number + 1][0] != offset + len(view):
            yield offset + len(view) - (end - begin), buffer[begin:end]
            begin = end


def _require_finite(record: TensorRecord, offset: int, index: int | None) -> None:
    if index is not None:
        element = offset // ITEM_BYTES[record.dtype] + index
        raise InspectError(
            f"tensor {record.name[:200]}: element {element} is not finite; the trainer diverged, or wrote the file "
            "while it was read",
            reason="not_finite",
            tensor=record.name[:200],
            index=element,
        )


def _fill(read_into: ReadInto, buffer: memoryview, chunk: Sequence[_Cut]) -> None:
    """Read a chunk to the front of a buffer."""
    size, filled = sum(count for _, _, count in chunk), 0
    while filled < size:
        count = read_into(buffer[filled:size])
        if not count:
            ends = itertools.accumulate(count for _, _, count in chunk)
            name = next(record.name for (record, _, _), end in zip(chunk, ends, strict=True) if end > filled)
            raise InspectError(f"safetensors: ends inside tensor {name[:200]}", reason="truncated", tensor=name[:200])
        filled += count


def write_whole(target: io.FileIO, view: memoryview, offset: int) -> None:
    """Write all of a buffer; a disk that takes only a part is asked again, and says why.

    Raises:
        StoreError: it cannot be written.
    """
    with storage_errors(Path(str(target.name)), "write"):
        while view:
            count = os.pwrite(target.fileno(), view, offset)
            view, offset = view[count:], offset + count


def read_into_all(descriptor: int, views: Sequence[memoryview], offset: int) -> None:
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


def mismatch(path: Path, expected: str, actual: str, *, tensor: str | None = None) -> DigestMismatchError:
    """Return the error of a stored file that is not the one its revision determines."""
    subject = f"{path.parent.name}/{path.name}" + (f" tensor {tensor}" if tensor else "")
    return DigestMismatchError(
        f"{subject}: expected {expected}, got {actual}; publish the adapter again to replace it",
        expected=expected,
        actual=actual,
        subject=subject,
    )
