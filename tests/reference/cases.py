"""Models and adapters of the differential tests: seeded weights, written as files that every engine reads.

Weights are N(0, 1) / sqrt(inputs), norms 1 + N(0, 0.5), biases N(0, 0.5), both LoRA factors non-zero: a unit norm or a
zero factor would hide the defects these tests look for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.adapters import ALL_TARGETS, ATTENTION, MLP, LlamaShape, encode_safetensors, make_adapter, make_tensors


@dataclass(frozen=True)
class Shape:
    """One base model: sizes, family, and the keys of config.json beyond them."""

    hidden: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int
    positions: int
    family: str = "llama"
    tied: bool = True
    head_dim: int | None = None
    dtype: str = "F32"
    shards: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def sizes(self) -> LlamaShape:
        """The shape in the words of tests/adapters.py."""
        return LlamaShape(
            self.hidden, 2 * self.hidden, self.layers, self.heads, self.kv_heads, self.size_of_head, self.vocab
        )

    def config(self) -> dict[str, Any]:
        """Return config.json."""
        name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[self.family]
        return {
            "architectures": [f"{name}ForCausalLM"],
            "model_type": self.family,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": None,
            **({"head_dim": self.head_dim} if self.head_dim else {}),
            **self.fields,
        }


SEED_SHAPES = {
    "tiny": Shape(64, 4, 4, 2, 97, 32),
    "gqa-2x": Shape(64, 8, 4, 3, 128, 48),
    "gqa-4x": Shape(96, 8, 2, 2, 200, 64),
    "mqa": Shape(64, 4, 1, 2, 64, 40),
    "untied-cls": Shape(128, 4, 4, 4, 512, 64, tied=False),
    "full-context": Shape(48, 2, 2, 1, 50, 128),
}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILY_SHAPES = {
    "qwen2": Shape(64, 8, 2, 2, 120, 40, family="qwen2"),
    "qwen3": Shape(64, 4, 2, 2, 120, 40, family="qwen3", tied=False, head_dim=24),
    "llama-biases": Shape(64, 4, 2, 2, 90, 40, fields={"attention_bias": True, "mlp_bias": True}, head_dim=32),
    "bf16": Shape(64, 4, 2, 2, 90, 40, dtype="BF16"),
    "fp16-shards": Shape(64, 4, 2, 2, 90, 40, tied=False, dtype="F16", shards=3),
    "rope-linear": Shape(64, 4, 2, 1, 90, 48, fields={"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "rope-dynamic": Shape(64, 4, 2, 1, 90, 48, fields={"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "rope-llama3": Shape(64, 4, 2, 1, 90, 48, fields={"rope_scaling": _LLAMA3}),
    "rope-yarn": Shape(
        128, 4, 2, 1, 90, 64, family="qwen2",
        fields={"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
}  # fmt: skip
SHAPES = SEED_SHAPES | FAMILY_SHAPES

LORA_AXES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "r1": {"rank": 1, "alpha": 1},
    "r8": {"rank": 8, "alpha": 8},
    "r16": {"rank": 16, "alpha": 16},
    "alpha": {"rank": 8, "alpha": 20},
    "rslora": {"rank": 8, "alpha": 12, "config": {"use_rslora": True}},
    "query-value": {"rank": 4, "alpha": 8, "targets": ("q_proj", "v_proj")},
    "attention": {"rank": 4, "alpha": 8, "targets": ATTENTION},
    "mlp": {"rank": 4, "alpha": 8, "targets": MLP},
    "head": {"rank": 4, "alpha": 8, "targets": (*ALL_TARGETS, "lm_head")},
    "last-layer": {"rank": 4, "alpha": 8, "last_layer": True},
    "patterns": {
        "rank": 4, "alpha": 8, "pattern_ranks": True,
        "config": {"rank_pattern": {"q_proj": 2, "mlp.up_proj": 6}, "alpha_pattern": {"q_proj": 3, "down_proj": 16}},
    },
}  # fmt: skip


def make_weights(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a checkpoint's float32 tensors by name."""
    random = np.random.default_rng(seed)
    sizes, fields, tensors = shape.sizes, shape.fields, {}

    def linear(name: str, target: str, bias: bool) -> None:
        outputs, inputs = sizes.projection(target)
        tensors[f"{name}.weight"] = random.standard_normal((outputs, inputs)) / np.sqrt(inputs)
        if bias:
            tensors[f"{name}.bias"] = 0.5 * random.standard_normal(outputs)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = 1 + 0.5 * random.standard_normal(size)

    tensors["model.embed_tokens.weight"] = random.standard_normal((shape.vocab, shape.hidden)) / np.sqrt(shape.hidden)
    norm("model.norm", shape.hidden)
    if not shape.tied:
        linear("lm_head", "lm_head", bias=False)
    for layer in range(shape.layers):
        stem = f"model.layers.{layer}."
        norm(stem + "input_layernorm", shape.hidden)
        norm(stem + "post_attention_layernorm", shape.hidden)
        for target in ("q_proj", "k_proj", "v_proj"):
            linear(f"{stem}self_attn.{target}", target, shape.family == "qwen2" or "attention_bias" in fields)
        linear(f"{stem}self_attn.o_proj", "o_proj", "attention_bias" in fields)
        if shape.family == "qwen3":
            norm(stem + "self_attn.q_norm", shape.size_of_head)
            norm(stem + "self_attn.k_norm", shape.size_of_head)
        for target in MLP:
            linear(f"{stem}mlp.{target}", target, "mlp_bias" in fields)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def write_model(directory: Path, shape: Shape, *, seed: int = 0) -> Path:
    """Write config.json and the weights, in one file or in shards with an index; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=1))
    tensors = make_weights(shape, seed)
    if shape.shards == 1:
        payload = encode_safetensors(tensors, dtype=shape.dtype, metadata={"format": "pt"})
        (directory / "model.safetensors").write_bytes(payload)
        return directory
    weight_map = {}
    for shard in range(shape.shards):
        file = f"model-{shard + 1:05d}-of-{shape.shards:05d}.safetensors"
        part = {name: tensors[name] for index, name in enumerate(tensors) if index % shape.shards == shard}
        (directory / file).write_bytes(encode_safetensors(part, dtype=shape.dtype, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_adapter(directory: Path, shape: Shape, axis: str, *, seed: int = 1) -> Path | None:
    """Write the adapter of one of LORA_AXES; return its directory, None for the base model alone."""
    options = LORA_AXES[axis]
    if options is None:
        return None
    options = dict(options)
    if options.pop("last_layer", False):
        options["layers"] = [shape.layers - 1]
        options["config"] = {"layers_to_transform": [shape.layers - 1]}
    if options.pop("pattern_ranks", False):
        names = [f"model.layers.{layer}." for layer in range(shape.layers)]
        ranks = {f"{name}self_attn.q_proj": 2 for name in names} | {f"{name}mlp.up_proj": 6 for name in names}
        options["tensors"] = make_tensors(seed, shape=shape.sizes, rank=options["rank"], ranks=ranks, scale=0.1)
    return make_adapter(directory, seed=seed, shape=shape.sizes, scale=0.1, **options)


def make_tokens(shape: Shape, seed: int = 2) -> list[int]:
    """Return a full context of seeded tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, shape.vocab, shape.positions)]


MIXTURE_SHAPE = "gqa-2x"
MIXTURE_AXES = ("head", "rslora")


def make_mixture(length: int) -> tuple[list[int | None], list[int | None]]:
    """Return per position the index of the adapter its cache is of, and of the one it was sampled under.

    Base, first, second and base again in runs that no block of a prefill starts at; some positions differ.
    """
    cached: list[int | None] = [None if at % 23 < 5 else (at // 9) % 2 for at in range(length)]
    sampled = list(cached)
    for at in (0, 11, 12, 30, length - 1):
        sampled[at] = 1 if cached[at] is None else None if cached[at] == 1 else 1
    return cached, sampled
