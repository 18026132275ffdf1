"""Which revision wrote what: the revision table, sampling spans over output tokens, KV spans over positions.

Sampling span: tokens ``[start, end)`` were sampled by one revision under one sampler. KV span: the keys and values
of positions ``[start, end)``, prompt first, that the last token was sampled from were computed by one revision. A
sequence of P prompt tokens and G output tokens has P + G - 1 such positions: the last token's are never computed.
Promises one encoding per history: spans are contiguous, non-empty and merged, and every table entry is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from epochless_vllm.errors import InvalidRequestError, ReceiptError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.names import MAX_STEP, parse_policy
from epochless_vllm.protocol.shapes import decode_json, read_digest, read_integer, read_list, read_object

MAX_SPANS = 1 << 16  # one per publication a response can outlive; bounds the final record
MAX_REVISIONS = 1 << 12
MAX_ENTRY_BYTES = 1024  # of one table row's canonical JSON
BASE_PREFIX = "base:"

PIN, RECOMPUTE, CONTINUE = "pin", "recompute", "continue"


@dataclass(frozen=True)
class RevisionEntry:
    """One row of the revision table: an adapter revision as published, or ``base:<digest>`` with no policy."""

    revision: str
    policy: str | None
    step: int | None

    def encode(self) -> dict[str, Any]:
        return {"policy": self.policy, "revision": self.revision, "step": self.step}

    def encode_bytes(self) -> bytes:
        return encode_canonical(self.encode())

    @classmethod
    def decode_bytes(cls, payload: bytes) -> RevisionEntry:
        """Return the entry of canonical JSON bytes; ReceiptError otherwise."""
        return cls.decode(decode_json(payload, max_bytes=MAX_ENTRY_BYTES))

    @classmethod
    def decode(cls, value: Any) -> RevisionEntry:
        """Return the entry of a JSON value; ReceiptError otherwise."""
        fields = read_object(value, ("policy", "revision", "step"), "revision entry")
        revision, policy, step = fields["revision"], fields["policy"], fields["step"]
        if isinstance(revision, str) and revision.startswith(BASE_PREFIX):
            read_digest(revision[len(BASE_PREFIX) :], "revision")
            if policy is not None or step is not None:
                raise ReceiptError("the base model has no policy and no step", threat="table_entry")
            return cls(revision, None, None)
        read_digest(revision, "revision")
        try:
            parse_policy(policy)
        except InvalidRequestError as error:
            raise ReceiptError(error.message, threat="text_form") from error
        return cls(revision, policy, read_integer(step, "step", maximum=MAX_STEP))


class SamplingSpan(NamedTuple):
    """Output tokens ``[start, end)`` and the table indices of their revision and sampler."""

    start: int
    end: int
    revision: int
    sampler: int


class KVSpan(NamedTuple):
    """Sequence positions ``[start, end)`` and the table index of the revision that computed their KV."""

    start: int
    end: int
    revision: int


def decode_sampling_spans(value: Any) -> tuple[SamplingSpan, ...]:
    """Return sampling spans of a JSON array of quadruples; ReceiptError otherwise."""
    return tuple(SamplingSpan(*_quad(item, "sampling span", 4)) for item in _rows(value, "sampling"))


def decode_kv_spans(value: Any) -> tuple[KVSpan, ...]:
    """Return KV spans of a JSON array of triples; ReceiptError otherwise."""
    return tuple(KVSpan(*_quad(item, "kv span", 3)) for item in _rows(value, "kv"))


def check_partition(spans: Sequence[SamplingSpan | KVSpan], total: int, kind: str) -> None:
    """Raise ReceiptError unless spans cover ``[0, total)`` once, in order, non-empty and merged."""
    position = 0
    for number, span in enumerate(spans):
        if span.end <= span.start:
            raise ReceiptError(f"{kind} span {number} is empty", threat=f"{kind}_empty")
        if span.start > position:
            raise ReceiptError(f"{kind} spans leave a gap at {position}", threat=f"{kind}_gap")
        if span.start < position:
            raise ReceiptError(f"{kind} spans overlap at {span.start}", threat=f"{kind}_overlap")
        if number and spans[number - 1][2:] == span[2:]:
            raise ReceiptError(f"{kind} spans {number - 1} and {number} are one span", threat=f"{kind}_not_merged")
        position = span.end
    if position != total:
        raise ReceiptError(f"{kind} spans end at {position}, not {total}", threat=f"{kind}_total")


def kv_positions(prompt_length: int, tokens: int) -> int:
    """Return how many positions' KV the tokens were sampled from."""
    return prompt_length + tokens - 1 if tokens else 0


def check_kv(
    kv: Sequence[KVSpan], sampling: Sequence[SamplingSpan], *, prompt_length: int, mode: str, rebuilds: int
) -> None:
    """Raise ReceiptError unless the KV could have come about beside these sampling spans.

    pin: one revision samples and computes everything. recompute: all KV is the last revision's. continue: the KV of
    an output token is computed in the step that samples the next token, by that step's revision; only a KV rebuilt
    after preemption may carry a later revision that was still sampling at or after that step.
    """
    samplers = merge((span.start, span.end, span.revision) for span in sampling)
    if mode == PIN and len(samplers) > 1:
        raise ReceiptError("a pinned request changed its revision", threat="revision_moved")
    if mode in (PIN, RECOMPUTE):
        if samplers and any(span.revision != samplers[-1].revision for span in kv):
            raise ReceiptError(f"{mode}: KV of a revision that did not sample the last token", threat="kv_not_active")
        return
    offset = prompt_length - 1  # the step that samples token j computes position offset + j
    if rebuilds:
        last = {span.revision: span.end - 1 for span in samplers}
        if any(span.end > offset and last.get(span.revision, -1) < span.end - 1 - offset for span in kv):
            raise ReceiptError("KV of a revision that had stopped sampling by then", threat="kv_not_active")
        return
    tail = merge((max(span.start - offset, 0), span.end - offset, span.revision) for span in kv if span.end > offset)
    if tail != samplers:
        raise ReceiptError("KV of a revision that was not sampling at that position", threat="kv_not_active")


def check_table_use(count: int, used: Iterable[int], kind: str) -> None:
    """Raise ReceiptError unless indices stay inside a table of ``count`` and leave none but the first unused."""
    indices = set(used)
    if indices and max(indices) >= count:
        raise ReceiptError(f"{kind} {max(indices)} is outside a table of {count}", threat=f"{kind}_index")
    if unused := set(range(1, count)) - indices:
        raise ReceiptError(f"{kind} {min(unused)} of the table is never used", threat="table_unused")


def merge(pieces: Iterable[tuple[int, int, int]]) -> list[KVSpan]:
    """Return (start, end, revision) pieces with adjacent pieces of one revision joined."""
    merged: list[KVSpan] = []
    for start, end, revision in pieces:
        if merged and merged[-1].revision == revision:
            start = merged.pop().start
        merged.append(KVSpan(start, end, revision))
    return merged


def _rows(value: Any, name: str) -> list[Any]:
    return read_list(value, name, at_most=MAX_SPANS)


def _quad(value: Any, name: str, size: int) -> list[int]:
    return [read_integer(item, name) for item in read_list(value, name, exactly=size)]
