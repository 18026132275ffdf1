"""The compact format: what a verifier cannot recompute, and nothing else.

Layout: magic, length-prefixed header and final record (canonical JSON), key id and signature, flag runs, then per
block the token ids, the widths, the kept masses of filtered rows and the packed offsets. Digests, the tree, block
boundaries, runs, the statement and the envelope are recomputed; draws come from the revealed seed, so a row's offset
needs only the bits its draw and width leave open. Rows that are not drawn (greedy, forced) take no bytes but their
ids. Expands to the verbose bytes exactly; a receipt with a draw outside its interval has no compact form.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.columns import (
    WORD,
    Cursor,
    column,
    decode_column,
    decode_ids,
    encode_column,
    encode_ids,
    id_width,
    pack_offsets,
    unpack_offsets,
)
from epochless_vllm.protocol.digests import bytes_from_digest, digest_from_bytes
from epochless_vllm.protocol.draw_window import DrawWindow
from epochless_vllm.protocol.envelope import SIGNATURE_BYTES, Signature
from epochless_vllm.protocol.header import Header, decode_header, reveal_key
from epochless_vllm.protocol.receipts import Final, Receipt, check_rows, decode_final
from epochless_vllm.protocol.records import BLOCK_TOKENS, FORCED, Block, Run, check_runs, extend_spans, filtered_rows
from epochless_vllm.protocol.shapes import decode_json
from epochless_vllm.protocol.spans import RevisionEntry, SamplingSpan, check_partition

MAGIC = b"EPc1"
_LENGTH = struct.Struct(">I")
_FLAGS = struct.Struct(">QB")
MAX_FLAG_RUNS = 1 << 26  # each costs 9 bytes on the wire, so the bytes bound them first
_MAX_PART = 8 << 20  # bytes of a header or a final record; a final of 65,536 spans of each kind fits


class Opened(NamedTuple):
    """A receipt whose blocks are decoded as they are read."""

    header: Header
    final: Final
    signature: Signature
    blocks: Iterator[Block]


class _Piece(NamedTuple):
    """Rows up to ``end`` share revision, sampler and flags."""

    end: int
    revision: int
    sampler: int
    flags: int


def encode_compact(receipt: Receipt) -> bytes:
    """Return the compact bytes of a receipt.

    Raises:
        ReceiptError: a row could not have been drawn, the seed is missing, or blocks and final record disagree.
    """
    header, final = receipt.header, receipt.final
    _check_agreement(receipt)
    window = _window(header, final)
    parts = [MAGIC]
    for text in (header.encoded, final.encoded):
        parts += (_LENGTH.pack(len(text)), text)
    parts += (bytes_from_digest(receipt.signature.keyid), receipt.signature.signature)
    flags = _flag_runs(receipt.blocks)
    parts.append(_LENGTH.pack(len(flags)))
    parts += [_FLAGS.pack(end, mark) for end, mark in flags]
    width = id_width(header.vocab_size)
    for block in receipt.blocks:
        drawn = drawn_rows(block.runs, header)
        widths = column(compress(block.width_less_one, drawn))
        parts += (encode_ids(block.tokens, width), encode_column(widths), encode_column(block.kept_less_one))
        if window is not None:
            draws = compress(window.read(block.first, block.count), drawn)
            parts.append(pack_offsets(list(compress(block.low, drawn)), widths, list(draws)))
    return b"".join(parts)


def open_compact(payload: bytes) -> Opened:
    """Return the header, final record and signature of compact bytes, and an iterator over the blocks.

    A block that is read has every draw inside its row's interval: the packed form cannot say otherwise.

    Raises:
        ReceiptError: the bytes are malformed; while iterating, also that they end early or late.
    """
    if payload[:4] != MAGIC:
        raise ReceiptError("not a compact receipt", threat="format")
    cursor = Cursor(payload, 4)
    header = decode_header(decode_json(bytes(cursor.take(cursor.length(_MAX_PART)))))
    final = decode_final(decode_json(bytes(cursor.take(cursor.length(_MAX_PART)))))
    signature = Signature(digest_from_bytes(bytes(cursor.take(32))), bytes(cursor.take(SIGNATURE_BYTES)))
    return Opened(header, final, signature, _decode_blocks(cursor, header, final))


def decode_compact(payload: bytes) -> Receipt:
    """Return the whole receipt of compact bytes; ReceiptError if they are malformed."""
    opened = open_compact(payload)
    return Receipt(opened.header, tuple(opened.blocks), opened.final, opened.signature)


def drawn_rows(runs: Sequence[Run], header: Header) -> list[bool]:
    """Return for each row whether a draw picked it: not greedy and not forced."""
    rows: list[bool] = []
    for run in runs:
        if run.sampler >= len(header.samplers):
            raise ReceiptError(f"sampler {run.sampler} is outside the table", threat="sampler_index")
        rows += [not (run.flags & FORCED or header.samplers[run.sampler].greedy)] * run.rows
    return rows


def _check_agreement(receipt: Receipt) -> None:
    """Raise ReceiptError where the blocks say what the compact form takes from the final record."""
    final, spans, position = receipt.final, list[SamplingSpan](), 0
    added = []
    for number, block in enumerate(receipt.blocks):
        if block.first != position or block.count != min(BLOCK_TOKENS, final.tokens - position):
            raise ReceiptError(f"a block at {block.first} where {position} was due", threat="block_order")
        position += block.count
        added += [(number, entry) for entry in block.revisions]
        check_rows(block, receipt.header, len(receipt.header.revisions) + len(added))
        extend_spans(spans, block.first, block.runs)
    if (position, len(receipt.blocks)) != (final.tokens, final.blocks):
        raise ReceiptError("the final record counts other tokens or blocks", threat="count_mismatch")
    if tuple(spans) != final.sampling or tuple(added) != final.added:
        raise ReceiptError("the final record's spans or table rows are not the blocks'", threat="sampling_mismatch")


def _decode_blocks(cursor: Cursor, header: Header, final: Final) -> Iterator[Block]:
    check_partition(final.sampling, final.tokens, "sampling")
    if final.blocks != -(-final.tokens // BLOCK_TOKENS):
        raise ReceiptError(f"{final.blocks} blocks for {final.tokens} tokens", threat="count_mismatch")
    pieces = _pieces(final, cursor)
    added: dict[int, list[RevisionEntry]] = {}
    for number, entry in final.added:
        added.setdefault(number, []).append(entry)
    window = _window(header, final)
    id_bytes = id_width(header.vocab_size)
    for number in range(final.blocks):
        first = number * BLOCK_TOKENS
        count = min(BLOCK_TOKENS, final.tokens - first)
        runs = _cut(pieces, first, count)
        tokens = decode_ids(cursor.take(count * id_bytes), id_bytes)
        drawn = drawn_rows(runs, header)
        widths = decode_column(cursor.take(4 * sum(drawn)))
        kept = decode_column(cursor.take(4 * filtered_rows(runs)))
        low = column()
        if window is not None:
            draws = window.read(first, count)
            if len(widths) < count:
                draws = list(compress(draws, drawn))
            low, consumed = unpack_offsets(cursor.payload[cursor.position :], widths, draws)
            cursor.take(consumed)
        if len(widths) < count:
            low, widths = _spread(low, drawn, 0), _spread(widths, drawn, WORD)
        yield Block(first, tokens, low, widths, kept, runs, tuple(added.get(number, ())))
    if cursor.position != len(cursor.payload):
        raise ReceiptError("bytes follow the last block", threat="trailing_bytes")


def _window(header: Header, final: Final) -> DrawWindow | None:
    key = reveal_key(header, final.seed)
    return DrawWindow(key, final.tokens) if key is not None else None


def _flag_runs(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    end = 0
    for block in blocks:
        for run in block.runs:
            end += run.rows
            if runs and runs[-1][1] == run.flags:
                runs.pop()
            runs.append((end, run.flags))
    return runs


def _pieces(final: Final, cursor: Cursor) -> list[_Piece]:
    """Return flag runs and sampling spans cut against each other, last piece first."""
    pieces: list[_Piece] = []
    spans = iter(final.sampling)
    span, position, previous = next(spans, None), 0, None
    for _ in range(cursor.length(MAX_FLAG_RUNS)):
        end, mark = _FLAGS.unpack(cursor.take(_FLAGS.size))
        if end <= position or end > final.tokens:
            raise ReceiptError("flag runs do not ascend within the tokens", threat="flag_runs")
        if mark == previous:
            raise ReceiptError("adjacent equal flag runs are one run", threat="flag_runs")
        previous = mark
        while span is not None and position < end:
            position = min(end, span.end)
            pieces.append(_Piece(position, span.revision, span.sampler, mark))
            if position == span.end:
                span = next(spans, None)
    if position != final.tokens:
        raise ReceiptError("flag runs do not cover the tokens", threat="flag_runs")
    pieces.reverse()
    return pieces


def _cut(pieces: list[_Piece], start: int, count: int) -> tuple[Run, ...]:
    """Return the runs of ``count`` rows from ``start`` and drop the pieces that end there."""
    runs, end = [], start + count
    while start < end:
        piece = pieces[-1]
        stop = min(piece.end, end)
        runs.append(Run(stop - start, piece.revision, piece.sampler, piece.flags))
        start = stop
        if stop == piece.end:
            pieces.pop()
    check_runs(runs, count)
    return tuple(runs)


def _spread(values: array[int], drawn: Sequence[bool], rest: int) -> array[int]:
    """Return a column with ``values`` in the drawn rows and ``rest`` in the others."""
    remaining = iter(values)
    return column([next(remaining) if is_drawn else rest for is_drawn in drawn])
