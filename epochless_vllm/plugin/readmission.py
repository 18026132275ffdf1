"""Seam: the handlers of requests, which run a second time when their request arrived late.

The whole request is admitted again while nothing of it was sent: by policy name it gets the head of now, by an exact
pin its 410, and every prompt and choice of it the same revision. Dies with late arrivals.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from epochless_vllm.errors import EpochlessError, SeamError
from epochless_vllm.plugin.error_responses import error_response
from epochless_vllm.plugin.late_arrivals import LateArrivalSignal, current_admission, restarts_left
from epochless_vllm.plugin.request_fields import keep_fields
from epochless_vllm.plugin.response_receipts import conclude, settle
from epochless_vllm.wire import ErrorEvent


def sse_refusal(answer: Any) -> list[str]:
    """Return the last chunks of a refused stream of server-sent events."""
    return [f"data: {json.dumps(answer.model_dump())}\n\n", "data: [DONE]\n\n"]


def event_refusal(answer: Any) -> list[ErrorEvent]:
    """Return the last event of a refused Responses stream."""
    error = answer.error
    return [ErrorEvent(code=error.error_code, message=error.message, param=error.param)]


@dataclass(frozen=True)
class Manner:
    """How a handler's requests are admitted again.

    Attributes:
        restarts: how often a request may be.
        refuse: the items that end a stream whose second admission was refused, from the ErrorResponse.
        announcements: items a stream sends before the engine's first output. They name the revision, so they wait for
            that output.
    """

    restarts: Callable[[Any], int] = lambda request: 1
    refuse: Callable[[Any], list[Any]] = sse_refusal
    announcements: int = 0


ORDINARY = Manner()
# A response that runs in the background is answered before the engine is asked.
RESPONSES = Manner(lambda request: 0 if request.background else 1, event_refusal, announcements=2)


def readmitting(handler: Callable[..., Awaitable[Any]], manner: Manner = ORDINARY) -> Callable[..., Any]:
    """Return a request handler that runs again when its request arrived late."""

    @functools.wraps(handler)
    async def handle(self: Any, request: Any, raw_request: Any = None) -> Any:
        async def run() -> Any:
            result = await handler(self, request, raw_request)
            admission = current_admission.get()
            if admission is None or admission.receipts is None:
                return result
            if isinstance(result, AsyncGenerator):
                return conclude(result, admission.receipts)
            await settle(admission.receipts)
            return result

        async def again() -> Any:
            restarts_left.set(0)
            return await run()

        await keep_fields(request, raw_request)
        restarts_left.set(manner.restarts(request))
        try:
            result = await run()
        except LateArrivalSignal:
            return await again()
        admission = current_admission.get()
        if not isinstance(result, AsyncGenerator) or admission is None or not admission.restartable:
            return result
        return _restarting(_held_back(result, admission, manner.announcements), again, manner)

    handle._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    return handle


async def _held_back(
    stream: AsyncGenerator[Any, None], admission: Any, announcements: int
) -> AsyncGenerator[Any, None]:
    # A stream is iterated in another task than its handler's, and may open the engine's stream only then.
    current_admission.set(admission)
    held: list[Any] = []
    async with aclosing(stream):
        async for item in stream:
            held.append(item)
            if admission.started or admission.lora_request is None or len(held) > announcements:
                for earlier in held:
                    yield earlier
                held.clear()
    for earlier in held:
        yield earlier


async def _restarting(
    stream: AsyncGenerator[Any, None], again: Callable[[], Awaitable[Any]], manner: Manner
) -> AsyncGenerator[Any, None]:
    try:
        async with aclosing(stream):
            async for chunk in stream:
                yield chunk
        return
    except LateArrivalSignal:  # raised before the engine's first output, so nothing was yielded
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
    for item in manner.refuse(result):
        yield item


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
    """Wrap every handler that binds a request.

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

    handlers: list[tuple[Any, str, Manner]] = [
        (OpenAIServingChat, "create_chat_completion", ORDINARY),
        (OpenAIServingChatBatch, "create_batch_chat_completion", ORDINARY),
        (OpenAIServingCompletion, "create_completion", ORDINARY),
        (OpenAIServingResponses, "create_responses", RESPONSES),
        (ServingTokens, "serve_tokens", ORDINARY),
        (ServingGenerativeScoring, "create_generative_scoring", ORDINARY),
        (PoolingBaseServing, "__call__", ORDINARY),
    ]
    answered = [(AnthropicServingMessages, "create_messages"), (AnthropicServingMessages, "count_tokens")]
    for owner, name in [*((o, n) for o, n, _ in handlers), *answered]:
        if name not in vars(owner):
            raise SeamError(f"{owner.__name__} has no {name}", target=name)
    for owner, name, manner in handlers:
        if not getattr(getattr(owner, name), "_epochless", False):
            setattr(owner, name, readmitting(getattr(owner, name), manner))
    for owner, name in answered:
        if not getattr(getattr(owner, name), "_epochless", False):
            setattr(owner, name, answer_errors(getattr(owner, name)))
