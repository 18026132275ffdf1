"""The sampler recipe read aloud: one row, Python's exact integers and fractions, no speed.

An oracle for sampling/ and for reference/sampler.py, sharing no code with either: the table entries come from decimal
powers of two, and the integer temperature from the request's exact number.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from math import floor, isinf, isnan

from epochless_vllm.protocol.sampler_config import SamplerConfig


@dataclass(frozen=True)
class PlainRecord:
    """A sampled token and its record; see ``sampling.Sampled`` for the fields. ``status`` as there: 0, 1 or 2."""

    token: int
    lo: int
    w: int
    draw: int
    kept: int
    status: int = 0


def sample_row(logits: Sequence[float], config: SamplerConfig, draw: int) -> PlainRecord:
    """Return what a 32-bit draw picks from one row of float32 logits."""
    if any(isnan(x) or x == float("inf") for x in logits):
        return PlainRecord(0, 0, 0, 0, 0, status=1)
    if all(isinf(x) for x in logits):
        return PlainRecord(0, 0, 0, 0, 0, status=2)
    if config.greedy:
        # Largest value, then lowest id; Python holds 0.0 and -0.0 equal.
        return PlainRecord(min(range(len(logits)), key=lambda i: (-logits[i], i)), 0, 2**32, 0, 2**32)
    weights = _row_weights(logits, config.temperature)
    kept = _kept_ids(logits, weights, config)
    total = sum(weights[i] for i in kept)
    share = floor(Fraction(total * 2**32, sum(weights)))
    below = 0
    for i in sorted(kept):
        lo, hi = below * 2**32 // total, (below + weights[i]) * 2**32 // total
        if lo <= draw < hi:
            return PlainRecord(i, lo, hi - lo, draw, share)
        below += weights[i]
    raise AssertionError("the cumulative ends at 2**32, above every draw")


def _row_weights(logits: Sequence[float], temperature: Fraction) -> list[int]:
    quanta = [None if isinf(x) else _quantum(x) for x in logits]
    top = max(q for q in quanta if q is not None)
    beta, shift = _integer_temperature(temperature)
    return [0 if q is None else _weight(floor(Fraction((top - q) * beta, 2**shift) + Fraction(1, 2))) for q in quanta]


def _quantum(logit: float) -> int:
    clamped = max(Fraction(-8192), min(Fraction(8192), Fraction(logit)))
    return round(clamped * 2**16)  # Python rounds a fraction half to even


def _weight(k: int) -> int:
    octaves, fraction = divmod(k, 2**16)
    coarse, fine = divmod(fraction, 2**8)
    return int((_power(coarse, 8) * _power(fine, 16)) // 2 ** (22 + octaves))


@lru_cache(maxsize=512)
def _power(i: int, bits: int) -> int:
    """Return the integer nearest to 2**31 * 2**(-i / 2**bits)."""
    with localcontext() as context:
        context.prec = 60  # the nearest any entry comes to a tie is 1e-3
        return round(Fraction(Decimal(2) ** (31 - Decimal(i) / 2**bits)))


def _integer_temperature(temperature: Fraction) -> tuple[int, int]:
    with localcontext() as context:
        context.prec = 60
        log2_e = Fraction(1 / Decimal(2).ln())
    shift = 0
    while log2_e / temperature * 2**shift < 2**30:
        shift += 1
    while log2_e / temperature * 2**shift >= 2**31:
        shift -= 1
    return round(log2_e / temperature * 2**shift), shift


def _kept_ids(logits: Sequence[float], weights: list[int], config: SamplerConfig) -> list[int]:
    kept = [i for i, w in enumerate(weights) if w and w >= config.min_p * 2**40]
    kept.sort(key=lambda i: (-logits[i], i))
    if config.top_k:
        kept = kept[: config.top_k]
    if config.top_p < 1:
        whole, sum_so_far = sum(weights[i] for i in kept), 0
        for count, i in enumerate(kept, start=1):
            sum_so_far += weights[i]
            if sum_so_far >= config.top_p * whole:
                return kept[:count]
    return kept


def float32(value: float) -> float:
    """Return the float32 nearest to a Python float, as a Python float."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
