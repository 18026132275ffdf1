"""Where an audit's prompts come from: token ids in a file, text with the model's tokenizer, or the response itself.

None of them is trusted: the receipt's digest picks the one that is its prompt. Knows no model beyond its tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from epochless_vllm.cli.verify import read_file
from epochless_vllm.errors import InvalidRequestError, ReceiptError

if TYPE_CHECKING:
    from epochless_vllm.protocol.header import Header


def read_prompts(
    *, model: str, tokens_file: str | None, texts: Sequence[str] | None, responses: Sequence[bytes]
) -> list[list[int]]:
    """Return every list of token ids that may be a prompt.

    Raises:
        InvalidRequestError: none was given, or a file does not hold token ids.
        TokenizerError: the model's tokenizer cannot read a text.
    """
    found: list[list[int]] = []
    if tokens_file is not None:
        found += _read_lists(read_file(tokens_file, field="prompt-tokens"), tokens_file)
    if texts:
        from epochless_vllm.reference.tokenizer import read_tokenizer

        tokenizer = read_tokenizer(model)
        found += [tokenizer.encode(text, add_special_tokens=special) for text in texts for special in (True, False)]
    for response in responses:
        found += _in_response(response)
    if not found:
        raise InvalidRequestError(
            "prompt: a replay needs the prompt; give --prompt-tokens FILE, --prompt TEXT, or an answer to a request "
            "with return_token_ids",
            field="prompt",
        )
    return found


def find_prompt(prompts: list[list[int]], header: Header) -> list[int]:
    """Return the prompt that a header names.

    Raises:
        ReceiptError: it is none of them.
    """
    from epochless_vllm.protocol.header import prompt_digest

    for prompt in prompts:
        if len(prompt) == header.prompt_length and prompt_digest(prompt) == header.prompt:
            return prompt
    lengths = ", ".join(sorted({str(len(prompt)) for prompt in prompts}, key=int))
    raise ReceiptError(
        f"none of the prompts given ({lengths} tokens) is the receipt's, which has {header.prompt_length} tokens",
        threat="prompt_mismatch",
    )


def _read_lists(payload: bytes, name: str) -> list[list[int]]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        value = None
    lists = [value] if _is_tokens(value) else value
    if not isinstance(lists, list) or not lists or not all(_is_tokens(each) for each in lists):
        raise InvalidRequestError(f"prompt-tokens: {name}: not a JSON list of token ids", field="prompt-tokens")
    return lists


def _in_response(payload: bytes) -> list[list[int]]:
    """Return prompt_token_ids where vLLM writes them; what else an answer holds is the verifier's to judge."""
    lines = payload.splitlines() if payload.lstrip().startswith(b"data:") else [payload]
    found: list[Any] = []
    for line in lines:
        try:
            value: Any = json.loads(line.strip().removeprefix(b"data:"))
        except (ValueError, RecursionError):
            continue
        choices = value.get("choices") if isinstance(value, dict) else None
        places = [value, *choices] if isinstance(choices, list) else [value]
        found += [each.get("prompt_token_ids") for each in places if isinstance(each, dict)]
    return [each for each in found if _is_tokens(each)]


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < 1 << 32 for item in value)
