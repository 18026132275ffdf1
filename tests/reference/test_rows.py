"""Rows held against recomputed ones: bounded errors always pass, larger ones never, whatever the filters do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochless_vllm.protocol.records import ONE
from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters
from epochless_vllm.reference.rows import Record, RowResult, Tolerance, compare_rows
from epochless_vllm.reference.sampler import sample_rows

REACH = 0.02
SAMPLERS = {
    "plain": sampler_from_parameters(temperature=1.0),
    "cool": sampler_from_parameters(temperature=0.3),
    "top-k": sampler_from_parameters(temperature=1.1, top_k=5),
    "top-p": sampler_from_parameters(temperature=0.8, top_p=0.9),
    "min-p": sampler_from_parameters(temperature=1.0, min_p=0.05),
    "all": sampler_from_parameters(temperature=0.9, top_k=12, top_p=0.95, min_p=0.01),
    "greedy": sampler_from_parameters(temperature=0.0),
}


def records_of(logits: np.ndarray, config: SamplerConfig, draws: np.ndarray) -> list[Record]:
    """Return what a server with these logits records."""
    sampled = sample_rows(logits, config, draws)
    columns = (sampled.token, sampled.lo, sampled.w, sampled.kept, sampled.draw)
    return [Record(*map(int, row)) for row in zip(*columns, strict=True)]


def rows(seed: int, count: int = 40, vocab: int = 60, scale: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return (scale * random.standard_normal((count, vocab))).astype(np.float32), random.integers(0, ONE, count)


def compare(own: np.ndarray, config: SamplerConfig, records: list[Record], reach: float = REACH) -> list[RowResult]:
    return compare_rows(own, config, records, [reach] * len(records))


@pytest.mark.parametrize("name", SAMPLERS)
def test_equal_logits_are_exact(name: str) -> None:
    logits, draws = rows(1)
    results = compare(logits, SAMPLERS[name], records_of(logits, SAMPLERS[name], draws))
    assert all(each.fault is None and each.exact and not each.flips for each in results)
    assert max(each.ratio for each in results) < 1e-6


@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.01, 1.0, 4.0, 12.0]),
    worst=st.booleans(),
    shift=st.floats(-5, 5, width=32),
)
def test_errors_within_reach_never_are_a_fault(name: str, seed: int, scale: float, worst: bool, shift: float) -> None:
    """Also the worst ones: every error at the bound, with either sign."""
    config = SAMPLERS[name]
    logits, draws = rows(seed, count=6, scale=scale)
    random = np.random.default_rng(seed + 1)
    error = random.uniform(-1, 1, logits.shape)
    served = (logits + 0.98 * REACH * (np.sign(error) if worst else error) + shift).astype(np.float32)
    results = compare(logits, config, records_of(served, config, draws))
    assert [each for each in results if each.fault is not None] == []


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    step=st.sampled_from([0.02, 0.1, 0.25]),
    top_p=st.sampled_from([1.0, 0.95, 0.9, 0.8]),
    top_k=st.sampled_from([0, 3, 12]),
    min_p=st.sampled_from([0.0, 0.02]),
    error=st.sampled_from(["signs", "likeliest up", "likeliest down"]),
)
def test_worst_errors_that_move_the_end_of_the_kept_set_never_are_a_fault(
    seed: int, step: float, top_p: float, top_k: int, min_p: float, error: str
) -> None:
    """One likely token after a tail of unlikely ones that the filters may end at any place of: their ids come first."""
    random, reach = np.random.default_rng(seed), 0.1
    tail = -2.2 - step * np.arange(30)
    logits = np.concatenate([random.permutation(tail), [random.uniform(0, 1.5)]]).astype(np.float32)[None]
    signs = {"likeliest up": np.array([-1.0] * 30 + [1]), "likeliest down": np.array([1.0] * 30 + [-1])}
    errors = 0.98 * reach * signs.get(error, np.sign(random.uniform(-1, 1, 31)))
    served = (logits + errors).astype(np.float32)
    config = sampler_from_parameters(temperature=1.0, top_p=top_p, top_k=top_k, min_p=min_p)
    (result,) = compare(logits, config, records_of(served, config, random.integers(0, ONE, 1)), reach)
    assert (result.fault, result.detail) == (None, "")


@pytest.mark.parametrize("name", ["plain", "cool", "top-k", "top-p", "min-p", "all"])
def test_larger_error_of_the_sampled_token_is_a_fault(name: str) -> None:
    config = SAMPLERS[name]
    logits, draws = rows(3, scale=1.0)
    caught = 0
    for at in range(len(logits)):
        served = logits[at : at + 1].copy()
        token = records_of(served, config, draws[at : at + 1])[0].token
        served[0, token] += 6 * REACH
        record = records_of(served, config, draws[at : at + 1])[0]
        (result,) = compare(logits[at : at + 1], config, [record])
        caught += record.token == token and result.fault in ("replay_probability", "replay_interval")
    assert caught > len(logits) // 2


def test_greedy_token_behind_the_likeliest_is_a_fault() -> None:
    logits, _ = rows(4)
    config = SAMPLERS["greedy"]
    order = np.argsort(-logits, axis=1)
    for at, row in enumerate(logits):
        second = Record(int(order[at, 1]), 0, ONE, ONE, 0)
        gap = float(row[order[at, 0]] - row[order[at, 1]])
        (result,) = compare(row[None], config, [second], reach=gap / 2.1)
        assert result.fault == "replay_greedy"
        (result,) = compare(row[None], config, [second], reach=gap / 1.9)
        assert result.fault is None
        assert not result.exact


def test_moved_interval_of_the_right_probability_is_a_fault() -> None:
    logits, draws = rows(5)
    records = records_of(logits, SAMPLERS["plain"], draws)
    moved = [each._replace(low=(each.low + ONE // 3) % (ONE - each.width), draw=each.low) for each in records]
    results = compare(logits, SAMPLERS["plain"], moved)
    assert {each.fault for each in results} == {"replay_interval"}


@pytest.mark.parametrize(("logits", "end"), [([-10.0, 1.0, 1.0], "lower"), ([1.0, 1.0, -10.0], "upper")])
def test_either_end_of_an_interval_counts_where_the_other_hides_it(logits: list[float], end: str) -> None:
    """A share near 0 or 1 is as sensitive as any: three times nearly nothing is another logit."""
    own = np.array([logits], np.float32)
    (record,) = records_of(own, SAMPLERS["plain"], np.array([ONE // 2 - ONE // 8 if end == "lower" else ONE * 3 // 4]))
    assert record.token == 1
    hidden = record.low if end == "lower" else ONE - record.low - record.width
    moved = {"low": record.low + 2 * hidden} if end == "lower" else {"width": record.width - 2 * hidden}
    (result,) = compare(own, SAMPLERS["plain"], [record._replace(**moved)])
    assert result.fault == "replay_interval"
    assert end in result.detail


def test_draw_outside_the_recomputed_interval_is_a_fault() -> None:
    logits, draws = rows(6, scale=1.0)
    records = records_of(logits, SAMPLERS["plain"], draws)
    elsewhere = [each._replace(draw=(each.low + each.width + ONE // 4) % ONE) for each in records]
    results = compare(logits, SAMPLERS["plain"], elsewhere)
    assert {each.fault for each in results} == {"replay_draw"}


@pytest.mark.parametrize("name", ["top-k", "top-p", "all"])
def test_token_that_the_filters_drop_is_a_fault(name: str) -> None:
    logits, draws = rows(7)
    records = records_of(logits, SAMPLERS[name], draws)
    last = np.argmin(logits, axis=1)
    dropped = [each._replace(token=int(token)) for each, token in zip(records, last, strict=True)]
    assert {each.fault for each in compare(logits, SAMPLERS[name], dropped)} == {"replay_filter"}


@pytest.mark.parametrize("name", ["top-k", "top-p", "all"])
def test_other_kept_mass_is_a_fault(name: str) -> None:
    logits, draws = rows(8)
    records = records_of(logits, SAMPLERS[name], draws)
    wider = [each._replace(kept=min(ONE, each.kept + each.kept // 3), width=each.width * 3 // 4) for each in records]
    results = compare(logits, SAMPLERS[name], wider)
    assert {"replay_filter", "replay_probability"} >= {each.fault for each in results if each.fault} != set()
    assert sum(each.fault is not None for each in results) > len(results) * 3 // 4


def test_near_tie_at_the_end_of_top_k_is_a_flip_and_no_fault() -> None:
    logits = np.array([[3.0, 2.0, 1.001, 1.0, -2.0]], np.float32)
    served = np.array([[3.0, 2.0, 1.0, 1.001, -2.0]], np.float32)
    config = sampler_from_parameters(temperature=1.0, top_k=3)
    (record,) = records_of(served, config, np.array([ONE - 1]))
    assert record.token == 3
    (result,) = compare(logits, config, [record], reach=0.001)
    assert result.fault is None
    assert (result.exact, result.flips) == (False, 1)
    (result,) = compare(logits, config, [record], reach=0.0004)
    assert result.fault == "replay_filter"


def test_rows_that_are_not_numbers_are_a_fault_and_leave_the_others() -> None:
    logits, draws = rows(9, count=5)
    records = records_of(logits, SAMPLERS["plain"], draws)
    logits[2, 7] = np.nan
    results = compare(logits, SAMPLERS["plain"], records)
    assert [each.fault for each in results] == [None, None, "replay_probability", None, None]
    logits[:] = np.nan
    assert {each.fault for each in compare(logits, SAMPLERS["plain"], records)} == {"replay_probability"}
    assert {each.fault for each in compare(logits, SAMPLERS["greedy"], records)} == {"replay_greedy"}


def test_error_is_in_units_of_one_logit() -> None:
    logits, draws = rows(10, count=400)
    noise = 0.1 * REACH * np.random.default_rng(0).standard_normal(logits.shape)
    served = (logits + noise).astype(np.float32)
    results = compare(logits, SAMPLERS["plain"], records_of(served, SAMPLERS["plain"], draws))
    errors = [each.error for each in results if each.error is not None]
    assert len(errors) == 400
    assert 0.08 < math.sqrt(np.mean(np.square(errors))) < 0.16


def test_share_that_hides_its_logit_tells_nothing() -> None:
    logits = np.zeros((1, 4), np.float32)
    logits[0, 1] = 21
    (result,) = compare(logits, SAMPLERS["plain"], records_of(logits, SAMPLERS["plain"], np.array([ONE // 2])))
    assert result.fault is None
    assert result.error is None


def test_reach_grows_with_the_largest_logit_and_drift_with_fewer_rows() -> None:
    tolerance = Tolerance(absolute=0.5, relative=0.25, drift=0.2)
    assert tolerance.of_row(np.array([-8, 2, -np.inf], np.float32)) == 2.5
    assert tolerance.of_row(np.array([-np.inf], np.float32)) == 0.5
    assert tolerance.drift_of(64) == pytest.approx(0.45)
    assert Tolerance(0.0, 1.0, 0.1).of_row(np.zeros(3, np.float32)) > 0
    assert tolerance.drift_of(6400) == pytest.approx(0.2205)
