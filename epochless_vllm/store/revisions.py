"""Immutable adapter revisions on disk, named by what they contain.

    <root>/revisions/<64 hex>/{manifest.json, adapter_model.safetensors, adapter_config.json}
    <root>/incoming/    revisions being written or removed; see incoming.py

A revision appears whole and durable or not at all; its three files follow from its manifest to the byte, and every
read hashes them again. Any process may read or ingest at any time. Knows no policies, steps or engines.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from epochless_vllm.durable import crash_point, fsync_directory, fsync_files, rename_durable, storage_error
from epochless_vllm.errors import EpochlessError, InspectError, StorageFullError, StoreError, UnknownRevisionError
from epochless_vllm.protocol.digests import digest, parse_digest
from epochless_vllm.protocol.manifest import RECIPE, Manifest, RevisionId, decode_manifest, manifest_from_parts
from epochless_vllm.store import adapters, blobs
from epochless_vllm.store.adapters import InspectedAdapter, config_of, encode_config
from epochless_vllm.store.blobs import ReadInto, Watcher
from epochless_vllm.store.documents import MAX_BYTES, parse_document
from epochless_vllm.store.finite import FindNonFinite, find_non_finite
from epochless_vllm.store.incoming import Incoming, list_names, storage_errors
from epochless_vllm.store.lora_config import AdapterConfig
from epochless_vllm.store.permissions import make_private_directory
from epochless_vllm.store.reports import CollectReport, Damage, FsckReport
from epochless_vllm.store.safetensors import read_header
from epochless_vllm.store.sources import CONFIG_NAME, TENSORS_NAME, open_adapter_directory
from epochless_vllm.store.staged import StagedRevision
from epochless_vllm.store.uploads import Upload, open_uploads

MANIFEST_NAME = "manifest.json"
MAX_ADAPTER_BYTES = 16 << 30  # rank 256 on every layer of a 70B model in F32 takes 13 GB
RESERVED_BYTES = 16 << 20  # left free on the disk, so that an adapter cannot starve the journal beside it

_HEX = re.compile(r"[0-9a-f]{64}")

Watch = Callable[[AdapterConfig], Watcher]
Announce = Callable[[str], None]


@dataclass(frozen=True)
class Ingested:
    """``created`` is False when the store already held the same content."""

    revision_id: RevisionId
    manifest: Manifest
    created: bool


@dataclass(frozen=True)
class StoredRevision:
    """A revision read back; ``tensors`` holds the raw bytes of each in private memory, see ``read_tensors``."""

    manifest: Manifest
    config: AdapterConfig
    tensors: dict[str, memoryview]


class RevisionStore:
    """The revisions below one directory. Safe to share between threads and processes."""

    def __init__(
        self,
        root: Path | str,
        *,
        max_adapter_bytes: int = MAX_ADAPTER_BYTES,
        base_modules: Collection[str] = (),
        find_non_finite: FindNonFinite = find_non_finite,
    ) -> None:
        """Open a store, making its directories (mode 0700) if they are missing.

        Args:
            max_adapter_bytes: larger adapters are refused.
            base_modules: names of the base model's linear modules; an adapter that lists some of them as targets and
                has no tensors for them is refused. Empty: not checked.
            find_non_finite: finds what no adapter may hold, as store/finite.py does.

        Raises:
            StoreError: the directories cannot be made.
        """
        self.root = Path(root)
        self._revisions = self.root / "revisions"
        self._incoming = Incoming(self.root / "incoming")
        self._max_adapter_bytes = max_adapter_bytes
        self._base_modules = base_modules
        self._find = find_non_finite
        for directory in (self.root, self._revisions, self._incoming.path):
            make_private_directory(directory)
        fsync_directory(self.root)

    # Writing

    def ingest_directory(
        self,
        path: Path | str,
        *,
        import_root: Path | str | None = None,
        watch: Watch | None = None,
        announce: Announce | None = None,
    ) -> Ingested:
        """Inspect an adapter directory and copy it in; the same content again changes nothing.

        Args:
            watch: makes a watcher of the bytes from the adapter's configuration.
            announce: given the name by which ``open_staged`` finds the revision while it is written; not called where
                it is not written from front to back. Must not raise.

        Raises:
            AdapterNotFoundError, PathRefusedError: see ``open_adapter_directory``.
            InspectError, AdapterConfigError: the adapter cannot be served exactly as written.
            StorageFullError, StoreError: nothing was added.
        """
        with open_adapter_directory(path, import_root) as source:
            adapter = adapters.inspect_source(source)

            def check_unchanged() -> None:
                source.config.check_unchanged()
                source.tensors.check_unchanged()

            return self._ingest(adapter, source.tensors.read_into, check_unchanged, watch, announce)

    def ingest_files(
        self, files: Mapping[str, Upload], *, watch: Watch | None = None, announce: Announce | None = None
    ) -> Ingested:
        """Inspect adapter_config.json and adapter_model.safetensors given as streams and copy them in.

        Args:
            watch, announce: as ``ingest_directory``.

        Raises:
            InspectError, AdapterConfigError: the adapter cannot be served exactly as written.
            StorageFullError, StoreError: nothing was added.
        """
        config, tensors = open_uploads(files)
        document = parse_document(config.read_bounded(MAX_BYTES), subject=CONFIG_NAME)
        records, data_begin = read_header(tensors.read, None)
        adapter = adapters.inspect_parts(document, records, data_begin)
        return self._ingest(adapter, tensors.read_into, lambda: None, watch, announce)

    def clear_incoming(self) -> tuple[str, ...]:
        """Remove what interrupted writers left behind, and return the names; call it at start."""
        return self._incoming.clear()

    def collect(self, keep: Collection[str], older_than_s: float) -> CollectReport:
        """Remove revisions that are not in ``keep`` and were last ingested more than ``older_than_s`` seconds ago."""
        horizon = time.time() - older_than_s
        removed: list[RevisionId] = []
        freed = 0
        present = self.list()
        for revision_id in present:
            directory = self._directory(revision_id)
            with storage_errors(directory, "collect"):
                if revision_id in keep or directory.stat().st_mtime > horizon:
                    continue
            freed += self.byte_size(revision_id)
            self._incoming.remove(directory)
            removed.append(revision_id)
        return CollectReport(tuple(removed), len(present) - len(removed), freed)

    # Reading

    def has(self, revision_id: RevisionId) -> bool:
        """Whether the store holds a revision of that name; only ``read`` says that its bytes are right."""
        return (self._directory(revision_id) / MANIFEST_NAME).is_file()

    def list(self) -> tuple[RevisionId, ...]:
        """Return the names of the revisions held, sorted."""
        return tuple(RevisionId(f"sha256:{name}") for name in list_names(self._revisions) if _HEX.fullmatch(name))

    def byte_size(self, revision_id: RevisionId) -> int:
        """Return the bytes a revision's files take."""
        directory = self._directory(revision_id)
        with storage_errors(directory, "measure"):
            return sum((directory / name).lstat().st_size for name in list_names(directory))

    def manifest(self, revision_id: RevisionId) -> Manifest:
        """Return the manifest of a revision.

        Raises:
            UnknownRevisionError: the store does not hold it.
            DigestMismatchError: its manifest is damaged.
        """
        return decode_manifest(self._read_manifest(revision_id))

    def read(self, revision_id: RevisionId) -> StoredRevision:
        """Return a revision after hashing every byte of it.

        Raises:
            UnknownRevisionError: the store does not hold it.
            DigestMismatchError: a file is not the one the revision determines.
            StoreError: a file is missing or cannot be read.
        """
        manifest = self.manifest(revision_id)
        config = config_of(manifest)
        self._check_config(revision_id, config)
        tensors = blobs.read_tensors(self._directory(revision_id) / TENSORS_NAME, manifest)
        return StoredRevision(manifest, config, tensors)

    def check_description(self, revision_id: RevisionId, config: AdapterConfig) -> None:
        """Compare every byte of the two files that say what a revision is, without parsing them; raises as ``read``."""
        self._read_manifest(revision_id)
        self._check_config(revision_id, config)

    def open_staged(self, name: str) -> StagedRevision:
        """Return the reader of a revision that is being written, by the name that was announced.

        Raises:
            StoreError, InspectError, AdapterConfigError: see ``StagedRevision``.
        """
        return StagedRevision(self._incoming.path_of(name))

    def is_staged(self, name: str) -> bool:
        """Return whether a revision is still being written under a name that was announced."""
        return self._incoming.has(name)

    def fsck(self) -> FsckReport:
        """Hash every revision and name everything that does not belong; changes nothing."""
        strays, damaged, total = [], [], 0
        present = self.list()
        for revision_id in present:
            directory = self._directory(revision_id)
            strays += [
                f"revisions/{directory.name}/{name}"
                for name in list_names(directory)
                if name not in (MANIFEST_NAME, TENSORS_NAME, CONFIG_NAME)
            ]
            total += self.byte_size(revision_id)
            try:
                self.read(revision_id)
            except EpochlessError as error:  # each is a finding; the check goes on to the next revision
                damaged.append(Damage(revision_id, error.code, error.message))
        strays += [f"revisions/{name}" for name in list_names(self._revisions) if not _HEX.fullmatch(name)]
        return FsckReport(len(present), total, tuple(damaged), tuple(strays), self._incoming.names())

    # Steps of ingest

    def _ingest(
        self,
        adapter: InspectedAdapter,
        read_into: ReadInto,
        check_unchanged: Callable[[], None],
        watch: Watch | None,
        announce: Announce | None,
    ) -> Ingested:
        adapters.check_coverage(adapter, self._base_modules)
        self._check_room(adapter.byte_length)
        watcher = None if watch is None else watch(adapter.config)
        with self._incoming.staging() as directory, ExitStack() as files:

            def write(name: str, payload: bytes) -> IO[bytes]:
                file = files.enter_context(blobs.create_file(directory / name))
                blobs.write_whole(file, memoryview(payload), 0)
                return file

            config = write(CONFIG_NAME, encode_config(adapter.config))
            target = files.enter_context(blobs.create_file(directory / TENSORS_NAME))
            if announce is not None and blobs.is_canonical(adapter.tensors):
                announce(directory.name)
            entries = blobs.copy_tensors(read_into, adapter.tensors, target, watcher=watcher, find=self._find)
            check_unchanged()
            manifest = manifest_from_parts(adapter.config.manifest_config(), entries)
            crash_point("ingest.copy")
            written = [target, config, write(MANIFEST_NAME, manifest.encode())]
            fsync_files(written)
            files.close()
            fsync_directory(directory)
            crash_point("ingest.fsync")
            return Ingested(manifest.revision_id, manifest, self._admit(directory, manifest.revision_id))

    def _check_room(self, byte_length: int) -> None:
        if byte_length > self._max_adapter_bytes:
            raise InspectError(
                f"the adapter has {byte_length} bytes of tensors; at most {self._max_adapter_bytes} are taken",
                reason="too_large",
                need=byte_length,
                have=self._max_adapter_bytes,
            )
        with storage_errors(self.root, "ask for free space"):
            disk = os.statvfs(self._incoming.path)
        free = disk.f_bavail * disk.f_frsize - RESERVED_BYTES
        if byte_length > free:
            raise StorageFullError(
                f"{self.root}: {byte_length} bytes do not fit; collect old revisions or free space, then retry",
                path=str(self.root),
            )

    def _admit(self, staged: Path, revision_id: RevisionId) -> bool:
        """Give a staged directory its name; return False if a sound revision has it already."""
        target = self._directory(revision_id)
        if target.exists():
            if self._is_sound(revision_id):
                with storage_errors(target, "mark as used"):
                    os.utime(target)  # collect counts age from the last ingest
                return False
            self._incoming.remove(target)
        crash_point("ingest.rename")
        try:
            rename_durable(staged, target)
        except StoreError:
            if not (staged.exists() and target.exists()):
                raise
            return False  # another process gave the same content its name in between
        crash_point("ingest.directory")
        return True

    def _is_sound(self, revision_id: RevisionId) -> bool:
        try:
            self.read(revision_id)
        except EpochlessError:  # missing, changed, or written by a faulty disk: the fresh copy replaces it
            return False
        return True

    def _directory(self, revision_id: RevisionId) -> Path:
        return self._revisions / parse_digest(revision_id).removeprefix("sha256:")

    def _read_manifest(self, revision_id: RevisionId) -> bytes:
        payload = self._read_file(revision_id, MANIFEST_NAME)
        actual = RevisionId(digest(RECIPE, payload))
        if actual != revision_id:
            raise blobs.mismatch(self._directory(revision_id) / MANIFEST_NAME, revision_id, actual)
        return payload

    def _check_config(self, revision_id: RevisionId, config: AdapterConfig) -> None:
        expected, actual = encode_config(config), self._read_file(revision_id, CONFIG_NAME)
        if actual != expected:
            path, wanted = self._directory(revision_id) / CONFIG_NAME, f"{len(expected)} bytes of its manifest"
            raise blobs.mismatch(path, wanted, f"{len(actual)} others")

    def _read_file(self, revision_id: RevisionId, name: str) -> bytes:
        path = self._directory(revision_id) / name
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            if path.parent.is_dir():
                raise StoreError(f"{path}: is missing; publish the adapter again", path=str(path)) from error
            raise UnknownRevisionError(
                f"revision {revision_id} is not in {self.root}; publish the adapter again", revision_id=revision_id
            ) from error
        except OSError as error:
            raise storage_error(error, path, "read") from error
