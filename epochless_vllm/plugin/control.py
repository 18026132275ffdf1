"""Seam: calls that stop an engine, put it to sleep, or reach past publication into its workers.

Pausing, resuming and emptying caches keep every request on its revision and are left as they are. Calls that may change
weights are refused: the base model's bytes are part of what every revision, block key and receipt names, so another
base model is another deployment. Memory that was given up in a sleep is not trusted again: an adapter's slots are read
back before its next step. Dies when upstream tells a weight update from other calls.
"""

from __future__ import annotations

from typing import Any

from epochless_vllm.errors import InvalidRequestError, SeamError
from epochless_vllm.plugin.activation import distrust_slots
from epochless_vllm.plugin.options import options_of

# Worker methods that only read. Any other may hold weights in its hands, those of a worker extension included.
READING = frozenset({"check_health", "get_model_inspection", "list_loras"})
DISCARDS_WEIGHTS = 2  # the sleep level from which on the base model must be brought in anew


def check_worker_call(method: object) -> None:
    """Admit a call to every worker.

    Raises:
        InvalidRequestError: it may change weights, or publication's own state.
    """
    if isinstance(method, str) and method in READING:
        return
    name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
    raise InvalidRequestError(
        f"{str(name)[:80]}: refused while Epochless is on: it may change weights, and the base digest, block keys and "
        f"receipts name those the server started with; publish adapters, and start the server again for another base "
        f"model. Calls that only read: {', '.join(sorted(READING))}",
        field="method",
    )


def check_sleep(level: int) -> None:
    """Admit a sleep.

    Raises:
        InvalidRequestError: the base model would not survive it.
    """
    if level >= DISCARDS_WEIGHTS:
        raise InvalidRequestError(
            f"level: {level} discards the base model's weights, whose digest every revision is bound to; sleep at "
            "level 1 or below, or stop the server",
            field="level",
        )


def install() -> None:
    """Wrap the worker calls and the sleep of both kinds of front end, and the engine core's wake-up.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine

    for owner, names in ((AsyncLLM, ("collective_rpc", "sleep")), (LLMEngine, ("collective_rpc", "sleep"))):
        for name in names:
            if not hasattr(owner, name):
                raise SeamError(f"{owner.__name__} has no {name}", target=name)
    if not hasattr(EngineCore, "wake_up"):
        raise SeamError("EngineCore has no wake_up", target="wake_up")
    if getattr(EngineCore.wake_up, "_epochless", False):
        return
    for front_end in (AsyncLLM, LLMEngine):
        front_end.collective_rpc = _checked_call(front_end.collective_rpc)
        front_end.sleep = _checked_sleep(front_end.sleep)
    wake_up = EngineCore.wake_up

    def wake_up_distrusting(self: Any, tags: list[str] | None = None) -> Any:
        distrust_slots(self)
        return wake_up(self, tags)

    wake_up_distrusting._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    EngineCore.wake_up = wake_up_distrusting


def _checked_call(original: Any) -> Any:
    """Wrap a plain or an async method: what it returns is passed on, and the check comes first."""

    def collective_rpc(self: Any, method: Any, *arguments: Any, **keywords: Any) -> Any:
        if options_of(self.vllm_config.additional_config) is not None:
            check_worker_call(method)
        return original(self, method, *arguments, **keywords)

    return collective_rpc


def _checked_sleep(original: Any) -> Any:
    def sleep(self: Any, level: int = 1, *arguments: Any, **keywords: Any) -> Any:
        if options_of(self.vllm_config.additional_config) is not None:
            check_sleep(level)
        return original(self, level, *arguments, **keywords)

    return sleep
