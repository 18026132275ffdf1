"""A base model in memory: its configuration and its weights as float32 arrays, one per checkpoint tensor.

Promises that every tensor the architecture needs is there once with exactly its shape, and that no tensor of the
checkpoint is left out unless its name says it is derived. Memory: four bytes per weight. Knows no forward pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.errors import ModelRefusedError
from epochless_vllm.reference.config import ModelConfig, read_config
from epochless_vllm.reference.rounding import Rounding
from epochless_vllm.reference.weights import locate_tensors, read_tensor

Array = NDArray[np.float32]

# Buffers that old exporters stored beside the weights; they follow from the configuration.
_DERIVED = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


@dataclass(frozen=True)
class Linear:
    """``y = weight @ x + bias``; ``module`` is the name an adapter would use, ``weight`` is (outputs, inputs)."""

    module: str
    weight: Array
    bias: Array | None


@dataclass(frozen=True)
class Layer:
    """One decoder block. The norms are gains per element; ``q_norm`` and ``k_norm`` are per head."""

    input_norm: Array
    q: Linear
    k: Linear
    v: Linear
    q_norm: Array | None
    k_norm: Array | None
    o: Linear
    post_norm: Array
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Model:
    """The whole model; a tied ``head`` holds the embedding itself. ``rounding``: the dtype it computes in."""

    config: ModelConfig
    embedding: Array
    layers: tuple[Layer, ...]
    norm: Array
    head: Linear
    rounding: Rounding = "float32"

    @property
    def byte_size(self) -> int:
        """Bytes of weights held, a tied embedding once."""
        return 4 * sum(math.prod(shape) for shape in tensor_shapes(self.config).values())


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor a checkpoint of this configuration must hold."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, config.hidden),
        "model.norm.weight": (config.hidden,),
    }
    for name, shape in config.linear_shapes().items():
        if name == "lm_head" and config.tied:
            continue
        shapes[f"{name}.weight"] = shape
        if _has_bias(config, name):
            shapes[f"{name}.bias"] = shape[:1]
    for layer in range(config.layers):
        stem = f"model.layers.{layer}."
        shapes[stem + "input_layernorm.weight"] = (config.hidden,)
        shapes[stem + "post_attention_layernorm.weight"] = (config.hidden,)
        if config.head_norms:
            shapes[stem + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[stem + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def load_model(directory: Path | str, rounding: Rounding = "float32") -> Model:
    """Return the model of a directory with config.json and safetensors files.

    Args:
        rounding: the dtype in which the server holds its weights and hands on what it computes.

    Raises:
        ModelRefusedError: a model that is not computed here, or a tensor missing, unknown or of another shape.
        InspectError: a file is not well formed.
    """
    config = read_config(directory)
    located, wanted = locate_tensors(directory), tensor_shapes(config)
    missing = sorted(set(wanted) - set(located))
    if missing:
        _refuse("missing_tensor", f"{len(missing)} tensors are missing, first {missing[0]}")
    # Engines skip a stored head of a tied model; what it holds has no effect.
    extra = sorted(
        name
        for name in set(located) - set(wanted)
        if not _DERIVED.fullmatch(name) and not (config.tied and name == "lm_head.weight")
    )
    if extra:
        _refuse("unknown_tensor", f"{len(extra)} tensors have no place in {config.architecture}, first {extra[0]}")
    for name, shape in wanted.items():
        if located[name].record.shape != shape:
            _refuse("tensor_shape", f"{name} is {located[name].record.shape}, config.json makes it {shape}")
    return _assemble(config, {name: read_tensor(located[name], rounding) for name in wanted}, rounding)


def _assemble(config: ModelConfig, tensors: Mapping[str, Array], rounding: Rounding) -> Model:
    def linear(module: str) -> Linear:
        return Linear(module, tensors[f"{module}.weight"], tensors.get(f"{module}.bias"))

    def layer(index: int) -> Layer:
        stem = f"model.layers.{index}."
        return Layer(
            input_norm=tensors[stem + "input_layernorm.weight"],
            q=linear(stem + "self_attn.q_proj"),
            k=linear(stem + "self_attn.k_proj"),
            v=linear(stem + "self_attn.v_proj"),
            q_norm=tensors.get(stem + "self_attn.q_norm.weight"),
            k_norm=tensors.get(stem + "self_attn.k_norm.weight"),
            o=linear(stem + "self_attn.o_proj"),
            post_norm=tensors[stem + "post_attention_layernorm.weight"],
            gate=linear(stem + "mlp.gate_proj"),
            up=linear(stem + "mlp.up_proj"),
            down=linear(stem + "mlp.down_proj"),
        )

    embedding = tensors["model.embed_tokens.weight"]
    head = Linear("lm_head", embedding, None) if config.tied else linear("lm_head")
    layers = tuple(map(layer, range(config.layers)))
    return Model(config, embedding, layers, tensors["model.norm.weight"], head, rounding)


def _has_bias(config: ModelConfig, module: str) -> bool:
    part = module.rpartition(".")[2]
    if part in ("q_proj", "k_proj", "v_proj"):
        return config.query_bias
    if part == "o_proj":
        return config.output_bias
    return config.mlp_bias and part in ("gate_proj", "up_proj", "down_proj")


def _refuse(field: str, detail: str) -> NoReturn:
    raise ModelRefusedError(f"weights: {detail}; check the model directory", field=field)
