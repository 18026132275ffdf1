"""Paths as an enemy would give them: nothing outside is read, nothing blocks, every refusal is our own error."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from epochless_vllm.errors import AdapterNotFoundError, EpochlessError, InspectError, PathRefusedError
from epochless_vllm.store import sources
from epochless_vllm.store.adapters import inspect_adapter
from epochless_vllm.store.sources import open_adapter_directory
from tests.adapters import MINUTE, make_adapter


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An import root with one good adapter, and another adapter outside of it."""
    make_adapter(tmp_path / "outside", shape=MINUTE, seed=1)
    make_adapter(tmp_path / "root" / "run" / "step-5", shape=MINUTE)
    return tmp_path / "root"


@pytest.fixture
def adapter(root: Path) -> Path:
    return root / "run" / "step-5"


def test_directory_inside_the_import_root_is_opened_by_absolute_or_relative_path(root: Path, adapter: Path) -> None:
    assert inspect_adapter(adapter, root).modules == inspect_adapter("run/step-5", root).modules
    assert inspect_adapter(str(adapter) + "/", root)
    assert inspect_adapter(f"{root}//run/./step-5", root)


def test_link_that_stays_inside_the_import_root_is_followed(root: Path) -> None:
    (root / "latest").symlink_to("run/step-5")
    assert inspect_adapter("latest", root)


def test_import_root_may_itself_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(root)
    assert inspect_adapter("run/step-5", tmp_path / "alias")
    assert inspect_adapter(tmp_path / "alias" / "run" / "step-5", tmp_path / "alias")


def test_directory_anywhere_is_opened_when_there_is_no_import_root(tmp_path: Path, root: Path) -> None:
    assert inspect_adapter(tmp_path / "outside")


@pytest.mark.parametrize("path", ["../outside", "run/../../outside", "run/../run/step-5", "..", "/proc/self/cwd/../x"])
def test_path_with_dots_is_refused_even_where_it_stays_inside(root: Path, path: str) -> None:
    with pytest.raises(PathRefusedError, match=r"'\.\.'"):
        inspect_adapter(path, root)
    with pytest.raises(PathRefusedError, match=r"'\.\.'"):
        inspect_adapter(path)


@pytest.mark.parametrize("path", ["/etc", "/", "/etc/passwd", "/no/such/place", "/dev/zero", "/proc/1/root"])
def test_absolute_path_outside_is_refused_alike_whether_or_not_it_exists(root: Path, path: str) -> None:
    with pytest.raises(PathRefusedError, match="outside the import root"):
        inspect_adapter(path, root)


def test_directory_beside_the_root_with_the_roots_name_as_prefix_is_outside(root: Path) -> None:
    make_adapter(root.with_name("root-secret"), shape=MINUTE)
    with pytest.raises(PathRefusedError, match="outside the import root"):
        inspect_adapter(root.with_name("root-secret"), root)


@pytest.mark.parametrize("target", ["../outside", "/etc", "/"])
def test_link_that_leads_outside_the_import_root_is_refused(root: Path, target: str) -> None:
    (root / "sly").symlink_to(target)
    with pytest.raises(PathRefusedError, match="outside the import root"):
        inspect_adapter("sly", root)
    (root / "run" / "deep").symlink_to(f"../../{target}" if not target.startswith("/") else target)
    with pytest.raises(PathRefusedError):
        inspect_adapter("run/deep", root)


def test_link_loop_is_refused(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises((PathRefusedError, AdapterNotFoundError)):
        inspect_adapter("a", root)
    with pytest.raises(PathRefusedError):
        inspect_adapter(root / "a")


def test_link_swapped_in_after_the_check_is_not_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_path = os.path.realpath

    def swap_after(path, **options):
        answer = real_path(path, **options)
        if str(path).endswith("run/step-5"):
            shutil.rmtree(root / "run")
            (root / "run").symlink_to(root.parent)
            (root.parent / "outside").rename(root.parent / "step-5")
        return answer

    monkeypatch.setattr(os.path, "realpath", swap_after)
    with pytest.raises(PathRefusedError):
        inspect_adapter("run/step-5", root)
    assert (root / "run" / "step-5" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (AdapterNotFoundError, "meta-llama/Llama-3-8B-lora"),
        (AdapterNotFoundError, "hf://org/name"),
        (AdapterNotFoundError, "https://example.invalid/adapter"),
        (AdapterNotFoundError, "run/step-6"),
        (PathRefusedError, "run/step-5/adapter_config.json"),
        (PathRefusedError, "run\0/step-5"),
        (PathRefusedError, ""),
        (PathRefusedError, "a" * 300),
        (PathRefusedError, "a/" * 3000),
        (PathRefusedError, "\ud800"),
    ],
)
@pytest.mark.parametrize("confined", [True, False])
def test_what_is_not_a_local_directory_is_refused(
    root: Path, error: type[EpochlessError], path: str, confined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(error):
        inspect_adapter(path, root if confined else None)


def test_hub_id_is_answered_404_and_never_downloaded(root: Path) -> None:
    with pytest.raises(AdapterNotFoundError, match="hub ids are not downloaded") as caught:
        inspect_adapter("org/name", root)
    assert caught.value.status == 404


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["link out", "link in", "absolute link", "fifo", "directory", "socket", "dangling"])
def test_file_that_is_not_a_regular_file_is_refused_without_blocking(adapter: Path, name: str, kind: str) -> None:
    path = adapter / name
    kept = path.rename(adapter / "kept")
    listener = socket.socket(socket.AF_UNIX)
    if kind == "link out":
        path.symlink_to(f"../../../outside/{name}")
    elif kind == "link in":
        path.symlink_to("kept")
    elif kind == "absolute link":
        path.symlink_to(kept)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        here = Path.cwd()
        os.chdir(adapter)  # a socket's path is at most 107 bytes
        listener.bind(name)
        os.chdir(here)
    with pytest.raises(PathRefusedError, match="link or not a regular file"):
        inspect_adapter(adapter)
    listener.close()


def test_character_device_is_refused(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    path.unlink()
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("making a device needs privileges")
    with pytest.raises(PathRefusedError):
        inspect_adapter(adapter)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_regular_file_replaced_after_the_check_is_refused_without_blocking(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    path = adapter / "adapter_model.safetensors"
    before = path.stat()
    path.unlink()
    make(path)
    monkeypatch.setattr(os, "stat", lambda *_, **__: before)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PathRefusedError, match=r"not a regular file|link"):
        inspect_adapter(adapter)
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    "twin",
    [
        "Adapter_Config.json",
        "ADAPTER_MODEL.SAFETENSORS",
        "adapter_con\ufb01g.json",
        "\uff41dapter_config.json",
        "adapter_model.safeten\u017fors",
    ],
)
def test_file_name_that_looks_like_another_is_refused(adapter: Path, twin: str) -> None:
    (adapter / twin).write_bytes(b"")
    with pytest.raises(InspectError, match="looks like") as caught:
        inspect_adapter(adapter)
    assert caught.value.fields["reason"] == "lookalike_file"


@pytest.mark.parametrize("pickle", ["adapter_model.bin", "adapter_model.pt"])
def test_pickle_is_refused_and_never_opened(adapter: Path, pickle: str) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    os.mkfifo(adapter / pickle)  # opening it would hang
    with pytest.raises(InspectError) as caught:
        inspect_adapter(adapter)
    assert caught.value.fields["reason"] == "pickle"


def test_sharded_adapter_is_refused(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model-00001-of-00002.safetensors")
    with pytest.raises(InspectError) as caught:
        inspect_adapter(adapter)
    assert caught.value.fields["reason"] == "sharded"


def test_stale_files_beside_good_ones_are_not_opened(adapter: Path) -> None:
    alone = inspect_adapter(adapter)
    for name in ("adapter_model.bin", "optimizer.pt", "adapter_model.safetensors.tmp", "adapter_config.json~"):
        os.mkfifo(adapter / name)
    (adapter / "README.md").symlink_to("/etc/passwd")
    (adapter / "checkpoint-3").mkdir()
    assert inspect_adapter(adapter) == alone


def test_directory_with_countless_files_is_refused(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_ENTRIES", 20)
    for index in range(18):
        (adapter / f"{index}").touch()
    assert inspect_adapter(adapter)
    (adapter / "one more").touch()
    with pytest.raises(PathRefusedError, match="files"):
        inspect_adapter(adapter)


def test_write_during_the_reading_is_noticed(adapter: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with open_adapter_directory(adapter) as source:
            source.config.check_unchanged()
            source.tensors.check_unchanged()
            payload = (adapter / name).read_bytes()
            (adapter / name).write_bytes(payload)
            with pytest.raises(InspectError) as caught:
                (source.config if name == "adapter_config.json" else source.tensors).check_unchanged()
        assert caught.value.fields["reason"] == "changed_while_read"


def test_descriptors_are_closed_after_success_and_refusal(adapter: Path, root: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    inspect_adapter(adapter, root)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(InspectError):
        inspect_adapter(adapter, root)
    with pytest.raises(PathRefusedError):
        inspect_adapter("/etc", root)
    assert len(os.listdir("/proc/self/fd")) == before
