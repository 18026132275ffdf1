"""How the recorded odds of a row's token differ from recomputed ones: with the server's roundings, and with none.

One row says little of it, and many together much; verify/series.py says what the sums mean. Needs no second row of the
server's and no measured one. Knows no receipts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from epochless_vllm.protocol.records import ONE
from epochless_vllm.protocol.sampler_config import SamplerConfig
from epochless_vllm.reference.rows import (
    LEAST,
    MAX_SPREAD,
    SLACK,
    Contrast,
    Logits,
    Record,
    RowResult,
    log_odds_distance,
    spread_of,
)


def with_contrasts(
    results: Sequence[RowResult],
    logits_BV: Logits,
    plain_BV: Logits | None,
    config: SamplerConfig,
    records: Sequence[Record],
    reach_B: Sequence[float],
) -> list[RowResult]:
    """Return results of ``compare_rows``, with the contrast of those that tell something and have no fault.

    Args:
        logits_BV, config, records, reach_B: as ``compare_rows`` had them.
        plain_BV: the logits if nothing is rounded between the weights; None to leave that out.
    """
    contrasted = []
    for at, (result, record) in enumerate(zip(results, records, strict=True)):
        if result.error is None or result.fault is not None:
            contrasted.append(result)
        else:
            plain_V = None if plain_BV is None else plain_BV[at]
            contrast = _contrast(logits_BV[at], plain_V, config, record, reach_B[at])
            contrasted.append(replace(result, contrast=contrast))
    return contrasted


def _contrast(
    logits_V: Logits, plain_V: Logits | None, config: SamplerConfig, record: Record, reach: float
) -> Contrast:
    temperature, unit = float(config.temperature), spread_of(config, reach)
    share, heat = _share_and_heat(logits_V, record.token, temperature)
    recorded = record.width / ONE * (record.kept / ONE)
    error = log_odds_distance(recorded, share, SLACK) / unit
    if plain_V is None:
        return Contrast(error, 0.0, 0.0, heat / unit)
    # The heat of what no rounding has touched: errors seem to follow a heat that has some of them in it.
    plain, heat = _share_and_heat(plain_V, record.token, temperature)
    moved, rounded = (log_odds_distance(each, plain, SLACK) / unit for each in (recorded, share))
    return Contrast(error, moved, rounded, heat / unit)


def _share_and_heat(logits_V: Logits, token: int, temperature: float) -> tuple[float, float]:
    """Return a token's share of its row, and the derivative of its ln odds by ln(1 / temperature)."""
    scaled_V = logits_V.astype(np.float64) / temperature
    # A masked token has no share whatever its logit; clipped, it is a number.
    scaled_V = np.maximum(scaled_V - scaled_V.max(), -MAX_SPREAD)
    weights_V = np.exp(scaled_V)
    own, weights_V[token] = float(weights_V[token]), 0.0
    others = max(float(weights_V.sum()), LEAST)  # a row of one token has no others
    heat = float(scaled_V[token]) - float(weights_V @ scaled_V) / others
    return own / (own + others), heat
