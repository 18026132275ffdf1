"""Verifies a receipt in any format: bytes in, verified receipt or ReceiptError out.

Standard library only, whole numbers only. What is checked, and in which order, is listed in checker.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol import compact, stream
from epochless_vllm.protocol.draw_window import DrawWindow
from epochless_vllm.protocol.header import Header, reveal_key
from epochless_vllm.protocol.receipts import Receipt
from epochless_vllm.protocol.sampler_config import SamplerConfig
from epochless_vllm.protocol.verbose import decode_verbose
from epochless_vllm.verify.checker import ReceiptChecker, check_draws
from epochless_vllm.verify.expected import Expected
from epochless_vllm.verify.verified import VerifiedReceipt

_CHUNK = 1 << 16  # bytes of a stream looked at together


def verify_receipt(
    payload: bytes,
    *,
    public_key: bytes | None = None,
    receipt_id: str | None = None,
    nonce: str | None = None,
    request_id: str | None = None,
    token_ids: Sequence[int] | None = None,
    prompt_token_ids: Sequence[int] | None = None,
    finish_reason: str | None = None,
    logprobs: Sequence[Decimal] | None = None,
    base: str | None = None,
    tokenizer: str | None = None,
    revisions: Iterable[str] | None = None,
    sampler: SamplerConfig | None = None,
    seed: int | None = None,
    seed_commitment: str | None = None,
    response: bytes | None = None,
    check_draws: bool = True,
    allow_incomplete: bool = False,
    keep_blocks: bool = False,
) -> VerifiedReceipt:
    """Verify a receipt: verbose, compact or streaming, told apart by its first bytes.

    Every argument but the last three pins a claim to what the caller knows (see ``Expected``); what is left out is
    named in the caveats of the result.

    Args:
        response: bytes of the OpenAI-style response; pins tokens, finish reason, weight versions where it has them.
        check_draws: False skips the draws where the format allows, and the verdict is INTEGRITY.
        allow_incomplete: return the verdict INCOMPLETE for a stream without its final record instead of refusing.
        keep_blocks: return the verified rows too.

    Raises:
        ReceiptError: refused; ``fields["threat"]`` is the stable code.
    """
    expected = Expected(
        public_key=public_key,
        receipt_id=receipt_id,
        nonce=nonce,
        request_id=request_id,
        token_ids=token_ids,
        prompt_token_ids=prompt_token_ids,
        finish_reason=finish_reason,
        logprobs=logprobs,
        base=base,
        tokenizer=tokenizer,
        revisions=None if revisions is None else frozenset(revisions),
        sampler=sampler,
        seed=seed,
        seed_commitment=seed_commitment,
        response=response,
    )
    if payload[:1] == b"{":
        return _verify_verbose(decode_verbose(payload), expected, check_draws, keep_blocks)
    if payload[:4] == compact.MAGIC:
        return _verify_compact(payload, expected, keep_blocks)
    if payload[:4] == stream.MAGIC:
        verifier = StreamVerifier(expected, check_draws=check_draws, keep_blocks=keep_blocks)
        whole = memoryview(payload)
        for start in range(0, len(payload), _CHUNK):
            verifier.feed(whole[start : start + _CHUNK])
        return verifier.close(allow_incomplete=allow_incomplete)
    raise ReceiptError("not a receipt: neither JSON nor a format this verifier knows", threat="format")


class StreamVerifier:
    """Verifies a stream as it arrives: each block on arrival, the whole at ``close``.

    The verdict does not depend on how the bytes were cut. Memory is one frame, whatever the length.
    """

    def __init__(self, expected: Expected, *, check_draws: bool = True, keep_blocks: bool = False) -> None:
        self._expected = expected
        self._check_draws, self._keep_blocks = check_draws, keep_blocks
        self._decoder = stream.StreamDecoder()
        self._checker: ReceiptChecker | None = None
        self._final: stream.FinalFrame | None = None

    @property
    def tokens(self) -> int:
        """Output tokens checked so far."""
        return self._checker.tokens if self._checker else 0

    def feed(self, data: bytes | memoryview) -> None:
        """Check the frames that these bytes complete; ReceiptError at the first claim that does not hold."""
        for frame in self._decoder.feed(data):
            if isinstance(frame, Header):
                self._checker = ReceiptChecker(frame, self._expected, keep_blocks=self._keep_blocks)
            elif isinstance(frame, stream.FinalFrame):
                self._final = frame
            else:
                assert self._checker is not None  # the decoder lets no block precede the header
                draws = frame.draws if frame.draws and self._check_draws else None
                self._checker.add_block(frame.block, body=frame.body, draws=draws)

    def close(self, *, allow_incomplete: bool = False) -> VerifiedReceipt:
        """Return the verified receipt once the stream has ended.

        Raises:
            ReceiptError: the final record does not hold, or is missing and ``allow_incomplete`` is False.
        """
        if self._checker is None or (self._decoder.pending and not self._final):
            raise ReceiptError("the stream ends inside a frame", threat="truncated")
        if self._final is None:
            if not allow_incomplete:
                raise ReceiptError("the stream has no final record: it is incomplete", threat="incomplete")
            return self._checker.interrupt()
        return self._checker.finish(self._final.final, self._final.signature, sampling_checked=False)


def _verify_verbose(receipt: Receipt, expected: Expected, draws: bool, keep_blocks: bool) -> VerifiedReceipt:
    checker = ReceiptChecker(receipt.header, expected, keep_blocks=keep_blocks)
    key = reveal_key(receipt.header, receipt.final.seed)
    window = DrawWindow(key) if key is not None and draws else None
    for block in receipt.blocks:
        checker.add_block(block)
        if window is not None:
            check_draws(block, window.read(block.first, block.count), receipt.header, receipt.final.seed)
    return checker.finish(receipt.final, receipt.signature, sampling_checked=draws)


def _verify_compact(payload: bytes, expected: Expected, keep_blocks: bool) -> VerifiedReceipt:
    opened = compact.open_compact(payload)
    checker = ReceiptChecker(opened.header, expected, keep_blocks=keep_blocks)
    for block in opened.blocks:
        checker.add_block(block)
    return checker.finish(opened.final, opened.signature, sampling_checked=True)
