"""The adapters one rank holds: its engine's CPU registry, and those on their way into it.

vLLM walks its registry at every step, and one that changes meanwhile ends the engine. Adapters may be added here in any
thread; the registry takes them in when the step loop next looks at it. Promises that what is held is pinned there, and
never more than fits. Knows no slots.
"""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

from epochless_vllm.errors import CapacityError

IDLE_S = 1.0  # longer than all but a long prompt's step


class Adapter(Protocol):
    """What the registry needs of a loaded adapter; ``lora`` is vLLM's own object."""

    revision_id: str
    lora_int_id: int
    lora: Any


class AdapterRegistry:
    """Adapters by engine id. ``add`` and the readers may run in any thread, one ``add`` at a time."""

    def __init__(self, lora_manager: Any, rank: str) -> None:
        """Wrap a worker's ``WorkerLoRAManager``.

        Its ``list_adapters`` is how the step loop looks at its registry, its ``set_active_adapters`` begins a step.
        """
        self._manager = lora_manager._adapter_manager
        self._rank = rank
        self._held: dict[int, Any] = {}
        self._coming: dict[int, Any] = {}  # held, and not yet in the engine's registry
        self._stepped = -math.inf  # when the step loop last set the adapters of a step, be there any or none
        list_adapters = lora_manager.list_adapters
        set_active_adapters = lora_manager.set_active_adapters

        def list_all_adapters() -> set[int]:
            self.take_in()
            adapters: set[int] = list_adapters()
            return adapters

        def note_step(*arguments: Any) -> None:
            self._stepped = time.monotonic()
            set_active_adapters(*arguments)

        lora_manager.list_adapters = list_all_adapters
        lora_manager.set_active_adapters = note_step

    def add(self, adapter: Adapter) -> None:
        """Hold an adapter; a second time does nothing.

        Raises:
            CapacityError: the registry is full.
        """
        if adapter.lora_int_id in self._held:
            return
        if len(self._held) >= self._manager.capacity:
            raise CapacityError(
                f"{self._rank}: the registry holds {len(self._held)} adapters, its capacity; retire a revision or "
                "raise --max-cpu-loras",
                holders=sorted(self.held().values()),
            )
        self._coming[adapter.lora_int_id] = adapter
        self._held[adapter.lora_int_id] = adapter

    def is_idle(self) -> bool:
        """Return whether no step has begun for ``IDLE_S``."""
        return time.monotonic() - self._stepped > IDLE_S

    def take_in(self) -> None:
        """Put what is coming into the engine's registry and pin it there. Step loop only."""
        registry = self._manager._registered_adapters
        for lora_int_id in list(self._coming):
            registry[lora_int_id] = self._coming.pop(lora_int_id).lora
            registry.pin(lora_int_id)

    def get(self, lora_int_id: int) -> Any:
        """Return the loaded adapter, or None."""
        return self._held.get(lora_int_id)

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; return whether it was held. Step loop only."""
        self._coming.pop(lora_int_id, None)
        self._manager.remove_adapter(lora_int_id)
        return self._held.pop(lora_int_id, None) is not None

    def held(self) -> dict[int, str]:
        """Return revision_id by engine id."""
        return {lora_int_id: adapter.revision_id for lora_int_id, adapter in list(self._held.items())}
