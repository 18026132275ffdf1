"""The checks every format shares: one header, blocks in order, one final record.

Verification is this list, in this order; the code below carries its numbers.

1. The header is well-formed and is the one expected (nonce, request, prompt, base, sampler).
2. Blocks follow each other without gap, all full but the last.
3. Every row has a token of the vocabulary and an interval inside [0, 2**32); greedy and forced rows have it whole;
   flags agree with the sampler; runs name rows of the tables.
4. The tokens are those of the response; nothing follows a stop token.
5. Every draw lies in its row's interval.
6. Each block, with the header digest, is a leaf; the root over the leaves is the final record's.
7. The final record agrees with header and blocks: counts, sampling spans, KV, tables, finish, seed.
8. The draws are those of the revealed seed.
9. The signature covers the statement made of that final record, under the expected key.

Memory is one block, one window of draws and the spans. No floating point.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.columns import column, encode_column
from epochless_vllm.protocol.draw_window import DrawWindow
from epochless_vllm.protocol.draws import DrawKey
from epochless_vllm.protocol.envelope import PAYLOAD_TYPE, Signature, key_id, pre_authentication_encoding
from epochless_vllm.protocol.header import Header, check_entry, reveal_key
from epochless_vllm.protocol.merkle import Frontier
from epochless_vllm.protocol.receipts import ABORT, LENGTH, STOP, Final, check_rows
from epochless_vllm.protocol.records import BLOCK_TOKENS, Block, extend_spans, leaf_of
from epochless_vllm.protocol.spans import (
    MAX_SPANS,
    RevisionEntry,
    SamplingSpan,
    check_kv,
    check_partition,
    check_table_use,
    kv_positions,
)
from epochless_vllm.verify.diagnosis import explain_draws
from epochless_vllm.verify.ed25519 import verify_ed25519
from epochless_vllm.verify.expected import Expected, compare_tokens
from epochless_vllm.verify.response import compare_logprobs
from epochless_vllm.verify.verified import Verdict, VerifiedReceipt


class ReceiptChecker:
    """Checks one receipt, part by part; a method raises ReceiptError at the first claim that does not hold."""

    def __init__(self, header: Header, expected: Expected, *, keep_blocks: bool = False) -> None:
        expected = expected.resolve(header)
        expected.check_header(header)  # (1)
        self.header = header
        self.tokens = 0
        self._expected = expected
        self._frontier = Frontier()
        self._table: list[RevisionEntry] = list(header.revisions)
        self._names = {entry.revision for entry in self._table}
        self._added: list[tuple[int, RevisionEntry]] = []
        self._spans: list[SamplingSpan] = []
        self._stops = frozenset(header.stop_token_ids)
        self._stopped_at: int | None = None
        self._short = False
        self._kept: list[Block] | None = [] if keep_blocks else None
        self._draws_digest = hashlib.sha256()
        self._first_draws: array[int] | None = None

    def add_block(self, block: Block, *, body: bytes | None = None, draws: array[int] | None = None) -> None:
        """Check the next block.

        Args:
            body: the block's bytes, where the format carried them.
            draws: the rows' draws as the stream claims them; compared with the seed's in ``finish``.
        """
        if block.first != self.tokens or self._short:  # (2)
            threat = "block_repeated" if block.first < self.tokens else "block_order"
            raise ReceiptError(f"a block at {block.first} where {self.tokens} was due", threat=threat)
        self._short = block.count < BLOCK_TOKENS
        self._add_revisions(block)
        check_rows(block, self.header, len(self._table))  # (3)
        self._check_tokens(block)  # (4)
        if draws is not None:  # (5)
            check_draws(block, draws, self.header, None)
            self._draws_digest.update(encode_column(draws))
            if self._first_draws is None:
                self._first_draws = draws
        self._frontier.append(leaf_of(self.header.digest_bytes, block.encode() if body is None else body))  # (6)
        extend_spans(self._spans, block.first, block.runs)
        if len(self._spans) > MAX_SPANS:
            raise ReceiptError("too many sampling spans", threat="limit_exceeded")
        self.tokens += block.count
        if self._kept is not None:
            self._kept.append(block)

    def finish(self, final: Final, signature: Signature, *, sampling_checked: bool) -> VerifiedReceipt:
        """Check the final record and return the verified receipt.

        ``sampling_checked`` says that every block's draws were already taken from the revealed seed.
        """
        if final.header != self.header.digest:
            raise ReceiptError("the final record belongs to another header", threat="header_mismatch")
        if (final.tokens, final.blocks) != (self.tokens, self._frontier.size):  # (7)
            raise ReceiptError(
                f"the final record counts {final.tokens} tokens in {final.blocks} blocks; "
                f"{self.tokens} in {self._frontier.size} were read",
                threat="count_mismatch",
            )
        if final.root != self._frontier.root():  # (6)
            raise ReceiptError("the blocks are not those the final record binds", threat="root_mismatch")
        self._check_final(final)
        verdict = Verdict.INTEGRITY
        key = reveal_key(self.header, final.seed)
        if self._first_draws is not None and key is not None and final.seed is not None:  # (8)
            self._check_revealed(key, final.seed)
            sampling_checked = True
        if sampling_checked or key is None or not self.tokens:
            verdict = Verdict.SAMPLING_CONSISTENT
        anchor = "none" if self._expected.receipt_id is None else "receipt_id"
        if self._expected.public_key is not None:  # (9)
            check_signature(final, signature, self._expected.public_key)
            anchor = "signature"
        return self._verified(verdict, anchor, final)

    def interrupt(self) -> VerifiedReceipt:
        """Return what an unfinished stream amounts to: INCOMPLETE."""
        return self._verified(Verdict.INCOMPLETE, "none", None)

    def _verified(self, verdict: Verdict, anchor: str, final: Final | None) -> VerifiedReceipt:
        return VerifiedReceipt(
            verdict=verdict,
            anchor=anchor,
            caveats=self._expected.caveats(self.header),
            header=self.header,
            final=final,
            tokens=self.tokens,
            table=tuple(entry.revision for entry in self._table),
            blocks=tuple(self._kept or ()),
        )

    def _add_revisions(self, block: Block) -> None:
        for entry in block.revisions:
            check_entry(entry, self.header)
            if entry.revision in self._names:
                raise ReceiptError("the revision table names a revision twice", threat="table_duplicate")
            self._names.add(entry.revision)
            self._table.append(entry)
            self._added.append((self._frontier.size, entry))

    def _check_tokens(self, block: Block) -> None:
        if self._stopped_at is not None:
            raise ReceiptError("tokens follow a stop token", threat="token_after_stop")
        if not self._stops.isdisjoint(block.tokens):
            self._stopped_at = block.first + next(i for i, token in enumerate(block.tokens) if token in self._stops)
            if self._stopped_at != block.first + block.count - 1:
                raise ReceiptError("tokens follow a stop token", threat="token_after_stop")
        if self._expected.token_ids is not None:
            compare_tokens(self._expected.token_ids, block.tokens, block.first)
        if self._expected.logprobs is not None:
            compare_logprobs(self._expected.logprobs, block.width_less_one, block.first)

    def _check_final(self, final: Final) -> None:
        header = self.header
        check_partition(final.sampling, final.tokens, "sampling")
        if final.sampling != tuple(self._spans):
            raise ReceiptError("sampling spans differ from the blocks' runs", threat="sampling_mismatch")
        if final.added != tuple(self._added):
            raise ReceiptError("added table rows differ from the blocks'", threat="table_entry")
        check_partition(final.kv, kv_positions(header.prompt_length, final.tokens), "kv")
        used = [span.revision for span in final.sampling] + [span.revision for span in final.kv]
        check_table_use(len(self._table), used, "revision")
        check_table_use(len(header.samplers), (span.sampler for span in final.sampling), "sampler")
        check_kv(
            final.kv,
            final.sampling,
            prompt_length=header.prompt_length,
            mode=header.on_publish,
            rebuilds=final.kv_rebuilds,
        )
        self._check_end(final)
        self._expected.check_final(header, final, [entry.revision for entry in self._table])
        if self._expected.token_ids is not None and final.tokens < len(self._expected.token_ids):
            raise ReceiptError("the receipt ends before the response", threat="token_deleted")

    def _check_end(self, final: Final) -> None:
        reason, limit = final.finish_reason, self.header.max_tokens
        stopped = self._stopped_at is not None
        if final.tokens > limit or (reason == LENGTH and final.tokens != limit):
            raise ReceiptError(f"{final.tokens} tokens and {reason} under a limit of {limit}", threat="finish_reason")
        if (reason == STOP and not stopped) or (reason == LENGTH and stopped):
            raise ReceiptError(f"finish reason {reason} does not fit the last token", threat="finish_reason")
        if not final.tokens and reason != ABORT:
            raise ReceiptError(f"no tokens, yet finished by {reason}", threat="finish_reason")

    def _check_revealed(self, key: DrawKey, seed: int | bytes) -> None:
        window, revealed = DrawWindow(key, self.tokens), hashlib.sha256()
        for first in range(0, self.tokens, BLOCK_TOKENS):
            draws = window.read(first, min(BLOCK_TOKENS, self.tokens - first))
            revealed.update(encode_column(column(draws)))
        if revealed.digest() != self._draws_digest.digest():
            claimed = [(draw, draw) for draw in self._first_draws or ()]
            raise explain_draws(self.header, seed, 0, claimed, threat="draw_mismatch")


def check_draws(block: Block, draws: Sequence[int], header: Header, seed: int | bytes | None) -> None:
    """Raise ReceiptError unless every row's draw lies in its interval; header and seed serve to name the fault."""
    rows = zip(block.low, block.width_less_one, draws, strict=True)
    # A row that is not drawn has the whole interval, so none needs to be left out.
    if all(low <= draw <= low + most for low, most, draw in rows):
        return
    if seed is None:
        raise ReceiptError("a draw does not pick its token", threat="draw_outside_interval")
    intervals = [(low, low + most) for low, most in zip(block.low, block.width_less_one, strict=True)]
    raise explain_draws(header, seed, block.first, intervals, threat="draw_outside_interval")


def check_signature(final: Final, signature: Signature, public_key: bytes) -> None:
    """Raise ReceiptError unless the signature covers the final record's statement under this key."""
    if signature.keyid != key_id(public_key):  # compared with the given key, never used to find one
        raise ReceiptError("signed by another key than the one given", threat="key_mismatch")
    verify_ed25519(public_key, pre_authentication_encoding(PAYLOAD_TYPE, final.statement), signature.signature)
