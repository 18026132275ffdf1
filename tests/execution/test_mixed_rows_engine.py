"""Rows of the base model and of four adapters in one real engine, every slot full: each as if it were alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest

from tests.adapters import ALL_TARGETS, ATTENTION, MLP
from tests.execution.live import Answer, Engine, MergedModel, Row, prompt_of, running, write_adapter, write_model

pytestmark = pytest.mark.engine

LENGTHS = (5, 37, 70)
ROWS = 16
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixed_rows")


@pytest.fixture(scope="module")
def adapters(root: Path) -> list[Path]:
    """Different ranks, and each a different subset of the modules."""
    return [
        write_adapter(root, "all-modules-rank-4", seed=1, rank=4),
        write_adapter(
            root, "attention-of-two-layers-rank-5", seed=2, rank=5, targets=ATTENTION, layers=[1, 3], scale=0.15
        ),
        write_adapter(root, "head-and-mlp-rank-16", seed=3, rank=16, targets=(*MLP, "lm_head")),
        write_adapter(root, "value-and-up-rank-8", seed=4, rank=8, targets=("v_proj", "up_proj"), scale=0.15),
    ]


@pytest.fixture(scope="module")
def engine(root: Path, adapters: list[Path]) -> Iterator[Engine]:
    # 48 tokens a step: prompts are read in chunks, in steps where other rows decode.
    with running(write_model(root), adapters, max_num_batched_tokens=48) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[Row, Answer]:
    rows: list[Row] = [(adapter, prompt_of(n)) for adapter in (None, *engine.adapters) for n in LENGTHS]
    return {row: engine.answer([row], prompt=True)[0] for row in rows}


def assert_same(got: Answer, wanted: Answer, prompt: bool) -> None:
    assert got.tokens == wanted.tokens
    assert np.abs(got.logprobs - wanted.logprobs).max() <= TOLERANCE
    if prompt:
        assert np.abs(got.prompt_logprobs - wanted.prompt_logprobs).max() <= TOLERANCE


def test_alone_every_adapter_equals_the_merged_model(
    root: Path, adapters: list[Path], engine: Engine, alone: dict[Row, Answer]
) -> None:
    for adapter, path in zip((None, *engine.adapters), (None, *adapters), strict=True):
        merged = MergedModel(root / "model", path)
        for length in LENGTHS:
            prompt = prompt_of(length)
            answer = alone[adapter, prompt]
            expected = merged.logprobs([*prompt, *answer.tokens])
            got = np.concatenate([answer.prompt_logprobs, answer.logprobs])
            assert np.abs(got - expected).max() <= TOLERANCE


def test_the_adapters_say_different_things(engine: Engine, alone: dict[Row, Answer]) -> None:
    answers = {alone[adapter, prompt_of(37)].tokens for adapter in (None, *engine.adapters)}
    assert len(answers) == 5


@pytest.mark.parametrize("base_rows", range(ROWS + 1))
def test_mixed_rows_equal_the_same_rows_alone(engine: Engine, alone: dict[Row, Answer], base_rows: int) -> None:
    shuffle = random.Random(base_rows)
    kinds = [None] * base_rows + list(islice(cycle(engine.adapters), ROWS - base_rows))
    rows: list[Row] = [(kind, prompt_of(shuffle.choice(LENGTHS))) for kind in kinds]
    shuffle.shuffle(rows)
    prompt = base_rows % 4 == 0
    for row, answer in zip(rows, engine.answer(rows, prompt=prompt), strict=True):
        assert_same(answer, alone[row], prompt)


@pytest.mark.parametrize("shares", [(1, 15, 0, 0, 0), (0, 1, 0, 0, 15), (13, 0, 1, 1, 1), (1, 0, 0, 14, 1)])
def test_lopsided_batches_equal_the_same_rows_alone(
    engine: Engine, alone: dict[Row, Answer], shares: tuple[int, ...]
) -> None:
    kinds = [kind for kind, share in zip((None, *engine.adapters), shares, strict=True) for _ in range(share)]
    rows: list[Row] = [(kind, prompt_of(LENGTHS[place % 3])) for place, kind in enumerate(kinds)]
    for order in (rows, rows[::-1]):
        for row, answer in zip(order, engine.answer(order), strict=True):
            assert_same(answer, alone[row], prompt=False)


def test_vllm_own_operations_fail_this_check(engine: Engine, alone: dict[Row, Answer]) -> None:
    """The mutant: must run last, as it leaves the engine with vLLM's operations."""
    rows: list[Row] = [(kind, prompt_of(37)) for kind in (None, engine.adapters[0])]
    engine.use_stock_operations()
    base, adapted = engine.answer(rows)
    assert_same(adapted, alone[rows[1]], prompt=False)
    with pytest.raises(AssertionError):
        assert_same(base, alone[rows[0]], prompt=False)


def test_all_targets_are_covered_by_some_adapter() -> None:
    assert {*ATTENTION, *MLP} == set(ALL_TARGETS)
