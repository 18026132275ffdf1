"""What a rank holds: in the engine's registry once the step loop has looked, pinned, and never more than fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.errors import CapacityError
from epochless_vllm.plugin.registry import AdapterRegistry


class EngineRegistry(dict[int, Any]):
    """vLLM's registry as the wrapper needs it; ``pinned`` shows what it may not evict."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()

    def pin(self, lora_int_id: int) -> None:
        self.pinned.add(lora_int_id)


class Manager:
    """A worker's LoRA manager with room for two adapters."""

    def __init__(self) -> None:
        self._registered_adapters = EngineRegistry()
        self.capacity = 2
        self._adapter_manager = self
        self.steps: list[Any] = []

    def list_adapters(self) -> set[int]:
        return set(self._registered_adapters)

    def set_active_adapters(self, requests: set[Any], mapping: Any) -> None:
        self.steps.append((requests, mapping))

    def remove_adapter(self, lora_int_id: int) -> bool:
        return self._registered_adapters.pop(lora_int_id, None) is not None


def adapter(lora_int_id: int) -> Any:
    return SimpleNamespace(revision_id=f"r{lora_int_id}", lora_int_id=lora_int_id, lora=object())


def test_the_engines_registry_changes_only_when_its_step_loop_looks() -> None:
    manager = Manager()
    registry = AdapterRegistry(manager, "rank")
    first = adapter(1)
    registry.add(first)
    registry.add(first)
    assert manager._registered_adapters == {}
    assert registry.held() == {1: "r1"}
    assert registry.get(1) is first
    assert manager.list_adapters() == {1}
    assert manager._registered_adapters == {1: first.lora}
    assert manager._registered_adapters.pinned == {1}


def test_what_is_on_its_way_counts_against_the_capacity() -> None:
    registry = AdapterRegistry(Manager(), "engine0/rank0")
    registry.add(adapter(1))
    registry.add(adapter(2))
    with pytest.raises(CapacityError, match="engine0/rank0: the registry holds 2") as caught:
        registry.add(adapter(3))
    assert caught.value.fields["holders"] == ["r1", "r2"]
    assert registry.held() == {1: "r1", 2: "r2"}


@pytest.mark.parametrize("looked", [False, True])
def test_what_is_removed_never_comes_in(looked: bool) -> None:
    manager = Manager()
    registry = AdapterRegistry(manager, "rank")
    registry.add(adapter(1))
    if looked:
        manager.list_adapters()
    assert registry.remove(1)
    assert not registry.remove(1)
    assert manager.list_adapters() == set()
    assert (registry.get(1), registry.held()) == (None, {})


def test_an_engine_is_idle_until_a_step_begins_and_from_a_second_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 5000.0
    monkeypatch.setattr("epochless_vllm.plugin.registry.time.monotonic", lambda: now)
    manager = Manager()
    registry = AdapterRegistry(manager, "rank")
    assert registry.is_idle()
    manager.set_active_adapters(set(), None)  # of a step without adapters
    assert manager.steps == [(set(), None)]
    assert not registry.is_idle()
    now += 0.9
    assert not registry.is_idle()
    now += 0.2
    assert registry.is_idle()
