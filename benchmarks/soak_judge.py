"""What a soak saw, the figures of it, and which of its promises were kept.

Throughput and memory are judged from ``JUDGED_S`` on; a shorter run says too little about them. Knows no server.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engines import quantile
from processes import Use

JUDGED_S = 600
STEADY, GROWTH = 0.97, 0.01
WARM_S, WINDOW_S = 120.0, 60.0  # of a judged run; a shorter one takes thirds


@dataclass
class Observed:
    """What the clients and the trainer saw.

    Attributes:
        outcomes: requests by how they ended.
        publications: by the answer's status and error code.
        problems: what must not happen, in words, up to a hundred.
        tokens: when each piece of a stream came, in seconds since the start, and how many tokens it held.
        uses: memory and processor time of the server's processes, by seconds since the start.
        publish_s: seconds each good publication took, before the first stream and beside them.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    publications: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    wrong_tokens: int = 0
    compared_tokens: int = 0
    tokens: list[tuple[float, int]] = field(default_factory=list)
    uses: list[tuple[float, Use]] = field(default_factory=list)
    publish_s: dict[str, list[float]] = field(default_factory=lambda: {"idle": [], "streams": []})

    def problem(self, what: str) -> None:
        if len(self.problems) < 100:
            self.problems.append(what)


def measure(observed: Observed, seconds: float) -> dict[str, Any]:
    """Return the figures of a run."""
    window = min(WINDOW_S, seconds / 3)
    warm = min(WARM_S, seconds / 3)
    first, last = (0.0, window), (seconds - window, seconds)
    spans = [(begin * window, (begin + 1) * window) for begin in range(int(seconds / window))]
    rates = [_tokens_between(observed, *span) / window for span in (first, last)]
    per_cpu = [_tokens_between(observed, *span) / max(1e-9, _cpu_between(observed, *span)) for span in (first, last)]
    before, after = (_median_memory(observed, *span) for span in ((warm, warm + window), last))
    idle, beside = observed.publish_s["idle"], observed.publish_s["streams"]
    return {
        "seconds": seconds,
        "requests": dict(sorted(observed.outcomes.items())),
        "publications": dict(sorted(observed.publications.items())),
        "tokens_compared": observed.compared_tokens,
        "tokens_wrong": observed.wrong_tokens,
        "tokens_per_s": {
            "first": rates[0],
            "last": rates[1],
            "ratio": rates[1] / max(rates[0], 1e-9),
            "by_window": [_tokens_between(observed, *span) / window for span in spans],
        },
        "tokens_per_cpu_s": {
            "first": per_cpu[0],
            "last": per_cpu[1],
            "ratio": per_cpu[1] / max(per_cpu[0], 1e-9),
            "by_window": [_tokens_between(observed, *s) / max(1e-9, _cpu_between(observed, *s)) for s in spans],
        },
        "memory_mb": {
            "warm_after_s": warm,
            "warm": {name: size / 1e6 for name, size in before.items()},
            "last": {name: size / 1e6 for name, size in after.items()},
            "growth": sum(after.values()) / max(1, sum(before.values())) - 1,
            "by_window": [sum(_median_memory(observed, *span).values()) / 1e6 for span in spans],
        },
        "publish_ms": {
            kind: {"count": len(values), **{f"p{q}": 1000 * quantile(values, q / 100) for q in (50, 99)}}
            for kind, values in (("idle", idle), ("streams", beside))
            if values
        },
    }


def _tokens_between(observed: Observed, begin: float, end: float) -> int:
    return sum(count for when, count in observed.tokens if begin <= when < end)


def _cpu_between(observed: Observed, begin: float, end: float) -> float:
    inside = [use.cpu_s for when, use in observed.uses if begin <= when < end]
    return inside[-1] - inside[0] if inside else 0.0


def _median_memory(observed: Observed, begin: float, end: float) -> dict[str, float]:
    inside = [use.bytes for when, use in observed.uses if begin <= when < end]
    names = {name for sizes in inside for name in sizes}
    return {name: statistics.median(sizes.get(name, 0) for sizes in inside) for name in sorted(names)}


def judge(observed: Observed, figures: dict[str, Any]) -> list[tuple[str, bool]]:
    """Print what was seen; return each promise and whether it was kept."""
    print(json.dumps(figures, indent=1))
    for problem in observed.problems:
        print(f"problem: {problem}")
    verdicts = [
        ("no wrong token", observed.wrong_tokens == 0),
        ("tokens were compared", observed.compared_tokens > 0),
        ("nothing went wrong but the planned refusals", not observed.problems),
        ("good publications were made and bad ones refused", observed.publications["200"] > 0),
    ]
    if figures["seconds"] >= JUDGED_S:
        rate, growth = figures["tokens_per_s"]["ratio"], figures["memory_mb"]["growth"]
        verdicts.append((f"throughput of the end {rate:.3f} of the start's, at least {STEADY}", rate >= STEADY))
        verdicts.append((f"memory grew by {growth:.2%}, at most {GROWTH:.0%}", growth <= GROWTH))
    return verdicts
