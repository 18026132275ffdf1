"""An answer's text against its receipt's tokens, with a tokenizer that is not the server's.

A receipt covers tokens, never text: the server decodes them. What it may leave out is fixed here: special tokens, the
token or the string that ended the answer, and bytes at the end that are no whole character. Knows no chat formats: a
message that was taken apart into reasoning or tool calls has no text to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.receipts import STOP, STOP_STRING
from epochless_vllm.verify.response import find_choice

UNDECODED = "\ufffd"


class Decoder(Protocol):
    """What is needed of reference/tokenizer.py."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


def check_text(
    response: bytes,
    choice_index: int,
    tokens: Sequence[int],
    finish_reason: str,
    decoder: Decoder,
    *,
    prompt_index: int = 0,
) -> None:
    """Raise ReceiptError unless the text of an answer's choice is that of its receipt's tokens.

    Args:
        choice_index, prompt_index: the receipt header's.

    Raises:
        ReceiptError: it is another text, or the answer has none to compare.
        TokenizerError: a token is outside the tokenizer's vocabulary.
    """
    text = _text_of(find_choice(response, choice_index, prompt_index))
    endings = [tokens, tokens[:-1]] if finish_reason == STOP else [tokens]
    for ids in endings:
        for skipped in (True, False):
            whole = decoder.decode(ids, skip_special_tokens=skipped)
            rest = whole[len(text) :] if whole.startswith(text) else None
            if rest is not None and (not rest.strip(UNDECODED) or finish_reason == STOP_STRING):
                return
    expected = decoder.decode(tokens, skip_special_tokens=True)
    at = next((i for i, pair in enumerate(zip(text, expected, strict=False)) if pair[0] != pair[1]), len(expected))
    raise ReceiptError(
        f"the answer's text is not that of its tokens: {text[at : at + 20]!a} at character {at}, not "
        f"{expected[at : at + 20]!a}",
        threat="text_mismatch",
    )


def _text_of(choice: dict[str, Any]) -> str:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if not isinstance(text, str):
        raise ReceiptError(
            "the answer has no text of that choice; give a whole, unstreamed one", threat="text_mismatch"
        )
    return text
