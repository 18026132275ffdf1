"""Seam: requests of an engine in this process.

``LLMEngine.add_request`` registers a request with its output processor before the engine core sees it; a refusal by the
core then leaves a request that never ends. Here the core's gate is asked first. A request also gets the key material of
its draws here, and its finished output remembers what was asked, so that receipts can be made of it; one that brings
key material of its own keeps it and gets no receipt. Dies when upstream registers a request after the core took it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin import preemptions
from epochless_vllm.plugin.core import GATE
from epochless_vllm.plugin.options import KEY, options_of
from epochless_vllm.plugin.receipt_headers import KeyMaterial, take_material

ASKED = "_epochless_asked"  # attribute of a finished RequestOutput
_PENDING = "_epochless_pending"  # attribute of an LLMEngine


@dataclass(frozen=True)
class LocalRequest:
    """What was asked of an engine in this process.

    Attributes:
        params: as they were asked for, the seed apart; the caller may change its own meanwhile.
        internal_id: the engine's name for it.
        rebuilds: preemptions by choice index.
    """

    engine: Any
    params: Any
    material: KeyMaterial
    lora_request: Any
    internal_id: str
    rebuilds: Counter[int]

    def forget(self) -> None:
        """Count its preemptions no more."""
        preemptions.forget(self.internal_id, self.params.n)


def install() -> None:
    """Wrap the methods of ``LLMEngine`` through which requests enter, leave and give up.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    for name in ("add_request", "step", "abort_request"):
        if not hasattr(LLMEngine, name):
            raise SeamError(f"LLMEngine has no {name}", target=f"LLMEngine.{name}")
    if getattr(LLMEngine.add_request, "_epochless", False):
        return
    LLMEngine.add_request = _wrap_entry(LLMEngine.add_request)  # type: ignore[method-assign]
    LLMEngine.step = _wrap_step(LLMEngine.step)  # type: ignore[method-assign]
    LLMEngine.abort_request = _wrap_abort(LLMEngine.abort_request)  # type: ignore[method-assign]


def _wrap_entry(original: Any) -> Any:
    def add_request(
        self: Any, request_id: str, prompt: Any, params: Any, *arguments: Any, lora_request: Any = None, **keywords: Any
    ) -> Any:
        core = getattr(self.engine_core, "engine_core", None)
        gate = getattr(core, GATE, None)
        named = lora_request if lora_request is not None else getattr(prompt, "lora_request", None)
        if gate is not None and named is not None:
            gate.check(named)
        given = params
        sampled = hasattr(params, "temperature") and options_of(self.vllm_config.additional_config) is not None
        brings_own = hasattr(prompt, "sampling_params") or (sampled and KEY in (params.extra_args or {}))
        if sampled and not brings_own:
            params, material = take_material(params, nonce=None, request_id=request_id, prompt_index=0)
        added = original(self, request_id, prompt, params, *arguments, lora_request=lora_request, **keywords)
        if params is not given and given.output_kind.name != "DELTA":
            pending = self.__dict__.setdefault(_PENDING, {})
            rebuilds = preemptions.watch(added, params.n)
            pending[request_id] = LocalRequest(self, params, material, lora_request, added, rebuilds)
        return added

    add_request._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    return add_request


def _wrap_step(original: Any) -> Any:
    def step(self: Any) -> Any:
        outputs = original(self)
        pending = self.__dict__.get(_PENDING)
        if pending:
            for output in outputs:
                if output.finished and (asked := pending.pop(output.request_id, None)) is not None:
                    setattr(output, ASKED, asked)
                    asked.forget()
        return outputs

    return step


def _wrap_abort(original: Any) -> Any:
    def abort_request(self: Any, request_ids: list[str], *arguments: Any, **keywords: Any) -> Any:
        for request_id in request_ids:
            if (asked := self.__dict__.get(_PENDING, {}).pop(request_id, None)) is not None:
                asked.forget()
        return original(self, request_ids, *arguments, **keywords)

    return abort_request
