"""Builds a receipt beside serving: rows in, blocks out as they fill, a signed final record at the end.

Cheap by intent: a step's rows are appended to lists, and arrays, bytes and hashes are made once per 64 tokens.
Promises that what it builds is what the verifier accepts, provided the rows are true. Knows no sampler and no key
file: the rows and the signer are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.columns import column
from epochless_vllm.protocol.digests import Digest
from epochless_vllm.protocol.envelope import PAYLOAD_TYPE, Signature, pre_authentication_encoding
from epochless_vllm.protocol.header import Header, check_entry
from epochless_vllm.protocol.merkle import Frontier
from epochless_vllm.protocol.receipts import Final, Receipt, check_rows
from epochless_vllm.protocol.records import BLOCK_TOKENS, FILTERED, Block, Run, extend_spans, leaf_of
from epochless_vllm.protocol.spans import RECOMPUTE, KVSpan, RevisionEntry, SamplingSpan, kv_positions, merge


class Signer(Protocol):
    """Holds an Ed25519 private key."""

    @property
    def keyid(self) -> Digest: ...

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of a message."""


class ReceiptBuilder:
    """Collects the rows of one choice.

    ``keep_blocks=False`` keeps only the tree's frontier: for a caller that streams blocks out as ``append`` returns
    them and needs only the final record.
    """

    def __init__(self, header: Header, *, keep_blocks: bool = True) -> None:
        self.header = header
        self.blocks: list[Block] = []
        self._keep = keep_blocks
        self._frontier = Frontier()
        self._table = {entry.revision: index for index, entry in enumerate(header.revisions)}
        self._added: list[tuple[int, RevisionEntry]] = []
        self._spans: list[SamplingSpan] = []
        self._full_tokens = 0
        self._begin_block()

    @property
    def tokens(self) -> int:
        """Rows appended so far."""
        return self._full_tokens + len(self._tokens)

    def revision_index(self, entry: RevisionEntry) -> int:
        """Return the table index of a revision, adding a row to the table at its first use.

        Call it only for a revision that rows or KV will name: a row that nothing uses makes the receipt invalid.
        """
        index = self._table.get(entry.revision)
        if index is None:
            check_entry(entry, self.header)
            index = self._table[entry.revision] = len(self._table)
            self._entries.append(entry)
        return index

    def append(
        self,
        tokens: Sequence[int],
        low: Sequence[int],
        width: Sequence[int],
        *,
        revision: int | Sequence[int] = 0,
        sampler: int = 0,
        flags: int | Sequence[int] = 0,
        kept: Sequence[int] = (),
    ) -> list[Block]:
        """Append rows and return the blocks they completed.

        Args:
            tokens: token ids in order of emission.
            low, width: each row's interval in units of 2**-32; a greedy or forced row is (0, 2**32).
            revision: table index, for all rows or for each.
            flags: FILTERED, MASKED, FORCED, for all rows or for each.
            kept: kept mass of the FILTERED rows, in order, in units of 2**-32.

        Raises:
            ReceiptError: columns differ in length, or a row could never be verified.
        """
        completed: list[Block] = []
        count = len(tokens)
        if isinstance(revision, int) and isinstance(flags, int):  # the common case: one step of one revision
            pieces = [((revision, flags), count)]
            filtered = count if flags & FILTERED else 0
        else:
            revisions = [revision] * count if isinstance(revision, int) else revision
            marks = [flags] * count if isinstance(flags, int) else flags
            if not count == len(revisions) == len(marks):
                raise ReceiptError("columns of rows differ in length", threat="column_lengths")
            pieces = [(key, len(list(group))) for key, group in groupby(zip(revisions, marks, strict=True))]
            filtered = sum(rows for (_, mark), rows in pieces if mark & FILTERED)
        if not count == len(low) == len(width) or filtered != len(kept):
            raise ReceiptError("columns of rows differ in length", threat="column_lengths")
        start = kept_start = 0
        for (row_revision, mark), rows in pieces:
            while rows:
                taken = min(rows, BLOCK_TOKENS - len(self._tokens))
                end, kept_end = start + taken, kept_start + (taken if mark & FILTERED else 0)
                self._tokens += tokens[start:end]
                self._low += low[start:end]
                self._width += width[start:end]
                self._kept += kept[kept_start:kept_end]
                self._extend_run(taken, (row_revision, sampler, mark))
                start, kept_start, rows = end, kept_end, rows - taken
                if len(self._tokens) == BLOCK_TOKENS:
                    completed.append(self._close_block())
        return completed

    def finish(
        self,
        finish_reason: str,
        *,
        seed: int | bytes | None,
        kv: Sequence[KVSpan] | None = None,
        kv_rebuilds: int = 0,
    ) -> tuple[list[Block], Final]:
        """Return (the last block if one was open, the final record).

        ``kv`` defaults to the KV that ``on_publish`` implies where nothing was rebuilt.
        """
        rest = [self._close_block()] if self._tokens else []
        final = Final(
            tokens=self._full_tokens,
            blocks=self._frontier.size,
            finish_reason=finish_reason,
            header=self.header.digest,
            root=self._frontier.root(),
            sampling=tuple(self._spans),
            kv=tuple(self._natural_kv() if kv is None else kv),
            kv_rebuilds=kv_rebuilds,
            seed=seed,
            added=tuple(self._added),
        )
        return rest, final

    def seal(
        self,
        finish_reason: str,
        signer: Signer,
        *,
        seed: int | bytes | None,
        kv: Sequence[KVSpan] | None = None,
        kv_rebuilds: int = 0,
    ) -> Receipt:
        """Finish and sign; needs ``keep_blocks``."""
        _, final = self.finish(finish_reason, seed=seed, kv=kv, kv_rebuilds=kv_rebuilds)
        return Receipt(self.header, tuple(self.blocks), final, sign_final(final, signer))

    def _begin_block(self) -> None:
        self._tokens: list[int] = []
        self._low: list[int] = []
        self._width: list[int] = []
        self._kept: list[int] = []
        self._runs: list[Run] = []
        self._run_key = (0, 0, 0)
        self._entries: list[RevisionEntry] = []

    def _extend_run(self, rows: int, key: tuple[int, int, int]) -> None:
        if self._runs and self._run_key == key:
            rows += self._runs.pop().rows
        self._runs.append(Run(rows, *key))
        self._run_key = key

    def _close_block(self) -> Block:
        first, number = self._full_tokens, self._frontier.size
        block = Block(
            first=first,
            tokens=column(self._tokens),
            low=column(self._low),
            width_less_one=column([width - 1 for width in self._width]),
            kept_less_one=column([mass - 1 for mass in self._kept]),
            runs=tuple(self._runs),
            revisions=tuple(self._entries),
        )
        check_rows(block, self.header, len(self._table))
        self._frontier.append(leaf_of(self.header.digest_bytes, block.encode()))
        extend_spans(self._spans, block.first, block.runs)
        self._added += [(number, entry) for entry in self._entries]
        self._full_tokens += block.count
        if self._keep:
            self.blocks.append(block)
        self._begin_block()
        return block

    def _natural_kv(self) -> list[KVSpan]:
        positions = kv_positions(self.header.prompt_length, self._full_tokens)
        if not positions:
            return []
        if self.header.on_publish == RECOMPUTE:
            return [KVSpan(0, positions, self._spans[-1].revision)]
        offset = self.header.prompt_length - 1
        prompt = (0, offset, self._spans[0].revision)
        pieces = [(span.start + offset, span.end + offset, span.revision) for span in self._spans]
        return merge([prompt, *pieces] if offset else pieces)


def sign_final(final: Final, signer: Signer) -> Signature:
    """Return the DSSE signature over a final record's statement."""
    message = pre_authentication_encoding(PAYLOAD_TYPE, final.statement)
    return Signature(signer.keyid, signer.sign(message))
