"""Sampling parameters as the kernels read them: one row of eight integers a request, made once at admission.

Promises that a row holds everything a kernel needs of a ``SamplerConfig``. Knows no logits and no draws.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.protocol.sampler_config import FRACTION_BITS, SATURATION, WEIGHT_BITS, SamplerConfig

# Columns of a parameter row.
BETA, SHIFT, DISTANCE_CAP, TOP_K, TOP_P, TOP_P_SHIFT, MIN_WEIGHT, GREEDY = range(8)
PARAMETERS = 8

# Columns of a sampled record.
LO, W, DRAW, KEPT, STATUS = range(5)
RECORD = 5

# Values of the status column.
OK, NON_FINITE, ALL_MASKED = range(3)

MAX_VOCABULARY = 1 << 22  # a total of weights then stays under 2**62

_ZERO_OCTAVES = WEIGHT_BITS + 1  # a weight this many octaves down is zero
_MAX_TOP_P_SHIFT = 127  # a product of a 53-bit numerator and a total is far below 2**127: any larger shift acts alike


def parameter_row(config: SamplerConfig) -> NDArray[np.int64]:
    """Return the ``[8]`` row of a sampler."""
    row = np.zeros(PARAMETERS, dtype=np.int64)
    row[TOP_P] = 1
    if config.greedy:
        row[GREEDY] = 1
        return row
    beta, shift = config.scale.beta, config.scale.shift
    row[BETA], row[SHIFT] = beta, shift
    # The least distance of zero weight; distances are cut there, which also keeps every shift under 64.
    vanishing = -(((1 << (shift - 1)) - (_ZERO_OCTAVES << (FRACTION_BITS + shift))) // beta)
    row[DISTANCE_CAP] = min(vanishing, 2 * SATURATION << FRACTION_BITS)
    row[TOP_K] = config.top_k
    row[TOP_P], row[TOP_P_SHIFT] = _top_p_columns(config.top_p)
    row[MIN_WEIGHT] = -((-config.min_p.numerator << WEIGHT_BITS) // config.min_p.denominator)
    return row


def _top_p_columns(top_p: Fraction) -> tuple[int, int]:
    return top_p.numerator, min(top_p.denominator.bit_length() - 1, _MAX_TOP_P_SHIFT)
