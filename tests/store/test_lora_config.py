"""adapter_config.json: what changes the mathematics is honoured or refused by name, the rest leaves no trace."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import AdapterConfigError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.store.lora_config import config_from_manifest, is_selected, layer_of, resolve_config
from tests.adapters import MINUTE, make_adapter, make_config, make_tensors, module_name

Q0, Q1, HEAD = module_name("q_proj", 0), module_name("q_proj", 1), "lm_head"
RANKS = {Q0: 4, Q1: 4, HEAD: 4}
NAMED = {"target_modules": ["q_proj", "lm_head"]}


def resolve(ranks: dict[str, int] | None = None, **fields: Any):
    return resolve_config(make_config(**{**NAMED, **fields}), RANKS if ranks is None else ranks)


def refused_field(ranks: dict[str, int] | None = None, **fields: Any) -> str:
    with pytest.raises(AdapterConfigError) as caught:
        resolve(ranks, **fields)
    return str(caught.value.fields["field"])


def test_scaling_is_alpha_over_rank() -> None:
    assert resolve(lora_alpha=6).scaling_for(Q0) == 1.5


def test_rslora_divides_by_the_square_root_of_the_rank() -> None:
    config = resolve({Q0: 2}, r=2, lora_alpha=6, use_rslora=True)
    assert config.scaling_for(Q0) == 6 / math.sqrt(2)


def test_scaling_is_found_under_the_name_with_the_prefix_too() -> None:
    assert resolve().scaling_for("base_model.model." + Q0) == 2.0
    with pytest.raises(AdapterConfigError):
        resolve().scaling_for("model.layers.9.self_attn.q_proj")


def test_alpha_pattern_for_everything_is_the_alpha() -> None:
    assert resolve(alpha_pattern={".*": 64}) == resolve(lora_alpha=64)
    assert resolve(alpha_pattern={".*": 64}).scaling_for(Q1) == 16.0


def test_patterns_are_honoured_module_by_module() -> None:
    config = resolve({Q0: 4, Q1: 8}, rank_pattern={"layers.1.self_attn.q_proj": 8}, alpha_pattern={r".*\.0\..*": 2})
    assert (config.scaling_for(Q0), config.scaling_for(Q1)) == (0.5, 1.0)
    assert (config.r, config.rank_pattern, config.max_rank) == (4, {Q1: 8}, 8)


@pytest.mark.parametrize(
    ("field", "ranks", "fields"),
    [
        ("r", {Q0: 8}, {}),
        ("r", None, {"r": 8}),
        ("rank_pattern", None, {"rank_pattern": {"q_proj": 8}}),
        ("r", {Q0: 4, Q1: 8}, {"rank_pattern": {"k_proj": 8}}),
        ("target_modules", None, {"target_modules": ["k_proj", "lm_head"]}),
        ("target_modules", None, {"target_modules": ["proj", "lm_head"]}),
        ("exclude_modules", None, {"exclude_modules": ["lm_head"]}),
        ("layers_to_transform", {Q0: 4, Q1: 4}, {"layers_to_transform": [0]}),
        ("layers_to_transform", {Q0: 4, Q1: 4}, {"layers_to_transform": 1}),
        ("layers_to_transform", None, {"layers_to_transform": [0, 1]}),
    ],
)
def test_configuration_that_contradicts_the_tensors_is_refused(field: str, ranks: Any, fields: dict[str, Any]) -> None:
    assert refused_field(ranks, **fields) == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True), ("bias", "all"), ("bias", "lora_only"), ("bias", True), ("lora_bias", True),
        ("modules_to_save", ["lm_head"]), ("fan_in_fan_out", True), ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]), ("target_parameters", ["experts"]), ("alora_invocation_tokens", [5]),
        ("use_qalora", True), ("use_bdlora", {"nblocks": 2}), ("arrow_config", {"top_k": 1}), ("kasa_config", {"b": 1}),
        ("monteclora_config", {"n": 1}), ("loftq_config", {"loftq_bits": 4}), ("ensure_weight_tying", True),
        ("megatron_config", {"x": 1}), ("invented_in_2031", "sin"), ("invented_in_2031", 0.5), ("peft_type", "ADALORA"),
        ("peft_type", None), ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "OLoRA"), ("init_lora_weights", "loftq"), ("init_lora_weights", "corda"),
        ("init_lora_weights", "mica"), ("init_lora_weights", "lora_ga"), ("init_lora_weights", ["gaussian"]),
    ],
)  # fmt: skip
def test_field_that_may_change_the_mathematics_is_refused_by_name(field: str, value: Any) -> None:
    assert refused_field(**{field: value}) == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0), ("r", -4), ("r", True), ("r", 4.0), ("r", "4"), ("r", None), ("r", [4]), ("r", 1 << 40),
        ("lora_alpha", 0), ("lora_alpha", True), ("lora_alpha", "16"), ("lora_alpha", None), ("lora_alpha", 1 << 60),
        ("lora_alpha", [16]), ("lora_alpha", 5e-324), ("use_rslora", 1), ("use_rslora", "false"),
        ("rank_pattern", {"q_proj": "8"}), ("rank_pattern", {"unused": 0}), ("rank_pattern", [8]),
        ("alpha_pattern", {"q_proj": True}), ("alpha_pattern", {"unused": 0}), ("alpha_pattern", "q_proj"),
        ("alpha_pattern", {"(": 1}), ("target_modules", [1]), ("target_modules", {"a": 1}), ("target_modules", True),
        ("exclude_modules", [None]), ("layers_to_transform", "0"), ("layers_to_transform", [True]),
        ("layers_to_transform", [-1]), ("layers_to_transform", [0.0]),
    ],
)  # fmt: skip
def test_malformed_value_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    assert refused_field(**{field: value}) == field


@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_missing_number_is_refused_rather_than_guessed(field: str) -> None:
    document = make_config()
    del document[field]
    with pytest.raises(AdapterConfigError) as caught:
        resolve_config(document, RANKS)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_dropout": 0.1}, {"inference_mode": False}, {"peft_version": "0.21"}, {"base_model_name_or_path": "x/y"},
        {"revision": "main"}, {"task_type": None}, {"init_lora_weights": False}, {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}, {"modules_to_save": []}, {"layers_pattern": "layers"},
        {"megatron_core": "megatron.core"}, {"qalora_group_size": 16}, {"loftq_config": {}}, {"corda_config": None},
        {"target_modules": "all-linear"}, {"target_modules": r".*\.(q_proj|head)"}, {"target_modules": [Q0, Q1, HEAD]},
        {"target_modules": None}, {"exclude_modules": ["v_proj"]}, {"lora_alpha": 8.0}, {"auto_mapping": {"a": "b"}},
        {"rank_pattern": None, "alpha_pattern": None}, {"rank_pattern": {"not": 7}}, {"alpha_pattern": {"not": 7}},
        {"rank_pattern": {"q_proj": 4}, "r": 4}, {"alpha_pattern": {"lm_head": 8}}, {"invented_in_2031": None},
        {"invented_in_2031": False}, {"bias": None}, {"use_rslora": None},
    ],
)  # fmt: skip
def test_field_without_effect_on_the_mathematics_leaves_no_trace(fields: dict[str, Any]) -> None:
    assert encode_canonical(resolve(**fields).manifest_config()) == encode_canonical(resolve().manifest_config())


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": 9},
        {"lora_alpha": 8.5},
        {"use_rslora": True},
        {"alpha_pattern": {"lm_head": 9}},
        {"lora_alpha": -8},
    ],
)
def test_field_with_an_effect_changes_the_manifest(fields: dict[str, Any]) -> None:
    assert resolve(**fields).manifest_config() != resolve().manifest_config()


def test_alphas_written_as_default_or_as_pattern_are_the_same() -> None:
    one = resolve(lora_alpha=16, alpha_pattern={"lm_head": 8})
    other = resolve(lora_alpha=8, alpha_pattern={"q_proj": 16.0, "unused": 3})
    assert one.manifest_config() == other.manifest_config()
    assert one.manifest_config() == {
        "alpha_pattern": {"lm_head": "8"},
        "lora_alpha": "16",
        "peft_type": "LORA",
        "use_rslora": False,
    }


def test_smallest_of_equally_common_values_is_the_default() -> None:
    config = resolve({Q0: 8, Q1: 4}, rank_pattern={"layers.0.self_attn.q_proj": 8}, alpha_pattern={r".*\.0\..*": 64})
    assert (config.r, config.rank_pattern) == (4, {Q0: 8})
    assert (config.lora_alpha, config.alpha_pattern) == ("8", {Q0: "64"})


alphas = st.one_of(st.integers(1, 1 << 53), st.floats(1e-300, 2.0**53), st.floats(-(2.0**53), -1e-300))
configs = st.fixed_dictionaries(
    {
        "lora_alpha": alphas,
        "use_rslora": st.booleans(),
        "alpha_pattern": st.dictionaries(st.sampled_from(["q_proj", "lm_head", ".*", r"layers\.1\..*", "0"]), alphas),
    }
)


@given(configs, st.integers(1, 64))
def test_scaling_equals_pefts_and_survives_the_manifest_and_the_stored_file(fields: dict[str, Any], rank: int) -> None:
    ranks = dict.fromkeys(RANKS, rank)
    config = resolve(ranks, r=rank, **fields)
    for module in ranks:
        # PEFT's rule, with Python's own numbers.
        matched = [k for k in fields["alpha_pattern"] if re.match(rf"(.*\.)?({k})$", module)]
        alpha = fields["alpha_pattern"][matched[0]] if matched else fields["lora_alpha"]
        wanted = alpha / math.sqrt(rank) if fields["use_rslora"] else alpha / rank
        assert config.scaling_for(module) == wanted
    encoded = encode_canonical(config.manifest_config())
    assert config_from_manifest(json.loads(encoded), ranks) == config
    assert resolve_config(json.loads(json.dumps(config.peft_config())), ranks) == config


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"lora_alpha": "8.0"}, "lora_alpha"), ({"alpha_pattern": {"unknown": "4"}}, "alpha_pattern")],
)
def test_refused_manifest_names_what_is_wrong_with_it(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(AdapterConfigError) as caught:
        config_from_manifest({**resolve().manifest_config(), **changes}, RANKS)
    assert caught.value.fields["field"] == field


def test_true_is_no_rank_of_one() -> None:
    assert refused_field({Q0: 1}, r=True) == "r"


def test_a_stored_pattern_names_one_module_and_no_longer_name_that_ends_like_it() -> None:
    ranks = {"q_proj": 4, "a.q_proj": 4, "b.q_proj": 2}
    config = resolve(ranks, target_modules=["q_proj"], rank_pattern={"b.q_proj": 2}, alpha_pattern={"^q_proj": 64})
    stored = config.peft_config()
    for name in ranks:
        # PEFT's rule: a key may stand at the end of a name, behind a dot.
        alphas = [v for k, v in stored["alpha_pattern"].items() if re.match(rf"(.*\.)?({k})$", name)]
        assert alphas == ([64] if name == "q_proj" else [])


def test_the_last_index_of_a_name_counts_its_layer_as_peft_reads_it() -> None:
    name = "model.layers.3.experts.1.q_proj"
    assert re.match(r".*\.[^.]*\.(\d+)\.", name)[1] == "1"  # type: ignore[index]  # PEFT's own expression
    assert layer_of(name) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": "8.0"}, {"lora_alpha": "08"}, {"lora_alpha": "1e1"}, {"lora_alpha": "nan"}, {"lora_alpha": ""},
        {"lora_alpha": "0"}, {"lora_alpha": "-0"}, {"lora_alpha": 8}, {"lora_alpha": "8 "}, {"lora_alpha": "9" * 20},
        {"lora_alpha": "\uff18"}, {"lora_alpha": "1_0"}, {"lora_alpha": "-"}, {"peft_type": "X"}, {"use_rslora": 0},
        {"use_rslora": None}, {"alpha_pattern": []}, {"alpha_pattern": {"unknown": "4"}}, {"alpha_pattern": {Q0: "8"}},
        {"alpha_pattern": {Q0: "4", Q1: "4"}}, {"extra": 1},
    ],
)  # fmt: skip
def test_manifest_configuration_has_one_spelling(changes: dict[str, Any]) -> None:
    written = resolve().manifest_config()
    with pytest.raises(AdapterConfigError):
        config_from_manifest({**written, **changes}, RANKS)


def test_peft_computes_the_same_scaling_from_the_file_and_from_the_stored_configuration(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(8, 8, bias=False)
            self.up_proj = torch.nn.Linear(8, 12, bias=False)

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
            self.lm_head = torch.nn.Linear(8, 16, bias=False)

    ranks = {"layers.0.q_proj": 4, "layers.0.up_proj": 4, "layers.1.q_proj": 2, "layers.1.up_proj": 4, "lm_head": 3}
    document = make_config(
        targets=["q_proj", "up_proj", "lm_head"],
        alpha=5,
        task_type=None,
        base_model_name_or_path=None,
        use_rslora=True,
        rank_pattern={"layers.1.q_proj": 2, "^lm_head": 3},
        alpha_pattern={r".*\.1\..*": 7.5, "q_proj": 6},
    )
    ours = resolve_config(document, ranks)
    for index, config in enumerate((document, {**ours.peft_config(), "task_type": None})):
        directory = tmp_path / str(index)
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps(config))
        wrapped = peft.get_peft_model(Tower(), peft.LoraConfig.from_pretrained(str(directory)))
        theirs = {
            name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
            for name, module in wrapped.named_modules()
            if hasattr(module, "scaling")
        }
        assert theirs == {name: (rank, ours.scaling_for(name)) for name, rank in ranks.items()}


def test_adapter_writer_of_the_tests_agrees_with_itself(tmp_path: Path) -> None:
    one, other = make_adapter(tmp_path / "a", shape=MINUTE), make_adapter(tmp_path / "b", shape=MINUTE)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert not np.array_equal(*(next(iter(make_tensors(seed, shape=MINUTE).values())) for seed in (0, 1)))


def test_a_long_list_of_targets_is_looked_up_and_not_walked() -> None:
    """A stored configuration names every module in full: hundreds of them, asked for by each rank beside its steps."""

    class Names(frozenset[str]):
        def __iter__(self) -> Any:
            raise AssertionError("the list is walked once for each module")

    names = Names(f"model.layers.{layer}.self_attn.q_proj" for layer in range(100))
    assert is_selected("model.layers.42.self_attn.q_proj", names)
    assert is_selected("base.model.layers.42.self_attn.q_proj", names)
    assert not is_selected("model.layers.142.self_attn.q_proj", names)
    assert not is_selected("odel.layers.42.self_attn.q_proj", names)
