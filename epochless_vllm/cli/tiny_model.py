"""A deterministic tiny Llama directory with a byte-level tokenizer: 258 tokens, four layers, random weights.

Written with NumPy and the standard library only, so that making a model never imports an engine.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 258,
    "max_position_embeddings": 2048,
}


def write_safetensors(path: Path, tensors: dict[str, NDArray[np.float32]]) -> None:
    """Write float32 arrays in name order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        array = tensors[name]
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in sorted(tensors):
            file.write(np.ascontiguousarray(tensors[name], dtype="<f4").tobytes())


def byte_tokenizer() -> dict[str, object]:
    """Return tokenizer.json of a byte-level vocabulary: 256 bytes, then <s> = 256 and </s> = 257."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {byte: chr(byte) for byte in printable}
    extra = 0
    for byte in range(256):
        if byte not in byte_of:
            byte_of[byte] = chr(256 + extra)
            extra += 1
    vocabulary = {byte_of[byte]: byte for byte in range(256)} | {"<s>": 256, "</s>": 257}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": 256, "content": "<s>", **plain}, {"id": 257, "content": "</s>", **plain}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False, "fuse_unk": False},
    }


CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def make_model(directory: Path, *, seed: int = 0, **sizes: int) -> Path:
    """Write config, tokenizer and float32 weights of a random Llama; return the directory.

    Args:
        seed: equal seeds and sizes give equal bytes.
        sizes: overrides of TINY.
    """
    shape = {**TINY, **sizes}
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 256,
        "eos_token_id": 257,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        **shape,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "chat_template": CHAT_TEMPLATE,
                "model_max_length": shape["max_position_embeddings"],
            }
        )
    )
    write_safetensors(directory / "model.safetensors", _weights(shape, seed))
    return directory


def _weights(shape: dict[str, int], seed: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    hidden, inner, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    key_value = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return cast(
            "NDArray[np.float32]", (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
        )

    weights = {
        "model.embed_tokens.weight": random.standard_normal((vocabulary, hidden)).astype(np.float32),
        "lm_head.weight": 2 * matrix(vocabulary, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "self_attn.q_proj.weight": matrix(hidden, hidden),
            prefix + "self_attn.k_proj.weight": matrix(key_value, hidden),
            prefix + "self_attn.v_proj.weight": matrix(key_value, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, hidden),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights


def make_adapter(directory: Path, *, seed: int, rank: int = 8, strength: float = 0.5, **sizes: int) -> Path:
    """Write a PEFT adapter over all seven projections of a ``make_model`` model; return the directory.

    Args:
        seed: equal seeds and sizes give equal bytes.
        strength: standard deviation of A's and B's entries; 0.5 makes greedy text differ from the base's.
        sizes: overrides of TINY.
    """
    shape = {**TINY, **sizes}
    random = np.random.default_rng(seed)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    key_value = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    projections = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: dict[str, NDArray[np.float32]] = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (rows, columns) in projections.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            a, b = random.standard_normal((rank, columns)), random.standard_normal((rows, rank))
            tensors[f"{stem}.lora_A.weight"] = (strength * a / np.sqrt(columns)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = (strength * b / np.sqrt(rank)).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    targets = [name.rpartition(".")[2] for name in projections]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=1))
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    return directory
