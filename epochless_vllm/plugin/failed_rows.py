"""Seam: a row from which no token can be drawn ends its request, and no other.

vLLM samples token 0 from logits that are not finite and goes on. Here the rank marks the row; before the scheduler sees
the step's tokens its request is finished with the reason, and its blocks, whose values may be no better, leave the
prefix cache. Dies when upstream fails a request whose logits are not finite.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np

from epochless_vllm.errors import SamplingFailedError, SeamError
from epochless_vllm.plugin.activation import FAILED as FAILED_REQUESTS
from epochless_vllm.plugin.logs import logger
from epochless_vllm.plugin.token_rows import FAILED, FLAGS

REASON = (
    "sampling failed: the logits of this token are not finite, or every token was masked; look for NaN or infinities "
    "in the adapter's weights, and for constraints that exclude each other"
)


def guard_sampling(core: Any) -> None:
    """Make an engine core finish the requests of failed rows before it takes in a step's tokens."""
    sample = core.model_executor.sample_tokens

    def sample_tokens(*arguments: Any, **keywords: Any) -> Any:
        output = sample(*arguments, **keywords)
        rows = output.token_attest  # asynchronous scheduling, which would give a future, is refused
        if rows is not None:
            failed = np.flatnonzero(rows[:, 0, FLAGS] & FAILED)
            if failed.size:
                fail_requests(core, [output.req_ids[i] for i in failed if output.sampled_token_ids[i]])
        return output

    core.model_executor.sample_tokens = sample_tokens


def fail_requests(core: Any, request_ids: list[str]) -> None:
    """Finish requests with an error, and take their blocks out of the prefix cache."""
    from vllm.v1.request import RequestStatus

    scheduler = core.scheduler
    lost = [scheduler.requests[i] for i in request_ids if i in scheduler.requests]
    for request in lost:
        logger.error("request %s: %s", request.request_id, REASON)
        blocks = {block for group in scheduler.kv_cache_manager.get_block_ids(request.request_id) for block in group}
        scheduler.kv_cache_manager.evict_blocks(blocks)
        getattr(core, FAILED_REQUESTS).append((request.request_id, request.client_index, REASON))
    scheduler.finish_requests([request.request_id for request in lost], RequestStatus.FINISHED_ERROR)


async def raise_failures(stream: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield an engine's outputs until a choice ends for want of a token.

    Raises:
        SamplingFailedError: it does.
    """
    async with aclosing(stream):
        async for output in stream:
            for choice in output.outputs:
                if choice.finish_reason == "error" and choice.stop_reason == REASON:
                    raise SamplingFailedError(REASON, choice=choice.index)
            yield output


def install() -> None:
    """Wrap ``AsyncLLM.generate``, whose callers know an error only as internal.

    Raises:
        SeamError: the target is missing.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    original = vars(AsyncLLM).get("generate")
    if original is None:
        raise SeamError("AsyncLLM has no generate", target="AsyncLLM.generate")
    if getattr(original, "_epochless_failures", False):
        return

    @functools.wraps(original)
    def generate(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return raise_failures(original(self, *arguments, **keywords))

    generate._epochless_failures = True  # type: ignore[attr-defined]  # the mark of an installed seam
    AsyncLLM.generate = generate
