"""The base digest: what changes the base changes it, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from epochless_vllm.errors import ConfigurationError, DigestMismatchError
from epochless_vllm.store.base_model import CACHE_NAME, BaseSettings, compute_base_digest, identify_base
from tests.tiny_model import make_model

SETTINGS = {"dtype": "torch.float32", "quantization": "None", "kv_cache_dtype": "auto", "overrides": ""}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def digest(model: Path, cache: Path, mode: str = "full", **settings: str) -> str:
    return compute_base_digest(model, {**SETTINGS, **settings}, mode=mode, cache_directory=cache)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", **SMALL)


def flip(path: Path, offset: int) -> None:
    with path.open("rb+") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_equal_bytes_elsewhere_have_the_same_digest(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", **SMALL)
    assert digest(model, tmp_path) == digest(other, tmp_path)


def test_one_flipped_weight_bit_changes_the_full_digest(model: Path, tmp_path: Path) -> None:
    before = digest(model, tmp_path)
    weights = model / "model.safetensors"
    flip(weights, weights.stat().st_size - 3)
    assert digest(model, tmp_path) != before


def test_configuration_dtype_and_mode_are_inside(model: Path, tmp_path: Path) -> None:
    seen = {digest(model, tmp_path), digest(model, tmp_path, dtype="torch.bfloat16"), digest(model, tmp_path, "fast")}
    config = model / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    seen.add(digest(model, tmp_path))
    assert len(seen) == 4


def test_cached_digest_is_used_only_for_the_same_file(model: Path, tmp_path: Path) -> None:
    before = digest(model, tmp_path)
    assert (tmp_path / CACHE_NAME).exists()
    weights = model / "model.safetensors"
    status = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    replacement = tmp_path / "replacement"
    replacement.write_bytes(data)
    os.utime(replacement, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(replacement, weights)  # same size and time, another inode
    assert digest(model, tmp_path) != before


def test_damaged_cache_costs_time_only(model: Path, tmp_path: Path) -> None:
    before = digest(model, tmp_path)
    (tmp_path / CACHE_NAME).write_bytes(b"\xff{")
    assert digest(model, tmp_path) == before


@pytest.mark.parametrize("content", [None, "config"])
def test_incomplete_model_is_refused(tmp_path: Path, content: str | None) -> None:
    directory = tmp_path / "broken"
    directory.mkdir()
    if content:
        (directory / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="model"):
        digest(directory, tmp_path)


@pytest.mark.parametrize("mode", ["full", "fast"])
@pytest.mark.parametrize("settings", [BaseSettings("float32"), BaseSettings("bfloat16", kv_cache_dtype="fp8_e4m3")])
def test_settings_are_found_from_the_digest(model: Path, tmp_path: Path, mode: str, settings: BaseSettings) -> None:
    base = compute_base_digest(model, settings.encode(), mode=mode, cache_directory=tmp_path)
    assert identify_base(model, base) == settings


def test_search_for_settings_trusts_no_cache(model: Path, tmp_path: Path) -> None:
    base = compute_base_digest(model, BaseSettings("float32").encode(), mode="full", cache_directory=tmp_path)
    weights = model / "model.safetensors"
    status = weights.stat()
    flip(weights, status.st_size - 3)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = compute_base_digest(model, BaseSettings("float32").encode(), mode="full", cache_directory=tmp_path)
    assert again == base, "the cache believes the file's time"
    with pytest.raises(DigestMismatchError, match="quantised"):
        identify_base(model, base)


def test_overridden_configuration_is_not_identified(model: Path, tmp_path: Path) -> None:
    overridden = BaseSettings("float32", overrides="[('rope_theta', 2)]").encode()
    base = compute_base_digest(model, overridden, mode="full", cache_directory=tmp_path)
    with pytest.raises(DigestMismatchError):
        identify_base(model, base)
