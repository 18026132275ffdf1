"""Receipts as a trainer reads them: from a choice or a stream of chunks, verified, as one record per token.

    response = openai.chat.completions.create(model="policy", messages=messages, **request_fields(attest="receipt"))
    records = token_records(receipt_of(response.choices[0]), public_key=key)
    logprobs = [record.logprob for record in records]

Promises that a record comes from a receipt that was verified. Knows no transport.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

from epochless_vllm.errors import UnexpectedReplyError
from epochless_vllm.protocol.records import FILTERED, ONE
from epochless_vllm.verify import VerifiedReceipt, verify_receipt


class TokenRecord(NamedTuple):
    """One token: ``logprob`` is ln of its exact behaviour probability, ``kept_logmass`` ln of what filters left.

    Under the unfiltered distribution the token had ``logprob + kept_logmass``; without filters the mass is whole, 0.
    ``step`` is None where the base model wrote the token.
    """

    token_id: int
    revision: str
    step: int | None
    logprob: float
    kept_logmass: float


def receipt_of(choice: Any) -> bytes:
    """Return the receipt of a whole answer's choice, an openai object or a dictionary.

    Raises:
        UnexpectedReplyError: it carries none.
    """
    body = _field(choice, "epochless")
    encoded = body.get("receipt") if isinstance(body, Mapping) else None
    if not isinstance(encoded, str):
        raise UnexpectedReplyError("the choice carries no receipt; ask for it with request_fields(attest='receipt')")
    return _decode(encoded)


class StreamedReceipts:
    """Collects the receipts of a stream from its chunks.

    Attributes:
        ids: the receipt's id by the choice's index in the answer, once its last chunk was added.
    """

    def __init__(self) -> None:
        self.ids: dict[int, str] = {}
        self._frames: dict[int, bytearray] = {}

    def add(self, chunk: Any) -> None:
        """Take a chunk, an openai object or a dictionary; chunks without receipts change nothing.

        Raises:
            UnexpectedReplyError: its frames are not base64.
        """
        for choice in _field(chunk, "choices") or ():
            body = _field(choice, "epochless")
            if not isinstance(body, Mapping):
                continue
            index = int(_field(choice, "index"))
            if "frames" in body:
                self._frames.setdefault(index, bytearray()).extend(_decode(body["frames"]))
            if "id" in body:
                self.ids[index] = str(body["id"])

    def receipt(self, index: int = 0) -> bytes:
        """Return the receipt of a choice in the streaming format, as far as it came.

        Raises:
            UnexpectedReplyError: none of it came.
        """
        frames = self._frames.get(index)
        if frames is None:
            raise UnexpectedReplyError(f"the stream carried no receipt of choice {index}")
        return bytes(frames)


def token_records(payload: bytes, **expected: Any) -> list[TokenRecord]:
    """Verify a receipt and return its tokens in order.

    Args:
        expected: what is known of it, as for ``verify.verify_receipt``: ``public_key``, ``nonce``, ``token_ids`` and
            others; what is left out is not checked.

    Raises:
        ReceiptError: the receipt is refused.
    """
    return records_of(verify_receipt(payload, **expected, keep_blocks=True))


def records_of(verified: VerifiedReceipt) -> list[TokenRecord]:
    """Return the tokens of a receipt that was verified with ``keep_blocks``."""
    added = verified.final.added if verified.final is not None else ()
    table = [*verified.header.revisions, *(entry for _, entry in added)]
    records: list[TokenRecord] = []
    for block in verified.blocks:
        rows = iter(zip(block.tokens, block.width_less_one, strict=True))
        kept = iter(block.kept_less_one)
        for run in block.runs:
            entry = table[run.revision]
            for token, most in islice(rows, run.rows):
                mass = next(kept) + 1 if run.flags & FILTERED else ONE
                logprob, kept_logmass = math.log((most + 1) / ONE), math.log(mass / ONE)
                records.append(TokenRecord(token, entry.revision, entry.step, logprob, kept_logmass))
    return records


def _field(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _decode(encoded: Any) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise UnexpectedReplyError("the choice carries a receipt that is not base64") from error
