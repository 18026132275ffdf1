"""Whole sequences on the reference engine: greedy continuation, and recomputation under a recorded mixture.

A position may have been sampled under one adapter while the cache holds its keys and values under another; both are
given per position and reproduced exactly. Knows adapters, not the names or receipts that say which they were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.errors import ReplayError
from epochless_vllm.reference.forward import Adapters, Engine
from epochless_vllm.reference.lora import Adapter

Array = NDArray[np.float32]


def generate_greedy(
    engine: Engine,
    prompt: Sequence[int],
    count: int,
    *,
    adapter: Adapter | None = None,
    stop: Collection[int] = (),
) -> list[int]:
    """Return up to ``count`` tokens, each the most likely after those before; the lowest id wins a tie.

    The engine starts over; its last position is then that of the last token but one.

    Args:
        stop: tokens that end the text; the one that did is the last returned.

    Raises:
        ReplayError: an empty prompt, or what ``Engine.prefill`` refuses.
    """
    if not prompt:
        raise ReplayError("an empty prompt has no next token; begin with the model's own first token")
    engine.rewind(0)
    logits: Array | None = None
    for _, logits_ZV in engine.prefill(prompt, adapter, logits_from=len(prompt) - 1):
        logits = logits_ZV[-1]
    tokens: list[int] = []
    while logits is not None and len(tokens) < count:
        tokens.append(int(np.argmax(logits)))
        if tokens[-1] in stop or len(tokens) == count:
            break
        logits = engine.step(tokens[-1], adapter)
    return tokens


def replay_mixture(
    engine: Engine, tokens: Sequence[int], cached: Adapters, sampled: Adapters, *, logits_from: int = 0
) -> Iterator[tuple[int, Array]]:
    """Extend a sequence by positions whose cache and logits may come from different adapters.

    Args:
        cached: per token, the adapter under which the cache holds its keys and values.
        sampled: per token, the adapter under which its logits were computed, over the cache as it then was.
        logits_from: as for ``Engine.prefill``.

    Yields:
        (position, logits) as ``Engine.prefill`` does.

    Raises:
        ReplayError: the three differ in length, or what ``Engine.prefill`` refuses.
    """
    if not len(tokens) == len(cached) == len(sampled):
        raise ReplayError("a mixture needs one cached and one sampled adapter for each token")
    differing = [at for at in range(len(tokens)) if cached[at] is not sampled[at]]
    begin = 0
    for at in [*differing, len(tokens)]:
        yield from engine.prefill(tokens[begin:at], cached[begin:at], logits_from=logits_from)
        if at < len(tokens):
            yield from _replay_differing(engine, tokens[at], cached[at], sampled[at], logits_from)
        begin = at + 1


def _replay_differing(
    engine: Engine, token: int, cached: Adapter | None, sampled: Adapter | None, logits_from: int
) -> Iterator[tuple[int, Array]]:
    position = engine.length
    if position < logits_from:
        engine.extend([token], cached)
        return
    logits = engine.step(token, sampled)
    engine.rewind(position)
    engine.extend([token], cached)  # writes no logits, so those of the step stay
    yield position, logits[None]
