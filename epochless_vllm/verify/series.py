"""What many rows say together: three sums that stay near zero for an honest server, however many rows they are over.

``hotter`` and ``colder``: the errors follow what another temperature would do, by more than TEMPERATURE of it either
way. ``rougher``: the recorded rows are farther from unrounded arithmetic than rows rounded where the server's dtype is,
by more than ROUGHNESS of the distance; only for 16-bit servers, for float32 has no such distance.

Each term has either sign with the same chance if the server is honest: roundings know no temperature, and whichever of
two honest computations is the server's, the other is as far away. A sum of such terms, divided by the root of the sum
of their squares, exceeds x with a probability of at most exp(-x**2 / 2), whatever the terms' sizes are; nothing has to
be measured beforehand. LIMIT is the x at which the three together refuse an honest audit once in 1 / FALSE_REFUSALS.
A lie moves every term the same way, and its sum grows with the rows, not with their root. Knows no logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # NumPy comes with it
    from epochless_vllm.reference.rows import Contrast

FALSE_REFUSALS = 1e-6  # of honest audits, at most
LIMIT = math.sqrt(2 * math.log(3 / FALSE_REFUSALS))
TEMPERATURE = 0.005  # the share of a temperature that is no other one
ROUGHNESS = 0.05  # what roundings at other places may do beyond those repeated here; they were seen to do 0.01 more


class Sum(NamedTuple):
    """The sum of terms and of their squares."""

    total: float = 0.0
    squares: float = 0.0

    @property
    def score(self) -> float:
        """The sum in units of what signs by chance make of it."""
        return self.total / math.sqrt(self.squares) if self.squares else 0.0

    def plus(self, other: Sum) -> Sum:
        """Return the sum of both's terms."""
        return Sum(self.total + other.total, self.squares + other.squares)


class Series(NamedTuple):
    """The sums of some rows; see the module."""

    hotter: Sum = Sum()
    colder: Sum = Sum()
    rougher: Sum = Sum()

    def plus(self, other: Series) -> Series:
        """Return the sums of both's rows."""
        return Series(self.hotter.plus(other.hotter), self.colder.plus(other.colder), self.rougher.plus(other.rougher))

    @property
    def scores(self) -> dict[str, float]:
        """Each sum's score, by name."""
        return {name: each.score for name, each in zip(self._fields, self, strict=True)}

    @property
    def lie(self) -> tuple[str, str] | None:
        """The threat's code and its words if a sum is beyond LIMIT; None if chance explains them."""
        name, score = max(self.scores.items(), key=lambda each: each[1])
        if score <= LIMIT:
            return None
        said = f"{score:.3g} standard deviations, chance makes {LIMIT:.3g}"
        if name == "rougher":
            return "replay_drift", f"the rows are farther from the weights' own than roundings put them ({said})"
        return "replay_temperature", f"the errors are those of a temperature that is not the recorded one ({said})"


def add_up(contrasts: Iterable[Contrast]) -> Series:
    """Return the sums over rows."""
    terms = [_terms(each) for each in contrasts]
    columns = zip(*terms, strict=True)
    return Series(*(Sum(math.fsum(column), math.fsum(term**2 for term in column)) for column in columns))


def _terms(row: Contrast) -> tuple[float, float, float]:
    follows, allowed = row.error * row.heat, TEMPERATURE * row.heat**2
    return -follows - allowed, follows - allowed, abs(row.moved) - (1 + ROUGHNESS) * abs(row.rounded)
