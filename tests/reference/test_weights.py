"""Checkpoints: exact conversion, shards by their index, and refusals by name of everything else."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epochless_vllm.errors import InspectError, ModelRefusedError
from epochless_vllm.reference.model import load_model, tensor_shapes
from epochless_vllm.reference.weights import INDEX_NAME, locate_tensors, read_tensor, tensor_from_bytes
from tests.adapters import encode_safetensors, encode_tensor
from tests.reference.cases import SHAPES, make_weights, write_model

SHAPE = SHAPES["fp16-shards"]
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def rewrite(directory: Path, tensors: dict[str, np.ndarray], **options: Any) -> None:
    for stale in directory.glob("*.safetensors*"):
        stale.unlink()
    (directory / "model.safetensors").write_bytes(encode_safetensors(tensors, **options))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path, SHAPES["tiny"])


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_bit_pattern_converts_as_torch_converts_it(dtype: str) -> None:
    if dtype == "F32":
        payload = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32).tobytes()
        expected = torch.frombuffer(bytearray(payload), dtype=torch.float32)
    else:
        payload = np.arange(1 << 16, dtype=np.uint16).tobytes()
        expected = torch.frombuffer(bytearray(payload), dtype=TORCH[dtype]).float()
    found = tensor_from_bytes(memoryview(payload), dtype, (256, 256))
    np.testing.assert_array_equal(found.reshape(-1), expected.numpy())


def test_tensors_longer_than_a_chunk_are_whole(tmp_path: Path) -> None:
    tensors = {"a": np.random.default_rng(0).standard_normal((700, 1001)).astype(np.float32), "b": np.ones((0, 3))}
    for dtype in ("F32", "BF16"):
        (tmp_path / "model.safetensors").write_bytes(encode_safetensors(tensors, dtype=dtype))
        located = locate_tensors(tmp_path)
        expected = np.frombuffer(encode_tensor(tensors["a"], "BF16"), "<u2").astype(np.uint32) << 16
        wanted = tensors["a"] if dtype == "F32" else expected.view(np.float32).reshape(700, 1001)
        np.testing.assert_array_equal(read_tensor(located["a"]), wanted)
        assert read_tensor(located["b"]).shape == (0, 3)


def test_shards_give_the_model_one_file_gives(tmp_path: Path) -> None:
    sharded = load_model(write_model(tmp_path / "shards", SHAPE))
    tensors = make_weights(SHAPE)
    assert np.array_equal(sharded.head.weight, tensors["lm_head.weight"].astype(np.float16).astype(np.float32))
    assert sharded.layers[1].down.weight.shape == (64, 128)
    for stray in ("stale.safetensors", "consolidated.safetensors"):
        (tmp_path / "shards" / stray).write_bytes(b"not read: the index does not name it")
    assert load_model(tmp_path / "shards").byte_size == sharded.byte_size


def test_shards_without_an_index_are_all_read(tmp_path: Path) -> None:
    directory = write_model(tmp_path, SHAPE)
    (directory / INDEX_NAME).unlink()
    assert load_model(directory).head.weight.shape == (90, 64)


def test_one_named_file_wins_over_strays_beside_it(directory: Path) -> None:
    (directory / "old.safetensors").write_bytes(b"stale")
    assert load_model(directory).embedding.shape == (97, 64)


def test_memory_is_four_bytes_a_weight(directory: Path) -> None:
    tracemalloc.start()
    model = load_model(directory)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    elements = sum(tensor.size for tensor in make_weights(SHAPES["tiny"]).values())
    assert model.byte_size == 4 * elements
    assert held < model.byte_size + (64 << 10)
    assert peak < model.byte_size + (1 << 20) + (128 << 10)


def test_weights_are_held_as_a_server_of_that_dtype_holds_them(directory: Path) -> None:
    model = load_model(directory, "bfloat16")
    expected = torch.from_numpy(make_weights(SHAPES["tiny"])["model.embed_tokens.weight"]).bfloat16().float().numpy()
    assert np.array_equal(model.embedding, expected)


def test_stored_head_of_a_tied_model_and_derived_buffers_have_no_effect(directory: Path) -> None:
    tensors = make_weights(SHAPES["tiny"])
    extra = {"lm_head.weight": np.ones((97, 64)), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8)}
    rewrite(directory, tensors | extra)
    model = load_model(directory)
    assert model.head.weight is model.embedding
    assert set(tensor_shapes(model.config)) == set(tensors)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model.norm.weight": None}, "missing_tensor"),
        ({"model.layers.2.mlp.up_proj.weight": np.ones((128, 64))}, "unknown_tensor"),
        ({"model.layers.0.self_attn.q_proj.bias": np.ones(64)}, "unknown_tensor"),
        ({"model.norm.weight": np.ones(63)}, "tensor_shape"),
        ({"model.embed_tokens.weight": np.ones((64, 97))}, "tensor_shape"),
    ],
)
def test_tensors_that_are_not_those_of_the_configuration_are_refused(
    directory: Path, change: dict[str, Any], field: str
) -> None:
    tensors = {name: each for name, each in (make_weights(SHAPES["tiny"]) | change).items() if each is not None}
    rewrite(directory, tensors)
    with pytest.raises(ModelRefusedError) as caught:
        load_model(directory)
    assert caught.value.fields["field"] == field


def test_dtype_that_is_not_computed_is_refused(directory: Path) -> None:
    rewrite(directory, make_weights(SHAPES["tiny"]), dtypes={"model.norm.weight": "F64"})
    with pytest.raises(ModelRefusedError) as caught:
        load_model(directory)
    assert caught.value.fields["field"] == "dtype"


def test_configuration_that_claims_more_than_the_files_hold_allocates_nothing(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": 1 << 24, "hidden_size": 1 << 20}
    (directory / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    with pytest.raises(ModelRefusedError):
        load_model(directory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        [],
        {},
        {"model.norm.weight": "../model.safetensors"},
        {"model.norm.weight": "pytorch_model.bin"},
        {"model.norm.weight": 3},
        {"model.norm.weight": "missing.safetensors"},
        {"no.such.tensor": "model.safetensors"},
    ],
)
def test_index_that_does_not_describe_its_shards_is_refused(directory: Path, weight_map: Any) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelRefusedError):
        load_model(directory)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path, SHAPE)
    (directory / INDEX_NAME).unlink()
    (directory / "zz.safetensors").write_bytes(encode_safetensors({"model.norm.weight": np.ones(64)}))
    with pytest.raises(ModelRefusedError) as caught:
        load_model(directory)
    assert caught.value.fields["field"] == "duplicate_tensor"


def test_directories_without_readable_weights_are_refused(directory: Path, tmp_path: Path) -> None:
    whole = (directory / "model.safetensors").read_bytes()
    for payload in (whole[:-1], whole + b"\0", b"", whole[:100]):
        (directory / "model.safetensors").write_bytes(payload)
        with pytest.raises(InspectError):
            load_model(directory)
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelRefusedError) as caught:
        load_model(directory)
    assert caught.value.fields["field"] == "weights"
    (directory / "model.safetensors").mkdir()
    with pytest.raises(ModelRefusedError):
        load_model(directory)
    with pytest.raises(ModelRefusedError):
        locate_tensors(tmp_path / "nowhere")
