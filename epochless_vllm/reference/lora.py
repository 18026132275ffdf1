"""A LoRA adapter as float32 factors by module, from a store's revision or from a PEFT directory.

Promises that every tensor of the adapter is used, that each factor pair fits the base module it names, and that the
scaling is the one its configuration gives: nothing is merged, renamed or dropped. A 16-bit server holds B already
scaled, and rounded again; so does an adapter read with its rounding. Knows no forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.errors import InspectError
from epochless_vllm.reference.config import ModelConfig
from epochless_vllm.reference.rounding import Rounder, Rounding
from epochless_vllm.reference.weights import LocatedTensor, read_tensor, tensor_from_bytes
from epochless_vllm.store.adapters import AdapterConfig, check_base, inspect_source
from epochless_vllm.store.lora_config import PREFIX
from epochless_vllm.store.revisions import StoredRevision
from epochless_vllm.store.sources import TENSORS_NAME, open_adapter_directory

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Factors:
    """One adapted module: ``a`` is (rank, inputs), ``b`` is (outputs, rank), ``scaling`` multiplies ``b @ a``."""

    a: Array
    b: Array
    scaling: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """The factors of one revision by checkpoint module name; compared by identity, as a revision is."""

    modules: Mapping[str, Factors]

    @property
    def max_rank(self) -> int:
        return max(int(factors.a.shape[0]) for factors in self.modules.values())


def adapter_from_revision(revision: StoredRevision, base: ModelConfig, rounding: Rounding = "float32") -> Adapter:
    """Return the adapter of a revision read from a store.

    Args:
        rounding: the dtype in which the server holds its adapters.

    Raises:
        InspectError: a module is not in the base model, or its factors have other sizes.
    """
    tensors = {
        entry.name: tensor_from_bytes(revision.tensors[entry.name], entry.dtype, entry.shape, rounding)
        for entry in revision.manifest.tensors
    }
    return _assemble(revision.config, tensors, base, rounding)


def adapter_from_directory(path: Path | str, base: ModelConfig, rounding: Rounding = "float32") -> Adapter:
    """Return the adapter of a PEFT directory, inspected as the store would.

    Raises:
        AdapterNotFoundError, PathRefusedError: see ``open_adapter_directory``.
        InspectError, AdapterConfigError: the adapter cannot be computed exactly as written over this base model.
    """
    with open_adapter_directory(path) as source:
        inspected = inspect_source(source)
        check_base(inspected, base.linear_shapes())
        located = [
            LocatedTensor(Path(path) / TENSORS_NAME, record, inspected.data_begin + record.begin)
            for record in inspected.tensors
        ]
        tensors = {tensor.record.name: read_tensor(tensor, rounding) for tensor in located}
        source.tensors.check_unchanged()
    return _assemble(inspected.config, tensors, base, rounding)


def _assemble(config: AdapterConfig, tensors: Mapping[str, Array], base: ModelConfig, rounding: Rounding) -> Adapter:
    rounder = Rounder(rounding)
    shapes = base.linear_shapes()
    modules = {}
    for name in config.modules:
        stem = name if f"{name}.lora_A.weight" in tensors else PREFIX + name
        a, b = tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"]
        if name not in shapes:
            raise InspectError(
                f"module {name[:200]} is not in the base model; audit with the base it was trained on",
                reason="unmatched_module",
                module=name[:200],
            )
        if (b.shape[0], a.shape[1]) != shapes[name]:
            raise InspectError(
                f"module {name} is {shapes[name]} in the base model, {(b.shape[0], a.shape[1])} in the adapter; audit "
                "with the base it was trained on",
                reason="base_shape",
                module=name,
            )
        scaling = config.scaling_for(name)
        if rounding != "float32":
            b *= np.float32(scaling)
            rounder.round(b)
            scaling = 1.0
        modules[name] = Factors(a, b, scaling)
    return Adapter(modules)
