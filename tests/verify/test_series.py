"""Sums over many rows: chance stays within the limit whatever the errors' sizes, and what goes one way leaves it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from epochless_vllm.reference.rows import Contrast
from epochless_vllm.verify.series import FALSE_REFUSALS, LIMIT, ROUGHNESS, TEMPERATURE, Series, add_up

SIZES = {
    "even": lambda random, shape: np.ones(shape),
    "normal": lambda random, shape: random.standard_normal(shape),
    "mostly zero": lambda random, shape: random.standard_normal(shape) * (random.random(shape) < 0.05),
    "heavy tails": lambda random, shape: random.standard_cauchy(shape),
}


def honest_rows(seed: int, count: int, size: str, noise: float = 0.05) -> list[Contrast]:
    """Rows of a server whose roundings are as large as, and apart from, those repeated."""
    random = np.random.default_rng(seed)
    signs = random.choice((-1, 1), (2, count))
    moved, rounded = noise * signs * SIZES[size](random, (2, count))
    heat = 8 * random.standard_normal(count)
    return [Contrast(m - r, m, r, h) for m, r, h in zip(moved.tolist(), rounded.tolist(), heat.tolist(), strict=True)]


def test_limit_is_that_of_three_sums_and_the_stated_chance() -> None:
    assert 3 * math.exp(-(LIMIT**2) / 2) == pytest.approx(FALSE_REFUSALS)
    assert FALSE_REFUSALS <= 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_honest_rows_pass_whatever_the_sizes_of_their_errors(size: str) -> None:
    worst = -math.inf
    for seed in range(200):
        series = add_up(honest_rows(seed, 100, size))
        assert series.lie is None
        worst = max(worst, *series.scores.values())
    assert worst < 4  # of 600 sums, chance puts one in five beyond 4 even without the allowances


def test_honest_rows_pass_however_many_they_are() -> None:
    series = add_up(honest_rows(1, 50_000, "normal"))
    assert series.lie is None
    assert max(series.scores.values()) < 0  # the allowances grow with the rows, chance with their root


@pytest.mark.parametrize(("change", "name"), [(-0.02, "hotter"), (0.02, "colder")])
def test_rows_of_another_temperature_are_refused_once_they_are_many(change: float, name: str) -> None:
    rows = [row._replace(error=row.error + change * row.heat) for row in honest_rows(2, 3000, "normal")]
    assert add_up(rows[:10]).lie is None
    series = add_up(rows)
    assert series.lie is not None
    assert series.lie[0] == "replay_temperature"
    assert max(series.scores, key=lambda each: series.scores[each]) == name


def test_temperature_within_the_allowance_passes() -> None:
    rows = [row._replace(error=row.error + 0.9 * TEMPERATURE * row.heat) for row in honest_rows(3, 20_000, "normal")]
    assert add_up(rows).lie is None


@pytest.mark.parametrize(("noise", "refused"), [(0.9, False), (1.02, False), (1.5, True)])
def test_rows_rougher_than_roundings_are_refused_once_they_are_many(noise: float, refused: bool) -> None:
    rows = [row._replace(moved=noise * row.moved) for row in honest_rows(4, 3000, "normal")]
    assert noise < 1 + ROUGHNESS or refused
    assert add_up(rows[:20]).lie is None
    lie = add_up(rows).lie
    assert (lie is not None and lie[0] == "replay_drift") is refused


def test_sums_of_parts_are_those_of_the_whole() -> None:
    rows = honest_rows(5, 300, "normal")
    parts = add_up(rows[:100]).plus(add_up(rows[100:150])).plus(add_up(rows[150:])).plus(Series())
    whole = add_up(rows)
    for part, all_of in zip(parts, whole, strict=True):
        assert part == pytest.approx(all_of)


def test_no_rows_and_rows_without_errors_say_nothing() -> None:
    assert add_up([]) == Series()
    assert Series().lie is None
    assert add_up([Contrast(0.0, 0.0, 0.0, 0.0)] * 100).lie is None
    assert set(Series().scores.values()) == {0.0}
