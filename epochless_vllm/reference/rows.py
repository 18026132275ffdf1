"""Recorded rows against recomputed ones: is this what the sampler would have recorded, up to rounding of the logits?

One number bounds everything. If no logit of the server differs from its recomputed one by more than ``e`` (a common
shift aside), then for any set of tokens the odds of the set, p / (1 - p), differ by a factor of at most
exp(2 e / temperature). That holds for the token itself, for the tokens before it (the interval's lower end), up to it
(its upper end), and for the kept set of a filter. ``e`` is ``Tolerance.of_row``; what is beyond it has a fault.

min-p, top-k and top-p keep a prefix of the tokens ordered by logit, and the k-th largest logit moves by no more than
``e`` either. So the ends of the prefix that are within reach are those that the filters give when the thresholds of
min-p and top-p move by the same odds, and of them only those count whose mass is, within these odds, the recorded one.
Tokens within 2 ``e`` of such an end may be kept or not; they may add what mass the recorded one leaves for them.

Own shares are the exact integers of reference/sampler.py. Knows no model, no revision and no draw key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.protocol.records import ONE
from epochless_vllm.protocol.sampler_config import SamplerConfig
from epochless_vllm.reference.sampler import OK, kept_tokens, row_statuses, row_weights

Logits = NDArray[np.float32]
Integers = NDArray[np.int64]

SLACK = 4.0 / ONE  # rounding of intervals and of a kept mass to 2**-32, both sides
CHUNK = 1 << 17  # weights computed at a time: a dozen arrays of 1 MiB stay in cache
LEAST = 2.0**-40  # of a tolerance: it divides, and a row of zeros may have none of its own
MAX_SPREAD = 700.0  # exp of it is still a double


@dataclass(frozen=True)
class Tolerance:
    """How far a server's logits may be from the recomputed ones.

    Attributes:
        absolute, relative: the greatest error of a logit, and of one per unit of the row's largest magnitude.
        drift: the greatest root mean square of errors over many rows, in units of ``of_row``.
    """

    absolute: float
    relative: float
    drift: float

    def of_row(self, logits_V: Logits) -> float:
        """Return the greatest error of one row's logits, before any processor."""
        finite = logits_V[np.isfinite(logits_V)]
        return max(self.absolute + self.relative * float(np.abs(finite).max(initial=0.0)), LEAST)

    def drift_of(self, rows: int) -> float:
        """Return the greatest root mean square over so many rows: looser for few.

        Where roundings are repeated, most rows have no error and a few a large one, of which a window may hold several.
        """
        return self.drift * (1 + 4 / math.sqrt(rows)) ** 2


class Record(NamedTuple):
    """One recorded row: the token's interval and draw out of 2**32, and the kept mass (2**32 if nothing filters)."""

    token: int
    low: int
    width: int
    kept: int
    draw: int


class Contrast(NamedTuple):
    """How the ln odds of a row's token differ between three computations, in units of what the row may err.

    Attributes:
        error: recorded minus recomputed.
        moved: recorded minus what the same weights give if nothing between them is rounded; for an honest server that
            is what its roundings did. 0 if that was not computed, as for a server in float32.
        rounded: recomputed minus the same: what the roundings repeated here did.
        heat: how the odds move with ln(1 / temperature): the unrounded ones, if they were computed.
    """

    error: float
    moved: float
    rounded: float
    heat: float


@dataclass(frozen=True)
class RowResult:
    """How a recorded row compares.

    Attributes:
        fault: the threat's code, None if the row is within tolerance.
        detail: the fault in words.
        nats: recorded minus own ln of the token's share of the unfiltered row; 0 for a greedy row.
        ratio: the worst deviation over what is allowed; above 1 is a fault.
        error: the token's error in units of ``of_row``; None where the row tells nothing: greedy, or a share so close
            to 0 or 1 that its own rounding hides the logits'.
        exact: whether the recomputed row picks the recorded token, with the recorded draw.
        flips: tokens kept by one side's filters only.
        contrast: what the row says together with others, where ``error`` is a number; contrasts.py takes it.
    """

    fault: str | None
    detail: str
    nats: float
    ratio: float
    error: float | None
    exact: bool
    flips: int = 0
    contrast: Contrast | None = None


class Own(NamedTuple):
    """What a row's recomputed logits give, as shares: of the token in the whole row, of the kept set in the whole row,
    and of the tokens before and up to the token in the kept set. Ranges where rounding may move the kept set.

    ``picks`` says whether the exact row picks the token with the recorded draw.
    """

    share: float
    lower: tuple[float, float]
    upper: tuple[float, float]
    picks: bool
    kept_ratio: float = 0.0
    kept: float = 1.0
    flips: int = 0


def compare_rows(
    logits_BV: Logits, config: SamplerConfig, records: Sequence[Record], reach_B: Sequence[float]
) -> list[RowResult]:
    """Compare rows of one sampler with their records.

    Args:
        logits_BV: recomputed logits, processors applied.
        reach_B: ``Tolerance.of_row`` of each row.
    """
    if config.greedy:
        pairs = zip(logits_BV, records, reach_B, strict=True)
        return [_compare_greedy(logits_V, record, reach) for logits_V, record, reach in pairs]
    results: list[RowResult] = []
    rows = max(1, CHUNK // logits_BV.shape[1])
    for begin in range(0, len(records), rows):
        part = slice(begin, begin + rows)
        results += _compare_sampled(logits_BV[part], config, records[part], reach_B[part])
    return results


def _compare_greedy(logits_V: Logits, record: Record, reach: float) -> RowResult:
    best = int(np.argmax(logits_V))
    behind = float(logits_V[best]) - float(logits_V[record.token])
    ratio = behind / (2 * reach) if behind else 0.0
    exact = best == record.token
    if not ratio <= 1:  # also if it is no number
        detail = f"token {record.token} is {behind:.4g} behind token {best}, rounding reaches {2 * reach:.3g}"
        return RowResult("replay_greedy", detail, 0.0, ratio, None, exact)
    return RowResult(None, "", 0.0, ratio, None, exact)


def _compare_sampled(
    logits_BV: Logits, config: SamplerConfig, records: Sequence[Record], reach_B: Sequence[float]
) -> list[RowResult]:
    usable_B = row_statuses(logits_BV) == OK
    if not usable_B.all():  # a server refuses such a row, so no honest receipt has one
        fault = RowResult("replay_probability", "the recomputed logits are not numbers", 0.0, math.inf, None, False)
        kept = [at for at in range(len(records)) if usable_B[at]]
        rest = iter(
            _compare_sampled(logits_BV[kept], config, [records[at] for at in kept], [reach_B[at] for at in kept])
            if kept
            else ()
        )
        return [next(rest) if usable else fault for usable in usable_B]
    weights_BV = row_weights(logits_BV, config)
    if config.filtered:
        kept_BV = kept_tokens(logits_BV, weights_BV, config)
        return [
            _compare_filtered(logits_BV[at], weights_BV[at], kept_BV[at], config, record, reach_B[at])
            for at, record in enumerate(records)
        ]
    tokens_B = np.array([record.token for record in records])[:, None]
    up_to_B = np.take_along_axis(np.cumsum(weights_BV, axis=1), tokens_B, axis=1)[:, 0]
    weight_B = np.take_along_axis(weights_BV, tokens_B, axis=1)[:, 0]
    whole_B = weights_BV.sum(axis=1)
    results = []
    for at, record in enumerate(records):
        whole, weight, up_to = int(whole_B[at]), int(weight_B[at]), int(up_to_B[at])
        lower, upper = (up_to - weight) / whole, up_to / whole
        picks = _picks(up_to - weight, weight, whole, record.draw)
        own = Own(weight / whole, (lower, lower), (upper, upper), picks)
        results.append(_judge(own, record, spread_of(config, reach_B[at])))
    return results


def _compare_filtered(
    logits_V: Logits,
    weights_V: Integers,
    kept_V: NDArray[np.bool_],
    config: SamplerConfig,
    record: Record,
    reach: float,
) -> RowResult:
    order_V = np.argsort(-logits_V, kind="stable")
    sums_V, spread, token = np.cumsum(weights_V[order_V]), spread_of(config, reach), record.token
    whole, own_count = int(sums_V[-1]), int(kept_V.sum())
    least, most = _reachable_ends(weights_V[order_V], sums_V, config, spread)
    least, most = min(least, own_count), max(most, own_count)
    masses = sums_V[least - 1 : most] / whole
    ratios = np.array([abs(log_odds_distance(record.kept / ONE, float(mass), SLACK)) / spread for mass in masses])
    fitting = np.flatnonzero(ratios <= 1)
    if not fitting.size:
        nearest = int(np.argmin(ratios))
        detail = f"the kept mass is recorded as {record.kept / ONE:.6g}, recomputed as {float(masses[nearest]):.6g}"
        return RowResult(
            "replay_filter", detail, 0.0, float(ratios[nearest]), None, False, abs(least + nearest - own_count)
        )
    shortest, longest = least + int(fitting[0]), least + int(fitting[-1])
    if float(logits_V[token]) < float(logits_V[order_V[longest - 1]]) - 2 * reach:
        detail = f"the filters leave {longest} tokens at most and token {token} is not among them"
        return RowResult("replay_filter", detail, 0.0, math.inf, None, False, 1)
    first_out = float(logits_V[order_V[shortest]]) if shortest < len(order_V) else -math.inf
    surely_V = logits_V > first_out + 2 * reach
    surely_V[token] = True  # it was emitted
    maybe_V = ~surely_V & (logits_V >= float(logits_V[order_V[longest - 1]]) - 2 * reach)
    weight = int(weights_V[token])
    lower, upper = _end_ranges(
        surely=(int(weights_V[:token][surely_V[:token]].sum()) / whole, int(weights_V[surely_V].sum()) / whole),
        maybe=(int(weights_V[:token][maybe_V[:token]].sum()) / whole, int(weights_V[maybe_V].sum()) / whole),
        weight=weight / whole,
        mass=tuple(_share(_log_odds(record.kept / ONE) + sign * spread) for sign in (-1, 1)),  # type: ignore[arg-type]
    )
    kept_weights_V = np.where(kept_V, weights_V, 0)
    below, kept = int(kept_weights_V[:token].sum()), int(kept_weights_V.sum())
    own = Own(
        share=weight / whole,
        lower=lower,
        upper=upper,
        picks=bool(kept_V[token]) and _picks(below, weight, kept, record.draw),
        kept_ratio=float(ratios.min()),
        kept=kept / whole,
        flips=max(shortest - own_count, own_count - longest, int(not kept_V[token])),
    )
    return _judge(own, record, spread)


def _end_ranges(
    *, surely: tuple[float, float], maybe: tuple[float, float], weight: float, mass: tuple[float, float]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ranges of an interval's lower and upper end, in shares of the kept set.

    Args:
        surely, maybe: (mass before the token, mass in all) of tokens that are kept, and that may be.
        weight: the token's mass.
        mass: the least and the most that the kept set may have.
    """
    (below, sure), (maybe_below, maybe_all) = surely, maybe
    least, most = max(mass[0], sure), max(min(mass[1], sure + maybe_all), sure)
    beside = maybe_all - maybe_below
    lower: list[float] = []
    upper: list[float] = []
    # Each end is monotone in the kept mass between these points.
    for whole in {least, most, *(min(max(sure + each, least), most) for each in (beside, maybe_below))}:
        added = max(whole - sure, 0.0)
        for before in (below + max(0.0, added - beside), below + min(maybe_below, added)):
            lower.append(min(before / whole, 1.0))
            upper.append(min((before + weight) / whole, 1.0))
    return (min(lower), max(lower)), (min(upper), max(upper))


def _judge(own: Own, record: Record, spread: float) -> RowResult:
    """Hold every recorded share of a row against the recomputed ones."""
    low, high = record.low / ONE, (record.low + record.width) / ONE
    share, draw = record.width / ONE * (record.kept / ONE), (record.draw + 0.5) / ONE
    error = log_odds_distance(share, own.share, SLACK)
    checks = [
        ("replay_probability", "the token's probability", share, own.share, abs(error) / spread),
        ("replay_filter", "the kept mass", record.kept / ONE, own.kept, own.kept_ratio),
        ("replay_interval", "the interval's lower end", low, *_outside(low, own.lower, spread)),
        ("replay_interval", "the interval's upper end", high, *_outside(high, own.upper, spread)),
        ("replay_draw", "the draw in its own interval", draw, *_outside(draw, (own.lower[0], own.upper[1]), spread)),
    ]
    fault = next((check for check in checks if not check[4] <= 1), None)
    told = own.share * (1 - own.share) * spread > 10 * SLACK
    return RowResult(
        fault=None if fault is None else fault[0],
        detail="" if fault is None else f"{fault[1]} is recorded as {fault[2]:.6g}, recomputed as {fault[3]:.6g}",
        nats=math.log(max(share, SLACK)) - math.log(max(own.share, SLACK)),
        ratio=max(check[4] for check in checks),
        error=error / spread * 2 if told else None,  # one logit's error moves these odds, not two
        exact=own.picks,
        flips=own.flips,
    )


def _picks(below: int, weight: int, kept: int, draw: int) -> bool:
    return below * ONE // kept <= draw < (below + weight) * ONE // kept


def spread_of(config: SamplerConfig, reach: float) -> float:
    """Return how far the ln odds of a set of tokens may be off where no logit is by more than ``reach``."""
    return min(2 * reach / float(config.temperature), MAX_SPREAD)


def _reachable_ends(sorted_V: Integers, sums_V: Integers, config: SamplerConfig, spread: float) -> tuple[int, int]:
    """Return the shortest and longest prefix that the filters could leave if weights moved by ``spread``."""
    ends = []
    for sign in (1, -1):  # stricter thresholds, then looser ones
        least = float(config.min_p) * 2.0**40 * math.exp(min(sign * spread, MAX_SPREAD))
        # Sorted descending: the count of weights that reach the threshold.
        count = max(1, int(np.searchsorted(-sorted_V, -max(least, 1.0), side="right")))
        if config.top_k:
            count = min(count, config.top_k)
        if config.top_p < 1:
            odds = float(config.top_p / (1 - config.top_p)) * math.exp(-sign * spread)
            need = odds / (1 + odds) * float(sums_V[count - 1])
            count = min(count, int(np.searchsorted(sums_V[:count], need, side="left")) + 1)
        ends.append(count)
    return ends[0], ends[1]


def log_odds_distance(recorded: float, own: float, slack: float) -> float:
    """Return ln odds of the first minus ln odds of the second, the least that ``slack`` on either allows."""
    if abs(recorded - own) <= slack:
        return 0.0
    towards = math.copysign(slack, own - recorded)
    return _log_odds(recorded + towards) - _log_odds(own)


def _log_odds(share: float) -> float:
    least = 2.0**-64
    share = min(max(share, least), 1 - 2.0**-53)
    return math.log(share) - math.log1p(-share)


def _share(log_odds: float) -> float:
    return 1 / (1 + math.exp(-max(min(log_odds, MAX_SPREAD), -MAX_SPREAD)))


def _outside(recorded: float, own: tuple[float, float], spread: float) -> tuple[float, float]:
    """Return the nearest value of a range, and how far outside of it the recorded one is, over what is allowed."""
    nearest = min(max(recorded, own[0]), own[1])
    return nearest, abs(log_odds_distance(recorded, nearest, SLACK)) / spread
