"""The receipt of one choice: header, blocks of rows, final record, signature.

The header is fixed before the first token and its digest is inside every leaf of the tree; the final record binds
header, tree root, spans and the revealed seed; the signature covers the final record. Promises one canonical form of
each part and the relations inside one part. Does not know the draws (verify/) nor the wire formats (verbose.py,
compact.py, stream.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import add
from typing import Any

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.columns import WORD
from epochless_vllm.protocol.digests import Digest
from epochless_vllm.protocol.envelope import Envelope, Signature, encode_statement, receipt_id_from_statement
from epochless_vllm.protocol.header import MAX_TOKENS, Header
from epochless_vllm.protocol.records import FILTERED, FORCED, Block
from epochless_vllm.protocol.shapes import (
    read_choice,
    read_decimal,
    read_digest,
    read_hex64,
    read_integer,
    read_list,
    read_object,
)
from epochless_vllm.protocol.spans import (
    MAX_REVISIONS,
    KVSpan,
    RevisionEntry,
    SamplingSpan,
    decode_kv_spans,
    decode_sampling_spans,
)

STOP, STOP_STRING, LENGTH, ABORT, REPETITION = "stop", "stop_string", "length", "abort", "repetition"
FINISH_REASONS = (STOP, STOP_STRING, LENGTH, ABORT, REPETITION)


@dataclass(frozen=True)
class Final:
    """What is known after the last token; ``seed`` is an int if seeded, 32 bytes if unseeded, None if nothing is drawn.

    ``added`` lists the table rows that blocks introduced, as (block index, entry). ``kv_rebuilds`` counts how often
    the KV was discarded and computed again.
    """

    tokens: int
    blocks: int
    finish_reason: str
    header: Digest
    root: bytes
    sampling: tuple[SamplingSpan, ...]
    kv: tuple[KVSpan, ...]
    kv_rebuilds: int
    seed: int | bytes | None
    added: tuple[tuple[int, RevisionEntry], ...] = ()

    def encode_json(self) -> dict[str, Any]:
        seed = self.seed
        return {
            "added": [[block, entry.encode()] for block, entry in self.added],
            "blocks": self.blocks,
            "finish_reason": self.finish_reason,
            "header": self.header,
            "kv": [list(span) for span in self.kv],
            "kv_rebuilds": self.kv_rebuilds,
            "root": self.root.hex(),
            "sampling": [list(span) for span in self.sampling],
            "seed": str(seed) if isinstance(seed, int) else seed.hex() if seed is not None else None,
            "tokens": self.tokens,
        }

    @cached_property
    def encoded(self) -> bytes:
        """The final record's canonical bytes."""
        return encode_canonical(self.encode_json())

    @cached_property
    def statement(self) -> bytes:
        """The in-toto statement that the signature covers."""
        return encode_statement(self.encode_json(), self.root)

    @cached_property
    def receipt_id(self) -> Digest:
        return receipt_id_from_statement(self.statement)


@dataclass(frozen=True)
class Receipt:
    """A complete receipt; the same whatever format it came in."""

    header: Header
    blocks: tuple[Block, ...] = field(repr=False)
    final: Final
    signature: Signature

    @property
    def receipt_id(self) -> Digest:
        return self.final.receipt_id

    @property
    def envelope(self) -> Envelope:
        return Envelope(self.final.statement, self.signature)


def check_rows(block: Block, header: Header, revisions: int) -> None:
    """Raise ReceiptError unless every row could have been sampled, under a table of ``revisions`` rows."""
    if max(block.tokens) >= header.vocab_size:
        raise ReceiptError("a token id is outside the vocabulary", threat="token_out_of_vocabulary")
    if max(map(add, block.low, block.width_less_one)) > WORD:
        raise ReceiptError("an interval leaves [0, 2**32)", threat="interval_bounds")
    start = 0
    for run in block.runs:
        if run.revision >= revisions:
            raise ReceiptError(f"revision {run.revision} is outside the table", threat="revision_index")
        if run.sampler >= len(header.samplers):
            raise ReceiptError(f"sampler {run.sampler} is outside the table", threat="sampler_index")
        sampler, end = header.samplers[run.sampler], start + run.rows
        if not run.flags & FORCED and bool(run.flags & FILTERED) != sampler.filtered:
            raise ReceiptError("rows carry a kept mass if and only if their sampler filters", threat="filter_flag")
        if sampler.greedy or run.flags & FORCED:
            rows = zip(block.low[start:end], block.width_less_one[start:end], strict=True)
            if any(row != (0, WORD) for row in rows):
                raise ReceiptError("a greedy or forced token has probability one", threat="greedy_width")
        start = end


def decode_final(value: Any) -> Final:
    """Return the final record of a JSON value.

    Raises:
        ReceiptError: a field is missing, unknown or malformed.
    """
    fields = read_object(value, _FINAL_KEYS, "final")
    added = []
    for item in read_list(fields["added"], "added", at_most=MAX_REVISIONS):
        block, entry = read_list(item, "added", exactly=2)
        added.append((read_integer(block, "added"), RevisionEntry.decode(entry)))
    return Final(
        tokens=read_integer(fields["tokens"], "tokens", maximum=MAX_TOKENS),
        blocks=read_integer(fields["blocks"], "blocks", maximum=MAX_TOKENS),
        finish_reason=read_choice(fields["finish_reason"], "finish_reason", FINISH_REASONS),
        header=read_digest(fields["header"], "final.header"),
        root=read_hex64(fields["root"], "root"),
        sampling=decode_sampling_spans(fields["sampling"]),
        kv=decode_kv_spans(fields["kv"]),
        kv_rebuilds=read_integer(fields["kv_rebuilds"], "kv_rebuilds"),
        seed=_seed(fields["seed"]),
        added=tuple(added),
    )


_FINAL_KEYS = (
    "added", "blocks", "finish_reason", "header", "kv", "kv_rebuilds", "root", "sampling", "seed", "tokens",
)  # fmt: skip


def _seed(value: Any) -> int | bytes | None:
    if value is None:
        return None
    if isinstance(value, str) and len(value) == 64:
        return read_hex64(value, "seed")
    return read_decimal(value, "seed", minimum=-(1 << 63), maximum=(1 << 63) - 1)
