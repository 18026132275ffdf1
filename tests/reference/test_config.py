"""config.json: every spelling of what is computed, and a refusal by name for what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epochless_vllm.errors import EpochlessError, InspectError, ModelRefusedError
from epochless_vllm.reference.config import config_from_document, read_config
from tests.reference.cases import SHAPES

LLAMA = SHAPES["gqa-4x"].config()
QWEN2 = SHAPES["qwen2"].config()
QWEN3 = SHAPES["qwen3"].config()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (LLAMA, "architectures", ["MixtralForCausalLM"]),
        (LLAMA, "architectures", ["LlamaForCausalLM", "LlamaForCausalLM"]),
        (LLAMA, "architectures", None),
        (LLAMA, "architectures", "LlamaForCausalLM"),
        (LLAMA, "model_type", "mistral"),
        (LLAMA, "hidden_act", "gelu"),
        (LLAMA, "quantization_config", {"quant_method": "awq"}),
        (LLAMA, "sliding_window", 4096),
        (LLAMA, "logit_scale", 0.5),
        (LLAMA, "is_causal", False),
        (LLAMA, "qkv_bias", True),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "num_key_value_heads", 3),
        (LLAMA, "num_key_value_heads", 0),
        (LLAMA, "head_dim", 13),
        (LLAMA, "vocab_size", 1 << 40),
        (LLAMA, "vocab_size", 200.0),
        (LLAMA, "vocab_size", True),
        (LLAMA, "num_hidden_layers", 1 << 20),
        (LLAMA, "rms_norm_eps", 0),
        (LLAMA, "rms_norm_eps", None),
        (LLAMA, "tie_word_embeddings", "yes"),
        (LLAMA, "eos_token_id", "</s>"),
        (LLAMA, "max_position_embeddings", None),
        (LLAMA, "rope_theta", -1),
        (QWEN2, "attention_bias", True),
        (QWEN2, "mlp_bias", True),
        (QWEN2, "use_sliding_window", True),
        (QWEN2, "layer_types", ["full_attention", "sliding_attention"]),
        (QWEN2, "head_dim", 24),
        (QWEN2, "num_key_value_heads", None),
        (QWEN2, "rope_theta", None),
        (QWEN2, "dual_chunk_attention_config", {"chunk_size": 8}),
        (QWEN3, "attention_bias", True),
    ],
)
def test_what_is_not_computed_is_refused_by_name(base: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(ModelRefusedError) as caught:
        config_from_document(base | {field: value})
    assert caught.value.fields["field"] == field


def test_heads_that_do_not_divide_the_hidden_size_are_refused() -> None:
    uneven = {"num_attention_heads": 5, "num_key_value_heads": 5}
    with pytest.raises(ModelRefusedError) as caught:
        config_from_document(LLAMA | uneven)
    assert caught.value.fields["field"] == "hidden_size"
    assert config_from_document(LLAMA | uneven | {"head_dim": 20}).query_size == 100


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"rope_type": "longrope", "short_factor": [], "long_factor": []}, "rope_type"),
        ({"type": "su"}, "rope_type"),
        ({"type": "linear", "rope_type": "yarn", "factor": 2}, "rope_type"),
        ({"type": "mrope", "mrope_section": [1]}, "rope_type"),
        ({"rope_type": ["linear"]}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -2}, "factor"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor"),
        ({"rope_type": "linear", "factor": 2, "attention_factor": 1.2}, "attention_factor"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
         "original_max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
          "original_max_position_embeddings": 16}, "high_freq_factor"),
        (YARN | {"mscale": 0.7}, "mscale"),
        (YARN | {"attention_factor": 1.0}, "attention_factor"),
        (YARN | {"extrapolation_factor": 2.0}, "extrapolation_factor"),
        (YARN | {"truncate": "no"}, "truncate"),
        ({"rope_type": "default", "truncate": False}, "truncate"),
        ({"rope_type": "default", "mrope_section": [8, 8]}, "mrope_section"),
        ({"rope_type": "default", "unheard_of": 1}, "unheard_of"),
        ({"rope_type": "dynamic", "factor": 2, "alpha": 1000}, "alpha"),
        ({"rope_theta": 5.0}, "rope_theta"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ([1], "rope_parameters"),
    ],
)  # fmt: skip
def test_rope_parameters_that_are_not_computed_are_refused_by_name(parameters: Any, field: str) -> None:
    with pytest.raises(ModelRefusedError) as caught:
        config_from_document(LLAMA | {"rope_parameters": parameters})
    assert caught.value.fields["field"] == field


def test_old_and_new_spelling_of_rope_parameters_mean_the_same() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16}
    old = config_from_document(LLAMA | {"rope_scaling": {"type": "yarn", **scaling}, "rope_theta": 1e6})
    without = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new = config_from_document(without | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **scaling}})
    both = {"rope_type": "yarn", "rope_theta": 1e6, **scaling}
    twice = config_from_document(LLAMA | {"rope_theta": 1e6, "rope_parameters": both, "rope_scaling": both})
    assert old == new == twice
    with pytest.raises(ModelRefusedError):
        config_from_document(LLAMA | {"rope_parameters": both, "rope_scaling": both | {"factor": 2.0}})


def test_defaults_of_a_family_are_its_own() -> None:
    llama = config_from_document({key: value for key, value in LLAMA.items() if key not in ("rope_theta", "head_dim")})
    assert (llama.rope.theta, llama.head_dim, llama.query_bias, llama.head_norms) == (10000.0, 12, False, False)
    single = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert config_from_document(single).kv_heads == 8
    qwen3 = config_from_document({key: value for key, value in QWEN3.items() if key != "head_dim"})
    assert (qwen3.head_dim, qwen3.head_norms) == (128, True)
    qwen2 = config_from_document(QWEN2 | {"sliding_window": 4096, "use_sliding_window": False})
    assert (qwen2.query_bias, qwen2.output_bias) == (True, False)
    biased = config_from_document(LLAMA | {"attention_bias": True})
    assert (biased.query_bias, biased.output_bias, biased.mlp_bias) == (True, True, False)
    assert not config_from_document({key: LLAMA[key] for key in LLAMA if key != "tie_word_embeddings"}).tied


def test_positions_end_where_the_rotary_embedding_does() -> None:
    assert config_from_document(LLAMA).rope.limit == 64
    linear = {"rope_scaling": {"type": "linear", "factor": 2.5}}
    assert config_from_document(LLAMA | linear).rope.limit == 160
    assert config_from_document(LLAMA | {"rope_scaling": YARN}).rope.limit == 64
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert config_from_document(LLAMA | dynamic).rope.limit == 64


def test_saved_configuration_of_every_family_is_read(tmp_path: Path) -> None:
    import transformers

    for index, (name, source) in enumerate((("Llama", LLAMA), ("Qwen2", QWEN2), ("Qwen3", QWEN3))):
        saved = getattr(transformers, f"{name}Config").from_dict(dict(source))
        saved.save_pretrained(tmp_path / str(index))
        assert read_config(tmp_path / str(index)) == config_from_document(source)


def test_missing_and_malformed_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 3, "vocab_size": 4}')
    with pytest.raises(InspectError):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(InspectError):
        read_config(tmp_path)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 64), 1 << 64) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
_ROPE_KEYS = ("type", "rope_type", "factor", "rope_theta", "beta_fast", "truncate", "original_max_position_embeddings")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
@given(
    st.sampled_from([LLAMA, QWEN2, QWEN3]),
    st.dictionaries(st.sampled_from(sorted({*LLAMA, "head_dim", "layer_types", "rope_scaling", "bias"})), _VALUES),
    st.none()
    | st.dictionaries(st.sampled_from(_ROPE_KEYS), _VALUES | st.sampled_from(["yarn", "linear", "llama3", 2.0, 16])),
)
def test_any_document_gives_a_configuration_or_our_own_error(
    base: dict[str, Any], changes: dict[str, Any], rope: dict[str, Any] | None
) -> None:
    document = base | changes | ({} if rope is None else {"rope_parameters": rope})
    try:
        config = config_from_document(document)
        config.rope.table(min(config.head_dim, 64), min(config.rope.limit, 16))
    except EpochlessError:
        return
