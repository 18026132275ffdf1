"""Token records in blocks of 64: what was emitted, by which revision, with which probability.

A row is (token id, low, width, flags, kept): the token occupies ``[low, low + width)`` of the 2**32 units of
probability, so its behaviour probability is exactly ``width / 2**32``; ``kept`` is the mass that top-k, top-p and
min-p left of the row, in the same units, present where the FILTERED flag is set. Rows of equal (revision, sampler,
flags) form runs. Promises one encoding per block, as bytes (the leaf of the receipt's tree) and as JSON. Knows no
draws and no files.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.columns import WORD, Cursor, column, decode_column, encode_column
from epochless_vllm.protocol.shapes import read_integer, read_list, read_object
from epochless_vllm.protocol.spans import MAX_ENTRY_BYTES, RevisionEntry, SamplingSpan

BLOCK_TOKENS = 64
ONE = 1 << 32  # the whole probability mass

FILTERED = 1  # top-k, top-p or min-p was applied; the row carries its kept mass
MASKED = 2  # a grammar or a list of allowed tokens restricted the row
FORCED = 4  # the token was imposed, not sampled: width is ONE and no draw was consumed
ALL_FLAGS = FILTERED | MASKED | FORCED

_HEAD = struct.Struct(">QI")  # position of the first token, count
_LENGTH = struct.Struct(">I")
_RUN = struct.Struct(">IIII")


class Run(NamedTuple):
    """``rows`` consecutive rows of one revision, one sampler and equal flags."""

    rows: int
    revision: int
    sampler: int
    flags: int


@dataclass(frozen=True)
class Block:
    """Up to 64 rows from output position ``first``; ``revisions`` joined the table in this block.

    ``width_less_one`` holds ``width - 1`` and ``kept_less_one`` holds ``kept - 1`` of the FILTERED rows in order: both
    quantities run from 1 to 2**32.
    """

    first: int
    tokens: array[int]
    low: array[int]
    width_less_one: array[int]
    kept_less_one: array[int]
    runs: tuple[Run, ...]
    revisions: tuple[RevisionEntry, ...] = ()

    @property
    def count(self) -> int:
        return len(self.tokens)

    def encode(self) -> bytes:
        """Return the block's bytes, the data of its leaf after the header digest."""
        parts = [_HEAD.pack(self.first, self.count), _LENGTH.pack(len(self.revisions))]
        for entry in self.revisions:
            text = entry.encode_bytes()
            parts += (_LENGTH.pack(len(text)), text)
        parts.append(_LENGTH.pack(len(self.runs)))
        parts += [_RUN.pack(*run) for run in self.runs]
        parts += [encode_column(self.tokens), encode_column(self.low), encode_column(self.width_less_one)]
        parts.append(encode_column(self.kept_less_one))
        return b"".join(parts)

    def encode_json(self) -> dict[str, Any]:
        """Return the block as a JSON value; widths and kept masses are given whole."""
        return {
            "first": self.first,
            "kept": [value + 1 for value in self.kept_less_one],
            "low": self.low.tolist(),
            "revisions": [entry.encode() for entry in self.revisions],
            "runs": [list(run) for run in self.runs],
            "tokens": self.tokens.tolist(),
            "width": [value + 1 for value in self.width_less_one],
        }


def leaf_data(header_digest: bytes, body: bytes) -> bytes:
    """Return what the leaf hash of a block is taken over; ``header_digest`` is 32 bytes."""
    return b"epochless/v1/block\0" + header_digest + body


def leaf_of(header_digest: bytes, body: bytes) -> bytes:
    """Return the leaf hash of a block's bytes."""
    return hashlib.sha256(b"\x00epochless/v1/block\0" + header_digest + body).digest()


def decode_block(payload: bytes | memoryview) -> tuple[Block, int]:
    """Return (block, bytes consumed) of encoded block bytes at the head of ``payload``.

    Raises:
        ReceiptError: the bytes end early or a value has no meaning.
    """
    cursor = Cursor(payload)
    first, count = _HEAD.unpack(cursor.take(_HEAD.size))
    if not 1 <= count <= BLOCK_TOKENS:
        raise ReceiptError(f"a block of {count} tokens", threat="block_size")
    entries = []
    for _ in range(cursor.length(BLOCK_TOKENS)):
        entries.append(RevisionEntry.decode_bytes(bytes(cursor.take(cursor.length(MAX_ENTRY_BYTES)))))
    runs = tuple(Run(*_RUN.unpack(cursor.take(_RUN.size))) for _ in range(cursor.length(count)))
    check_runs(runs, count)
    tokens, low, width_less_one = (decode_column(cursor.take(4 * count)) for _ in range(3))
    kept = decode_column(cursor.take(4 * filtered_rows(runs)))
    return Block(first, tokens, low, width_less_one, kept, runs, tuple(entries)), cursor.position


def decode_block_json(value: Any) -> Block:
    """Return the block of a JSON value.

    Raises:
        ReceiptError: a field is missing, unknown, of another type or out of range.
    """
    fields = read_object(value, ("first", "kept", "low", "revisions", "runs", "tokens", "width"), "block")
    tokens = column(_integers(fields["tokens"], "tokens", "token_out_of_vocabulary", 0, WORD))
    if not 1 <= len(tokens) <= BLOCK_TOKENS:
        raise ReceiptError(f"a block of {len(tokens)} tokens", threat="block_size")
    runs = tuple(
        Run(*(read_integer(item, "run", maximum=WORD) for item in read_list(run, "run", exactly=4)))
        for run in read_list(fields["runs"], "runs", at_most=BLOCK_TOKENS)
    )
    check_runs(runs, len(tokens))
    low = column(_integers(fields["low"], "low", "interval_bounds", 0, WORD))
    width = _integers(fields["width"], "width", "probability_above_one", 0, ONE)
    if 0 in width:
        raise ReceiptError("an emitted token of probability zero", threat="probability_zero")
    kept = _integers(fields["kept"], "kept", "kept_mass", 1, ONE)
    if not len(low) == len(width) == len(tokens) or len(kept) != filtered_rows(runs):
        raise ReceiptError("columns of a block differ in length", threat="column_lengths")
    revisions = tuple(RevisionEntry.decode(entry) for entry in read_list(fields["revisions"], "revisions", at_most=64))
    first = read_integer(fields["first"], "first")
    width_less_one = column([value - 1 for value in width])
    return Block(first, tokens, low, width_less_one, column([value - 1 for value in kept]), runs, revisions)


def check_runs(runs: Sequence[Run], count: int) -> None:
    """Raise ReceiptError unless runs are non-empty, merged, known in their flags and cover ``count`` rows."""
    total, previous = 0, None
    for run in runs:
        if run.rows == 0:
            raise ReceiptError("an empty run", threat="span_empty")
        if run[1:] == previous:
            raise ReceiptError("adjacent equal runs are one run", threat="span_not_merged")
        if run.flags & ~ALL_FLAGS or (run.flags & FORCED and run.flags & FILTERED):
            raise ReceiptError(f"flags {run.flags} have no meaning", threat="flags")
        total, previous = total + run.rows, run[1:]
    if total != count:
        raise ReceiptError(f"runs cover {total} of {count} rows", threat="span_total")


def filtered_rows(runs: Sequence[Run]) -> int:
    """Return how many rows carry a kept mass."""
    return sum(run.rows for run in runs if run.flags & FILTERED)


def extend_spans(spans: list[SamplingSpan], first: int, runs: Sequence[Run]) -> None:
    """Add the runs of the block at ``first`` to sampling spans, merging in place."""
    for run in runs:
        end = first + run.rows
        if spans and spans[-1][2:] == (run.revision, run.sampler):
            spans[-1] = spans[-1]._replace(end=end)
        else:
            spans.append(SamplingSpan(first, end, run.revision, run.sampler))
        first = end


def _integers(value: Any, name: str, threat: str, minimum: int, maximum: int) -> list[int]:
    items = read_list(value, name, at_most=BLOCK_TOKENS)
    for item in items:
        if type(item) is not int:  # True is an int to isinstance
            raise ReceiptError(f"{name}: not an integer", threat="not_integer")
        if not minimum <= item <= maximum:
            raise ReceiptError(f"{name}: {item} is outside [{minimum}, {maximum}]", threat=threat)
    return items
