"""The slot-layout and fail-closed seams."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import LoRAModelManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.worker_base import WorkerWrapperBase


def make_manager(layout: list[int | None]) -> tuple[LoRAModelManager, list[tuple[int | None, ...]]]:
    manager = LoRAModelManager.__new__(LoRAModelManager)
    refreshes: list[tuple[int | None, ...]] = []
    manager._last_mapping = manager._last_slot_layout = None
    manager.lora_index_to_id = layout
    manager._set_adapter_mapping = lambda mapping: refreshes.append(tuple(manager.lora_index_to_id))
    return manager, refreshes


def test_equal_mapping_over_moved_slots_refreshes_the_kernels():
    manager, refreshes = make_manager([7, 8])
    manager.set_adapter_mapping(LoRAMapping((7, 8), (7, 8)))
    manager.lora_index_to_id[0], manager.lora_index_to_id[1] = 8, 7
    manager.set_adapter_mapping(LoRAMapping((7, 8), (7, 8)))
    assert refreshes == [(7, 8), (8, 7)]


def test_equal_mapping_over_equal_slots_refreshes_once():
    manager, refreshes = make_manager([7, None])
    for _ in range(3):
        manager.set_adapter_mapping(LoRAMapping((7,), (7,)))
    manager.lora_index_to_id = [7, None]
    manager.set_adapter_mapping(LoRAMapping((7,), (7,)))
    assert refreshes == [(7, None)]


def test_changed_mapping_over_equal_slots_refreshes():
    manager, refreshes = make_manager([7, 8])
    manager.set_adapter_mapping(LoRAMapping((7, 8), (7, 8)))
    manager.set_adapter_mapping(LoRAMapping((8, 7), (8, 7)))
    assert len(refreshes) == 2


def test_configuration_without_the_plugin_is_refused_with_the_reason():
    with pytest.raises(RuntimeError, match=r"plugin is not active in this process.*VLLM_PLUGINS"):
        VllmConfig(additional_config={"epochless": {"store": "s"}})


def test_configuration_that_does_not_ask_for_epochless_is_accepted():
    assert VllmConfig().additional_config == {}
    VllmConfig(additional_config={"other": 1})


def test_an_active_plugin_sees_every_configuration(monkeypatch: pytest.MonkeyPatch):
    seen: list[VllmConfig] = []
    monkeypatch.setattr(VllmConfig, "activate_epochless", lambda config: seen.append(config))
    config = VllmConfig(additional_config={"epochless": {}})
    assert len(seen) == 1
    assert seen[0] is config


class ReachedError(Exception):
    """Raised by the activation under test."""


def refuse() -> None:
    raise ReachedError


def test_the_engine_core_activates_before_it_builds_an_executor():
    with pytest.raises(ReachedError):
        EngineCore(SimpleNamespace(activate_epochless=refuse), executor_class=pytest.fail, log_stats=False)


def test_a_worker_activates_before_it_resolves_its_class():
    config = SimpleNamespace(activate_epochless=refuse, enable_trace_function_call_for_thread=lambda: None)
    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    wrapper.rpc_rank = 0
    with pytest.raises(ReachedError):
        wrapper.init_worker([{"vllm_config": config}])
