"""Seam: a request that reaches the engine after its revision was retired.

Between binding and the engine's gate lie awaits, a socket and, in another server, a retirement. The gate refuses such a
request before any token; here it is admitted once more as a whole: by policy name it gets the head of now, by an exact
pin it gets 410. Dies when upstream binds adapters inside the engine.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from epochless_vllm.errors import EpochlessError, RetiredRevisionError, SeamError
from epochless_vllm.plugin import metrics
from epochless_vllm.plugin.error_responses import error_response
from epochless_vllm.plugin.request_fields import keep_fields
from epochless_vllm.protocol.publication import Status

# The admission of the HTTP request whose task this is. Read when an engine stream is made, in the same task.
current_admission: ContextVar[Any] = ContextVar("epochless_admission", default=None)
_restarts_left: ContextVar[int] = ContextVar("epochless_restarts_left", default=0)


class LateArrivalSignal(BaseException):
    """Unwinds a request that is to be admitted again.

    Not an Exception: the stream generators between the engine and the route turn every Exception into a last chunk.
    """


def may_restart() -> bool:
    """Whether the HTTP request of this task may still be admitted again."""
    return _restarts_left.get() > 0


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


def readmitting(handler: Callable[..., Awaitable[Any]], *, restarts: Callable[[Any], int]) -> Callable[..., Any]:
    """Return a request handler that runs again when its request arrived late; ``restarts`` says how often it may."""

    @functools.wraps(handler)
    async def handle(self: Any, request: Any, raw_request: Any = None) -> Any:
        async def again() -> Any:
            _restarts_left.set(0)
            return await handler(self, request, raw_request)

        await keep_fields(request, raw_request)
        _restarts_left.set(restarts(request))
        try:
            result = await handler(self, request, raw_request)
        except LateArrivalSignal:
            return await again()
        return _restarting(result, again) if isinstance(result, AsyncGenerator) else result

    handle._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    return handle


async def _restarting(
    stream: AsyncGenerator[Any, None], again: Callable[[], Awaitable[Any]]
) -> AsyncGenerator[Any, None]:
    try:
        async with aclosing(stream):
            async for chunk in stream:
                yield chunk
        return
    except LateArrivalSignal:  # raised before the first chunk only
        pass
    try:
        result = await again()
    except EpochlessError as error:
        result = error_response(error)
    if isinstance(result, AsyncGenerator):
        async with aclosing(result):
            async for chunk in result:
                yield chunk
        return
    yield f"data: {json.dumps(result.model_dump())}\n\n"
    yield "data: [DONE]\n\n"


def answer_errors(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Return a handler that returns an EpochlessError as a body; its route would answer 500 for the exception."""

    @functools.wraps(handler)
    async def handle(self: Any, request: Any, raw_request: Any = None) -> Any:
        try:
            return await handler(self, request, raw_request)
        except EpochlessError as error:
            return error_response(error)

    handle._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    return handle


def install() -> None:
    """Wrap the engine's two streams and every handler that opens them.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.generate.generative_scoring.serving import ServingGenerativeScoring
    from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.v1.engine.async_llm import AsyncLLM

    once: Callable[[Any], int] = lambda request: 1  # noqa: E731  # one word where it is used
    # A response that runs in the background or streams events has been announced before the engine answers.
    unannounced: Callable[[Any], int] = lambda request: 0 if request.background or request.stream else 1  # noqa: E731
    handlers: list[tuple[Any, str, Any]] = [
        (OpenAIServingChat, "create_chat_completion", once),
        (OpenAIServingChatBatch, "create_batch_chat_completion", once),
        (OpenAIServingCompletion, "create_completion", once),
        (OpenAIServingResponses, "create_responses", unannounced),
        (ServingTokens, "serve_tokens", once),
        (ServingGenerativeScoring, "create_generative_scoring", once),
        (PoolingBaseServing, "__call__", once),
    ]
    answered = [(AnthropicServingMessages, "create_messages"), (AnthropicServingMessages, "count_tokens")]
    streams = [(AsyncLLM, "generate"), (AsyncLLM, "encode")]
    for owner, name in [*((o, n) for o, n, _ in handlers), *answered, *streams]:
        if name not in vars(owner):
            raise SeamError(f"{owner.__name__} has no {name}", target=name)
    for owner, name, restarts in handlers:
        if not getattr(getattr(owner, name), "_epochless", False):
            setattr(owner, name, readmitting(getattr(owner, name), restarts=restarts))
    for owner, name in answered:
        if not getattr(getattr(owner, name), "_epochless", False):
            setattr(owner, name, answer_errors(getattr(owner, name)))
    for owner, name in streams:
        if not getattr(getattr(owner, name), "_epochless", False):
            setattr(owner, name, _watched(getattr(owner, name)))
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
