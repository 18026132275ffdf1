"""Adapters: the same factors from a store and from a directory, and refusals of what does not fit the base."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from epochless_vllm.errors import AdapterConfigError, AdapterNotFoundError, InspectError
from epochless_vllm.reference.config import ModelConfig, config_from_document
from epochless_vllm.reference.lora import Adapter, adapter_from_directory, adapter_from_revision
from epochless_vllm.store.revisions import RevisionStore
from tests.adapters import make_adapter, make_config, make_tensors
from tests.reference.cases import LORA_AXES, SHAPES, write_adapter

SHAPE = SHAPES["gqa-4x"]


@pytest.fixture
def base() -> ModelConfig:
    return config_from_document(SHAPE.config())


def from_store(directory: Path, store: Path, base: ModelConfig, **options: str) -> Adapter:
    revisions = RevisionStore(store)
    stored = revisions.read(revisions.ingest_directory(directory).revision_id)
    return adapter_from_revision(stored, base, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", [axis for axis in LORA_AXES if axis != "none"])
def test_store_and_directory_give_the_same_adapter(tmp_path: Path, base: ModelConfig, axis: str) -> None:
    directory = write_adapter(tmp_path / "adapter", SHAPE, axis)
    assert directory is not None
    stored, direct = from_store(directory, tmp_path / "store", base), adapter_from_directory(directory, base)
    assert stored.modules.keys() == direct.modules.keys()
    for name, factors in stored.modules.items():
        other = direct.modules[name]
        assert factors.scaling == other.scaling
        assert np.array_equal(factors.a, other.a)
        assert np.array_equal(factors.b, other.b)


def test_every_tensor_of_the_file_is_used_as_written(tmp_path: Path, base: ModelConfig) -> None:
    tensors = make_tensors(3, shape=SHAPE.sizes, rank=4)
    adapter = adapter_from_directory(make_adapter(tmp_path, shape=SHAPE.sizes, tensors=tensors), base)
    used = {f"base_model.model.{name}.lora_A.weight": each.a for name, each in adapter.modules.items()}
    used |= {f"base_model.model.{name}.lora_B.weight": each.b for name, each in adapter.modules.items()}
    assert used.keys() == tensors.keys()
    assert all(np.array_equal(used[name], tensors[name]) for name in tensors)
    assert adapter.max_rank == 4


def test_scaling_is_alpha_by_rank_or_by_its_root(tmp_path: Path, base: ModelConfig) -> None:
    patterns = write_adapter(tmp_path / "patterns", SHAPE, "patterns")
    rslora = write_adapter(tmp_path / "rslora", SHAPE, "rslora")
    assert patterns is not None
    assert rslora is not None
    modules = adapter_from_directory(patterns, base).modules
    assert modules["model.layers.0.self_attn.q_proj"].scaling == 3 / 2
    assert modules["model.layers.1.mlp.up_proj"].scaling == 8 / 6
    assert modules["model.layers.1.mlp.down_proj"].scaling == 16 / 4
    assert modules["model.layers.1.mlp.gate_proj"].scaling == 8 / 4
    root = adapter_from_directory(rslora, base).modules["model.layers.0.self_attn.q_proj"]
    assert root.scaling == 12 / math.sqrt(8)


def test_factors_are_held_as_a_server_of_that_dtype_holds_them(tmp_path: Path, base: ModelConfig) -> None:
    tensors = make_tensors(3, shape=SHAPE.sizes, rank=4)
    directory = make_adapter(tmp_path / "adapter", shape=SHAPE.sizes, tensors=tensors)
    name = "model.layers.0.self_attn.q_proj"
    expected = torch.from_numpy(tensors[f"base_model.model.{name}.lora_A.weight"]).bfloat16().float().numpy()
    for adapter in (
        adapter_from_directory(directory, base, "bfloat16"),
        from_store(directory, tmp_path / "store", base, rounding="bfloat16"),
    ):
        assert np.array_equal(adapter.modules[name].a, expected)


def test_adapter_of_another_base_is_refused(tmp_path: Path, base: ModelConfig) -> None:
    other = make_adapter(tmp_path / "other", shape=SHAPES["tiny"].sizes)
    deeper = make_adapter(tmp_path / "deeper", shape=SHAPES["gqa-2x"].sizes)
    for directory in (other, deeper):
        for load in (
            lambda path: adapter_from_directory(path, base),
            lambda path: from_store(path, tmp_path / "store", base),
        ):
            with pytest.raises(InspectError) as caught:
                load(directory)
            assert caught.value.fields["reason"] in ("base_shape", "unmatched_module")


def test_embedding_adapters_and_missing_targets_are_refused(tmp_path: Path, base: ModelConfig) -> None:
    tensors = make_tensors(3, shape=SHAPE.sizes, rank=4)
    embedding = {
        "base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 200), np.float32),
        "base_model.model.model.embed_tokens.lora_embedding_B": np.ones((96, 4), np.float32),
    }
    with pytest.raises(InspectError):
        adapter_from_directory(make_adapter(tmp_path / "e", shape=SHAPE.sizes, tensors=tensors | embedding), base)
    short = {name: each for name, each in tensors.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(AdapterConfigError):
        adapter_from_directory(make_adapter(tmp_path / "s", shape=SHAPE.sizes, tensors=short), base)
    with pytest.raises(AdapterConfigError):
        adapter_from_directory(make_adapter(tmp_path / "d", shape=SHAPE.sizes, config={"use_dora": True}), base)
    assert make_config()["use_dora"] is False
    with pytest.raises(AdapterNotFoundError):
        adapter_from_directory(tmp_path / "nowhere", base)
