"""Seam: the ``epochless:*`` series of ``/metrics``.

Every label takes values from a list fixed in the code: policies and revisions are unbounded and never become labels.
Works with several API servers: counters add up, and gauges show what was set last by a server that lives. Series exist
from the first observation of a front end; engine cores and workers make none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from epochless_vllm import errors
from epochless_vllm.protocol.publication import State, Status

PUBLISH_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@lru_cache(maxsize=1)
def _known_codes() -> frozenset[str]:
    codes = {"base", "revision", "committed", "repeated"}
    pending = [errors.EpochlessError]
    while pending:
        kind = pending.pop()
        codes.add(kind.code)
        pending.extend(kind.__subclasses__())
    return frozenset(codes)


class Series:
    """The series of one front end."""

    def __init__(self, registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        target: dict[str, Any] = {"registry": registry if registry is not None else REGISTRY}
        live: dict[str, Any] = {"multiprocess_mode": "livemostrecent", **target}
        outcome = ("outcome",)
        self.admissions = Counter("epochless:admissions", "Requests bound to a revision or refused.", outcome, **target)
        self.publications = Counter("epochless:publications", "Publish calls by outcome.", outcome, **target)
        self.publish_s = Histogram(
            "epochless:publish_seconds", "Time of committed publish calls.", buckets=PUBLISH_BUCKETS_S, **target
        )
        self.retirements = Counter("epochless:retirements", "Revisions whose retirement began.", **target)
        self.late = Counter("epochless:late_arrivals", "Requests that reached a retired revision.", outcome, **target)
        self.tokens = Counter("epochless:labelled_tokens", "Output tokens by their label.", ("kind",), **target)
        self.receipts = Counter(
            "epochless:receipts", "Receipts kept, dropped for room or age, or failed.", outcome, **target
        )
        self.revisions = Gauge("epochless:revisions", "Held (policy, revision) pairs by status.", ("status",), **live)
        self.policies = Gauge("epochless:policies", "Policies that hold a revision.", **live)
        self.sequence = Gauge("epochless:sequence", "Sequence of the last committed publication.", **live)


@lru_cache(maxsize=1)
def series() -> Series:
    """Return this process's series, registered at the first call."""
    return Series()


@lru_cache(maxsize=512)
def _admissions(outcome: str) -> Any:
    return series().admissions.labels(outcome)


def count_admission(outcome: str) -> None:
    """Count an admission: ``base``, ``revision`` or the code of the error that refused it."""
    _admissions(bounded(outcome)).inc()


def count_publication(outcome: str, seconds: float) -> None:
    """Count a publish call: ``committed``, ``repeated`` or the code of the error it ended with."""
    series().publications.labels(bounded(outcome)).inc()
    if outcome == "committed":
        series().publish_s.observe(seconds)


def count_retirements(number: int) -> None:
    """Count revisions whose retirement began."""
    series().retirements.inc(number)


def count_late_arrival(outcome: str) -> None:
    """Count a late arrival: ``readmitted`` or ``refused``."""
    series().late.labels(outcome).inc()


def count_tokens(kind: str, number: int) -> None:
    """Count the labelled tokens of a finished choice: ``revision`` or ``base``."""
    _tokens(kind).inc(number)


@lru_cache(maxsize=2)
def _tokens(kind: str) -> Any:
    return series().tokens.labels(kind)


def count_receipt(outcome: str, number: int = 1) -> None:
    """Count receipts: ``kept``, ``dropped`` from the sink by size or age, or ``failed``."""
    series().receipts.labels(outcome).inc(number)


def observe_state(state: State) -> None:
    """Show a committed state in the gauges."""
    counts = dict.fromkeys((Status.LIVE, Status.DRAINING, Status.QUARANTINED), 0)
    for policy, revision_id in state.holdings:
        status = state.status(policy, revision_id)
        if status in counts:
            counts[status] += 1
    for status, count in counts.items():
        series().revisions.labels(status.value).set(count)
    series().policies.set(len(state.heads))
    series().sequence.set(state.sequence)


def bounded(outcome: str) -> str:
    """Return the outcome if it is one of this package's words, else ``other``."""
    return outcome if outcome in _known_codes() else "other"


def install() -> None:
    """Nothing to wrap: vLLM's ``/metrics`` shows every series of the process."""
