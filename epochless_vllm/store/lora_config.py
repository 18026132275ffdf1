"""adapter_config.json reduced to what changes the mathematics, module by module; everything else refused or ignored.

A LoRA module adds ``scaling * B @ A`` to its base weight; scaling is alpha/rank, or alpha/sqrt(rank) with rsLoRA. The
rank is the tensors' own; a configuration that says otherwise is refused. Patterns are resolved to module names here,
once, so that no later reader evaluates them and equal mathematics has equal bytes. Knows no files and no base model.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from epochless_vllm.errors import AdapterConfigError
from epochless_vllm.store.patterns import PatternSet

PREFIX = "base_model.model."  # PEFT's wrapper; some exporters leave it out
MAX_RANK = 1 << 16
Number = TypeVar("Number", int, float)
MAX_EXACT = 1 << 53  # beyond it a float no longer holds every integer

# Fields that steer training, bookkeeping or initialisation only. ``target_modules`` and its kin select modules before
# training; afterwards the tensors present say the same, and contradictions are checked by check_declared.
_IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
    "lora_dropout", "megatron_core", "eva_config", "qalora_group_size", "runtime_config", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "r", "lora_alpha", "use_rslora", "rank_pattern",
    "alpha_pattern", "init_lora_weights", "bias", "peft_type",
})  # fmt: skip
_WHY = {
    "use_dora": "DoRA rescales each column of the base weight",
    "lora_bias": "a bias in B is not applied by the engine",
    "modules_to_save": "whole modules trained beside LoRA are not applied by the engine",
    "fan_in_fan_out": "transposed layers (Conv1D) are not served",
    "layer_replication": "replicated layers change the base model",
    "trainable_token_indices": "trained token embeddings are not applied by the engine",
    "target_parameters": "LoRA on bare parameters (MoE experts) is not served",
    "alora_invocation_tokens": "activated LoRA applies to part of the tokens only",
    "use_qalora": "QALoRA pools the inputs of A",
}
_PLAIN_INITIALISATIONS = frozenset({"gaussian", "eva", "orthogonal", "true", "false"})


@dataclass(frozen=True)
class LoraModule:
    """One adapted module: the rank of its factors and its alpha as exact text (an integer, or a float's repr)."""

    rank: int
    alpha: str


@dataclass(frozen=True)
class AdapterConfig:
    """What the configuration contributes to the mathematics. ``modules`` is sorted by name, without PEFT's prefix."""

    use_rslora: bool
    modules: Mapping[str, LoraModule]

    @property
    def r(self) -> int:
        """The commonest rank; ties go to the smallest."""
        return _commonest(module.rank for module in self.modules.values())

    @property
    def lora_alpha(self) -> str:
        """The commonest alpha, as exact text; ties go to the smallest."""
        return _number_text(_commonest(float(module.alpha) for module in self.modules.values()))

    @property
    def rank_pattern(self) -> dict[str, int]:
        """Rank by module name, where it is not ``r``."""
        usual = self.r
        return {name: module.rank for name, module in self.modules.items() if module.rank != usual}

    @property
    def alpha_pattern(self) -> dict[str, str]:
        """Alpha by module name, where it is not ``lora_alpha``."""
        usual = self.lora_alpha
        return {name: module.alpha for name, module in self.modules.items() if module.alpha != usual}

    @property
    def max_rank(self) -> int:
        return max(module.rank for module in self.modules.values())

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The adapted modules' full names."""
        return tuple(self.modules)

    def scaling_for(self, module: str) -> float:
        """Return the factor of ``B @ A`` in a module, named with or without PEFT's prefix, as PEFT computes it.

        Raises:
            AdapterConfigError: the adapter has no such module.
        """
        found = self.modules.get(module) or self.modules.get(module.removeprefix(PREFIX))
        if found is None:
            raise AdapterConfigError(f"the adapter has no module {module[:200]}", field="target_modules")
        return float(found.alpha) / (math.sqrt(found.rank) if self.use_rslora else found.rank)

    def manifest_config(self) -> dict[str, Any]:
        """Return the configuration's part of a manifest. Ranks are left out: the tensors' shapes say them."""
        return {
            "alpha_pattern": self.alpha_pattern,
            "lora_alpha": self.lora_alpha,
            "peft_type": "LORA",
            "use_rslora": self.use_rslora,
        }

    def peft_config(self) -> dict[str, Any]:
        """Return an adapter_config.json from which PEFT computes the same mathematics."""

        def pattern(name: str) -> str:
            return "^" + re.escape(name)

        return {
            "alpha_pattern": {pattern(name): _number(alpha) for name, alpha in self.alpha_pattern.items()},
            "bias": "none",
            "inference_mode": True,
            "lora_alpha": _number(self.lora_alpha),
            "peft_type": "LORA",
            "r": self.r,
            "rank_pattern": {pattern(name): rank for name, rank in self.rank_pattern.items()},
            "target_modules": list(self.target_modules),
            "task_type": "CAUSAL_LM",
            "use_rslora": self.use_rslora,
        }


def resolve_config(document: Mapping[str, Any], ranks: Mapping[str, int]) -> AdapterConfig:
    """Return the configuration of an adapter_config.json over the modules its tensors name.

    Args:
        document: the parsed file.
        ranks: rank by module name without prefix, from the tensors' shapes.

    Raises:
        AdapterConfigError: a field changes the mathematics and is not supported, or contradicts the tensors.
    """
    _refuse_unsupported(document)
    use_rslora = document.get("use_rslora") or False
    if use_rslora is not True and use_rslora is not False:
        _refuse("use_rslora", "must be true or false")
    usual_rank, usual_alpha = _rank(document.get("r"), "r"), _alpha(document.get("lora_alpha"), "lora_alpha")
    rank_of = {key: _rank(value, "rank_pattern") for key, value in _pattern(document, "rank_pattern").items()}
    alpha_of = {key: _alpha(value, "alpha_pattern") for key, value in _pattern(document, "alpha_pattern").items()}
    rank_keys, alpha_keys = PatternSet(rank_of, field="rank_pattern"), PatternSet(alpha_of, field="alpha_pattern")
    modules = {}
    for name in sorted(ranks):
        rank_key, alpha_key = rank_keys.first_match(name), alpha_keys.first_match(name)
        declared = usual_rank if rank_key is None else rank_of[rank_key]
        if declared != ranks[name]:
            field = "r" if rank_key is None else "rank_pattern"
            _refuse(field, f"says rank {declared} for {name}, its tensors have rank {ranks[name]}")
        modules[name] = LoraModule(ranks[name], usual_alpha if alpha_key is None else alpha_of[alpha_key])
    check_declared(document, ranks)
    return _checked(AdapterConfig(use_rslora, MappingProxyType(modules)))


def config_from_manifest(config: Mapping[str, Any], ranks: Mapping[str, int]) -> AdapterConfig:
    """Return the configuration a manifest carries, over the modules its tensors name.

    Raises:
        AdapterConfigError: it is not what ``manifest_config`` writes.
    """
    if set(config) != {"alpha_pattern", "lora_alpha", "peft_type", "use_rslora"} or config["peft_type"] != "LORA":
        _refuse("manifest", "is not of a LoRA adapter")
    exceptions = config["alpha_pattern"]
    if not isinstance(exceptions, dict) or not set(exceptions) <= set(ranks):
        _refuse("alpha_pattern", "names modules without tensors")
    if type(config["use_rslora"]) is not bool:
        _refuse("use_rslora", "must be true or false")
    modules = {
        name: LoraModule(ranks[name], _alpha_text(exceptions.get(name, config["lora_alpha"]))) for name in sorted(ranks)
    }
    resolved = _checked(AdapterConfig(config["use_rslora"], MappingProxyType(modules)))
    if resolved.manifest_config() != dict(config):
        _refuse("manifest", "is a second spelling of its configuration")
    return resolved


def check_declared(document: Mapping[str, Any], modules: Iterable[str]) -> None:
    """Check that the modules are among those the configuration selects; PEFT would drop the others in silence.

    A regular expression or ``all-linear`` is not evaluated.

    Raises:
        AdapterConfigError: a module with tensors is not selected.
    """
    targets, excluded = document.get("target_modules"), document.get("exclude_modules")
    layers = _layers(document.get("layers_to_transform"))
    for field, names in (("target_modules", targets), ("exclude_modules", excluded)):
        if isinstance(names, list) and not all(isinstance(name, str) for name in names):
            _refuse(field, "must list module names")
        if names is not None and not isinstance(names, (list, str)):
            _refuse(field, "must be a list or a string")
    selected = frozenset(targets) if isinstance(targets, list) else frozenset()
    left_out = frozenset(excluded) if isinstance(excluded, list) else frozenset()
    for module in modules:
        if selected and not is_selected(module, selected):
            _refuse("target_modules", f"does not select {module}, which has tensors")
        if is_selected(module, left_out):
            _refuse("exclude_modules", f"excludes {module}, which has tensors")
        if layers is not None and layer_of(module) not in layers:
            _refuse("layers_to_transform", f"does not select {module}, which has tensors")


def is_selected(module: str, names: Collection[str]) -> bool:
    """Whether full names or dotted endings select a module, as PEFT reads ``target_modules``.

    Args:
        names: looked up once for each part of the module's name; a set, where there are many.
    """
    parts = module.split(".")
    return any(".".join(parts[begin:]) in names for begin in range(len(parts)))


def layer_of(module: str) -> int | None:
    """Return the layer a module's name counts, or None for a module outside the layers."""
    indices = [part for part in module.split(".")[:-1] if part.isdigit() and len(part) < 10]
    return int(indices[-1]) if indices else None


def _layers(value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    listed = value if isinstance(value, list) else [value]
    if not all(type(index) is int and index >= 0 for index in listed):
        _refuse("layers_to_transform", "must be a layer index or a list of them")
    return frozenset(listed)


def _refuse_unsupported(document: Mapping[str, Any]) -> None:
    if document.get("peft_type", "LORA") != "LORA":
        _refuse("peft_type", "must be LORA")
    if document.get("bias", "none") not in ("none", None):
        _refuse("bias", "must be none: trained biases are not applied by the engine")
    initialisation = document.get("init_lora_weights")
    if initialisation is not None and str(initialisation).lower() not in _PLAIN_INITIALISATIONS:
        _refuse(
            "init_lora_weights",
            f"is {str(initialisation)[:40]!r}, which may have changed the base weights; convert the adapter to plain "
            "LoRA when saving",
        )
    for key, value in document.items():
        # A field that is off changes nothing, also one of a PEFT newer than this list.
        if key not in _IGNORED and value:
            _refuse(key[:80], _WHY.get(key, "is not known here and may change the mathematics"))


def _pattern(document: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = document.get(field) or {}
    if not isinstance(value, dict):
        _refuse(field, "must map module names to numbers")
    return value


def _rank(value: object, field: str) -> int:
    if type(value) is not int or not 0 < value <= MAX_RANK:
        _refuse(field, f"must be a rank from 1 to {MAX_RANK}, in every place")
    return value


def _alpha(value: object, field: str) -> str:
    if type(value) not in (int, float) or value == 0 or abs(value) > MAX_EXACT:  # type: ignore[arg-type]
        _refuse(field, "must be a non-zero number of at most 2**53, in every place")
    return _number_text(value)  # type: ignore[arg-type]


def _alpha_text(text: object) -> str:
    if not isinstance(text, str) or not re.fullmatch(r"-?[0-9.e+-]{1,32}", text):
        _refuse("lora_alpha", "is not a number as exact text")
    try:
        value = float(text)
    except ValueError:
        _refuse("lora_alpha", "is not a number as exact text")
    if value == 0 or abs(value) > MAX_EXACT or _number_text(value) != text:
        _refuse("lora_alpha", "is not a number as exact text")
    return text


def _checked(config: AdapterConfig) -> AdapterConfig:
    for name in config.modules:
        scaling = config.scaling_for(name)
        if scaling == 0 or not math.isfinite(scaling):
            _refuse("lora_alpha", f"gives {name} the scaling {scaling}")
    return config


def _number_text(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else float(text)


def _commonest(values: Iterable[Number]) -> Number:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))


def _refuse(field: str, detail: str) -> NoReturn:
    raise AdapterConfigError(f"adapter_config.json: {field} {detail}", field=field)
