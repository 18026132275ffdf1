"""Under which revision each position is to be computed again, from a receipt's sampling and KV spans.

A pass computes the sequence once and covers the tokens whose logits saw the KV as that pass has it. Pinned requests
take one pass. Where a move to another revision discarded the KV (recompute), every revision's tokens take a pass of
their own over KV that is all that revision's. Where the KV was kept (continue), one pass takes each position's KV from
the revision that the receipt names. Knows no weights and no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epochless_vllm.protocol.receipts import Final
from epochless_vllm.protocol.spans import CONTINUE, RECOMPUTE, KVSpan, SamplingSpan, merge

REBUILT = "rebuilt_kv"
"""Why a token cannot be replayed: its KV was rebuilt among revisions, and the receipt does not say when."""


@dataclass(frozen=True)
class Pass:
    """Tokens ``[start, end)`` were sampled over KV that these spans of sequence positions describe."""

    start: int
    end: int
    kv: tuple[KVSpan, ...]


def passes_of(final: Final, *, prompt_length: int, mode: str) -> tuple[Pass, ...]:
    """Return the passes of a verified final record, in order of their tokens.

    Tokens of no pass cannot be replayed; the reason is REBUILT.
    """
    tokens = final.tokens
    if not tokens:
        return ()
    runs = merge((span.start, span.end, span.revision) for span in final.sampling)
    if mode == RECOMPUTE:
        return tuple(Pass(run.start, run.end, (KVSpan(0, prompt_length + run.end - 1, run.revision),)) for run in runs)
    several = len(runs) > 1 or len(final.kv) > 1
    if mode == CONTINUE and final.kv_rebuilds and several:
        # The spans tell the KV as the last token saw it; those before it may have seen another.
        return (Pass(tokens - 1, tokens, final.kv),)
    return (Pass(0, tokens, final.kv),)


def revision_at(spans: Sequence[KVSpan | SamplingSpan], total: int) -> list[int]:
    """Return the revision of each of ``total`` positions or tokens; spans may go on beyond them."""
    revisions: list[int] = []
    for span in spans:
        revisions += [span.revision] * (min(span.end, total) - len(revisions))
    return revisions
