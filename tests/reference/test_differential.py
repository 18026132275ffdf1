"""The engine agrees with transformers and peft at every logit; the harness notices when it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.reference.cases import LORA_AXES, SHAPES, make_mixture, make_tokens
from tests.reference.differential import (
    ALL_CASES,
    FAST_CASES,
    MIXTURE_RUNS,
    compare,
    engine_logits,
    mixture_by_engine,
    write_case,
    write_mixture,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]


@pytest.mark.parametrize(("shape", "axis"), FAST_CASES, ids=lambda part: part)
def test_every_logit_is_within_tolerance_of_transformers_and_peft(case_directory: Path, shape: str, axis: str) -> None:
    from tests.reference.oracle import oracle_logits

    model, adapter = write_case(case_directory, shape, axis)
    tokens = make_tokens(SHAPES[shape])
    oracle = oracle_logits(model, adapter, tokens)
    for way, logits in engine_logits(model, adapter, tokens):
        result = compare(logits, oracle)
        assert result.agrees, f"{way}: {result}"
        assert result.largest > 3, "flat logits prove nothing"


@pytest.mark.parametrize(("rows", "first"), MIXTURE_RUNS)
def test_mixture_of_adapters_over_one_cache_is_within_tolerance_of_peft(
    case_directory: Path, rows: int, first: int
) -> None:
    from tests.reference.oracle import mixture_logits

    model, adapters, tokens = write_mixture(case_directory)
    stored = case_directory / "mixture.npy"
    if not stored.exists():
        np.save(stored, mixture_logits(model, adapters, tokens, *make_mixture(len(tokens))))
    result = compare(mixture_by_engine(model, adapters, tokens, rows, first), np.load(stored)[first:])
    assert result.agrees, result


def test_fast_cases_are_some_of_the_grid_and_cover_its_shapes_and_axes() -> None:
    assert {shape for shape, _ in FAST_CASES} == set(SHAPES)
    assert {axis for _, axis in FAST_CASES} == set(LORA_AXES)
    assert {shape for shape, _ in ALL_CASES} == set(SHAPES)


def test_comparison_notices_one_logit_an_argmax_and_a_value_that_is_not_finite() -> None:
    oracle = np.random.default_rng(0).standard_normal((5, 40))
    off, flipped, undefined = oracle.copy(), oracle.copy(), oracle.copy()
    off[4, 3] += 1e-4 + 1.1e-4 * abs(oracle[4, 3])
    top = oracle[2].argmax()
    oracle[2, top - 1] = oracle[2, top] - 1e-6
    flipped[2, top - 1] = oracle[2, top] + 1e-6
    undefined[0, 0] = np.nan
    assert not compare(off, oracle).agrees
    assert compare(flipped, oracle).argmax_flips == 1
    assert not compare(undefined, oracle).agrees
    assert compare(oracle, oracle).agrees
