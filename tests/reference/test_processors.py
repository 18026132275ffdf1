"""Penalties, biases and minimum lengths on recomputed rows, against plain Python and the engine's own formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.sampler_config import processor_entries
from epochless_vllm.reference.processors import Processors, unknown_processor

VOCAB = 12
PROMPT = [1, 2, 2]


def plain(
    logits: list[float], output: list[int], *, repetition: float, frequency: float, presence: float
) -> list[float]:
    changed = []
    for token, value in enumerate(logits):
        if token in PROMPT or token in output:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token)
        value -= presence if token in output else 0
        changed.append(value)
    return changed


def test_penalties_are_those_of_their_definition_at_every_position() -> None:
    random = np.random.default_rng(0)
    entries = processor_entries(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.25)
    processors = Processors(entries, PROMPT, VOCAB)
    output = [3, 3, 1, 7, 3, 0]
    for position in range(len(output) + 1):
        logits = random.standard_normal(VOCAB).astype(np.float32)
        expected = plain(
            logits.tolist(), output[:position], repetition=1.3, frequency=0.5, presence=-0.25
        )  # fmt: skip
        processors.apply(logits, output, position)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_positions_may_be_left_out() -> None:
    entries = processor_entries(frequency_penalty=0.5)
    output = [3, 3, 1, 7]
    logits = np.zeros(VOCAB, np.float32)
    Processors(entries, PROMPT, VOCAB).apply(logits, output, 3)
    assert logits.tolist() == plain([0.0] * VOCAB, output[:3], repetition=1, frequency=0.5, presence=0)


def test_stop_tokens_are_masked_until_the_minimum() -> None:
    processors = Processors(processor_entries(min_tokens=2, min_tokens_stop_ids=[4, 5]), PROMPT, VOCAB)
    for position in range(4):
        logits = np.zeros(VOCAB, np.float32)
        processors.apply(logits, [0] * 4, position)
        assert np.isneginf(logits[[4, 5]]).all() == (position < 2)
        assert np.isfinite(np.delete(logits, [4, 5])).all()


def test_bias_precedes_penalties() -> None:
    entries = processor_entries(logit_bias={2: 4.0}, repetition_penalty=2.0)
    logits = np.full(VOCAB, -1, np.float32)
    Processors(entries, PROMPT, VOCAB).apply(logits, [], 0)
    assert logits[2] == 1.5  # (-1 + 4) / 2, not -1 * 2 + 4
    assert logits[1] == -2
    assert logits[0] == -1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"grammar": "sha256:" + "ab" * 32}, "grammar"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"bad_words_token_ids": [[1]]}, "bad_words"),
        ({"custom": (("my_plugin", None),)}, "my_plugin"),
        ({"min_tokens": 1, "logit_bias": {1: 1.0}, "presence_penalty": 1.0}, None),
    ],
)
def test_what_is_not_computed_is_named(options: dict[str, Any], name: str | None) -> None:
    assert unknown_processor(processor_entries(**options)) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_tokens", 3), ("min_tokens", [3]), ("min_tokens", [-1, []]), ("min_tokens", [2, [VOCAB]]),
        ("min_tokens", [True, []]), ("logit_bias", [[1]]), ("logit_bias", [[1, 2]]), ("logit_bias", [[-1, "1/2"]]),
        ("logit_bias", [[1, "1/0"]]), ("logit_bias", [[1, "x"]]), ("logit_bias", [[1, "1/1"], [1, "2/1"]]),
        ("logit_bias", [[1, "1" + "0" * 60 + "/1"]]), ("logit_bias", {}), ("penalties", ["1/1", "0/1"]),
        ("penalties", ["0/1", "0/1", "0/1"]), ("penalties", [1, 0, 0]), ("penalties", None),
    ],
)  # fmt: skip
def test_malformed_entry_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ReceiptError) as refusal:
        Processors([(name, value)], PROMPT, VOCAB)
    assert refusal.value.fields["threat"] == "sampler_form"
