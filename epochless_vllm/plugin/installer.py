"""Brings a stored revision into one rank's engine: CPU registry at prepare, device slots at first use.

``load`` runs in a background thread, off the step loop: it re-reads and re-hashes the store, checks that every tensor
is consumed by a module of exactly its shape and is finite, and builds what the registry will hold. ``register`` may run
beside a step, too: the engine's own registry, which steps read, takes the adapter in when it is next looked at.
``activate`` and ``remove`` run between steps. Promises that what it reports was read back, not assumed.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epochless_vllm.errors import RefusedAdapterError
from epochless_vllm.plugin.background import short_turns, step_aside
from epochless_vllm.plugin.expectations import (
    DTYPE_OF_TORCH,
    ExpectedPair,
    SlotShards,
    expect_slots,
    expect_tensor,
    registered_digest,
    scaling_of,
    sha256_of,
    slot_digest,
)
from epochless_vllm.plugin.module_plan import ModulePlan, check_coverage, plan_modules
from epochless_vllm.plugin.options import options_of
from epochless_vllm.plugin.registry import AdapterRegistry
from epochless_vllm.store.revisions import RevisionStore

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BITS = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16}
# All ones in a non-finite value.
_EXPONENT = {"BF16": np.uint16(0x7F80), "F16": np.uint16(0x7C00)}
A_SUFFIX = ".lora_A.weight"


@dataclass
class LoadedAdapter:
    """An adapter built by ``load``, not yet visible to the engine."""

    revision_id: str
    lora_int_id: int
    lora: Any
    receipt: dict[str, Any]
    expected_slots: concurrent.futures.Future[SlotShards]


def _stem(tensor: str) -> str:
    return tensor[: -len(A_SUFFIX)]


class LoRAInstaller:
    """The Installer of a vLLM worker. ``load`` and ``register`` may run in any thread; the rest only between steps."""

    def __init__(self, worker: Any, rank: str) -> None:
        options = options_of(worker.vllm_config.additional_config)
        assert options is not None
        self._worker = worker
        self._rank = rank
        self._store = RevisionStore(Path(options.store))
        self._registry = AdapterRegistry(worker.model_runner.lora_manager, rank)
        self._plans: tuple[ModulePlan, ...] | None = None
        self._plan_lock = threading.Lock()
        self._expecting = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="epochless-slots", initializer=step_aside
        )

    @property
    def _manager(self) -> Any:
        return self._worker.model_runner.lora_manager._adapter_manager

    @property
    def _dtype(self) -> str:
        return DTYPE_OF_TORCH[str(self._worker.lora_config.lora_dtype)]

    def _plan(self) -> tuple[ModulePlan, ...]:
        with self._plan_lock:
            if self._plans is None:
                self._plans = plan_modules(self._manager)
            return self._plans

    def load(self, order: Any) -> LoadedAdapter:
        """Read, verify and build a revision.

        Raises:
            RefusedAdapterError: the model cannot serve the adapter exactly as written.
            DigestMismatchError: the store's bytes changed.
        """
        step_aside()
        with short_turns():
            stored = self._store.read(order.revision_id)
            modules = self._modules_of(stored)
            lora, registered = self._build(stored, modules, order.lora_int_id)
        receipt = {
            "rank": self._rank,
            "source_digest": stored.manifest.revision_id,
            "registered_digest": registered,
        }
        # Needed at the first step of the adapter, not for the receipt.
        expected = self._expecting.submit(self._expect_slots, stored, modules)
        return LoadedAdapter(order.revision_id, order.lora_int_id, lora, receipt, expected)

    def _modules_of(self, stored: Any) -> dict[str, str]:
        """Return source module by tensor-name stem, after checking names, pairs and shapes against the model."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        model = self._manager.model
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        mapper = mapper.get_unstacked_mapper() if mapper is not None else None
        shapes: dict[str, list[int]] = {}
        modules: dict[str, str] = {}
        for entry in stored.manifest.tensors:
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
        check_coverage(self._plan(), {name: tuple(s) for name, s in shapes.items()})  # type: ignore[misc]
        return modules

    def _build(self, stored: Any, modules: dict[str, str], lora_int_id: int) -> tuple[Any, str]:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        loras: dict[str, Any] = {}
        for entry in stored.manifest.tensors:
            name = modules[_stem(entry.name)]
            is_a = entry.name.endswith(A_SUFFIX)
            rank = entry.shape[0] if is_a else entry.shape[1]
            layer = loras.setdefault(name, LoRALayerWeights(name, rank, rank, None, None, scaling=1))  # type: ignore[arg-type]
            setattr(layer, "lora_a" if is_a else "lora_b", self._convert(stored, entry))
        lora = LoRAModel(lora_int_id, max(layer.rank for layer in loras.values()), loras)
        self._manager._create_merged_loras_inplace(lora)
        return lora, self._read_registered(stored, modules, lora)

    def _convert(self, stored: Any, entry: Any) -> torch.Tensor:
        """Return a tensor as the registry holds it: what the store read, where neither dtype nor scale changes.

        Works in one thread: the step loop's threads are not borrowed.
        """
        scaling = scaling_of(stored.config, entry.name)
        data = stored.tensors[entry.name]
        tensor = torch.frombuffer(data, dtype=_TORCH[entry.dtype]).reshape(entry.shape)
        if entry.dtype == self._dtype == "F32" and scaling != 1.0:
            tensor = torch.from_numpy(tensor.numpy() * np.float32(scaling))
        elif entry.dtype != self._dtype or scaling != 1.0:
            tensor = tensor.to(_TORCH[self._dtype], copy=True)
            if scaling != 1.0:
                tensor *= scaling
        if not self._is_finite(tensor):
            raise RefusedAdapterError(
                f"{entry.name}: holds a non-finite value in {self._dtype} after scaling; the trainer diverged, or the "
                "value does not fit the LoRA dtype",
                reason="non_finite",
                tensor=entry.name,
            )
        return tensor

    def _is_finite(self, tensor: torch.Tensor) -> bool:
        if self._dtype == "F32":
            return bool(np.isfinite(tensor.numpy()).all())
        exponent = _EXPONENT[self._dtype]
        return not np.any((self._bits_of(tensor) & exponent) == exponent)

    def _read_registered(self, stored: Any, modules: dict[str, str], lora: Any) -> str:
        """Return the digest of what the registry will hold, found module by module where packing put it."""
        places = {}
        for plan in self._plan():
            for index, item in enumerate(plan.slices):
                places[item.source] = (plan.name, index if len(plan.slices) > 1 else None)
        entries = []
        for entry in stored.manifest.tensors:
            stem = _stem(entry.name)
            name, index = places[modules[stem]]
            layer = lora.loras[name]
            held = layer.lora_a if entry.name.endswith(A_SUFFIX) else layer.lora_b
            tensor = held[index] if isinstance(held, list) else held
            entries.append((entry.name, tuple(tensor.shape), self._registered_hash(stored, entry, tensor)))
        return registered_digest(entries, self._dtype)

    def _registered_hash(self, stored: Any, entry: Any, tensor: torch.Tensor) -> str:
        source = torch.frombuffer(stored.tensors[entry.name], dtype=_TORCH[entry.dtype])
        if tensor.data_ptr() == source.data_ptr() and tensor.dtype == source.dtype and tensor.is_contiguous():
            return str(entry.sha256).removeprefix("sha256:")  # the store hashed this very memory
        return sha256_of(self._bits_of(tensor))

    def _bits_of(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        host = tensor.detach().contiguous().cpu()
        signed = torch.int32 if host.element_size() == 4 else torch.int16
        return host.view(signed).numpy().view(_BITS[self._dtype])

    def _expect_slots(self, stored: Any, modules: dict[str, str]) -> SlotShards:
        with short_turns():
            return self._compute_slots(stored, modules)

    def _compute_slots(self, stored: Any, modules: dict[str, str]) -> SlotShards:
        halves: dict[str, dict[str, Any]] = {}
        for entry in stored.manifest.tensors:
            stem = _stem(entry.name)
            half = "a" if entry.name.endswith(A_SUFFIX) else "b"
            bits, sha256 = expect_tensor(stored, entry, self._dtype)
            halves.setdefault(modules[stem], {}).update({half: bits, f"sha256_{half}": sha256})
        return expect_slots(self._plan(), {name: ExpectedPair(**parts) for name, parts in halves.items()})

    def register(self, loaded: LoadedAdapter) -> None:
        """Hold a loaded adapter for the engine's CPU registry; in any thread, one call at a time.

        Raises:
            CapacityError: the registry is full.
        """
        self._registry.add(loaded)

    def activate(self, lora_int_id: int, in_step: list[int]) -> dict[str, Any]:
        """Copy an adapter into a slot and compare what the device holds with what the file says.

        Returns:
            ``ok`` with ``slot_digest``, or not ``ok`` with ``reason``; then the slot is zeroed and free.
        """
        manager = self._manager
        held = self._registry.get(lora_int_id)
        if held is None:
            return {"ok": False, "reason": f"adapter {lora_int_id} is not in the registry"}
        self._registry.take_in()
        for other in in_step:
            manager._active_adapters.touch(other)
        try:
            manager.activate_adapter(lora_int_id)
            torch.accelerator.synchronize() if torch.accelerator.is_available() else None
            actual = self._read_slots(manager.lora_index_to_id.index(lora_int_id), held)
        except Exception as error:  # noqa: BLE001  # whatever the copy raised, the slot is half-written: free it
            self._free_slot(lora_int_id)
            return {"ok": False, "reason": f"activation failed: {type(error).__name__}: {error}"}
        for name, shards in held.expected_slots.result().items():
            if actual.get(name) != shards:
                self._free_slot(lora_int_id)
                return {"ok": False, "reason": f"{name}: the device slot does not hold the revision's bytes"}
        return {"ok": True, "slot_digest": slot_digest(actual, self._dtype)}

    def _read_slots(self, slot: int, held: LoadedAdapter) -> SlotShards:
        manager = self._manager
        actual: SlotShards = {}
        for plan in self._plan():
            module = manager.modules[plan.name]
            stacked_a, stacked_b = module.lora_a_stacked, module.lora_b_stacked
            if isinstance(stacked_a, torch.Tensor):
                stacked_a, stacked_b = (stacked_a,), (stacked_b,)
            if stacked_a[0].is_meta:
                continue  # a pooling model has no LM head: nothing is computed with these slots
            wanted = held.expected_slots.result().get(plan.name)
            layer = held.lora.loras.get(plan.name)
            if (packed := getattr(module, "epochless", None)) is not None:
                self._check_packed(packed, plan.name, slot, layer)
            shards: list[tuple[str, str] | None] = []
            for index in range(len(plan.slices)):
                a, b = stacked_a[index][slot, 0], stacked_b[index][slot, 0]
                source = None if layer is None else layer.lora_a
                if isinstance(source, list):
                    source = source[index]
                rank = 0 if source is None else source.shape[0]
                if torch.count_nonzero(a[rank:]) or torch.count_nonzero(b[:, rank:]):
                    raise RefusedAdapterError(f"{plan.name}: stale values beyond rank {rank}", reason="stale_slot")
                if source is None:
                    shards.append(None)
                    continue
                shards.append((self._hash(a[:rank]), self._hash(b[:, :rank])))
            if wanted is not None:
                actual[plan.name] = shards
        return actual

    def _check_packed(self, packed: Any, name: str, slot: int, layer: Any) -> None:
        """Compare the copy of a slot that the grouped kernel reads with the slot itself."""
        try:
            packed.check(slot, None if layer is None else layer.lora_a)
        except ValueError as error:
            raise RefusedAdapterError(f"{name}: the packed copy differs: {error}", reason="packed_slot") from error

    def _hash(self, tensor: torch.Tensor) -> str:
        return hashlib.sha256(self._bits_of(tensor)).hexdigest()

    def _free_slot(self, lora_int_id: int) -> None:
        manager = self._manager
        if lora_int_id in manager.lora_index_to_id:
            slot = manager.lora_index_to_id.index(lora_int_id)
            manager.deactivate_adapter(lora_int_id)
            for module in manager.modules.values():
                module.reset_lora(slot)

    def remove(self, lora_int_id: int) -> dict[str, Any]:
        """Forget an adapter: free and zero its slot, drop it from the registry, wait for the device.

        Returns:
            The rank's receipt: ``removed`` says whether it was held.
        """
        self._free_slot(lora_int_id)
        removed = self._registry.remove(lora_int_id)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return {"rank": self._rank, "removed": removed, "lora_int_id": lora_int_id}

    def held(self) -> dict[int, str]:
        """Return revision_id by engine id, for adapters in the registry."""
        return self._registry.held()
