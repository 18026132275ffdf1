"""One slot reused by adapter after adapter in a compiled model, where whatever Python looked up once would stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.adapters import ALL_TARGETS
from tests.execution.live import Engine, MergedModel, Row, prompt_of, running, write_adapter, write_model

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("single_modules")


@pytest.fixture(scope="module")
def adapters(root: Path) -> list[Path]:
    """One adapter per module: fused layers must put its one part where it belongs and leave the others alone."""
    ranks = (4, 8, 3, 16, 1, 8, 4)
    return [
        write_adapter(root, target, seed=seed, rank=rank, targets=[target], scale=0.1)
        for seed, (target, rank) in enumerate(zip(ALL_TARGETS, ranks, strict=True), 1)
    ]


@pytest.fixture(scope="module")
def engine(root: Path, adapters: list[Path]) -> Iterator[Engine]:
    with running(write_model(root), adapters, max_loras=1, enforce_eager=False) as engine:
        yield engine


@pytest.mark.parametrize("number", range(7), ids=ALL_TARGETS)
def test_an_adapter_of_one_module_equals_the_merged_model(
    engine: Engine, root: Path, adapters: list[Path], number: int
) -> None:
    row: Row = (engine.adapters[number], prompt_of(40))
    answer = engine.answer([row], prompt=True)[0]
    expected = MergedModel(root / "model", adapters[number]).logprobs([*row[1], *answer.tokens])
    got = np.concatenate([answer.prompt_logprobs, answer.logprobs])
    assert np.abs(got - expected).max() <= TOLERANCE
    base = MergedModel(root / "model", None).logprobs([*row[1], *answer.tokens])
    assert np.abs(got - base).max() > 100 * TOLERANCE


@pytest.mark.parametrize("base_first", [True, False])
def test_a_base_request_beside_an_adapter_is_answered_by_the_base(engine: Engine, base_first: bool) -> None:
    rows: list[Row] = [(None, prompt_of(12)), (engine.adapters[6], prompt_of(12))]
    if not base_first:
        rows.reverse()
    alone = [engine.answer([row])[0] for row in rows]
    assert alone[0].tokens != alone[1].tokens
    for got, wanted in zip(engine.answer(rows), alone, strict=True):
        assert got.tokens == wanted.tokens
        assert np.abs(got.logprobs - wanted.logprobs).max() <= TOLERANCE
