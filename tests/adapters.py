"""PEFT adapter directories for tests, written with the standard library and NumPy, the same bytes for the same seed.

Shares no code with the package: the safetensors writer here is the oracle of the reader in store/. Default: all seven
projections of a tiny Llama, both factors non-zero (a zero B hides every defect).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL_TARGETS = ATTENTION + MLP
PREFIX = "base_model.model."


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama that an adapter's tensors must fit; the defaults are those of tests/tiny_model.py."""

    hidden: int = 256
    intermediate: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    vocab: int = 258

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LlamaShape:
        """Return the sizes written in a model's config.json."""
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
        )

    def projection(self, target: str) -> tuple[int, int]:
        """Return (output size, input size) of a projection, or of ``lm_head``."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
            "lm_head": (self.vocab, self.hidden),
        }[target]


TINY = LlamaShape()
MINUTE = LlamaShape(hidden=8, intermediate=12, layers=2, heads=2, kv_heads=1, head_dim=4, vocab=16)


def module_name(target: str, layer: int) -> str:
    """Return the dotted name of a module inside the base model; ``lm_head`` has no layer."""
    if target == "lm_head":
        return "lm_head"
    return f"model.layers.{layer}.{'self_attn' if target in ATTENTION else 'mlp'}.{target}"


def tensor_names(module: str) -> tuple[str, str]:
    """Return PEFT's names of a module's A and B factors."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def make_tensors(
    seed: int = 0,
    *,
    shape: LlamaShape = TINY,
    rank: int = 4,
    targets: Sequence[str] = ALL_TARGETS,
    layers: Iterable[int] | None = None,
    ranks: Mapping[str, int] | None = None,
    scale: float = 0.25,
) -> dict[str, np.ndarray]:
    """Return float32 factors with N(0, scale**2) entries: A is (rank, input), B is (output, rank).

    Args:
        layers: the layers that carry the targets; default all.
        ranks: rank by module name, over ``rank``.
    """
    generator = np.random.default_rng(seed)
    chosen = range(shape.layers) if layers is None else layers
    modules = [(t, module_name(t, layer)) for layer in chosen for t in targets if t != "lm_head"]
    modules += [("lm_head", "lm_head")] if "lm_head" in targets else []
    tensors: dict[str, np.ndarray] = {}
    for target, module in modules:
        outputs, inputs = shape.projection(target)
        own_rank = (ranks or {}).get(module, rank)
        name_a, name_b = tensor_names(module)
        tensors[name_a] = generator.normal(0.0, scale, (own_rank, inputs)).astype(np.float32)
        tensors[name_b] = generator.normal(0.0, scale, (outputs, own_rank)).astype(np.float32)
    return tensors


def make_config(
    *, rank: int = 4, alpha: float = 8, targets: Sequence[str] = ALL_TARGETS, **fields: Any
) -> dict[str, Any]:
    """Return an adapter_config.json as PEFT writes it; ``fields`` replace or add keys."""
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "tiny-llama",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": alpha,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
        **fields,
    }


def encode_tensor(array: np.ndarray, dtype: str) -> bytes:
    """Return the little-endian bytes of an array as F64, F32, F16 or BF16 (rounded to nearest, ties to even)."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, dtype="<f4").view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # Rounding would carry a NaN's payload into the exponent: keep one bit of it instead.
        return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype("<u2").tobytes()
    return np.ascontiguousarray(array).astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def encode_safetensors(
    tensors: Mapping[str, np.ndarray],
    *,
    dtype: str = "F32",
    dtypes: Mapping[str, str] | None = None,
    order: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    pad: int = 0,
) -> bytes:
    """Return a safetensors file.

    Args:
        dtypes: dtype by tensor name, over ``dtype``.
        order: the order of the data; default that of the safetensors library: wider items first, then by name.
        pad: spaces appended to the header.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    chunks: list[bytes] = []
    offset = 0
    kinds = {name: (dtypes or {}).get(name, dtype) for name in tensors}
    widths = {kind: len(encode_tensor(np.zeros(1, np.float32), kind)) for kind in kinds.values()}
    for name in order or sorted(tensors, key=lambda name: (-widths[kinds[name]], name)):
        kind = kinds[name]
        data = encode_tensor(tensors[name], kind)
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
        chunks.append(data)
    text = json.dumps(header, separators=(",", ":")).encode() + b" " * pad
    return struct.pack("<Q", len(text)) + text + b"".join(chunks)


def make_adapter(
    path: Path,
    *,
    seed: int = 0,
    shape: LlamaShape = TINY,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ALL_TARGETS,
    layers: Iterable[int] | None = None,
    dtype: str = "F32",
    scale: float = 0.25,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    **layout: Any,
) -> Path:
    """Write adapter_config.json and adapter_model.safetensors into a directory, made if missing; return it.

    Args:
        config: keys of adapter_config.json to replace or add.
        tensors: the tensors themselves, instead of seeded ones.
        layout: ``dtypes``, ``order``, ``metadata``, ``pad`` of ``encode_safetensors``.
    """
    path.mkdir(parents=True, exist_ok=True)
    fields = make_config(rank=rank, alpha=alpha, targets=targets) | dict(config or {})
    if tensors is None:
        tensors = make_tensors(seed, shape=shape, rank=rank, targets=targets, layers=layers, scale=scale)
    (path / "adapter_config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    (path / "adapter_model.safetensors").write_bytes(encode_safetensors(tensors, dtype=dtype, **layout))
    return path
