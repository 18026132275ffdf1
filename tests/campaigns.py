"""How every campaign reports: one table, and a last line ``N passed, N failed``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Judged(Protocol):
    @property
    def passed(self) -> bool: ...


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(outcomes: Sequence[Judged]) -> str:
    """Return the last line of a campaign."""
    failed = sum(not outcome.passed for outcome in outcomes)
    return f"{len(outcomes) - failed} passed, {failed} failed"
