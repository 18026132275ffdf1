"""A revision that is still being written, read while it grows.

What is read is in private memory and named by its own bytes: who asks for a revision compares the name, and so owes
the writer no trust. Promises to end: with the revision, or with StoreError when the writer stopped; at once when it
removed the file, unless the filesystem hides that from a reader, as NFS does. Knows nothing of who writes.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

from epochless_vllm.errors import StoreError
from epochless_vllm.protocol.digests import digest_from_bytes
from epochless_vllm.protocol.manifest import Manifest, TensorEntry, manifest_from_parts
from epochless_vllm.store.adapters import InspectedAdapter, inspect_parts
from epochless_vllm.store.blobs import TensorMemory, group_views, open_strictly, read_into_all
from epochless_vllm.store.documents import MAX_BYTES, parse_document
from epochless_vllm.store.incoming import storage_errors
from epochless_vllm.store.safetensors import TensorRecord, read_header
from epochless_vllm.store.sources import CONFIG_NAME, TENSORS_NAME

LOOK_S = 0.0005  # a writer adds half a megabyte in that time
SLOWEST_LOOK_S = 0.01  # at a writer that waits for its own source
PATIENCE_S = 10.0  # without a byte; a disk that flushes may hold a writer for a second


class StagedRevision:
    """The reader of one staged directory, to be closed. For one thread.

    Attributes:
        adapter: what its configuration and its header say.
        tensors: the raw bytes of each tensor that has been read, in private memory.
    """

    def __init__(self, directory: Path, *, patience_s: float = PATIENCE_S) -> None:
        """Open a staged directory whose configuration is written and whose tensors file exists; wait for its header.

        Raises:
            StoreError: it cannot be read, or ``patience_s`` passed without a byte.
            InspectError, AdapterConfigError: it holds no adapter.
        """
        self._path = directory / TENSORS_NAME
        self._patience_s = patience_s
        with storage_errors(directory, "read"):
            with io.FileIO(str(directory / CONFIG_NAME), "rb", opener=open_strictly) as file:
                payload = file.read(MAX_BYTES)
            self._file = io.FileIO(str(self._path), "rb", opener=open_strictly)
        try:
            document = parse_document(payload, subject=CONFIG_NAME)
            records, self._begin = read_header(self._read_next, None)
            self.adapter: InspectedAdapter = inspect_parts(document, records, self._begin)
            with storage_errors(self._path, "find memory"):  # of which only what is written is taken
                self._memory = TensorMemory(records)
            self.tensors = self._memory.views
        except BaseException:  # whatever ends the constructor, nobody else could close the file; it is raised on
            self.close()
            raise
        self._entries: list[TensorEntry] = []

    def __enter__(self) -> StagedRevision:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was read stays."""
        self._file.close()

    def read(self) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Yield each tensor once it is written, read and hashed.

        Raises:
            StoreError: as the constructor.
        """
        records = {record.name: record for record in self.adapter.tensors}
        offset = self._begin
        for group in group_views([(name, self.tensors[name]) for name in records]):
            end = offset + sum(len(view) for _, view in group)
            self._wait_for(end)
            self._memory.take_pages([name for name, _ in group])
            with storage_errors(self._path, "read"):
                read_into_all(self._file.fileno(), [view for _, view in group], offset)
            offset = end
            for name, view in group:
                self._entries.append(_entry_of(records[name], view))
                yield self._entries[-1], view

    def manifest(self) -> Manifest:
        """Return the manifest of what was read; the store's revision is this one if it has this name."""
        return manifest_from_parts(self.adapter.config.manifest_config(), self._entries)

    def _wait_for(self, size: int) -> None:
        end, seen, pause = time.monotonic() + self._patience_s, 0, LOOK_S
        while (status := os.fstat(self._file.fileno())).st_size < size:
            if status.st_size > seen:
                end, seen, pause = time.monotonic() + self._patience_s, status.st_size, LOOK_S
            if not status.st_nlink or time.monotonic() > end:
                why = "was removed" if not status.st_nlink else f"did not grow for {self._patience_s:g} s"
                raise StoreError(f"{self._path}: {why} at {status.st_size} of {size} bytes", path=str(self._path))
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_LOOK_S)

    def _read_next(self, count: int) -> bytes:
        self._wait_for(self._file.tell() + count)
        with storage_errors(self._path, "read"):
            return self._file.read(count)


def _entry_of(record: TensorRecord, view: memoryview) -> TensorEntry:
    sha256 = digest_from_bytes(hashlib.sha256(view).digest())
    return TensorEntry(record.name, record.dtype, record.shape, record.byte_length, sha256)
