"""Brings a stored revision into one rank's engine: CPU registry at prepare, device slots at first use.

``load`` runs in a background thread, off the step loop: it re-reads and re-hashes the store and builds what the
registry will hold (loading.py), or takes what was built while the store wrote it (early_loads.py). ``register`` may run
beside a step, too: the engine's own registry, which steps read, takes the adapter in when it is next looked at.
``activate`` and ``remove`` run between steps. Promises that what it reports was read back, not assumed.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epochless_vllm.errors import RefusedAdapterError
from epochless_vllm.plugin.background import short_turns, step_aside
from epochless_vllm.plugin.early_loads import EarlyLoads
from epochless_vllm.plugin.expectations import SlotShards, slot_digest
from epochless_vllm.plugin.loading import AdapterLoader, Assembled
from epochless_vllm.plugin.options import options_of
from epochless_vllm.plugin.registry import AdapterRegistry
from epochless_vllm.store.revisions import RevisionStore


@dataclass
class LoadedAdapter:
    """An adapter built by ``load``, not yet visible to the engine."""

    revision_id: str
    lora_int_id: int
    lora: Any
    receipt: dict[str, Any]
    expected_slots: concurrent.futures.Future[SlotShards]


class LoRAInstaller:
    """The Installer of a vLLM worker. ``load`` and ``register`` may run in any thread; the rest only between steps."""

    def __init__(self, worker: Any, rank: str) -> None:
        options = options_of(worker.vllm_config.additional_config)
        assert options is not None
        self._worker = worker
        self._rank = rank
        self._store = RevisionStore(Path(options.store))
        self._registry = AdapterRegistry(worker.model_runner.lora_manager, rank)
        self._loader = AdapterLoader(worker)
        self._early = EarlyLoads(self._assemble_staged, self._store.is_staged, self._registry.is_idle)
        self._expecting = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="epochless-slots", initializer=step_aside
        )

    @property
    def _manager(self) -> Any:
        return self._worker.model_runner.lora_manager._adapter_manager

    def load_early(self, staged: str) -> None:
        """Begin to load a revision that is still being written, by the name it has until then.

        Whatever fails later is told when the revision is to be loaded.

        Raises:
            StoreError: nothing is ever named so.
        """
        if self._store.is_staged(staged):
            self._early.begin(staged)

    def load(self, order: Any) -> LoadedAdapter:
        """Read, verify and build a revision, unless that was done while it was written.

        Raises:
            RefusedAdapterError: the model cannot serve the adapter exactly as written.
            DigestMismatchError: the store's bytes changed.
        """
        step_aside(idle=self._registry.is_idle())
        with short_turns():
            assembled = self._early.take(order.revision_id)
            if assembled is None:
                assembled = self._loader.assemble(self._store.read(order.revision_id))
            else:
                # What is committed must be found at a restart.
                self._store.check_description(order.revision_id, assembled.stored.config)
        receipt = {
            "rank": self._rank,
            "source_digest": assembled.stored.manifest.revision_id,
            "registered_digest": assembled.registered,
        }
        # Needed at the first step of the adapter, not for the receipt.
        expected = self._expecting.submit(self._expect_slots, assembled)
        return LoadedAdapter(
            order.revision_id, order.lora_int_id, assembled.lora_under(order.lora_int_id), receipt, expected
        )

    def _assemble_staged(self, name: str) -> Assembled:
        with self._store.open_staged(name) as staged:
            return self._loader.assemble_staged(staged)

    def _expect_slots(self, assembled: Assembled) -> SlotShards:
        with short_turns():
            return self._loader.expect_slots(assembled)

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
        return {"ok": True, "slot_digest": slot_digest(actual, self._loader.dtype)}

    def _read_slots(self, slot: int, held: LoadedAdapter) -> SlotShards:
        manager = self._manager
        actual: SlotShards = {}
        for plan in self._loader.plan():
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
        return hashlib.sha256(self._loader.bits_of(tensor)).hexdigest()

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
