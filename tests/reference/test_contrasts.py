"""Contrasts of rows against differences taken in double precision, and where rows have none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters
from epochless_vllm.reference.contrasts import with_contrasts
from epochless_vllm.reference.rows import RowResult, compare_rows
from tests.reference.test_rows import records_of, rows

REACH = 0.05
SAMPLERS = {
    "plain": sampler_from_parameters(temperature=1.0),
    "cool": sampler_from_parameters(temperature=0.6),
    "filtered": sampler_from_parameters(temperature=1.2, top_k=20, top_p=0.95),
}


def log_odds(row: np.ndarray, token: int, temperature: float) -> float:
    """Return ln p - ln (1 - p), summed exactly."""
    scaled = [float(each) / temperature for each in row]
    others = [each for at, each in enumerate(scaled) if at != token]
    highest = max(others)
    return scaled[token] - highest - math.log(math.fsum(math.exp(each - highest) for each in others))


def contrasted(
    own: np.ndarray, plain: np.ndarray, served: np.ndarray, config: SamplerConfig, draws: np.ndarray
) -> tuple[list[RowResult], list[int]]:
    records, reach = records_of(served, config, draws), [REACH] * len(own)
    results = compare_rows(own, config, records, reach)
    return with_contrasts(results, own, plain, config, records, reach), [each.token for each in records]


@pytest.mark.parametrize("name", SAMPLERS)
def test_contrast_is_the_difference_of_the_log_odds(name: str) -> None:
    config, (own, draws) = SAMPLERS[name], rows(1)
    temperature = float(config.temperature)
    random = np.random.default_rng(2)
    plain, served = ((own + 0.01 * random.standard_normal(own.shape)).astype(np.float32) for _ in range(2))
    results, tokens = contrasted(own, plain, served, config, draws)
    unit = 2 * REACH / temperature
    told = [at for at, result in enumerate(results) if result.contrast is not None]
    assert len(told) > len(own) // 2
    for at in told:
        found = results[at].contrast
        assert found is not None
        of_own, of_plain, of_served = (log_odds(each[at], tokens[at], temperature) for each in (own, plain, served))
        colder = log_odds(plain[at], tokens[at], temperature / math.exp(1e-5))
        # Recorded to 2**-32, which the distances forgive, and computed of logits in 2**-16.
        assert found.error == pytest.approx((of_served - of_own) / unit, abs=1e-3)
        assert found.moved == pytest.approx((of_served - of_plain) / unit, abs=1e-3)
        assert found.rounded == pytest.approx((of_own - of_plain) / unit, abs=1e-3)
        assert found.heat == pytest.approx((colder - of_plain) / 1e-5 / unit, rel=1e-4, abs=1e-3)


def test_masked_tokens_count_for_nothing() -> None:
    config, (own, draws) = SAMPLERS["plain"], rows(3)
    own[:, 40:] = -np.inf
    without, _ = contrasted(own[:, :40], own[:, :40], own[:, :40], config, draws)
    masked, _ = contrasted(own, own, own, config, draws)
    for one, other in zip(without, masked, strict=True):
        assert (one.contrast is None) == (other.contrast is None)
        if one.contrast is not None and other.contrast is not None:
            assert other.contrast == pytest.approx(one.contrast, abs=1e-9)


def test_rows_that_tell_nothing_or_are_a_fault_have_no_contrast() -> None:
    config, (own, draws) = SAMPLERS["plain"], rows(4)
    greedy = sampler_from_parameters(temperature=0.0)
    assert {each.contrast for each in contrasted(own, own, own, greedy, draws)[0]} == {None}
    results, _ = contrasted(own, own, (3 * own).astype(np.float32), config, draws)
    assert {each.contrast for each in results if each.fault is not None} == {None}
    assert any(each.fault is not None for each in results)
    alone = np.full((1, 5), -np.inf, np.float32)
    alone[0, 2] = 1.0
    (only,), _ = contrasted(alone, alone, alone, config, draws[:1])
    assert (only.contrast, only.fault) == (None, None)
