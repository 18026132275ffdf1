"""An adapter as PEFT writes it, inspected from its two headers: which modules, which ranks, which configuration.

Every tensor must be the A or B factor of a linear module, both factors must be there and fit, and the configuration
must agree with them; anything else is refused by name before a byte of data is read. Knows no engine; it knows the
base model only as far as ``check_base`` is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from epochless_vllm.errors import AdapterConfigError, InspectError
from epochless_vllm.protocol.manifest import Manifest
from epochless_vllm.store.documents import MAX_BYTES, parse_document
from epochless_vllm.store.lora_config import (
    PREFIX,
    AdapterConfig,
    config_from_manifest,
    is_selected,
    layer_of,
    resolve_config,
)
from epochless_vllm.store.safetensors import TensorRecord, read_header
from epochless_vllm.store.sources import CONFIG_NAME, AdapterSource, open_adapter_directory

__all__ = [
    "AdapterConfig",
    "InspectedAdapter",
    "ModuleShape",
    "check_base",
    "check_coverage",
    "config_of",
    "inspect_adapter",
    "inspect_parts",
    "inspect_source",
]

DTYPES = ("F32", "F16", "BF16")

_FACTOR = re.compile(r"(?P<module>[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\.lora_(?P<factor>[AB])\.weight")
_EMBEDDINGS = ("embed_tokens", "wte", "wpe", "word_embeddings", "tok_embeddings")
# What a tensor that is not a factor is, most telling part first.
_STRANGERS = (
    ("lora_embedding_", "LoRA on embeddings is not served"),
    ("lora_magnitude_vector", "DoRA is not served"),
    (".base_layer.", "a base weight saved with the adapter would be ignored; save with save_embedding_layers=False"),
    ("modules_to_save", "whole modules trained beside LoRA are not served"),
    (".bias", "trained biases are not served"),
    (".default.weight", "the adapter's name is in its tensor names; save with save_pretrained"),
)


@dataclass(frozen=True)
class ModuleShape:
    """A module's factors: A is (rank, inputs), B is (outputs, rank)."""

    rank: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class InspectedAdapter:
    """What the headers of an adapter say.

    Attributes:
        config: the resolved configuration.
        tensors: records in the order of their data.
        data_begin: byte offset of the data in the safetensors file.
        modules: shapes by module name, without PEFT's prefix.
        document: adapter_config.json as written.
    """

    config: AdapterConfig
    tensors: tuple[TensorRecord, ...]
    data_begin: int
    modules: Mapping[str, ModuleShape]
    document: Mapping[str, Any]

    @property
    def byte_length(self) -> int:
        """Bytes of tensor data."""
        return self.tensors[-1].end


def inspect_adapter(path: Path | str, import_root: Path | str | None = None) -> InspectedAdapter:
    """Return what an adapter directory holds, reading its configuration and its header only.

    Raises:
        AdapterNotFoundError, PathRefusedError: see ``open_adapter_directory``.
        InspectError, AdapterConfigError: the adapter cannot be served exactly as written.
    """
    with open_adapter_directory(path, import_root) as source:
        return inspect_source(source)


def inspect_source(source: AdapterSource) -> InspectedAdapter:
    """Return what an open adapter holds; its tensors file is left at the first byte of data."""
    document = _read_config(source)
    tensors, data_begin = read_header(source.tensors.read, source.tensors.byte_size)
    return inspect_parts(document, tensors, data_begin)


def inspect_parts(document: Mapping[str, Any], tensors: list[TensorRecord], data_begin: int) -> InspectedAdapter:
    """Return the adapter that a parsed configuration and a parsed header make together.

    Raises:
        InspectError, AdapterConfigError: they cannot be served exactly as written.
    """
    modules = group_factors((record.name, record.dtype, record.shape) for record in tensors)
    config = resolve_config(document, {name: shape.rank for name, shape in modules.items()})
    return InspectedAdapter(config, tuple(tensors), data_begin, modules, MappingProxyType(dict(document)))


def config_of(manifest: Manifest) -> AdapterConfig:
    """Return the configuration of a manifest.

    Raises:
        InspectError, AdapterConfigError: the manifest is not of an adapter that this package would have admitted.
    """
    modules = group_factors((entry.name, entry.dtype, entry.shape) for entry in manifest.tensors)
    return config_from_manifest(dict(manifest.config), {name: shape.rank for name, shape in modules.items()})


def encode_config(config: AdapterConfig) -> bytes:
    """Return the adapter_config.json of a stored revision: one sequence of bytes for each configuration."""
    return json.dumps(config.peft_config(), indent=2, sort_keys=True).encode("ascii") + b"\n"


def group_factors(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Mapping[str, ModuleShape]:
    """Return the modules that (name, dtype, shape) tensors adapt, sorted by name.

    Raises:
        InspectError: a tensor is not a factor of a linear module, lacks its partner or does not fit it.
    """
    factors: dict[str, dict[str, tuple[int, ...]]] = {}
    folded: dict[str, str] = {}
    for name, dtype, shape in tensors:
        module, factor = _parse_name(name)
        if dtype not in DTYPES:
            _refuse("dtype", name, f"dtype {dtype} is not served; save it as F32, F16 or BF16")
        if len(shape) != 2 or 0 in shape:
            _refuse("shape", name, f"shape {list(shape)} is not that of a LoRA factor; were shards gathered?")
        # Two spellings of one module would be merged or dropped by whoever reads them next.
        if folded.setdefault(module.casefold(), module) != module or factor in factors.setdefault(module, {}):
            _refuse("lookalike_name", name, "another tensor has almost the same name")
        factors[module][factor] = shape
    if not factors:
        raise InspectError("the adapter has no tensors; was it saved before it was trained?", reason="no_tensors")
    return MappingProxyType({module: _pair(module, factors[module]) for module in sorted(factors)})


def check_base(adapter: InspectedAdapter, base: Mapping[str, tuple[int, int] | None]) -> None:
    """Check an adapter against the linear modules of a base model.

    Args:
        base: (outputs, inputs) by module name as the model's checkpoint names it, None where the size is not known.

    Raises:
        InspectError: a module is not in the base model, or its factors have other sizes.
        AdapterConfigError: ``target_modules`` lists modules that the base has and the adapter lacks.
    """
    unmatched = [name for name in adapter.modules if name not in base]
    if unmatched:
        raise InspectError(
            f"{len(unmatched)} of {len(adapter.modules)} modules are not in the base model, first {unmatched[0]}; "
            "the adapter would have no effect there",
            reason="unmatched_module",
            modules=unmatched[:20],
        )
    for name, shape in adapter.modules.items():
        wanted = base[name]
        if wanted is not None and wanted != (shape.outputs, shape.inputs):
            raise InspectError(
                f"module {name} is {wanted[0]} x {wanted[1]} in the base model, "
                f"{shape.outputs} x {shape.inputs} in the adapter",
                reason="base_shape",
                module=name,
            )
    check_coverage(adapter, base)


def check_coverage(adapter: InspectedAdapter, base: Collection[str]) -> None:
    """Check that every module of a base model that ``target_modules`` lists has tensors.

    A trainer that loses a layer while saving writes a file that looks whole. Where the adapter uses other names than
    ``base`` nothing is concluded: a rank, which knows the model's own names, decides.

    Args:
        base: names of the base model's linear modules, as its checkpoint has them.

    Raises:
        AdapterConfigError: modules are missing and ``layers_to_transform`` does not say so.
    """
    targets, document = adapter.document.get("target_modules"), adapter.document
    if not isinstance(targets, list) or document.get("exclude_modules") or not set(adapter.modules) <= set(base):
        return
    targets = frozenset(targets)
    layers = document.get("layers_to_transform")
    wanted_layers = None if layers in (None, []) else set(layers if isinstance(layers, list) else [layers])
    missing = [
        name
        for name in base
        if name not in adapter.modules
        and is_selected(name, targets)
        and (wanted_layers is None or layer_of(name) in wanted_layers)
    ]
    if missing:
        raise AdapterConfigError(
            f"adapter_config.json: target_modules selects {len(missing)} modules that have no tensors, first "
            f"{missing[0]}; save all of them, or say which layers are meant in layers_to_transform",
            field="target_modules",
            modules=missing[:20],
        )


def _read_config(source: AdapterSource) -> dict[str, Any]:
    if source.config.byte_size > MAX_BYTES:
        raise InspectError(f"{CONFIG_NAME}: more than {MAX_BYTES} bytes", reason="too_large", file=CONFIG_NAME)
    return parse_document(source.config.read(MAX_BYTES + 1), subject=CONFIG_NAME)


def _parse_name(name: str) -> tuple[str, str]:
    match = _FACTOR.fullmatch(name)
    if match is None:
        reason = next((why for part, why in _STRANGERS if part in name), "not a LoRA factor of a linear module")
        _refuse("unsupported_tensor", name, reason)
    module = match["module"].removeprefix(PREFIX)
    if "base_model." in module + ".":
        _refuse("name", name, f"the prefix {PREFIX} is there twice")
    parts = module.split(".")
    if parts[-1] in _EMBEDDINGS:
        _refuse("unsupported_tensor", name, "LoRA on embeddings is not served")
    if "experts" in parts:
        _refuse("unsupported_tensor", name, "LoRA on mixture-of-experts layers is not served")
    return module, match["factor"]


def _pair(module: str, factors: dict[str, tuple[int, ...]]) -> ModuleShape:
    if len(factors) != 2:
        present = "A" if "A" in factors else "B"
        _refuse("unpaired", module, f"has only its {present} factor")
    (rank, inputs), (outputs, other_rank) = factors["A"], factors["B"]
    if rank != other_rank:
        _refuse("rank", module, f"A has rank {rank}, B has rank {other_rank}")
    return ModuleShape(rank, inputs, outputs)


def _refuse(reason: str, name: str, detail: str) -> NoReturn:
    raise InspectError(f"tensor {name[:200]}: {detail}", reason=reason, tensor=name[:200])
