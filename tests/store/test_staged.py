"""Revisions read while they are written: the same revision, or a refusal that ends."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epochless_vllm.errors import EpochlessError, InspectError, StoreError
from epochless_vllm.store import blobs, staged
from epochless_vllm.store.revisions import RevisionStore
from epochless_vllm.store.staged import StagedRevision
from tests.adapters import MINUTE, encode_tensor, make_adapter, make_tensors


@pytest.fixture
def store(tmp_path: Path) -> RevisionStore:
    return RevisionStore(tmp_path / "store")


@pytest.fixture
def reader() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def read_whole(revision: StagedRevision) -> dict[str, bytes]:
    with revision:
        return {entry.name: bytes(view) for entry, view in revision.read()}


def follow(store: RevisionStore, name: str) -> tuple[str, dict[str, bytes]]:
    revision = store.open_staged(name)
    tensors = read_whole(revision)
    return revision.manifest().revision_id, tensors


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("chunk", [64, 1000, blobs.CHUNK_BYTES])
def test_what_is_read_while_it_is_written_is_the_revision_that_is_stored(
    store: RevisionStore,
    reader: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    chunk: int,
) -> None:
    monkeypatch.setattr(blobs, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(blobs, "READ_BYTES", chunk)
    tensors = make_tensors(5, shape=MINUTE, rank=2)
    adapter = make_adapter(tmp_path / "a", rank=2, alpha=5, dtype=dtype, tensors=tensors, config={"use_rslora": True})
    following: list[Any] = []
    ingested = store.ingest_directory(
        adapter, announce=lambda name: following.append(reader.submit(follow, store, name))
    )
    revision_id, found = following[0].result(10)
    assert revision_id == ingested.revision_id
    assert found == {name: encode_tensor(tensor, dtype) for name, tensor in tensors.items()}
    stored = store.read(ingested.revision_id)
    assert found == {name: bytes(view) for name, view in stored.tensors.items()}


def test_tensors_come_as_soon_as_they_are_written(
    store: RevisionStore, reader: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer stops long before its end until the reader has had a few."""
    monkeypatch.setattr(blobs, "CHUNK_BYTES", 64)
    monkeypatch.setattr(blobs, "READ_BYTES", 1)
    adapter = make_adapter(tmp_path / "a", shape=MINUTE, rank=2)
    names: list[str] = []
    a_few = threading.Event()

    def read(name: str) -> list[str]:
        with store.open_staged(name) as revision:
            assert store.is_staged(name)
            for entry, _ in revision.read():
                names.append(entry.name)
                if len(names) == 4:
                    a_few.set()
        return names

    seen: list[str] = []

    class Watcher:
        def update(self, record: Any, piece: memoryview) -> None:
            if record.name not in seen:
                seen.append(record.name)
            if len(seen) == len(make_tensors(shape=MINUTE)) - 2 * blobs.CHUNKS:
                assert a_few.wait(10)

    following: list[Any] = []
    store.ingest_directory(
        adapter,
        watch=lambda config: Watcher(),
        announce=lambda name: following.append(reader.submit(read, name)),
    )
    assert following[0].result(10) == seen


def test_a_source_in_another_order_than_the_store_is_not_announced(store: RevisionStore, tmp_path: Path) -> None:
    tensors = make_tensors(shape=MINUTE, rank=2)
    backwards = sorted(tensors, reverse=True)
    announced: list[str] = []
    first = store.ingest_directory(make_adapter(tmp_path / "a", rank=2, tensors=tensors), announce=announced.append)
    assert len(announced) == 1
    other = RevisionStore(tmp_path / "other")
    again = other.ingest_directory(
        make_adapter(tmp_path / "b", rank=2, tensors=tensors, order=backwards), announce=announced.append
    )
    assert len(announced) == 1
    assert again.revision_id == first.revision_id


def stage(tmp_path: Path, adapter: Path) -> tuple[Path, bytes]:
    """Return a directory with an adapter's configuration and an empty tensors file, and the bytes to write there."""
    directory = tmp_path / "incoming"
    directory.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (directory / name).write_bytes((adapter / name).read_bytes())
    data = (directory / "adapter_model.safetensors").read_bytes()
    (directory / "adapter_model.safetensors").write_bytes(b"")
    return directory, data


def cut_header(data: bytes) -> bytes:
    return data[:20]


def cut_data(data: bytes) -> bytes:
    return data[:-1]


def failure_of(directory: Path, patience_s: float) -> BaseException | None:
    """Return what reading ends with; a reading that does not end is left behind."""
    ended: list[BaseException | None] = []

    def read() -> None:
        try:
            read_whole(StagedRevision(directory, patience_s=patience_s))
        except EpochlessError as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(5)
    assert ended, "it goes on"
    return ended[0]


@pytest.mark.parametrize("cut", [cut_header, cut_data])
def test_a_writer_that_stops_is_not_waited_for_for_ever(tmp_path: Path, cut: Callable[[bytes], bytes]) -> None:
    directory, data = stage(tmp_path, make_adapter(tmp_path / "a", shape=MINUTE, rank=2))
    (directory / "adapter_model.safetensors").write_bytes(cut(data))
    failure = failure_of(directory, 0.05)
    assert isinstance(failure, StoreError)
    assert re.search(r"did not grow for 0.05 s at \d+ of \d+ bytes", failure.message)


@pytest.mark.parametrize("cut", [cut_header, cut_data])
def test_a_writer_that_gives_up_ends_the_reading_at_once(tmp_path: Path, cut: Callable[[bytes], bytes]) -> None:
    directory, data = stage(tmp_path, make_adapter(tmp_path / "a", shape=MINUTE, rank=2))
    path = directory / "adapter_model.safetensors"
    path.write_bytes(cut(data))
    threading.Timer(0.05, path.unlink).start()
    failure = failure_of(directory, 60.0)
    assert isinstance(failure, StoreError)
    assert "was removed at" in failure.message


def test_a_writer_that_is_slow_is_waited_for_from_its_last_byte_on(
    tmp_path: Path, reader: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, data = stage(tmp_path, make_adapter(tmp_path / "a", shape=MINUTE, rank=2))
    clock = iter(range(10**9))
    sizes = iter(range(0, len(data) + 1, 7))
    path = directory / "adapter_model.safetensors"

    def write_more(pause: float) -> None:  # nine seconds pass from byte to byte
        size = next(sizes, len(data))
        path.write_bytes(data[:size])
        for _ in range(7):
            next(clock)

    monkeypatch.setattr(staged.time, "sleep", write_more)
    monkeypatch.setattr(staged.time, "monotonic", lambda: float(next(clock)))
    assert len(read_whole(StagedRevision(directory, patience_s=10.0))) == len(make_tensors(shape=MINUTE))


def test_bytes_that_are_no_adapter_are_our_error(tmp_path: Path) -> None:
    directory, data = stage(tmp_path, make_adapter(tmp_path / "a", shape=MINUTE, rank=2))
    path = directory / "adapter_model.safetensors"
    for hostile in (b"\xff" * 64, b"\0" * 64, b"\x04" + b"\0" * 7 + b"[[[[", data[:8] + b"x" * len(data)):
        path.write_bytes(hostile)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(EpochlessError):
            StagedRevision(directory, patience_s=0.01)
        assert os.listdir("/proc/self/fd") == before
    path.write_bytes(data)
    (directory / "adapter_config.json").write_text("[]")
    with pytest.raises(InspectError):
        StagedRevision(directory, patience_s=0.01)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", shape=MINUTE, rank=2)
    directory, _ = stage(tmp_path, adapter)
    path = directory / "adapter_model.safetensors"
    path.unlink()
    path.symlink_to(adapter / "adapter_model.safetensors")
    with pytest.raises(StoreError):
        StagedRevision(directory, patience_s=0.01)


@pytest.mark.parametrize("name", ["", ".", "..", "../revisions", "1-0/..", "/etc", "1-" + 17 * "0", "a-" + 16 * "0"])
def test_only_the_names_of_stagings_are_looked_for(store: RevisionStore, name: str) -> None:
    with pytest.raises(StoreError, match="no entry is named"):
        store.open_staged(name)
    with pytest.raises(StoreError, match="no entry is named"):
        store.is_staged(name)


def test_large_tensors_lie_in_private_memory_of_their_own(
    store: RevisionStore, reader: ThreadPoolExecutor, tmp_path: Path
) -> None:
    name_a, name_b = make_tensors(layers=[0], targets=["q_proj"])
    long = blobs.CHUNK_BYTES // 4
    random = np.random.default_rng(1)
    tensors = {name_a: random.random((2, long), np.float32), name_b: random.random((long, 2), np.float32)}
    held: list[StagedRevision] = []

    def read(name: str) -> None:
        held.append(store.open_staged(name))
        read_whole(held[0])

    reading: list[Any] = []
    ingested = store.ingest_directory(
        make_adapter(tmp_path / "a", rank=2, tensors=tensors),
        announce=lambda name: reading.append(reader.submit(read, name)),
    )
    reading[0].result(10)
    blob = store.root / "revisions" / ingested.revision_id[7:] / "adapter_model.safetensors"
    blob.chmod(0o600)
    blob.write_bytes(b"")
    assert bytes(held[0].tensors[name_a]) == tensors[name_a].tobytes()
    assert held[0].tensors[name_a].obj is not held[0].tensors[name_b].obj
