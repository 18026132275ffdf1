"""Seam: which adapter slot a step may evict.

vLLM activates a step's adapters one by one and evicts the least recently used slot, which may belong to a later adapter
of the same step: that one is then copied again into another slot. Here the step's resident adapters are touched first,
so a slot in use by a scheduled request is never evicted. Dies when upstream activates a step's adapters as a set.
"""

from __future__ import annotations

from typing import Any

from epochless_vllm.errors import SeamError


def install() -> None:
    """Wrap ``LRUCacheWorkerLoRAManager._apply_adapters``.

    Raises:
        SeamError: the target is missing.
    """
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    original = getattr(LRUCacheWorkerLoRAManager, "_apply_adapters", None)
    if original is None:
        raise SeamError("LRUCacheWorkerLoRAManager has no _apply_adapters", target="_apply_adapters")
    if getattr(original, "_epochless", False):
        return

    def apply_adapters(self: Any, lora_requests: Any) -> None:
        active = self._adapter_manager._active_adapters
        for lora_request in lora_requests:
            if lora_request is not None:
                active.touch(lora_request.lora_int_id)
        original(self, lora_requests)

    apply_adapters._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    LRUCacheWorkerLoRAManager._apply_adapters = apply_adapters
