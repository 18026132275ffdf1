"""What a receipt's sampler says changed the logits before sampling, applied again to recomputed rows.

Applied in the order of the sampler's entries, which is the engine's, in float32: stop tokens masked until
``min_tokens``, ``logit_bias``, and the three penalties over prompt and output so far. Grammars, allowed tokens and bad
words enter a receipt as digests, custom processors as names: their rows cannot be recomputed, and ``unknown_processor``
says so. Hostile entries surface as ReceiptError.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.errors import ReceiptError

Logits = NDArray[np.float32]
Entry = tuple[str, Any]

COMPUTED = ("min_tokens", "logit_bias", "penalties")


def unknown_processor(entries: Sequence[Entry]) -> str | None:
    """Return the first processor that is not computed here, or None if all are."""
    return next((name for name, _ in entries if name not in COMPUTED), None)


class Processors:
    """The processors of one sampler over one response, rows in ascending order of output position."""

    def __init__(self, entries: Sequence[Entry], prompt: Sequence[int], vocab: int) -> None:
        """Read the entries, all of which must be in COMPUTED.

        Raises:
            ReceiptError: an entry is malformed or names a token outside the vocabulary.
        """
        self._steps = [(name, _READERS[name](value, vocab)) for name, value in entries]
        self._penalised = any(name == "penalties" for name, _ in self._steps)
        self._counts = np.zeros(vocab if self._penalised else 0, np.float32)
        self._counted = 0
        self._prompt = np.zeros(vocab if self._penalised else 0, bool)
        if self._penalised:
            self._prompt[np.asarray(prompt, np.int64)] = True

    @property
    def active(self) -> bool:
        return bool(self._steps)

    def apply(self, logits_V: Logits, output: Sequence[int], position: int) -> None:
        """Change in place the row that token ``position`` of ``output`` was sampled from."""
        if self._penalised:
            for token in output[self._counted : position]:
                self._counts[token] += 1
            self._counted = position
        for name, value in self._steps:
            if name == "min_tokens":
                least, stops = value
                if position < least:
                    logits_V[stops] = -np.inf
            elif name == "logit_bias":
                tokens, bias = value
                logits_V[tokens] += bias
            else:
                self._penalise(logits_V, *value)

    def _penalise(self, logits_V: Logits, repetition: np.float32, frequency: np.float32, presence: np.float32) -> None:
        emitted = self._counts > 0
        seen = np.flatnonzero(emitted | self._prompt)
        values = logits_V[seen]
        logits_V[seen] = np.where(values > 0, values / repetition, values * repetition)
        logits_V -= frequency * self._counts
        logits_V -= presence * emitted


def _read_min_tokens(value: Any, vocab: int) -> tuple[int, NDArray[np.int64]]:
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], list):
        raise _refusal("min_tokens", "not a count and a list of tokens")
    (least,) = _tokens("min_tokens", [value[0]], 1 << 40)
    return least, np.array(_tokens("min_tokens", value[1], vocab), np.int64)


def _read_logit_bias(value: Any, vocab: int) -> tuple[NDArray[np.int64], Logits]:
    if not isinstance(value, list) or any(not isinstance(item, list) or len(item) != 2 for item in value):
        raise _refusal("logit_bias", "not a list of pairs")
    tokens = _tokens("logit_bias", [item[0] for item in value], vocab)
    if len(set(tokens)) != len(tokens):
        raise _refusal("logit_bias", "a token is biased twice")
    return np.array(tokens, np.int64), np.array([_number("logit_bias", item[1]) for item in value], np.float32)


def _read_penalties(value: Any, vocab: int) -> tuple[np.float32, ...]:
    if not isinstance(value, list) or len(value) != 3:
        raise _refusal("penalties", "not three numbers")
    numbers = [_number("penalties", item) for item in value]
    if numbers[0] <= 0:
        raise _refusal("penalties", "a repetition penalty that is not positive")
    return tuple(map(np.float32, numbers))


_READERS: dict[str, Any] = {
    "min_tokens": _read_min_tokens, "logit_bias": _read_logit_bias, "penalties": _read_penalties,
}  # fmt: skip


def _tokens(name: str, values: list[Any], limit: int) -> list[int]:
    for value in values:
        if type(value) is not int or not 0 <= value < limit:
            raise _refusal(name, f"{str(value)[:40]} is not an integer below {limit}")
    return values


def _number(name: str, text: Any) -> float:
    if not isinstance(text, str) or len(text) > 700:
        raise _refusal(name, "not an exact rational")
    try:
        number = float(Fraction(text))
    except (ValueError, ArithmeticError) as error:  # not a fraction, a zero denominator, or beyond a double
        raise _refusal(name, f"{text[:40]!r} is not an exact rational") from error
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise _refusal(name, f"{text[:40]!r} is beyond float32")
    return number


def _refusal(name: str, detail: str) -> ReceiptError:
    return ReceiptError(f"the sampler's {name}: {detail}", threat="sampler_form")
