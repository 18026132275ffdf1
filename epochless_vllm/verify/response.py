"""Reads what an OpenAI-style response says about a choice, so that a receipt can be held against it.

Text is not compared: that needs the tokenizer. Knows only the fields it compares; answer.py reads the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from typing import Any

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.columns import WORD
from epochless_vllm.protocol.shapes import read_integer, read_list
from epochless_vllm.verify.answer import read_choices, refusal

LOGPROB_TOLERANCE = Decimal("0.00001")  # a float32 of the largest magnitude, 22.2 nats, is within 1e-6


@dataclass(frozen=True)
class ResponseClaims:
    """One choice's claims; None where the response is silent.

    ``weight_versions`` are (version, start, end) over output tokens, ``logprobs`` the behaviour log-probabilities
    of ``choices[i].epochless.logprobs``.
    """

    token_ids: tuple[int, ...] | None
    finish_reason: str | None
    weight_versions: tuple[tuple[str, int, int], ...] | None
    logprobs: tuple[Decimal, ...] | None
    receipt_id: str | None


def find_choice(payload: bytes, choice_index: int, prompt_index: int = 0) -> dict[str, Any]:
    """Return a prompt's choice of an answer.

    A choice that says which one it is (``epochless.prompt_index`` and ``choice_index``) is taken at its word, the
    others by their ``index``, which counts the choices of all prompts.

    Raises:
        ReceiptError: the bytes are no response, or have no such choice.
    """
    choices = read_choices(payload)
    named = [item for item in choices if _place(item) is not None]
    if named:
        matching = [item for item in named if _place(item) == (prompt_index, choice_index)]
    else:
        matching = [item for item in choices if type(item.get("index")) is int and item["index"] == choice_index]
    if len(matching) != 1:
        raise refusal(f"{len(matching)} choices are number {choice_index} of prompt {prompt_index}")
    return matching[0]


def read_response(payload: bytes, choice_index: int, prompt_index: int = 0) -> ResponseClaims:
    """Return the claims of a prompt's choice.

    Raises:
        ReceiptError: the bytes are no response, have no such choice (see ``find_choice``), or a claim is malformed.
    """
    choice = find_choice(payload, choice_index, prompt_index)
    extension = choice.get("epochless")
    if not isinstance(extension, dict):
        extension = {}
    return ResponseClaims(
        token_ids=_optional(choice, "token_ids", _token),
        finish_reason=_text(choice, "finish_reason"),
        weight_versions=_optional(choice, "weight_versions", _version),
        logprobs=_optional(extension, "logprobs", _decimal),
        receipt_id=_text(extension, "id"),
    )


def compare_logprobs(expected: Sequence[Decimal], width_less_one: Sequence[int], first: int) -> None:
    """Raise ReceiptError where a claimed log-probability is not ln(width / 2**32) of the row at its position."""
    claimed = expected[first : first + len(width_less_one)]
    if len(claimed) != len(width_less_one):
        raise ReceiptError("fewer log-probabilities than tokens", threat="logprob_mismatch")
    with localcontext(Context(prec=28, traps=[])):  # what overflows or is no number is merely far away
        whole = Decimal(WORD + 1).ln()
        for place, (value, most) in enumerate(zip(claimed, width_less_one, strict=True)):
            distance = abs(Decimal(most + 1).ln() - whole - Decimal(value))
            if distance.is_nan() or distance > LOGPROB_TOLERANCE:
                raise ReceiptError(
                    f"the log-probability at position {first + place} is not the receipt's", threat="logprob_mismatch"
                )


def _place(described: dict[str, Any]) -> tuple[int, int] | None:
    extension = described.get("epochless")
    if not isinstance(extension, dict):
        return None
    prompt, choice = extension.get("prompt_index"), extension.get("choice_index")
    return (prompt, choice) if type(prompt) is int and type(choice) is int else None


def _optional(source: dict[str, Any], name: str, read: Any) -> Any:
    value = source.get(name)
    return None if value is None else tuple(read(item) for item in read_list(value, name))


def _text(source: dict[str, Any], name: str) -> str | None:
    value = source.get(name)
    if value is not None and not isinstance(value, str):
        raise refusal(f"{name} is not a string")
    return value


def _token(value: Any) -> int:
    return read_integer(value, "token_ids", maximum=WORD)


def _decimal(value: Any) -> Decimal:
    if type(value) is not int and not isinstance(value, Decimal):
        raise refusal("a log-probability that is not a number")
    return Decimal(value)


def _version(value: Any) -> tuple[str, int, int]:
    if not isinstance(value, dict) or not isinstance(value.get("version"), str):
        raise refusal("a weight version without its name")
    return value["version"], read_integer(value.get("start"), "start"), read_integer(value.get("end"), "end")
