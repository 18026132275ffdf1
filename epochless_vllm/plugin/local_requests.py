"""Seam: requests of an engine in this process.

``LLMEngine.add_request`` registers a request with its output processor before the engine core sees it; a refusal by the
core then leaves a request that never ends. Here the core's gate is asked first. Dies when upstream registers a request
after the core took it.
"""

from __future__ import annotations

from typing import Any

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin.core import GATE


def install() -> None:
    """Wrap ``LLMEngine.add_request``.

    Raises:
        SeamError: the target is missing.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    original = getattr(LLMEngine, "add_request", None)
    if original is None:
        raise SeamError("LLMEngine has no add_request", target="LLMEngine.add_request")
    if getattr(original, "_epochless", False):
        return

    def add_request(
        self: Any, request_id: str, prompt: Any, params: Any, *arguments: Any, lora_request: Any = None, **keywords: Any
    ) -> Any:
        core = getattr(self.engine_core, "engine_core", None)
        gate = getattr(core, GATE, None)
        named = lora_request if lora_request is not None else getattr(prompt, "lora_request", None)
        if gate is not None and named is not None:
            gate.check(named)
        return original(self, request_id, prompt, params, *arguments, lora_request=lora_request, **keywords)

    add_request._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    LLMEngine.add_request = add_request
