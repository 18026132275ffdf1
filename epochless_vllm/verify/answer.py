"""Reads an answer as a client received it, whole or as server-sent events, into one list of choices.

The answer is untrusted and not canonical: numbers with a fraction are read as decimals, never as floats. Of a stream's
chunks, what a receipt can be held against is put together per choice. Promises that a malformed answer surfaces as
ReceiptError. Does not know what is claimed: see response.py.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, NamedTuple

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.shapes import read_base64

MAX_RESPONSE_BYTES = 64 << 20
_EVENT = b"data:"
_END = b"[DONE]"
_JOINED = ("token_ids",)
_LAST = ("finish_reason", "weight_versions")


class AttestedChoice(NamedTuple):
    """The ``index`` of a choice in the answer, and the bytes of its receipt."""

    choice: int
    receipt: bytes


def read_choices(payload: bytes) -> list[dict[str, Any]]:
    """Return the choices of an answer, each with its whole ``token_ids`` and ``epochless`` where it has them.

    Raises:
        ReceiptError: the bytes are no answer.
    """
    if len(payload) > MAX_RESPONSE_BYTES:
        raise refusal("too large")
    lines = [line.strip() for line in payload.splitlines()] if payload.lstrip().startswith(_EVENT) else []
    if not lines:
        return _choices(_parse(payload))
    joined: dict[int, dict[str, Any]] = {}
    failure: ReceiptError | None = None
    for line in lines:
        event = line[len(_EVENT) :].strip() if line.startswith(_EVENT) else b""
        if event and event != _END:
            value = _parse(event)
            failure = failure or _failure_of(value)
            for choice in _choices(value) if "choices" in value else ():
                _join(joined, choice)
    if not joined and failure is not None:
        raise failure
    return list(joined.values())


def attested_choices(payload: bytes) -> list[AttestedChoice]:
    """Return the receipts that an answer's choices carry.

    Raises:
        ReceiptError: the bytes are no answer, or none of its choices carries a receipt.
    """
    found = []
    for choice in read_choices(payload):
        extension, index = choice.get("epochless"), choice.get("index")
        if isinstance(extension, dict) and type(index) is int:
            encoded = extension.get("receipt")
            if encoded is not None:
                found.append(AttestedChoice(index, read_base64(encoded, "receipt", max_bytes=MAX_RESPONSE_BYTES)))
            elif frames := extension.get("frames"):
                pieces = frames if isinstance(frames, list) else [frames]
                decoded = [read_base64(piece, "frames", max_bytes=MAX_RESPONSE_BYTES) for piece in pieces]
                found.append(AttestedChoice(index, b"".join(decoded)))
    if not found:
        raise refusal("no choice carries a receipt; ask for one with epochless: {attest: receipt}")
    return found


def refusal(detail: str) -> ReceiptError:
    """Return the error of an answer that cannot be read."""
    return ReceiptError(f"the response cannot be read: {detail}", threat="response_form")


def _join(joined: dict[int, dict[str, Any]], chunk: dict[str, Any]) -> None:
    index = chunk.get("index")
    if type(index) is not int:
        raise refusal("a chunk of no choice")
    choice = joined.setdefault(index, {"index": index})
    for name in _JOINED:
        if isinstance(chunk.get(name), list):
            choice.setdefault(name, []).extend(chunk[name])
    for name in _LAST:
        if chunk.get(name) is not None:
            choice[name] = chunk[name]
    extension = chunk.get("epochless")
    if isinstance(extension, dict):
        own = choice.setdefault("epochless", {})
        frames = extension.get("frames")
        own.update({name: value for name, value in extension.items() if name != "frames"})
        if frames is not None:
            own.setdefault("frames", []).append(frames)


def _choices(value: dict[str, Any]) -> list[dict[str, Any]]:
    choices = value.get("choices")
    if not isinstance(choices, list):
        raise _failure_of(value) or refusal("no choices")
    return [item for item in choices if isinstance(item, dict)]


def _failure_of(value: dict[str, Any]) -> ReceiptError | None:
    """Return what to say of an answer that is an error of the server's: it was asked in vain, and claims nothing."""
    error = value.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return refusal(f"it is an error, {message[:200]!a}; ask again") if isinstance(message, str) else None


def _parse(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload.decode("utf-8"), parse_float=Decimal, parse_constant=_refuse_constant)
    except (ValueError, ArithmeticError, RecursionError) as error:  # ArithmeticError: an exponent beyond decimal's
        raise refusal("not UTF-8 JSON") from error
    if not isinstance(value, dict):
        raise refusal("not an object")
    return value


def _refuse_constant(text: str) -> Any:
    raise refusal(f"{text} is no number")
