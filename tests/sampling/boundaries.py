"""Inputs on which an error of one shows: scalars at the edges of their ranges, and draws at the edges of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters
from epochless_vllm.reference import sampler

Scalar = Callable[..., int]

_FILTERS: tuple[dict[str, float], ...] = ({}, {"top_k": 9}, {}, {"top_p": 0.999}, {}, {"min_p": 1e-6})


def scalar_difference(normalised: Scalar, target_of: Scalar, share_of: Scalar) -> str:
    """Return the first difference of three scalar functions from exact integers, or nothing."""
    generator = np.random.default_rng(5)
    totals = [2**40, 2**40 + 1, 2**58 - 1, 3 * 2**40, 2**62 - 1, 151_936 << 40]
    totals += [int(bits) for bits in generator.integers(2**40, 2**62, 60)]
    for total in totals:
        parts = {0, 1, total // 3, total - 1, total, int(generator.integers(0, total))}
        for part in parts:
            if normalised(part, total) != part * 2**32 // total:
                return f"normalised({part}, {total})"
        for draw in {0, 1, 2**16 - 1, 2**31, 2**32 - 2, 2**32 - 1, int(generator.integers(0, 2**32))}:
            if target_of(draw, total) != -(-(draw + 1) * total // 2**32) - 1:
                return f"target_of({draw}, {total})"
        for value in (1.0, 0.5, 0.9, 1 - 2**-53, 2.0**-30, 2.0**-64, 1.5 * 2**-70, 2.0**-126, 0.1 + 2**-54):
            share = Fraction(value)
            shift = share.denominator.bit_length() - 1
            if share_of(share.numerator, shift, total) != -(-share.numerator * total // 2**shift):
                return f"share_of({share.numerator}, {shift}, {total})"
    return ""


def boundary_rows() -> Iterator[tuple[np.ndarray, SamplerConfig, list[int]]]:
    """Yield (logits, sampler, draws): the first and the last draw of every token that can be drawn.

    Near a total of 2**40 a step of the draw is 256 steps of the cumulative, so edges are met exactly now and then.
    """
    generator = np.random.default_rng(6)
    for number in range(96):
        logits_V = (generator.standard_normal(17) - 9).astype(np.float32)
        logits_V[generator.integers(0, 17)] = 0.0
        config = sampler_from_parameters(temperature=1.0, **_FILTERS[number % len(_FILTERS)])
        draws = set()
        for token in range(17):
            lo, w, _ = sampler.share_of_token(logits_V, config, token)
            draws |= {lo, lo + w - 1} if w else set()
        yield logits_V, config, sorted(draws)
