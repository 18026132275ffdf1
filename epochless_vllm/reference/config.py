"""config.json of a dense Llama or Qwen model, reduced to the numbers the forward pass needs.

Total over hostile files: a ModelConfig, or a ModelRefusedError or InspectError that names the field. A key that would
change the mathematics and is not computed here is refused, never ignored. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from epochless_vllm.errors import ModelRefusedError
from epochless_vllm.reference.rope import Rope, rope_from_config
from epochless_vllm.store.documents import MAX_BYTES, parse_document

CONFIG_NAME = "config.json"
MAX_DIMENSION = 1 << 24
MAX_LAYERS = 1 << 12


@dataclass(frozen=True)
class Family:
    """What an architecture's name fixes and its configuration does not say."""

    model_type: str
    query_bias: bool | None  # None: attention_bias decides, for the output projection too
    head_norms: bool
    own_head_dim: bool
    default_theta: float | None


FAMILIES = {
    "LlamaForCausalLM": Family("llama", None, False, True, 10000.0),
    "Qwen2ForCausalLM": Family("qwen2", True, False, False, None),
    "Qwen3ForCausalLM": Family("qwen3", False, True, True, None),
}
QWEN3_HEAD_DIM = 128  # what Qwen3 means when it leaves head_dim out

# Keys that change the mathematics, and the values at which they do not: absent or null, and these.
_NEUTRAL: dict[object, tuple[str, ...]] = {
    None: (
        "quantization_config", "compression_config", "attention_multiplier", "final_logit_softcapping",
        "attn_logit_softcapping", "query_pre_attn_scalar", "dual_chunk_attention_config", "qkv_bias", "clip_qkv",
        "no_rope_layers", "rotary_emb_base", "target_layer_count",
    ),
    False: ("use_sliding_window", "qk_norm", "bias", "num_experts", "num_local_experts", "num_nextn_predict_layers"),
    1: (  # or true
        "is_causal", "logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier",
        "partial_rotary_factor", "rotary_pct", "rotary_emb_fraction",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model; all sizes are counts of elements."""

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope: Rope
    tied: bool
    query_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of every linear module by its checkpoint name, ``lm_head`` included."""
        block = {
            "self_attn.q_proj": (self.query_size, self.hidden),
            "self_attn.k_proj": (self.kv_size, self.hidden),
            "self_attn.v_proj": (self.kv_size, self.hidden),
            "self_attn.o_proj": (self.hidden, self.query_size),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        shapes = {
            f"model.layers.{layer}.{name}": shape for layer in range(self.layers) for name, shape in block.items()
        }
        return shapes | {"lm_head": (self.vocab, self.hidden)}


def read_config(directory: Path | str) -> ModelConfig:
    """Return the configuration of a model directory.

    Raises:
        ModelRefusedError: no such file, or a model that is not computed exactly here.
        InspectError: the file is not strict JSON.
    """
    path = Path(directory) / CONFIG_NAME
    try:
        with path.open("rb") as file:
            payload = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ModelRefusedError(
            f"{path}: {error.strerror}; name a complete local model directory", field=CONFIG_NAME
        ) from error
    return config_from_document(parse_document(payload, subject=CONFIG_NAME))


def config_from_document(document: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration a parsed config.json describes.

    Raises:
        ModelRefusedError: ``field`` names what is missing, contradictory or not computed here.
    """
    architecture, family = _family(document)
    for neutral, keys in _NEUTRAL.items():
        for key in keys:
            if document.get(key) not in (None, neutral):
                _refuse(key, f"{key} = {str(document[key])[:60]} is not computed here")
    _refuse_windows(document, family)
    if document.get("hidden_act", "silu") != "silu":
        _refuse("hidden_act", f"activation {str(document['hidden_act'])[:40]!r} is not computed; only silu is")
    hidden, heads = _count(document, "hidden_size"), _count(document, "num_attention_heads")
    kv_heads = heads if family.model_type == "llama" and document.get("num_key_value_heads") is None else None
    kv_heads = kv_heads or _count(document, "num_key_value_heads")
    if heads % kv_heads:
        _refuse("num_key_value_heads", f"{heads} query heads do not share {kv_heads} key heads evenly")
    attention_bias = _switch(document, "attention_bias")
    if attention_bias and family.query_bias is not None:
        _refuse("attention_bias", f"attention_bias is read differently by engines for {architecture}")
    mlp_bias = _switch(document, "mlp_bias")
    if mlp_bias and family.model_type != "llama":
        _refuse("mlp_bias", f"mlp_bias is not a key of {architecture}")
    return ModelConfig(
        architecture=architecture,
        vocab=_count(document, "vocab_size"),
        hidden=hidden,
        intermediate=_count(document, "intermediate_size"),
        layers=_count(document, "num_hidden_layers", limit=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(document, family, hidden, heads),
        norm_epsilon=_epsilon(document),
        rope=rope_from_config(document, default_theta=family.default_theta),
        tied=_switch(document, "tie_word_embeddings"),
        query_bias=attention_bias if family.query_bias is None else family.query_bias,
        output_bias=attention_bias if family.query_bias is None else False,
        mlp_bias=mlp_bias,
        head_norms=family.head_norms,
        bos_ids=_token_ids(document, "bos_token_id"),
        eos_ids=_token_ids(document, "eos_token_id"),
    )


def _family(document: Mapping[str, Any]) -> tuple[str, Family]:
    named = document.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        _refuse("architectures", "architectures must name exactly one architecture")
    family = FAMILIES.get(named[0])
    if family is None:
        _refuse("architectures", f"{named[0][:80]} is not computed; known are {', '.join(FAMILIES)}")
    if document.get("model_type", family.model_type) != family.model_type:
        _refuse("model_type", f"model_type {str(document['model_type'])[:40]!r} contradicts {named[0]}")
    return named[0], family


def _refuse_windows(document: Mapping[str, Any], family: Family) -> None:
    # Qwen files state a window that use_sliding_window turns off; a Llama file that states one means it.
    if family.model_type == "llama" and document.get("sliding_window") is not None:
        _refuse("sliding_window", "sliding-window attention is not computed here")
    kinds = document.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        _refuse("layer_types", "layers other than full_attention are not computed here")


def _head_dim(document: Mapping[str, Any], family: Family, hidden: int, heads: int) -> int:
    if document.get("head_dim") is not None:
        head_dim = _count(document, "head_dim")
    elif family.model_type == "qwen3":
        head_dim = QWEN3_HEAD_DIM
    elif hidden % heads:
        _refuse("hidden_size", f"hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is not given")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        _refuse("head_dim", f"rotary embedding turns pairs; {head_dim} is odd")
    if not family.own_head_dim and head_dim * heads != hidden:
        _refuse("head_dim", f"head_dim {head_dim} is read differently by engines; {hidden} / {heads} is meant")
    return head_dim


def _epsilon(document: Mapping[str, Any]) -> float:
    value = document.get("rms_norm_eps")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1:
        _refuse("rms_norm_eps", "rms_norm_eps must be a number between 0 and 1")
    return float(value)


def _count(document: Mapping[str, Any], key: str, *, limit: int = MAX_DIMENSION) -> int:
    value = document.get(key)
    if type(value) is not int or not 0 < value <= limit:
        _refuse(key, f"{key} must be an integer from 1 to {limit}")
    return value


def _switch(document: Mapping[str, Any], key: str) -> bool:
    value = document.get(key, False)
    if type(value) is not bool:
        _refuse(key, f"{key} must be true or false")
    return value


def _token_ids(document: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = document.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or not 0 <= token < 1 << 31 for token in ids):
        _refuse(key, f"{key} must be a token id or a list of them")
    return tuple(ids)


def _refuse(field: str, detail: str) -> NoReturn:
    raise ModelRefusedError(f"config.json: {detail}; audit with a release that knows it", field=field)
