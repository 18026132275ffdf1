"""Builds what one rank's registry holds from the bytes of a revision: off the step loop, before or after it is stored.

Checks that every tensor is consumed by a module of exactly its shape and is finite in the LoRA dtype, and computes what
the device's slots must hold. Promises that what it reports of the registry was found where the engine will look for
it. Knows no transactions.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from epochless_vllm.errors import RefusedAdapterError
from epochless_vllm.plugin.expectations import (
    DTYPE_OF_TORCH,
    ExpectedPair,
    SlotShards,
    expect_bits,
    expect_slots,
    registered_digest,
    scaling_of,
    sha256_of,
)
from epochless_vllm.plugin.finite import find_non_finite
from epochless_vllm.plugin.module_plan import ModulePlan, check_coverage, plan_modules
from epochless_vllm.store.revisions import StoredRevision
from epochless_vllm.store.staged import StagedRevision

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BITS = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16}
A_SUFFIX = ".lora_A.weight"
_UNNAMED = 1  # the engine id of what is built before it has one


class _Tensor(NamedTuple):
    """A tensor as the registry is to hold it, and the SHA-256 in hexadecimal where the store has hashed this memory."""

    tensor: torch.Tensor
    sha256: str | None


@dataclass(frozen=True)
class Assembled:
    """An adapter as the registry will hold it.

    Attributes:
        lora: vLLM's own object, under no engine id yet.
        sha256: of each tensor there, in hexadecimal, by name.
        registered: the registered digest, which follows from them.
        modules: source module by tensor-name stem.
    """

    stored: StoredRevision
    lora: Any
    sha256: Mapping[str, str]
    registered: str
    modules: Mapping[str, str]

    def lora_under(self, lora_int_id: int) -> Any:
        """Return vLLM's object under an engine id."""
        from vllm.lora.lora_model import LoRAModel

        return LoRAModel(lora_int_id, self.lora.rank, self.lora.loras)


class AdapterLoader:
    """Builds adapters for the worker it belongs to; any thread may, several at a time."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._plans: tuple[ModulePlan, ...] | None = None
        self._plan_lock = threading.Lock()
        # Of the last adapter, by names and shapes: those of one policy differ in neither.
        self._last: tuple[tuple[Any, ...] | None, Mapping[str, str]] = (None, {})

    @property
    def _manager(self) -> Any:
        return self._worker.model_runner.lora_manager._adapter_manager

    @property
    def dtype(self) -> str:
        """The registry's dtype: ``F32``, ``BF16`` or ``F16``."""
        return DTYPE_OF_TORCH[str(self._worker.lora_config.lora_dtype)]

    def plan(self) -> tuple[ModulePlan, ...]:
        """Return how the engine's modules consume an adapter."""
        with self._plan_lock:
            if self._plans is None:
                self._plans = plan_modules(self._manager)
            return self._plans

    def assemble(self, stored: StoredRevision) -> Assembled:
        """Build a revision that was read.

        Raises:
            RefusedAdapterError: the model cannot serve the adapter exactly as written.
        """
        modules = self._modules_of(stored.manifest.tensors)
        tensors = {
            entry.name: self._convert(stored.config, entry, stored.tensors[entry.name])
            for entry in stored.manifest.tensors
        }
        return self._build(stored, modules, tensors)

    def assemble_staged(self, staged: StagedRevision) -> Assembled:
        """Build a revision while it is written; returns when it is whole.

        Raises:
            RefusedAdapterError: as ``assemble``. StoreError: it was given up.
        """
        config = staged.adapter.config
        modules = self._modules_of(staged.adapter.tensors)
        tensors = {entry.name: self._convert(config, entry, view) for entry, view in staged.read()}
        return self._build(StoredRevision(staged.manifest(), config, staged.tensors), modules, tensors)

    def _modules_of(self, tensors: Sequence[Any]) -> Mapping[str, str]:
        """Return source module by tensor-name stem, after checking names, pairs and shapes against the model.

        Args:
            tensors: with ``name`` and ``shape``.
        """
        wanted = tuple((entry.name, entry.shape) for entry in tensors)
        last, modules = self._last
        if wanted != last:
            modules = self._check_modules(tensors)
            self._last = wanted, modules
        return modules

    def _check_modules(self, tensors: Sequence[Any]) -> dict[str, str]:
        from vllm.lora.utils import parse_fine_tuned_lora_name

        model = self._manager.model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        mapper = mapper.get_unstacked_mapper() if mapper is not None else None
        shapes: dict[str, list[int]] = {}
        modules: dict[str, str] = {}
        for entry in tensors:
            stem = _stem(entry.name)
            try:
                module = parse_fine_tuned_lora_name(entry.name, mapper)[0]
            except ValueError as error:
                raise RefusedAdapterError(
                    f"{entry.name}: the engine cannot map this tensor: {error}", reason="unmapped_tensor"
                ) from error
            if modules.setdefault(stem, module) != module:
                raise RefusedAdapterError(f"{stem}: A and B map to different modules", reason="unmapped_tensor")
            shape = shapes.setdefault(module, [0, 0, 0])
            if entry.name.endswith(A_SUFFIX):
                shape[0], shape[1] = entry.shape
            else:
                shape[2] = entry.shape[0]
        highest = self._worker.lora_config.max_lora_rank
        for module, (rank, _, _) in shapes.items():
            if rank > highest:
                raise RefusedAdapterError(
                    f"{module}: rank {rank} exceeds --max-lora-rank {highest}; restart with a higher one",
                    reason="rank_too_high",
                )
        check_coverage(self.plan(), {name: tuple(s) for name, s in shapes.items()})  # type: ignore[misc]
        return modules

    def _convert(self, config: Any, entry: Any, data: memoryview) -> _Tensor:
        """Return a tensor as the registry holds it: what the store read, where neither dtype nor scale changes.

        Works in one thread: the step loop's threads are not borrowed.
        """
        scaling = scaling_of(config, entry.name)
        tensor = torch.frombuffer(data, dtype=_TORCH[entry.dtype]).reshape(entry.shape)
        same = entry.dtype == self.dtype and scaling == 1.0
        if entry.dtype == self.dtype == "F32" and not same:
            tensor = torch.from_numpy(tensor.numpy() * np.float32(scaling))
        elif not same:
            tensor = tensor.to(_TORCH[self.dtype], copy=True)
            if scaling != 1.0:
                tensor *= scaling
        if find_non_finite(self.dtype, memoryview(self.bits_of(tensor))) is not None:
            raise RefusedAdapterError(
                f"{entry.name}: holds a non-finite value in {self.dtype} after scaling; the trainer diverged, or the "
                "value does not fit the LoRA dtype",
                reason="non_finite",
                tensor=entry.name,
            )
        return _Tensor(tensor, str(entry.sha256).removeprefix("sha256:") if same else None)

    def _build(self, stored: StoredRevision, modules: Mapping[str, str], tensors: Mapping[str, _Tensor]) -> Assembled:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        loras: dict[str, Any] = {}
        for entry in stored.manifest.tensors:
            name = modules[_stem(entry.name)]
            is_a = entry.name.endswith(A_SUFFIX)
            rank = entry.shape[0] if is_a else entry.shape[1]
            layer = loras.setdefault(name, LoRALayerWeights(name, rank, rank, None, None, scaling=1))  # type: ignore[arg-type]
            setattr(layer, "lora_a" if is_a else "lora_b", tensors[entry.name].tensor)
        lora = LoRAModel(_UNNAMED, max(layer.rank for layer in loras.values()), loras)
        self._manager._create_merged_loras_inplace(lora)
        entries = self._read_registered(stored, modules, lora, tensors)
        sha256 = {name: held for name, _, held in entries}
        return Assembled(stored, lora, sha256, registered_digest(entries, self.dtype), modules)

    def _read_registered(
        self, stored: StoredRevision, modules: Mapping[str, str], lora: Any, tensors: Mapping[str, _Tensor]
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Return name, shape and SHA-256 of what the registry will hold, each found where packing put it."""
        places = {}
        for plan in self.plan():
            for index, item in enumerate(plan.slices):
                places[item.source] = (plan.name, index if len(plan.slices) > 1 else None)
        entries = []
        for entry in stored.manifest.tensors:
            name, index = places[modules[_stem(entry.name)]]
            layer = lora.loras[name]
            held = layer.lora_a if entry.name.endswith(A_SUFFIX) else layer.lora_b
            tensor = held[index] if isinstance(held, list) else held
            entries.append((entry.name, tuple(tensor.shape), self._hash_of(tensor, tensors[entry.name])))
        return entries

    def _hash_of(self, held: torch.Tensor, built: _Tensor) -> str:
        read = built.tensor
        same = held.data_ptr() == read.data_ptr() and held.dtype == read.dtype and held.is_contiguous()
        return built.sha256 if same and built.sha256 is not None else sha256_of(self.bits_of(held))

    def expect_slots(self, assembled: Assembled) -> SlotShards:
        """Return what this rank's slots must hold of an adapter, computed from its bytes without the engine."""
        stored = assembled.stored
        halves: dict[str, dict[str, Any]] = {}
        for entry in stored.manifest.tensors:
            half = "a" if entry.name.endswith(A_SUFFIX) else "b"
            make_bits = partial(expect_bits, stored, entry, self.dtype)
            parts = {f"sha256_{half}": assembled.sha256[entry.name], f"make_{half}": make_bits}
            halves.setdefault(assembled.modules[_stem(entry.name)], {}).update(parts)
        return expect_slots(self.plan(), {name: ExpectedPair(**parts) for name, parts in halves.items()})

    def bits_of(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """Return the raw bits of a tensor of the registry's dtype, on the host and contiguous."""
        host = tensor.detach().contiguous().cpu()
        signed = torch.int32 if host.element_size() == 4 else torch.int16
        return host.view(signed).numpy().view(_BITS[self.dtype])


def _stem(tensor: str) -> str:
    return tensor[: -len(A_SUFFIX)]
