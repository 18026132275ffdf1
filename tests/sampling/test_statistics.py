"""Draws follow the recorded probabilities, and the recorded probabilities follow a float64 softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epochless_vllm.protocol.draws import DrawKey, draw_range, seeded_key
from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters
from epochless_vllm.reference import sampler
from epochless_vllm.sampling import parameter_row, sample_rows

DRAWS = 1_000_000
ROWS = 5_000  # draws a call
FILTERED = sampler_from_parameters(temperature=0.8, top_k=24, top_p=0.97, min_p=0.001)


def chi_square_tail(statistic: float, degrees: int) -> float:
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def counted_draws(logits_V: torch.Tensor, config: SamplerConfig, key: DrawKey, draws: int) -> np.ndarray:
    counts_V = torch.zeros(len(logits_V), dtype=torch.int64)
    logits_BV = logits_V.expand(ROWS, -1).contiguous()
    parameters_BP = np.tile(parameter_row(config), (ROWS, 1))
    keys_B2 = np.tile(np.array(key, dtype=np.uint32), (ROWS, 1))
    for first in range(0, draws, ROWS):
        found = sample_rows(logits_BV, parameters_BP, keys_B2, np.arange(first, first + ROWS))
        counts_V += torch.bincount(found.tokens, minlength=len(logits_V))
    return counts_V.numpy()


@pytest.mark.parametrize(
    ("config", "seed"), [(sampler_from_parameters(temperature=1.0), 11), (FILTERED, 12)], ids=["unfiltered", "filtered"]
)
def test_a_million_draws_follow_the_recorded_probabilities(config: SamplerConfig, seed: int) -> None:
    logits_V = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 1.5
    shares = [sampler.share_of_token(logits_V.numpy(), config, token)[:2] for token in range(64)]
    widths_V = np.array([w for _, w in shares], dtype=np.float64)
    assert widths_V.sum() == 2**32
    counts_V = counted_draws(logits_V, config, seeded_key(seed=seed, prompt_index=0, choice_index=0), DRAWS)
    assert counts_V.sum() == DRAWS
    assert (counts_V[widths_V == 0] == 0).all()
    expected_V = widths_V / 2**32 * DRAWS
    common = expected_V >= 5  # the usual limit of the chi-square approximation; the rest is one cell
    found = np.append(counts_V[common], counts_V[~common].sum())
    wanted = np.append(expected_V[common], expected_V[~common].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    assert 0.001 <= chi_square_tail(float(((found - wanted) ** 2 / wanted).sum()), len(found) - 1) <= 0.999


def test_the_same_test_fails_for_draws_of_a_slightly_other_distribution() -> None:
    logits_V = torch.randn(64, generator=torch.Generator().manual_seed(11)) * 1.5
    counts_V = counted_draws(
        logits_V, sampler_from_parameters(temperature=1.02), seeded_key(seed=11, prompt_index=0, choice_index=0), DRAWS
    )
    config = sampler_from_parameters(temperature=1.0)
    expected_V = np.array([sampler.share_of_token(logits_V.numpy(), config, token)[1] for token in range(64)])
    expected_V = expected_V / 2**32 * DRAWS
    assert chi_square_tail(float(((counts_V - expected_V) ** 2 / expected_V).sum()), 63) < 1e-6


def test_a_million_words_are_uniform_in_every_byte() -> None:
    words = np.array(draw_range(seeded_key(seed=5, prompt_index=0, choice_index=0), 0, DRAWS), dtype=np.uint32)
    for byte_N in words.view(np.uint8).reshape(-1, 4).T:
        counts = np.bincount(byte_N, minlength=256)
        assert 0.001 <= chi_square_tail(float(((counts - DRAWS / 256) ** 2 / (DRAWS / 256)).sum()), 255) <= 0.999


def vocabulary_rows() -> dict[str, np.ndarray]:
    generator, size = np.random.default_rng(17), 151_936
    rows = {f"normal x {scale}": generator.standard_normal(size) * scale for scale in (1, 2, 3, 4, 5)}
    rows["peaked"] = generator.standard_normal(size) + np.where(np.arange(size) == 77, 20.0, 0.0)
    rows["zipf"] = -1.1 * np.log(1.0 + generator.permutation(size)) + 12
    rows["flat"] = np.zeros(size)
    return {name: row.astype(np.float32) for name, row in rows.items()}


def log_softmax(logits_V: np.ndarray, temperature: float) -> np.ndarray:
    scaled_V = logits_V.astype(np.float64) / temperature
    scaled_V = scaled_V - scaled_V.max()
    return scaled_V - np.log(np.exp(scaled_V).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_recorded_probabilities_are_a_float64_softmax_to_within_the_stated_bounds(temperature: float) -> None:
    config = sampler_from_parameters(temperature=temperature)
    for name, logits_V in vocabulary_rows().items():
        cumulative_V = np.cumsum(sampler.row_weights(logits_V[None], config)[0]).astype(object)
        ends_V = np.append(0, cumulative_V * 2**32 // cumulative_V[-1]).astype(np.int64)
        widths_V = np.diff(ends_V)
        exact_V = log_softmax(logits_V, temperature)
        with np.errstate(divide="ignore"):
            error_V = np.abs(np.log(widths_V / 2**32) - exact_V)
        probability_V = np.exp(exact_V)
        assert error_V[probability_V > 1e-6].max(initial=0) <= 4e-4, name
        assert error_V[probability_V > 1e-3].max(initial=0) <= 2e-5, name
        assert np.abs(widths_V / 2**32 - probability_V).sum() / 2 <= 2e-5, name


def penalised(logits_V: np.ndarray, counts_V: np.ndarray) -> np.ndarray:
    seen_V = counts_V > 0
    repeated_V = np.where(logits_V > 0, logits_V / np.float32(1.2), logits_V * np.float32(1.2))
    logits_V = np.where(seen_V, repeated_V, logits_V)
    return (logits_V - np.float32(0.3) * counts_V - np.float32(0.7) * seen_V).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}])
def test_the_behaviour_probability_is_recomputable_in_floats(temperature: float, filters: dict[str, float]) -> None:
    generator = np.random.default_rng(23)
    config = sampler_from_parameters(temperature=temperature, **filters)
    logits_V = penalised(
        (generator.standard_normal(1000) * 3).astype(np.float32), generator.integers(0, 3, 1000).astype(np.float32)
    )
    rows = 400
    found = sample_rows(
        torch.from_numpy(np.tile(logits_V, (rows, 1))),
        np.tile(parameter_row(config), (rows, 1)),
        np.tile(np.array([[1, 2]], dtype=np.uint32), (rows, 1)),
        np.arange(rows),
    )
    exact_V = log_softmax(logits_V, temperature)
    probability_V = np.exp(exact_V)
    order_V = np.argsort(-logits_V, kind="stable")
    size = min(int((probability_V >= filters.get("min_p", 0) * probability_V.max()).sum()), filters.get("top_k", 1000))
    nucleus_V = np.cumsum(probability_V[order_V[:size]]) / probability_V[order_V[:size]].sum()
    size = min(size, int(np.searchsorted(nucleus_V, filters.get("top_p", 2.0))) + 1)
    kept = set(order_V[:size].tolist())
    mass = np.log(probability_V[order_V[:size]].sum())
    tolerance = 1e-3  # of tokens down to 1e-6, over the temperatures
    for token, w, kept_mass in zip(found.tokens.tolist(), found.w.tolist(), found.kept.tolist(), strict=True):
        assert token in kept
        assert abs(np.log(kept_mass / 2**32) - mass) <= tolerance
        assert abs(np.log(w / 2**32) - (exact_V[token] - mass)) <= tolerance
        assert abs(np.log(w / 2**32) + np.log(kept_mass / 2**32) - exact_V[token]) <= tolerance
