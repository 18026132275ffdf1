"""Text of answers against tokens: what a server may leave out, and nothing else."""

from __future__ import annotations

import json

import pytest

from epochless_vllm.cli.tiny_model import byte_tokenizer
from epochless_vllm.errors import ReceiptError, TokenizerError
from epochless_vllm.protocol.receipts import LENGTH, STOP, STOP_STRING
from epochless_vllm.reference.tokenizer import Tokenizer
from epochless_vllm.verify.text import check_text

TOKENIZER = Tokenizer(byte_tokenizer())
TOKENS = list("grün?".encode())
EOS = 257


def answer(text: object, *, chat: bool = False, index: int = 0) -> bytes:
    choice = {"index": index, "message": {"content": text}} if chat else {"index": index, "text": text}
    return json.dumps({"choices": [choice]}).encode()


@pytest.mark.parametrize(
    ("text", "tokens", "reason"),
    [
        ("grün?", TOKENS, LENGTH),
        ("grün?", [*TOKENS, EOS], STOP),
        ("grün", TOKENS, STOP),  # the stop token's text is left out
        ("gr", TOKENS, STOP_STRING),
        ("gr", TOKENS[:3], LENGTH),  # half a character
        ("gr\ufffd", TOKENS[:3], LENGTH),
        ("<s>grün?", [256, *TOKENS], LENGTH),
        ("", [], "abort"),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_text_of_the_tokens_passes(text: str, tokens: list[int], reason: str, chat: bool) -> None:
    check_text(answer(text, chat=chat), 0, tokens, reason, TOKENIZER)


@pytest.mark.parametrize(
    ("text", "tokens", "reason"),
    [
        ("grun?", TOKENS, LENGTH),
        ("grün", TOKENS, LENGTH),
        ("grün??", TOKENS, LENGTH),
        ("gr", TOKENS, STOP),
        ("rün", TOKENS, STOP_STRING),
        ("", TOKENS, LENGTH),
        (None, TOKENS, LENGTH),
        (7, TOKENS, LENGTH),
    ],
)
def test_another_text_is_refused(text: object, tokens: list[int], reason: str) -> None:
    with pytest.raises(ReceiptError) as error:
        check_text(answer(text), 0, tokens, reason, TOKENIZER)
    assert error.value.fields["threat"] == "text_mismatch"


def test_text_is_that_of_the_prompt_the_receipt_is_of() -> None:
    """Each prompt of a request counts its choices from zero, the answer counts on."""
    places = [(0, "grün?"), (1, "blau")]
    choices = [
        {"index": index, "text": text, "epochless": {"prompt_index": index, "choice_index": 0}}
        for index, text in places
    ]
    payload = json.dumps({"choices": choices}).encode()
    for prompt_index, text in places:
        tokens = list(text.encode())
        check_text(payload, 0, tokens, LENGTH, TOKENIZER, prompt_index=prompt_index)
        with pytest.raises(ReceiptError):
            check_text(payload, 0, tokens, LENGTH, TOKENIZER, prompt_index=1 - prompt_index)


def test_answer_without_that_choice_is_refused_and_a_foreign_token_named() -> None:
    with pytest.raises(ReceiptError):
        check_text(answer("grün?", index=1), 0, TOKENS, LENGTH, TOKENIZER)
    with pytest.raises(TokenizerError):
        check_text(answer("grün?"), 0, [*TOKENS, 999], LENGTH, TOKENIZER)
