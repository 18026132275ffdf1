"""What a replay found, and what it amounts to: a verdict, or a refusal that names the first disagreement.

Rows are judged by reference/rows.py, one by one; here their errors are also looked at together. Errors that rounding
makes are small and scatter; weights that are slightly wrong make errors that are each within reach of rounding and
together are not. How large they are is held against the tolerance (``drift``), and which way they go against chance
(series.py), over each response and over all of an audit. Knows no weights and no logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from epochless_vllm.errors import ReceiptError
from epochless_vllm.verify.series import LIMIT, Series, add_up
from epochless_vllm.verify.verified import Verdict, VerifiedReceipt

if TYPE_CHECKING:  # NumPy comes with it
    from epochless_vllm.reference.rows import RowResult, Tolerance

WINDOW = 64  # tokens whose errors are looked at together


class Fault(NamedTuple):
    """A row beyond tolerance, or a window of rows with its last token; ``threat`` is the stable code."""

    position: int
    threat: str
    detail: str


@dataclass(frozen=True)
class Replay:
    """What a replay found; ``require_replayed`` turns it into a verdict or an error.

    Attributes:
        compared: rows held against the recomputed ones.
        not_replayable: rows that cannot be recomputed, by reason.
        faults: every row and window of rows beyond tolerance, by position.
        worst_nats: the largest |recorded - own| ln of a token's probability, and where.
        worst_ratio: the worst deviation over what is allowed, and where.
        drift: root mean square error over all rows that tell, in units of the allowed error of a row.
        drift_rows: how many rows tell.
        series: the sums of these rows; see series.py.
        exact: rows whose recomputed interval holds the draw; for greedy rows, whose likeliest token is the recorded.
        flips: tokens that one side's filters kept and the other's did not.
    """

    receipt: VerifiedReceipt = field(repr=False)
    tolerance: Tolerance
    compared: int
    not_replayable: dict[str, int]
    faults: tuple[Fault, ...]
    worst_nats: tuple[float, int]
    worst_ratio: tuple[float, int]
    drift: float
    drift_rows: int
    series: Series
    exact: int
    flips: int

    @property
    def complete(self) -> bool:
        """Whether every token of the receipt was compared."""
        return self.compared == self.receipt.tokens


def summarise(
    receipt: VerifiedReceipt, tolerance: Tolerance, results: Mapping[int, RowResult], reasons: Mapping[str, int]
) -> Replay:
    """Return the findings over rows by token position, and over rows that were not recomputed by reason."""
    order = sorted(results)
    faults = [Fault(at, fault, results[at].detail) for at in order if (fault := results[at].fault) is not None]
    told = [(at, error) for at in order if (error := results[at].error) is not None and results[at].fault is None]
    begins = range(0, len(told), WINDOW) if len(told) > WINDOW else ()
    for window in [*(told[begin : begin + WINDOW] for begin in begins), told]:
        drift, allowed = _root_mean_square(window), tolerance.drift_of(max(1, len(window)))
        if drift > allowed:
            detail = f"the errors of {len(window)} tokens are {drift:.3g} in the mean, rounding makes {allowed:.3g}"
            faults.append(Fault(window[-1][0], "replay_drift", detail))
    series = add_up(row.contrast for row in results.values() if row.contrast is not None)
    if series.lie is not None:
        threat, said = series.lie
        faults.append(Fault(order[-1], threat, f"over {len(told)} tokens {said}"))
    return Replay(
        receipt=receipt,
        tolerance=tolerance,
        compared=len(order),
        not_replayable=dict(reasons),
        faults=tuple(sorted(faults)),
        worst_nats=_first_worst([(abs(results[at].nats), at) for at in order]),
        worst_ratio=_first_worst([(results[at].ratio, at) for at in order]),
        drift=_root_mean_square(told),
        drift_rows=len(told),
        series=series,
        exact=sum(results[at].exact for at in order),
        flips=sum(results[at].flips for at in order),
    )


class Pooled(NamedTuple):
    """Several replays together: rows that tell, their root mean square error and what is allowed, and their sums."""

    rows: int
    drift: float
    allowed: float
    series: Series

    def describe(self) -> dict[str, object]:
        """Return a JSON-encodable value."""
        return {"rows": self.rows, "drift": self.drift, "allowed": self.allowed, **_describe_series(self.series)}


def judge_together(replays: Sequence[Replay]) -> Pooled:
    """Return what replays under one tolerance say together; what hides in one response may not hide in many.

    Raises:
        ReceiptError: their errors are larger than rounding makes them, or go one way.
    """
    rows, series = sum(each.drift_rows for each in replays), Series()
    # The same tokens after the same prompt err alike: what is repeated is no second witness.
    for each in {_text_of(each.receipt): each for each in replays}.values():
        series = series.plus(each.series)
    if not rows:
        return Pooled(0, 0.0, math.inf, series)
    drift = math.sqrt(sum(each.drift**2 * each.drift_rows for each in replays) / rows)
    pooled = Pooled(rows, drift, replays[0].tolerance.drift_of(rows), series)
    over = f"{rows} tokens in {len(replays)} receipts"
    if drift > pooled.allowed:
        raise ReceiptError(
            f"the errors of {over} are {drift:.3g} in the mean, rounding makes {pooled.allowed:.3g}",
            threat="replay_drift",
            **pooled.describe(),
        )
    if series.lie is not None:
        threat, said = series.lie
        raise ReceiptError(f"over {over} {said}", threat=threat, **pooled.describe())
    return pooled


def _text_of(receipt: VerifiedReceipt) -> tuple[object, ...]:
    return receipt.header.prompt, *(token for block in receipt.blocks for token in block.tokens)


def require_replayed(replay: Replay) -> VerifiedReceipt:
    """Return the receipt with the verdict that a replay supports.

    REPLAYED if every token was compared; otherwise the verdict it had.

    Raises:
        ReceiptError: a row or a window is beyond tolerance; the fields hold what ``describe_replay`` returns.
    """
    if replay.faults:
        first = replay.faults[0]
        raise ReceiptError(f"token {first.position}: {first.detail}", threat=first.threat, **describe_replay(replay))
    return replace(replay.receipt, verdict=Verdict.REPLAYED) if replay.complete else replay.receipt


def describe_replay(replay: Replay) -> dict[str, object]:
    """Return a replay as a JSON-encodable value."""
    first = replay.faults[0] if replay.faults else None
    return {
        "compared": replay.compared,
        "disagreements": len(replay.faults),
        "drift": replay.drift,
        "drift_rows": replay.drift_rows,
        "exact": replay.exact,
        "first_disagreement": None if first is None else first._asdict(),
        "membership_flips": replay.flips,
        "not_replayable": replay.not_replayable,
        **_describe_series(replay.series),
        "tolerance": {
            "absolute": replay.tolerance.absolute,
            "relative": replay.tolerance.relative,
            "drift": replay.tolerance.drift,
        },
        "worst_nats": {"value": replay.worst_nats[0], "position": replay.worst_nats[1]},
        "worst_ratio": {"value": replay.worst_ratio[0], "position": replay.worst_ratio[1]},
    }


def _describe_series(series: Series) -> dict[str, object]:
    return {"scores": series.scores, "score_limit": LIMIT}


def _first_worst(values: Sequence[tuple[float, int]]) -> tuple[float, int]:
    return max(values, key=lambda each: (each[0], -each[1]), default=(0.0, 0))


def _root_mean_square(rows: Sequence[tuple[int, float]]) -> float:
    return math.sqrt(sum(error * error for _, error in rows) / len(rows)) if rows else 0.0
