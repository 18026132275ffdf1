"""The receipt of one choice while it is being generated: the sampler's rows in, frames and a sealed receipt out.

Rows wait in the arrays they came in and are taken up 64 at a time, so that a step costs a choice two list appends.
Promises that a row which contradicts the admission (another revision, a failed row, none at all) is an error and
never a receipt. Knows neither HTTP nor the sink: see response_receipts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.errors import TokenRowsError
from epochless_vllm.plugin import token_rows
from epochless_vllm.plugin.token_rows import record_flags
from epochless_vllm.protocol.builder import ReceiptBuilder, Signer, sign_final
from epochless_vllm.protocol.draws import draw_range
from epochless_vllm.protocol.header import Header, reveal_key
from epochless_vllm.protocol.receipts import ABORT, LENGTH, REPETITION, STOP, STOP_STRING, Receipt
from epochless_vllm.protocol.records import BLOCK_TOKENS, Block
from epochless_vllm.protocol.stream import encode_block_frame, encode_final_frame, encode_header_frame

_FINISH = {"length": LENGTH, "abort": ABORT, "repetition": REPETITION}


class ChoiceRecorder:
    """Collects the rows of one choice.

    Attributes:
        frames: encoded frames not handed out yet; stays empty unless ``framed``.
        tokens: rows so far.
    """

    def __init__(self, header: Header, *, lora_int_id: int, seed: int | bytes | None, framed: bool) -> None:
        self.header = header
        self.tokens = 0
        self.frames: list[bytes] = [encode_header_frame(header)] if framed else []
        self._framed, self._lora_int_id = framed, lora_int_id
        self._seed = None if header.samplers[0].greedy else seed
        self._key = reveal_key(header, self._seed)
        self._builder = ReceiptBuilder(header)
        self._waiting: list[tuple[Sequence[int], NDArray[np.int64]]] = []
        self._waiting_tokens = 0

    def add(self, token_ids: Sequence[int], rows: NDArray[np.int64] | None) -> None:
        """Take the tokens of an output and their rows; neither may change afterwards.

        Raises:
            TokenRowsError: the rows are missing or not one for each token.
        """
        if not token_ids:
            return
        if rows is None or rows.shape != (len(token_ids), token_rows.COLUMNS):
            raise TokenRowsError(
                f"{self._name}: the engine sent {0 if rows is None else len(rows)} rows for {len(token_ids)} tokens; "
                "send the request with epochless.attest 'none'"
            )
        self._waiting.append((token_ids, rows))
        self._waiting_tokens += len(token_ids)
        self.tokens += len(token_ids)

    def advance(self) -> None:
        """Take the waiting rows up once they fill a block.

        Raises:
            TokenRowsError, ReceiptError: a row cannot be attested.
        """
        if self._waiting_tokens >= BLOCK_TOKENS:
            self._flush()

    def seal(self, finish_reason: str, stop_reason: int | str | None, signer: Signer, *, rebuilds: int = 0) -> Receipt:
        """Return the signed receipt of everything added.

        Args:
            finish_reason, stop_reason: the CompletionOutput's.
            rebuilds: how often the KV was discarded and computed again.

        Raises:
            TokenRowsError, ReceiptError: a row cannot be attested.
        """
        self._flush()
        rest, final = self._builder.finish(_reason(finish_reason, stop_reason), seed=self._seed, kv_rebuilds=rebuilds)
        self._frame(rest)
        signature = sign_final(final, signer)
        if self._framed:
            self.frames.append(encode_final_frame(final, signature))
        return Receipt(self.header, tuple(self._builder.blocks), final, signature)

    def take_frames(self) -> bytes:
        """Return the frames that are ready and forget them."""
        ready = b"".join(self.frames)
        self.frames.clear()
        return ready

    def _flush(self) -> None:
        if not self._waiting:
            return
        tokens = [token for token_ids, _ in self._waiting for token in token_ids]
        rows = np.concatenate([rows for _, rows in self._waiting]) if len(self._waiting) > 1 else self._waiting[0][1]
        self._waiting, self._waiting_tokens = [], 0
        columns: list[list[int]] = (
            rows.T.tolist()
        )  # lists: for a block's length, NumPy's calls cost more than they save
        if columns[token_rows.LORA].count(self._lora_int_id) != len(tokens):
            raise TokenRowsError(
                f"{self._name}: a token was sampled by another revision than was admitted; report this"
            )
        flags, kept = columns[token_rows.FLAGS], columns[token_rows.KEPT]
        kinds = set(flags)
        if max(kinds) >= token_rows.FAILED:
            raise TokenRowsError(f"{self._name}: a row says that its token was not sampled; report this")
        if len(kinds) == 1:
            (kind,) = kinds
            marks: int | list[int] = record_flags(kind)
            kept = kept if kind & token_rows.FILTERED else []
        else:
            marks = [record_flags(kind) for kind in flags]
            kept = [mass for mass, kind in zip(kept, flags, strict=True) if kind & token_rows.FILTERED]
        blocks = self._builder.append(tokens, columns[token_rows.LO], columns[token_rows.W], flags=marks, kept=kept)
        self._frame(blocks)

    def _frame(self, blocks: Sequence[Block]) -> None:
        if not self._framed:
            return
        for block in blocks:
            draws = () if self._key is None else draw_range(self._key, block.first, block.count)
            self.frames.append(encode_block_frame(block, draws))

    @property
    def _name(self) -> str:
        header = self.header
        return f"{header.request_id}, prompt {header.prompt_index}, choice {header.choice_index}"


def _reason(finish_reason: str, stop_reason: Any) -> str:
    if finish_reason == "stop":
        return STOP_STRING if isinstance(stop_reason, str) else STOP
    return _FINISH[finish_reason]
