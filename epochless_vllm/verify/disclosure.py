"""Verifies the disclosure of a single token: its block is in the signed tree, and its draw picked it.

1. The header is the one expected and the final record names it.
2. The signature covers the statement, under the expected key; or the receipt's id is the pinned one.
3. The block is the one its position says: aligned, full unless last, canonical, within the counts.
4. Block and path lead to the root; index and size fix the path's length.
5. The row: vocabulary, interval, draw, revision, as the final record's spans have it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.disclosure import Disclosure, decode_disclosure
from epochless_vllm.protocol.draws import draw_at
from epochless_vllm.protocol.header import Header, reveal_key
from epochless_vllm.protocol.merkle import root_from_path
from epochless_vllm.protocol.receipts import Final, check_rows
from epochless_vllm.protocol.records import BLOCK_TOKENS, FILTERED, Block, decode_block, leaf_of
from epochless_vllm.protocol.spans import check_partition
from epochless_vllm.verify.checker import check_signature
from epochless_vllm.verify.expected import Expected


@dataclass(frozen=True)
class VerifiedToken:
    """One token, verified.

    ``width / 2**32`` is its behaviour probability; ``kept`` is the mass its filters left, in the same units, or None.
    """

    position: int
    token_id: int
    low: int
    width: int
    kept: int | None
    flags: int
    revision: str
    anchor: str
    caveats: tuple[str, ...]
    header: Header = field(repr=False)
    final: Final = field(repr=False)


def verify_disclosure(payload: bytes, position: int, expected: Expected | None = None) -> VerifiedToken:
    """Return the token at an output position, verified from the disclosure of its block.

    Raises:
        ReceiptError: refused; ``fields["threat"]`` is the stable code.
    """
    disclosure = decode_disclosure(payload)
    header, final = disclosure.header, disclosure.final
    expected = (expected or Expected()).resolve(header)
    expected.check_header(header)  # (1)
    if final.header != header.digest:
        raise ReceiptError("the final record belongs to another header", threat="header_mismatch")
    table = [entry.revision for entry in (*header.revisions, *(entry for _, entry in final.added))]
    expected.check_final(header, final, table)  # (2)
    anchor = "none" if expected.receipt_id is None else "receipt_id"
    if expected.public_key is not None:
        check_signature(final, disclosure.signature, expected.public_key)
        anchor = "signature"
    block = _locate(disclosure, position)  # (3)
    leaf = leaf_of(header.digest_bytes, disclosure.body)  # (4)
    if root_from_path(leaf, position // BLOCK_TOKENS, final.blocks, disclosure.path) != final.root:
        raise ReceiptError("block and path do not lead to the signed root", threat="root_mismatch")
    return _read_row(disclosure, block, position, table, anchor, expected)  # (5)


def _locate(disclosure: Disclosure, position: int) -> Block:
    final = disclosure.final
    if final.blocks != -(-final.tokens // BLOCK_TOKENS):
        raise ReceiptError(f"{final.blocks} blocks for {final.tokens} tokens", threat="count_mismatch")
    if not 0 <= position < final.tokens:
        raise ReceiptError(f"no token at position {position}", threat="leaf_index")
    block, consumed = decode_block(disclosure.body)
    if consumed != len(disclosure.body):
        raise ReceiptError("bytes follow the block", threat="trailing_bytes")
    first = position - position % BLOCK_TOKENS
    if (block.first, block.count) != (first, min(BLOCK_TOKENS, final.tokens - first)):
        raise ReceiptError("the block is not the one that holds this position", threat="block_order")
    return block


def _read_row(
    disclosure: Disclosure, block: Block, position: int, table: list[str], anchor: str, expected: Expected
) -> VerifiedToken:
    header, final = disclosure.header, disclosure.final
    row = position - block.first
    low, most, token_id = block.low[row], block.width_less_one[row], block.tokens[row]
    check_rows(block, header, len(table))
    if expected.token_ids is not None and list(expected.token_ids[position : position + 1]) != [token_id]:
        raise ReceiptError("the response has another token at this position", threat="token_swapped")
    key = reveal_key(header, final.seed)
    if key is not None and not low <= draw_at(key, position) <= low + most:
        raise ReceiptError("the draw does not pick the token", threat="draw_outside_interval")
    check_partition(final.sampling, final.tokens, "sampling")
    span = next(span for span in final.sampling if position < span.end)
    runs = [run for run in block.runs for _ in range(run.rows)]
    run = runs[row]
    if run.revision != span.revision or run.sampler != span.sampler:
        raise ReceiptError("the block's revision is not the final record's", threat="sampling_mismatch")
    kept = None
    if run.flags & FILTERED:
        kept = block.kept_less_one[sum(1 for earlier in runs[:row] if earlier.flags & FILTERED)] + 1
    return VerifiedToken(
        position=position,
        token_id=token_id,
        low=low,
        width=most + 1,
        kept=kept,
        flags=run.flags,
        revision=table[run.revision],
        anchor=anchor,
        caveats=expected.caveats(header),
        header=header,
        final=final,
    )
