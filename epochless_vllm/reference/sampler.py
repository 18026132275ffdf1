"""The sampler recipe in NumPy: many rows of one sampler at once, by sorting, for auditors.

An oracle for sampling/: it shares neither arithmetic nor tables with it and takes the other road at each step (sorted
rows and whole cumulatives instead of selection and block sums, unbounded integers where a product passes 64 bits).
Also answers what an auditor asks of a row it recomputed: the exact share of a given token.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.protocol.sampler_config import SamplerConfig

Integers = NDArray[np.int64]
Logits = NDArray[np.float32]

OK, NON_FINITE, ALL_MASKED = 0, 1, 2


class Records(NamedTuple):
    """A token and its record for each row, all ``[B]`` int64; see ``sampling.Sampled`` for their meaning."""

    token: Integers
    lo: Integers
    w: Integers
    draw: Integers
    kept: Integers
    status: Integers


def sample_rows(logits_BV: Logits, config: SamplerConfig, draws_B: Integers) -> Records:
    """Return what each draw picks from its row of float32 logits."""
    rows = len(logits_BV)
    fields = [np.zeros(rows, dtype=np.int64) for _ in Records._fields]
    records = Records(*fields)
    records.status[:] = row_statuses(logits_BV)
    usable = np.flatnonzero(records.status == OK)
    logits_UV = logits_BV[usable]
    if config.greedy:
        records.token[usable] = np.argmax(logits_UV, axis=1)  # the first of equals; -0.0 equals 0.0
        records.w[usable] = records.kept[usable] = 1 << 32
        return records
    weights_UV = row_weights(logits_UV, config)
    kept_UV = np.where(kept_tokens(logits_UV, weights_UV, config), weights_UV, 0)
    cumulative_UV = np.cumsum(kept_UV, axis=1)
    totals_U = cumulative_UV[:, -1].astype(object)
    # The drawn token is the first whose cumulative, out of 2**32, is above the draw.
    targets_U = -(-((draws_B[usable].astype(object) + 1) * totals_U) // 2**32)
    tokens_U = np.argmax(cumulative_UV >= targets_U.astype(np.int64)[:, None], axis=1)
    above_U = np.take_along_axis(cumulative_UV, tokens_U[:, None], axis=1)[:, 0].astype(object)
    below_U = above_U - np.take_along_axis(kept_UV, tokens_U[:, None], axis=1)[:, 0].astype(object)
    records.token[usable] = tokens_U
    records.lo[usable] = below_U * 2**32 // totals_U
    records.w[usable] = above_U * 2**32 // totals_U - records.lo[usable].astype(object)
    records.draw[usable] = draws_B[usable]
    records.kept[usable] = totals_U * 2**32 // weights_UV.sum(axis=1).astype(object)
    return records


def share_of_token(logits_V: Logits, config: SamplerConfig, token: int) -> tuple[int, int, int]:
    """Return (lo, w, kept) of one token of one usable row: what a draw that picked it would have recorded.

    ``w`` is 0 for a token the sampler would not pick.
    """
    if config.greedy:
        return 0, int(np.argmax(logits_V) == token) << 32, 1 << 32
    weights_V = row_weights(logits_V[None], config)[0]
    kept_V = np.where(kept_tokens(logits_V[None], weights_V[None], config)[0], weights_V, 0)
    below, total = int(kept_V[:token].sum()), int(kept_V.sum())
    lo = below * 2**32 // total
    return lo, (below + int(kept_V[token])) * 2**32 // total - lo, total * 2**32 // int(weights_V.sum())


def row_statuses(logits_BV: Logits) -> Integers:
    """Return 0 for a usable row, 1 for one with a NaN or +inf, 2 for one that is -inf throughout."""
    broken_B = (np.isnan(logits_BV) | np.isposinf(logits_BV)).any(axis=1)
    masked_B = np.isneginf(logits_BV).all(axis=1)
    return np.where(broken_B, NON_FINITE, np.where(masked_B, ALL_MASKED, OK)).astype(np.int64)


def row_weights(logits_BV: Logits, config: SamplerConfig) -> Integers:
    """Return the integer weight of every token of usable rows, before any filter."""
    masked_BV = np.isneginf(logits_BV)
    quanta_BV = np.rint(np.clip(logits_BV.astype(np.float64), -8192, 8192) * 65536).astype(np.int64)
    top_B1 = np.where(masked_BV, np.int64(-(2**40)), quanta_BV).max(axis=1, keepdims=True)
    scale = config.scale
    # At most 2**30 and 2**31 multiply here, so 64 bits hold it.
    products_BV = (top_B1 - np.minimum(quanta_BV, top_B1)) * np.int64(scale.beta)
    exponents_BV = (products_BV + (1 << (scale.shift - 1))) >> scale.shift
    octaves_BV = np.minimum(exponents_BV >> 16, 41)
    coarse, fine = _tables()
    mantissas_BV = coarse[(exponents_BV >> 8) % 256] * fine[exponents_BV % 256]
    return np.where(masked_BV | (octaves_BV > 40), 0, mantissas_BV >> (22 + octaves_BV))


def kept_tokens(logits_BV: Logits, weights_BV: Integers, config: SamplerConfig) -> NDArray[np.bool_]:
    """Return which tokens min-p, top-k and top-p keep, in that order."""
    order_BV = np.argsort(-logits_BV, axis=1, kind="stable")  # value descending, then id ascending
    sorted_BV = np.take_along_axis(weights_BV, order_BV, axis=1)
    least = -(-(config.min_p.numerator << 40) // config.min_p.denominator)
    kept_BV = sorted_BV >= max(least, 1)
    if config.top_k:
        kept_BV[:, config.top_k :] = False
    if config.top_p < 1:
        sums_BV = np.cumsum(np.where(kept_BV, sorted_BV, 0), axis=1)
        share: Any = sums_BV[:, -1].astype(object) * config.top_p.numerator
        need_B = (-(-share // config.top_p.denominator)).astype(np.int64)
        kept_BV &= sums_BV - sorted_BV < need_B[:, None]
    by_id_BV = np.zeros_like(kept_BV)
    np.put_along_axis(by_id_BV, order_BV, kept_BV, axis=1)
    return by_id_BV


@lru_cache(maxsize=1)
def _tables() -> tuple[Integers, Integers]:
    with localcontext() as context:
        context.prec = 50
        unit = Decimal(2**31)
        ln2 = Decimal(2).ln()
        coarse = [int((unit * (-ln2 * i / 256).exp()).to_integral_value()) for i in range(256)]
        fine = [int((unit * (-ln2 * i / 65536).exp()).to_integral_value()) for i in range(256)]
    return np.array(coarse, dtype=np.int64), np.array(fine, dtype=np.int64)
