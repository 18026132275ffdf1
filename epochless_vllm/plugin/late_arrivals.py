"""Seam: the engine's streams, where a request turns out to have arrived after its revision was retired.

Between binding and the engine's gate lie awaits, a socket and, in another server, a retirement. The gate refuses such a
request before any token; here the refusal unwinds the HTTP request, so that readmission.py can admit it once more as a
whole. Dies when upstream binds adapters inside the engine.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from epochless_vllm.errors import RetiredRevisionError, SeamError
from epochless_vllm.plugin import metrics
from epochless_vllm.protocol.publication import Status

# The admission of the HTTP request whose task this is. Read when an engine stream is made, in the same task.
current_admission: ContextVar[Any] = ContextVar("epochless_admission", default=None)
# How often the HTTP request of this task may still be admitted again; set by the handler that would run again.
restarts_left: ContextVar[int] = ContextVar("epochless_restarts_left", default=0)


class LateArrivalSignal(BaseException):
    """Unwinds a request that is to be admitted again.

    Not an Exception: the stream generators between the engine and the route turn every Exception into a last chunk.
    """


def may_restart() -> bool:
    """Whether the HTTP request of this task may still be admitted again."""
    return restarts_left.get() > 0


async def watch(stream: AsyncGenerator[Any, None], admission: Any) -> AsyncGenerator[Any, None]:
    """Yield an engine's outputs, unless the first says that the revision was retired on the way.

    Raises:
        LateArrivalSignal: it was, and nothing of the HTTP request has been sent.
        RetiredRevisionError: it was, and the request cannot be admitted again.
    """
    async with aclosing(stream):
        async for output in stream:
            if not admission.started:
                if is_refused(output) and not _is_live(admission):
                    metrics.count_late_arrival("readmitted" if admission.restartable else "refused")
                    if admission.restartable:
                        raise LateArrivalSignal
                    raise RetiredRevisionError(
                        f"model {admission.publication.lora_name}: retired before the request reached the engine; "
                        "send it again by policy name",
                        model=admission.publication.lora_name,
                    )
                admission.started = True
            yield output


def is_refused(output: Any) -> bool:
    """Whether an output of the engine is the refusal of a request that never ran."""
    choices = output.outputs
    if not isinstance(choices, list):  # pooling
        return bool(output.finished and choices.data.numel() == 0)
    return any(choice.finish_reason == "error" and not choice.token_ids for choice in choices)


def _is_live(admission: Any) -> bool:
    state, publication = admission.served.service.state(), admission.publication
    return state.is_held(publication) and state.status(publication.policy, publication.revision_id) is Status.LIVE


def install() -> None:
    """Wrap the engine's two streams.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    for name in ("generate", "encode"):
        original = vars(AsyncLLM).get(name)
        if original is None:
            raise SeamError(f"AsyncLLM has no {name}", target=name)
        if not getattr(original, "_epochless", False):
            setattr(AsyncLLM, name, _watched(original))
    _end_refused_pooling()


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def open_stream(self: Any, *arguments: Any, **keywords: Any) -> Any:
        stream = original(self, *arguments, **keywords)
        admission, lora_request = current_admission.get(), keywords.get("lora_request")
        # The streams of one admission carry its very LoRARequest; another caller's do not.
        if admission is None or lora_request is None or admission.lora_request is not lora_request:
            return stream
        return watch(stream, admission)

    open_stream._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    return open_stream


def _end_refused_pooling() -> None:
    """Let a refused pooling request end as an aborted one does.

    vLLM's output processor asserts that an output without pooling data belongs to a generation; the refusal of one
    pooling request would end the task that serves all requests. Dies when upstream gives refusals their own output.
    """
    from vllm.v1.engine import FinishReason
    from vllm.v1.engine.output_processor import EMPTY_CPU_TENSOR, OutputProcessor

    original = OutputProcessor.process_outputs
    if getattr(original, "_epochless", False):
        return

    def process_outputs(self: Any, engine_core_outputs: Any, *arguments: Any, **keywords: Any) -> Any:
        for output in engine_core_outputs:
            if output.finish_reason is FinishReason.ERROR and output.pooling_output is None:
                state = self.request_states.get(output.request_id)
                if state is not None and state.detokenizer is None:
                    output.pooling_output = EMPTY_CPU_TENSOR
        return original(self, engine_core_outputs, *arguments, **keywords)

    process_outputs._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    OutputProcessor.process_outputs = process_outputs
