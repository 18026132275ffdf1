"""The store: one content, one name; nothing served that is not what its name says; nothing half there."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import mmap
import os
import resource
import shutil
import stat
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epochless_vllm import durable
from epochless_vllm.durable import FileLock
from epochless_vllm.errors import (
    AdapterConfigError,
    DigestMismatchError,
    EncodingError,
    EpochlessError,
    InspectError,
    StorageFullError,
    StoreError,
    UnknownRevisionError,
)
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.store import blobs
from epochless_vllm.store.adapters import inspect_adapter
from epochless_vllm.store.finite import find_non_finite
from epochless_vllm.store.revisions import RevisionStore
from epochless_vllm.store.safetensors import read_header
from tests.adapters import MINUTE, encode_safetensors, encode_tensor, make_adapter, make_config, make_tensors

FILES = ("manifest.json", "adapter_model.safetensors", "adapter_config.json")


@pytest.fixture
def store(tmp_path: Path) -> RevisionStore:
    return RevisionStore(tmp_path / "store")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", shape=MINUTE, rank=2)


def directory_of(store: RevisionStore, revision_id: RevisionId) -> Path:
    return store.root / "revisions" / revision_id.removeprefix("sha256:")


def tree(store: RevisionStore) -> dict[str, bytes]:
    return {str(path.relative_to(store.root)): path.read_bytes() for path in store.root.rglob("*") if path.is_file()}


def overwrite(path: Path, payload: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(payload)


def independent_revision_id(tensors: dict[str, np.ndarray], dtype: str, config: dict[str, Any]) -> str:
    """The recipe by hand: tagged, length-prefixed canonical JSON of config and tensors in name order."""
    entries = []
    for name in sorted(tensors):
        raw = encode_tensor(tensors[name], dtype)
        entries.append(
            {
                "byte_length": len(raw),
                "dtype": dtype,
                "name": name,
                "sha256": "sha256:" + hashlib.sha256(raw).hexdigest(),
                "shape": list(tensors[name].shape),
            }
        )
    recipe = "epochless/manifest/v1"
    body = json.dumps({"config": config, "recipe": recipe, "tensors": entries}, separators=(",", ":"), sort_keys=True)
    payload = body.encode()
    return "sha256:" + hashlib.sha256(recipe.encode() + b"\0" + len(payload).to_bytes(8, "big") + payload).hexdigest()


# Identity


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_revision_id_is_what_the_recipe_says(store: RevisionStore, tmp_path: Path, dtype: str) -> None:
    tensors = make_tensors(3, shape=MINUTE, rank=2)
    directory = make_adapter(
        tmp_path / "a", rank=2, alpha=5.5, dtype=dtype, tensors=tensors, config={"use_rslora": True}
    )
    config = {"alpha_pattern": {}, "lora_alpha": "5.5", "peft_type": "LORA", "use_rslora": True}
    assert store.ingest_directory(directory).revision_id == independent_revision_id(tensors, dtype, config)


@pytest.mark.parametrize(
    "options",
    [
        {"pad": 13},
        {"metadata": {"format": "pt"}},
        {"order": sorted(make_tensors(shape=MINUTE, rank=2), reverse=True)},
        {"config": {"lora_dropout": 0.3, "base_model_name_or_path": "elsewhere", "target_modules": "all-linear"}},
        {"config": {"lora_alpha": 1, "alpha_pattern": {".*": 8.0}}},
    ],
    ids=["padding", "metadata", "order", "inert fields", "alpha as a pattern"],
)
def test_layout_and_inert_fields_do_not_change_the_revision(
    store: RevisionStore, adapter: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    other = make_adapter(tmp_path / "other name", shape=MINUTE, rank=2, **options)
    first = store.ingest_directory(adapter)
    second = store.ingest_directory(other)
    assert (second.revision_id, second.created) == (first.revision_id, False)


def test_spacing_of_the_header_does_not_change_the_revision(
    store: RevisionStore, adapter: Path, tmp_path: Path
) -> None:
    payload = (adapter / "adapter_model.safetensors").read_bytes()
    end = 8 + int.from_bytes(payload[:8], "little")
    header = json.dumps(dict(reversed(json.loads(payload[8:end]).items())), indent=1).encode()
    spaced = shutil.copytree(adapter, tmp_path / "spaced")
    (spaced / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + payload[end:])
    assert store.ingest_directory(spaced).revision_id == store.ingest_directory(adapter).revision_id


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1},
        {"alpha": 9},
        {"dtype": "BF16"},
        {"rank": 3},
        {"config": {"use_rslora": True}},
        {"targets": ["q_proj"]},
        {"config": {"alpha_pattern": {"q_proj": 2}}},
    ],
)
def test_anything_that_changes_the_mathematics_changes_the_revision(
    store: RevisionStore, adapter: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    other = make_adapter(tmp_path / "other", **{"shape": MINUTE, "rank": 2, **options})
    assert store.ingest_directory(other).revision_id != store.ingest_directory(adapter).revision_id
    assert len(store.list()) == 2


def test_changing_one_bit_of_a_tensor_changes_the_revision(store: RevisionStore, adapter: Path) -> None:
    before = store.ingest_directory(adapter).revision_id
    path = adapter / "adapter_model.safetensors"
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 0x80  # the sign of the last element
    path.write_bytes(payload)
    assert store.ingest_directory(adapter).revision_id != before


def test_swapping_two_equal_sized_tensors_changes_the_revision(store: RevisionStore, tmp_path: Path) -> None:
    tensors = make_tensors(shape=MINUTE, rank=2)
    names = [name for name in tensors if "q_proj.lora_A" in name]
    swapped = {**tensors, names[0]: tensors[names[1]], names[1]: tensors[names[0]]}
    one, other = (make_adapter(tmp_path / key, rank=2, tensors=t) for key, t in (("a", tensors), ("b", swapped)))
    assert store.ingest_directory(one).revision_id != store.ingest_directory(other).revision_id


def test_stored_directory_is_an_adapter_of_the_same_revision(store: RevisionStore, adapter: Path) -> None:
    ingested = store.ingest_directory(adapter)
    again = store.ingest_directory(directory_of(store, ingested.revision_id))
    assert (again.revision_id, again.created) == (ingested.revision_id, False)


def test_stored_files_follow_from_the_revision_alone(store: RevisionStore, adapter: Path, tmp_path: Path) -> None:
    other_store = RevisionStore(tmp_path / "second")
    order = sorted(make_tensors(shape=MINUTE, rank=2), reverse=True)
    other = make_adapter(tmp_path / "b", shape=MINUTE, rank=2, order=order, config={"r": 2, "task_type": None})
    store.ingest_directory(adapter)
    other_store.ingest_directory(other)
    assert tree(store) == tree(other_store)
    assert len(tree(store)) == 3


# Reading


def test_reading_gives_every_tensor_its_bytes(store: RevisionStore, tmp_path: Path) -> None:
    tensors = make_tensors(5, shape=MINUTE, rank=3, targets=["q_proj", "down_proj", "lm_head"])
    names = sorted(tensors)
    dtypes = {name: ("F32", "BF16", "F16")[index % 3] for index, name in enumerate(names)}
    directory = make_adapter(
        tmp_path / "a", rank=3, tensors=tensors, targets=["q_proj", "down_proj", "lm_head"], dtypes=dtypes
    )
    stored = store.read(store.ingest_directory(directory).revision_id)
    assert {name: bytes(view) for name, view in stored.tensors.items()} == {
        name: encode_tensor(tensors[name], dtypes[name]) for name in names
    }
    assert stored.config == inspect_adapter(directory).config
    assert [entry.name for entry in stored.manifest.tensors] == names


def test_memory_of_a_read_is_private(store: RevisionStore, adapter: Path) -> None:
    revision_id = store.ingest_directory(adapter).revision_id
    view = next(iter(store.read(revision_id).tensors.values()))
    view[:4] = b"\xff" * 4
    assert not store.fsck().damaged


@pytest.mark.parametrize("name", FILES)
def test_any_changed_byte_is_noticed_when_read(store: RevisionStore, tmp_path: Path, name: str) -> None:
    directory = make_adapter(tmp_path / "a", shape=MINUTE, rank=1, targets=["k_proj"], layers=[0], dtype="BF16")
    revision_id = store.ingest_directory(directory).revision_id
    path = directory_of(store, revision_id) / name
    original = path.read_bytes()
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 1
        overwrite(path, bytes(changed))
        with pytest.raises(DigestMismatchError):
            store.read(revision_id)
    overwrite(path, original)
    store.read(revision_id)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["shorter", "longer", "empty", "missing", "link", "directory", "of another"])
def test_damaged_file_is_refused_and_replaced_by_publishing_again(
    store: RevisionStore, adapter: Path, tmp_path: Path, name: str, damage: str
) -> None:
    revision_id = store.ingest_directory(adapter).revision_id
    other = store.ingest_directory(make_adapter(tmp_path / "b", shape=MINUTE, rank=2, seed=1, alpha=3)).revision_id
    path = directory_of(store, revision_id) / name
    sound = tree(store)
    payload = path.read_bytes()
    if damage in ("missing", "link", "directory"):
        path.unlink()
    if damage == "shorter":
        overwrite(path, payload[:-1])
    elif damage == "longer":
        overwrite(path, payload + b" ")
    elif damage == "empty":
        overwrite(path, b"")
    elif damage == "of another":
        overwrite(path, (directory_of(store, other) / name).read_bytes())
    elif damage == "link":
        path.symlink_to("nowhere")
    elif damage == "directory":
        path.mkdir()
    with pytest.raises((DigestMismatchError, StoreError)):
        store.read(revision_id)
    assert [finding.revision_id for finding in store.fsck().damaged] == [revision_id]
    healed = store.ingest_directory(adapter)
    assert (healed.revision_id, healed.created) == (revision_id, True)
    assert tree(store) == sound
    assert store.fsck().damaged == store.fsck().leftovers == ()


def test_tensors_behind_a_symbolic_link_are_refused_even_if_they_are_the_right_ones(
    store: RevisionStore, adapter: Path, tmp_path: Path
) -> None:
    revision_id = store.ingest_directory(adapter).revision_id
    path = directory_of(store, revision_id) / "adapter_model.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        store.read(revision_id)


def test_unknown_revision_is_named(store: RevisionStore) -> None:
    absent = RevisionId("sha256:" + "0" * 64)
    assert not store.has(absent)
    for read in (store.read, store.manifest):
        with pytest.raises(UnknownRevisionError):
            read(absent)


@pytest.mark.parametrize(
    "name", ["", "sha256:", "sha256:../../../etc", "sha256:" + "A" * 64, "0" * 64, "sha256:" + "0" * 65]
)
def test_text_that_is_no_revision_id_never_becomes_a_path(store: RevisionStore, name: str) -> None:
    for method in (store.read, store.manifest, store.has, store.byte_size):
        with pytest.raises(EncodingError):
            method(RevisionId(name))


# Ingest


def test_refused_adapter_leaves_nothing_behind(store: RevisionStore, tmp_path: Path) -> None:
    tensors = make_tensors(shape=MINUTE, rank=2)
    name = sorted(tensors)[-1]
    tensors[name] = tensors[name].copy()
    tensors[name].flat[-1] = np.inf
    with pytest.raises(InspectError) as caught:
        store.ingest_directory(make_adapter(tmp_path / "inf", rank=2, tensors=tensors))
    assert caught.value.fields == {"reason": "not_finite", "tensor": name, "index": tensors[name].size - 1}
    with pytest.raises(AdapterConfigError):
        store.ingest_directory(make_adapter(tmp_path / "dora", shape=MINUTE, config={"use_dora": True}))
    assert tree(store) == {}
    assert store.list() == store.clear_incoming() == ()


def test_hundred_bad_adapters_in_a_row_leave_good_ones_readable(
    store: RevisionStore, adapter: Path, tmp_path: Path
) -> None:
    revision_id = store.ingest_directory(adapter).revision_id
    payload = (adapter / "adapter_model.safetensors").read_bytes()
    before = tree(store)
    for index in range(100):
        bad = make_adapter(tmp_path / "bad", shape=MINUTE, rank=2)
        (bad / "adapter_model.safetensors").write_bytes(payload[: index * len(payload) // 100])
        with pytest.raises(InspectError):
            store.ingest_directory(bad)
    assert tree(store) == before
    store.read(revision_id)


def test_source_may_be_overwritten_or_deleted_once_ingested(store: RevisionStore, adapter: Path) -> None:
    revision_id = store.ingest_directory(adapter).revision_id
    make_adapter(adapter, shape=MINUTE, rank=2, seed=9)
    assert store.ingest_directory(adapter).revision_id != revision_id
    shutil.rmtree(adapter)
    assert len(store.read(revision_id).tensors) == 28


def test_what_is_named_is_what_was_copied_even_if_the_source_changes_underneath(tmp_path: Path, adapter: Path) -> None:
    rewritten = []

    def rewrite_then_search(dtype: str, raw: memoryview) -> int | None:
        if not rewritten:
            rewritten.append((adapter / "adapter_model.safetensors").read_bytes())
            make_adapter(adapter, shape=MINUTE, rank=2, seed=9)
        return find_non_finite(dtype, raw)

    store = RevisionStore(tmp_path / "store", find_non_finite=rewrite_then_search)
    with pytest.raises(InspectError) as caught:
        store.ingest_directory(adapter)
    assert caught.value.fields["reason"] == "changed_while_read"
    assert store.list() == ()
    # A stream has no time stamps: whatever mixture arrived is named for what it is.
    stream = io.BytesIO((adapter / "adapter_model.safetensors").read_bytes())
    config = (adapter / "adapter_config.json").read_bytes()
    ingested = store.ingest_files({"adapter_model.safetensors": stream, "adapter_config.json": io.BytesIO(config)})
    assert store.read(ingested.revision_id).manifest == ingested.manifest


def test_a_description_that_is_damaged_or_gone_is_noticed_without_the_tensors(
    store: RevisionStore, adapter: Path
) -> None:
    revision_id = store.ingest_directory(adapter).revision_id
    config = store.read(revision_id).config
    directory = store.root / "revisions" / revision_id.removeprefix("sha256:")
    (directory / "adapter_model.safetensors").unlink()
    store.check_description(revision_id, config)
    for name in ("manifest.json", "adapter_config.json"):
        file = directory / name
        payload = file.read_bytes()
        file.unlink()
        with pytest.raises(StoreError, match="is missing"):
            store.check_description(revision_id, config)
        file.write_bytes(payload.replace(b"1", b"2", 1))
        with pytest.raises(DigestMismatchError, match=name):
            store.check_description(revision_id, config)
        file.write_bytes(payload)
    store.check_description(revision_id, config)


@pytest.mark.parametrize("advice", [blobs.MADV_POPULATE_WRITE, 9999], ids=["taken at once", "unknown to the kernel"])
def test_taking_pages_leaves_what_is_in_them(advice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MADV_POPULATE_WRITE", advice)
    names = [f"m{number}.lora_{half}.weight" for number in range(9) for half in "AB"]
    layout = blobs.lay_out([(name, "F32", (1, 3 + 700 * place)) for place, name in enumerate(names)])
    memory = blobs.TensorMemory(layout)
    for place, name in enumerate(names):
        memory.take_pages(names[place : place + 3])
        memory.views[name][:] = bytes([place + 1]) * len(memory.views[name])
    memory.take_pages(names)
    assert {name: set(memory.views[name]) for name in names} == {name: {at + 1} for at, name in enumerate(names)}


def test_pages_that_were_taken_are_there_when_they_are_filled() -> None:
    """Each tensor begins within a page of the one before it."""
    probe = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        probe.madvise(blobs.MADV_POPULATE_WRITE)
    except OSError:
        pytest.skip("this kernel does not take pages in advance")
    names = [f"m{number}.lora_A.weight" for number in range(4)]
    memory = blobs.TensorMemory(blobs.lay_out([(name, "F32", (1, (1 << 18) + 99)) for name in names]))
    faults = []
    for name in names:
        filling = b"x" * len(memory.views[name])
        memory.take_pages([name])
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        memory.views[name][:] = filling
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    assert max(faults) < 26, "of 257 pages each"


def test_source_is_read_once_from_start_to_end(
    store: RevisionStore, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    class Counting(io.FileIO):
        def read(self, size: int = -1) -> bytes:  # type: ignore[override]
            return self._count(super().read(size))

        def readinto(self, buffer: Any) -> int:
            count = super().readinto(buffer)
            counts.append(count or 0)
            return count or 0

        def _count(self, piece: bytes | None) -> bytes:
            counts.append(len(piece or b""))
            return piece or b""

        def seek(self, *_: Any) -> int:
            raise AssertionError("the source is read forward only")

    monkeypatch.setattr("epochless_vllm.store.sources.io.FileIO", Counting)
    store.ingest_directory(adapter)
    size = sum((adapter / name).stat().st_size for name in ("adapter_config.json", "adapter_model.safetensors"))
    assert sum(counts) == size


def test_adapter_of_many_chunks_is_copied_exactly_with_a_few_chunks_in_memory(
    store: RevisionStore, tmp_path: Path
) -> None:
    generator = np.random.default_rng(0)
    name_a, name_b = make_tensors(layers=[0], targets=["q_proj"])
    long = blobs.CHUNKS * blobs.CHUNK_BYTES + 12345
    tensors = {name_a: generator.random((2, long), np.float32), name_b: generator.random((long, 2), np.float32)}
    directory = make_adapter(tmp_path / "large", rank=2, tensors=tensors)
    tracemalloc.start()
    try:
        ingested = store.ingest_directory(directory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * blobs.CHUNKS * blobs.CHUNK_BYTES
    stored = store.read(ingested.revision_id)
    assert all(bytes(stored.tensors[name]) == tensors[name].tobytes() for name in tensors)
    assert stored.tensors[name_a].obj is not stored.tensors[name_b].obj  # keeping A's memory does not keep B's


def test_a_watcher_sees_every_byte_of_every_tensor_in_order(store: RevisionStore, adapter: Path) -> None:
    seen: dict[str, bytes] = {}

    class Watcher:
        def update(self, record: Any, piece: memoryview) -> None:
            seen[record.name] = seen.get(record.name, b"") + bytes(piece)

    ingested = store.ingest_directory(adapter, watch=lambda config: Watcher())
    stored = store.read(ingested.revision_id)
    assert seen == {name: bytes(view) for name, view in stored.tensors.items()}


@pytest.mark.parametrize("chunk", [4, 13, 64, 1000])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_the_size_of_the_pieces_changes_nothing(
    store: RevisionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: str
) -> None:
    tensors = make_tensors(3, shape=MINUTE, rank=2)
    directory = make_adapter(
        tmp_path / "a", rank=2, alpha=5.5, dtype=dtype, tensors=tensors, config={"use_rslora": True}
    )
    monkeypatch.setattr(blobs, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(blobs, "READ_BYTES", chunk)
    revision_id = store.ingest_directory(directory).revision_id
    config = {"alpha_pattern": {}, "lora_alpha": "5.5", "peft_type": "LORA", "use_rslora": True}
    assert revision_id == independent_revision_id(tensors, dtype, config)
    stored = store.read(revision_id).tensors
    assert {name: bytes(view) for name, view in stored.items()} == {
        name: encode_tensor(tensor, dtype) for name, tensor in tensors.items()
    }


def test_a_flipped_byte_of_any_tensor_is_found_whichever_was_read_with_it(
    store: RevisionStore, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingested = store.ingest_directory(adapter)
    path = directory_of(store, ingested.revision_id) / "adapter_model.safetensors"
    sound = path.read_bytes()
    monkeypatch.setattr(blobs, "READ_BYTES", 100)
    end = len(sound)
    for entry in reversed(blobs.lay_out([(e.name, e.dtype, e.shape) for e in ingested.manifest.tensors])):
        at = end - 1
        overwrite(path, sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises(DigestMismatchError) as caught:
            store.read(ingested.revision_id)
        assert entry.name in str(caught.value)
        end -= entry.byte_length


def test_what_a_watcher_raises_fails_the_ingest(store: RevisionStore, adapter: Path) -> None:
    class Watcher:
        def update(self, record: Any, piece: memoryview) -> None:
            if record.name.endswith("lora_B.weight"):
                raise InspectError("the watcher does not like it", reason="watched")

    with pytest.raises(InspectError, match="does not like it"):
        store.ingest_directory(adapter, watch=lambda config: Watcher())
    assert store.list() == ()


@pytest.mark.parametrize("failing", range(3))
def test_one_of_several_files_that_cannot_be_synced_fails_the_ingest(
    store: RevisionStore, adapter: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    sync, name = os.fsync, FILES[failing]

    def fail(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(name):
            raise OSError(errno.EIO, "the disk does not answer")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match="fsync"):
        store.ingest_directory(adapter)
    assert store.list() == ()


def test_a_disk_that_fails_once_while_the_file_is_written_fails_the_ingest(
    store: RevisionStore, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux tells of a lost write once; the sync at the end would succeed."""
    sync, failures = os.fsync, iter([OSError(errno.EIO, "lost")])

    def fail_once(descriptor: int) -> None:
        if (error := next(failures, None)) is not None:
            raise error
        sync(descriptor)

    monkeypatch.setattr(durable, "FLUSH_BYTES", 1 << 10)
    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(StoreError, match="fsync"):
        store.ingest_directory(adapter)
    assert store.list() == ()
    assert store.ingest_directory(adapter).created


def test_adapter_larger_than_allowed_is_refused_before_it_is_copied(tmp_path: Path, adapter: Path) -> None:
    store = RevisionStore(tmp_path / "small", max_adapter_bytes=1000)
    with pytest.raises(InspectError) as caught:
        store.ingest_directory(adapter)
    assert caught.value.fields["reason"] == "too_large"


def test_adapter_that_does_not_fit_the_disk_is_refused_before_it_is_copied(
    store: RevisionStore, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(store.root)
    values = list(real)
    values[4] = 16  # f_bavail: nearly nothing
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    with pytest.raises(StorageFullError) as caught:
        store.ingest_directory(adapter)
    assert caught.value.status == 507
    assert tree(store) == {}


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_disk_failure_anywhere_adds_nothing_and_is_our_error(
    store: RevisionStore, adapter: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    original = getattr(os, call)

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    descriptors = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(StorageFullError if code == errno.ENOSPC else StoreError):
            store.ingest_directory(adapter)
    assert getattr(os, call) is original
    assert os.listdir("/proc/self/fd") == descriptors
    if call != "fsync":
        assert store.list() == ()
    assert store.clear_incoming() == ()
    assert store.ingest_directory(adapter).created
    assert store.fsck().damaged == ()


def test_partial_writes_are_completed(store: RevisionStore, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.pwrite
    written: set[str] = set()

    def write_a_little(descriptor: int, view: memoryview, offset: int) -> int:
        written.add(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2])
        return original(descriptor, view[:7], offset)

    monkeypatch.setattr(os, "pwrite", write_a_little)
    store.read(store.ingest_directory(adapter).revision_id)
    assert written >= set(FILES)


def test_no_file_is_cut_by_a_disk_that_fills_in_the_middle_of_it(store: RevisionStore, adapter: Path) -> None:
    """The system writes what fits and says only then that there is no room: short counts are not success."""
    store.ingest_directory(adapter)  # afterwards only the content is new
    sizes = sorted(path.stat().st_size for path in store.root.rglob("*") if path.name in FILES)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in sizes:
        other = make_adapter(adapter.parent / f"cut-{size}", shape=MINUTE, rank=2, seed=size)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
        try:
            with pytest.raises(StorageFullError):
                store.ingest_directory(other)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(store.list()) == 1


def test_missing_layer_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    names = [name.removeprefix("base_model.model.")[: -len(".lora_A.weight")] for name in make_tensors(shape=MINUTE)]
    store = RevisionStore(tmp_path / "store", base_modules=names)
    assert store.ingest_directory(make_adapter(tmp_path / "whole", shape=MINUTE)).created
    with pytest.raises(AdapterConfigError, match="no tensors"):
        store.ingest_directory(make_adapter(tmp_path / "partial", shape=MINUTE, layers=[1]))
    assert len(store.list()) == 1


# Uploads


def upload(adapter: Path, **changes: Any) -> dict[str, Any]:
    files = {name: (adapter / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    return {**files, **changes}


def in_pieces(payload: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(payload), size):
        yield payload[begin : begin + size]
        yield b""


@pytest.mark.parametrize("size", [1, 7, 100, 4096, 1 << 20])
def test_uploaded_files_give_the_same_revision_however_they_are_cut(
    store: RevisionStore, adapter: Path, size: int
) -> None:
    files = {name: in_pieces(payload, size) for name, payload in upload(adapter).items()}
    assert store.ingest_files(files).revision_id == store.ingest_directory(adapter).revision_id


def test_source_that_cannot_be_read_is_refused(
    store: RevisionStore, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("epochless_vllm.store.sources.io.FileIO", Broken)
    with pytest.raises(InspectError) as caught:
        store.ingest_directory(adapter)
    assert caught.value.fields["reason"] == "unreadable"


def test_upload_that_breaks_off_is_refused(store: RevisionStore, adapter: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield (adapter / "adapter_model.safetensors").read_bytes()[:5000]
        raise OSError("connection lost")

    files = {**upload(adapter), "adapter_model.safetensors": broken()}
    with pytest.raises(InspectError) as caught:
        store.ingest_files({**files, "adapter_config.json": io.BytesIO(files["adapter_config.json"])})
    assert caught.value.fields["reason"] == "unreadable"
    assert tree(store) == {}


def test_uploaded_file_objects_are_read_to_their_end(store: RevisionStore, adapter: Path) -> None:
    files = {name: io.BytesIO(payload) for name, payload in upload(adapter).items()}
    assert store.ingest_files(files).created
    assert all(file.read() == b"" for file in files.values())


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("trailing_bytes", lambda payload: payload + b"\0"),
        ("truncated", lambda payload: payload[:-1]),
        ("truncated", lambda payload: payload[:20]),
        ("truncated", lambda payload: b""),
        ("header_length", lambda payload: b"\xff" * 8 + payload),
    ],
)
def test_malformed_upload_is_refused_and_leaves_nothing(
    store: RevisionStore, adapter: Path, reason: str, change
) -> None:
    files = upload(adapter)
    changed = {**files, "adapter_model.safetensors": change(files["adapter_model.safetensors"])}
    with pytest.raises(InspectError) as caught:
        store.ingest_files({name: io.BytesIO(payload) for name, payload in changed.items()})
    assert caught.value.fields["reason"] == reason
    assert tree(store) == {}


@pytest.mark.parametrize(("cut", "place"), [(-1, 0), (0, 1), (1, 1)], ids=["in it", "after it", "in the next"])
def test_upload_that_ends_early_is_refused_by_the_tensor_that_is_not_whole(
    store: RevisionStore, adapter: Path, cut: int, place: int
) -> None:
    files = upload(adapter)
    payload = files["adapter_model.safetensors"]
    records, begin = read_header(io.BytesIO(payload).read, None)
    files["adapter_model.safetensors"] = payload[: begin + records[0].end + cut]
    with pytest.raises(InspectError) as caught:
        store.ingest_files({name: io.BytesIO(each) for name, each in files.items()})
    assert (caught.value.fields["reason"], caught.value.fields["tensor"]) == ("truncated", records[place].name)


@pytest.mark.parametrize(
    "name", ["../adapter_config.json", "/etc/passwd", "adapter_model.bin", "a\0b", "", "README.md"]
)
def test_upload_of_any_other_name_is_refused(store: RevisionStore, adapter: Path, name: str) -> None:
    with pytest.raises(InspectError) as caught:
        store.ingest_files({key: io.BytesIO(payload) for key, payload in upload(adapter, **{name: b"x"}).items()})
    assert caught.value.fields["reason"] == "file_name"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_upload_that_lacks_a_file_is_refused(store: RevisionStore, adapter: Path, name: str) -> None:
    files = {key: io.BytesIO(payload) for key, payload in upload(adapter).items() if key != name}
    with pytest.raises(InspectError) as caught:
        store.ingest_files(files)
    assert caught.value.fields["reason"] == "file_missing"


def test_endless_configuration_is_cut_off(store: RevisionStore) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 65536

    files = {"adapter_config.json": endless(), "adapter_model.safetensors": endless()}
    with pytest.raises(InspectError) as caught:
        store.ingest_files(files)
    assert caught.value.fields["reason"] == "too_large"


def test_endless_tensors_are_cut_off_at_what_the_header_says(store: RevisionStore, adapter: Path) -> None:
    files = upload(adapter)

    def endless() -> Iterator[bytes]:
        yield files["adapter_model.safetensors"]
        while True:
            yield bytes(65536)

    config = io.BytesIO(files["adapter_config.json"])
    with pytest.raises(InspectError) as caught:
        store.ingest_files({"adapter_config.json": config, "adapter_model.safetensors": endless()})
    assert caught.value.fields["reason"] == "trailing_bytes"


# Housekeeping


def test_store_is_private_to_its_owner_and_its_files_are_read_only(store: RevisionStore, adapter: Path) -> None:
    directory = directory_of(store, store.ingest_directory(adapter).revision_id)
    for path in (store.root, store.root / "revisions", store.root / "incoming", directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE((directory / name).stat().st_mode) for name in FILES} == {0o400}


def test_fsck_names_what_does_not_belong(store: RevisionStore, adapter: Path) -> None:
    revision_id = store.ingest_directory(adapter).revision_id
    directory = directory_of(store, revision_id)
    (directory / "notes.txt").write_text("x")
    (store.root / "revisions" / "latest").symlink_to(directory)
    (store.root / "incoming" / "123-dead").mkdir()
    report = store.fsck()
    assert (report.checked, report.damaged) == (1, ())
    assert report.strays == (f"revisions/{directory.name}/notes.txt", "revisions/latest")
    assert report.leftovers == ("123-dead",)
    assert report.byte_length == store.byte_size(revision_id)


def test_directory_renamed_to_another_digest_is_found(store: RevisionStore, adapter: Path) -> None:
    revision_id = store.ingest_directory(adapter).revision_id
    false = RevisionId("sha256:" + "f" * 64)
    directory_of(store, revision_id).rename(directory_of(store, false))
    with pytest.raises(DigestMismatchError):
        store.manifest(false)
    (finding,) = store.fsck().damaged
    assert (finding.revision_id, finding.code) == (false, "digest_mismatch")


def test_collect_removes_what_is_old_and_not_kept(store: RevisionStore, tmp_path: Path) -> None:
    ids = [
        store.ingest_directory(make_adapter(tmp_path / str(seed), shape=MINUTE, rank=2, seed=seed)).revision_id
        for seed in range(4)
    ]
    size = store.byte_size(ids[1])
    for revision_id in ids[:3]:
        os.utime(directory_of(store, revision_id), (1, 1))
    assert store.ingest_directory(tmp_path / "2").created is False  # published again: young again
    report = store.collect({ids[0]}, older_than_s=3600)
    assert (report.removed, report.kept, report.freed_bytes) == ((ids[1],), 3, size)
    assert set(store.list()) == {ids[0], ids[2], ids[3]}
    assert set(store.collect((), older_than_s=-1).removed) == {ids[0], ids[2], ids[3]}
    assert tree(store) == {}


def test_collect_frees_space_on_a_disk_that_takes_no_more_bytes(
    store: RevisionStore, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision_id = store.ingest_directory(adapter).revision_id

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        for call in ("write", "pwrite", "mkdir"):
            patched.setattr(os, call, full)
        assert store.collect((), older_than_s=-1).removed == (revision_id,)
    assert tree(store) == {}


def test_leftovers_of_dead_writers_are_cleared_and_those_of_live_ones_kept(store: RevisionStore) -> None:
    incoming = store.root / "incoming"
    (incoming / "1-dead").mkdir()
    (incoming / "1-dead" / "adapter_model.safetensors").write_bytes(b"x")
    (incoming / "2-dead.lock").touch()
    (incoming / "3-link").symlink_to(store.root)
    (incoming / "4-live").mkdir()
    lock = FileLock(incoming / "4-live.lock", purpose="test")
    assert store.clear_incoming() == ("1-dead", "2-dead", "3-link")
    assert sorted(os.listdir(incoming)) == ["4-live", "4-live.lock"]
    lock.release()
    assert store.clear_incoming() == ("4-live",)
    assert store.root.exists()


def test_store_of_another_process_sees_what_was_added(store: RevisionStore, adapter: Path) -> None:
    reader = RevisionStore(store.root)
    revision_id = store.ingest_directory(adapter).revision_id
    assert reader.list() == (revision_id,)
    assert reader.has(revision_id)
    assert reader.manifest(revision_id).revision_id == revision_id


def test_many_threads_ingesting_the_same_content_agree(store: RevisionStore, adapter: Path) -> None:
    results, failures = [], []
    barrier = threading.Barrier(8)

    def ingest() -> None:
        barrier.wait()
        try:
            results.append(store.ingest_directory(adapter))
        except EpochlessError as error:
            failures.append(error)

    threads = [threading.Thread(target=ingest) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len({result.revision_id for result in results}) == 1
    assert sum(result.created for result in results) == 1
    assert store.fsck().damaged == store.fsck().leftovers == ()


def test_directory_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError):
        RevisionStore(tmp_path / "file")
    with pytest.raises(StoreError):
        RevisionStore(tmp_path / "file" / "below")


def test_writer_of_the_tests_is_not_the_stored_layout(store: RevisionStore, adapter: Path) -> None:
    tensors = make_tensors(shape=MINUTE, rank=2)
    config = io.BytesIO(json.dumps(make_config(rank=2)).encode())
    payload = encode_safetensors(tensors)
    ingested = store.ingest_files({"adapter_config.json": config, "adapter_model.safetensors": io.BytesIO(payload)})
    stored = (directory_of(store, ingested.revision_id) / "adapter_model.safetensors").read_bytes()
    assert stored != payload
    assert ingested.revision_id == store.ingest_directory(adapter).revision_id
