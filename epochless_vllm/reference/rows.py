"""Recorded rows against recomputed ones: is this what the sampler would have recorded, up to rounding of the logits?

One number bounds everything. If no logit of the server differs from its recomputed one by more than ``e`` (a common
shift aside), then for any set of tokens the odds of the set, p / (1 - p), differ by a factor of at most
exp(2 e / temperature). That holds for the token itself, for the tokens before it (the interval's lower end), up to it
(its upper end), and for the kept set of a filter. ``e`` is ``Tolerance.of_row``; what is beyond it has a fault.

min-p, top-k and top-p keep a prefix of the tokens ordered by logit. Rounding may move the end of that prefix: the ends
that are within reach are those the filters give when min-p's and top-p's thresholds move by the same odds. The recorded
kept mass picks one of them; tokens that could change places across that end may be on either side.

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
        return self.absolute + self.relative * float(np.abs(finite).max(initial=0.0))

    def drift_of(self, rows: int) -> float:
        """Return the greatest root mean square over so many rows: looser for few."""
        return self.drift * (1 + 4 / math.sqrt(rows))


class Record(NamedTuple):
    """One recorded row: the token's interval and draw out of 2**32, and the kept mass (2**32 if nothing filters)."""

    token: int
    low: int
    width: int
    kept: int
    draw: int


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
    """

    fault: str | None
    detail: str
    nats: float
    ratio: float
    error: float | None
    exact: bool
    flips: int = 0


class Shares(NamedTuple):
    """Integer weights of one row: of all tokens, of the kept ones, of those kept before the token, of the token."""

    whole: int
    kept: int
    below: int
    own: int


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
    own_B = np.take_along_axis(weights_BV, tokens_B, axis=1)[:, 0]
    whole_B = weights_BV.sum(axis=1)
    results = []
    for at, record in enumerate(records):
        whole, own = int(whole_B[at]), int(own_B[at])
        shares = Shares(whole, whole, int(up_to_B[at]) - own, own)
        results.append(_judge(shares, record, reach_B[at], config, in_own=True, flips=0, swapped=0.0))
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
    sums_V = np.cumsum(weights_V[order_V])
    whole, own_count = int(sums_V[-1]), int(kept_V.sum())
    spread = _spread(config, reach)
    least, most = _reachable_ends(weights_V[order_V], sums_V, config, spread)
    least, most = min(least, own_count), max(most, own_count)
    masses = sums_V[least - 1 : most] / whole
    recorded = record.kept / ONE
    count = least + int(np.argmin(np.abs(masses - recorded)))
    # Tokens that could have changed places across the end of the prefix.
    last_in = float(logits_V[order_V[count - 1]])
    first_out = float(logits_V[order_V[count]]) if count < len(order_V) else -math.inf
    unsure_V = (logits_V <= first_out + 2 * reach) & (logits_V >= last_in - 2 * reach) & (weights_V > 0)
    set_V = np.zeros(len(logits_V), bool)
    set_V[order_V[:count]] = True
    swapped = 0.0
    if last_in - first_out < 2 * reach:
        inside, outside = int(weights_V[unsure_V & set_V].sum()), int(weights_V[unsure_V & ~set_V].sum())
        swapped = min(inside, outside) * math.exp(spread) / max(1, int(sums_V[count - 1]))
    # The recorded mass, itself rounded, may fit several ends: what lies between them may be kept or not.
    odds = _log_odds(recorded)
    fitting = masses[(masses >= _share(odds - spread) - SLACK) & (masses <= _share(odds + spread) + SLACK)]
    if fitting.size:
        swapped += float(fitting[-1] - fitting[0]) / float(masses[count - least])
    in_own = bool(kept_V[record.token])
    if not set_V[record.token]:
        if float(logits_V[record.token]) < last_in - 2 * reach:
            detail = f"the filters leave {most} tokens at most and token {record.token} is not among them"
            return RowResult("replay_filter", detail, 0.0, math.inf, None, False, 1)
        set_V[record.token] = True
    kept = np.where(set_V, weights_V, 0)
    shares = Shares(whole, int(kept.sum()), int(kept[: record.token].sum()), int(weights_V[record.token]))
    flips = abs(count - own_count) + (not in_own)
    own_V = np.where(kept_V, weights_V, 0)
    own = (int(own_V[: record.token].sum()), int(own_V[record.token]), int(own_V.sum()))
    return _judge(shares, record, reach, config, in_own=in_own, flips=flips, swapped=swapped, own=own)


def _judge(
    shares: Shares,
    record: Record,
    reach: float,
    config: SamplerConfig,
    *,
    in_own: bool,
    flips: int,
    swapped: float,
    own: tuple[int, int, int] | None = None,
) -> RowResult:
    """Hold every recorded share of a row against the recomputed ones; ``swapped`` is mass that filters may exchange."""
    spread = _spread(config, reach)
    low, high = record.low / ONE, (record.low + record.width) / ONE
    share = record.width / ONE * (record.kept / ONE)
    own_share = shares.own / shares.whole
    error = _log_odds_distance(share, own_share, SLACK)
    checks = [("replay_probability", "the token's probability", share, own_share, error / spread)]
    if record.kept != ONE or shares.kept != shares.whole:
        mass = shares.kept / shares.whole
        checks.append(
            ("replay_filter", "the kept mass", record.kept / ONE, mass,
             abs(_log_odds_distance(record.kept / ONE, mass, SLACK + swapped)) / spread)
        )  # fmt: skip
    ends = (shares.below / shares.kept, (shares.below + shares.own) / shares.kept)
    for name, recorded, recomputed in (("lower", low, ends[0]), ("upper", high, ends[1])):
        distance = abs(_log_odds_distance(recorded, recomputed, SLACK + swapped))
        checks.append(("replay_interval", f"the interval's {name} end", recorded, recomputed, distance / spread))
    draw = (record.draw + 0.5) / ONE
    outside = _beyond(draw, ends, SLACK + swapped)
    checks.append(("replay_draw", "the draw in its own interval", draw, ends[draw > ends[1]], outside / spread))
    fault = next((check for check in checks if not abs(check[4]) <= 1), None)
    told = own_share * (1 - own_share) * spread > 10 * SLACK
    below, weight, total = own or (shares.below, shares.own, shares.kept)
    exact = in_own and below * ONE // total <= record.draw < (below + weight) * ONE // total
    return RowResult(
        fault=None if fault is None else fault[0],
        detail="" if fault is None else f"{fault[1]} is recorded as {fault[2]:.6g}, recomputed as {fault[3]:.6g}",
        nats=math.log(max(share, SLACK)) - math.log(max(own_share, SLACK)),
        ratio=max(abs(check[4]) for check in checks),
        error=error / spread * 2 if told else None,  # one logit's error moves these odds, not two
        exact=exact,
        flips=flips,
    )


def _spread(config: SamplerConfig, reach: float) -> float:
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


def _log_odds_distance(recorded: float, own: float, slack: float) -> float:
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


def _beyond(draw: float, ends: tuple[float, float], slack: float) -> float:
    """Return how far, in ln odds, a draw is outside an interval; 0 inside."""
    if draw < ends[0]:
        return abs(_log_odds_distance(draw, ends[0], slack))
    return abs(_log_odds_distance(draw, ends[1], slack)) if draw > ends[1] else 0.0
