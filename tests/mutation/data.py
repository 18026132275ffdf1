"""Data mutants: a receipt, a ledger or a patch with one fault, and the checkers that are to refuse it.

Several checkers judge each, and the matrix shows which of them refuse it. It is caught when those named in ``wanted``
do, with that code and in those words; accepted, refused for another reason, or answered with any other exception, it
fails. Checkers must accept the undamaged data first. Knows no particular datum: see data_rooms/.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """What a checker says: a stable code, and its words. Of one that is wanted, words that must occur."""

    code: str
    words: str = ""

    def is_for(self, wanted: Refusal) -> bool:
        return self.code == wanted.code and wanted.words in self.words

    def __str__(self) -> str:
        return f"{self.code}: {self.words}" if self.words else self.code


# Given a datum, the files its room prepared and an empty directory of its own: the refusal, None where it accepts.
Checker = Callable[[Any, Path, Path], Refusal | None]


@dataclass(frozen=True)
class DataMutant:
    """One fault.

    Attributes:
        damages: what is damaged, in a word.
        datum: what the room's checkers take.
        wanted: by checker, the refusal it must give. What other checkers say is shown and not required.
    """

    name: str
    damages: str
    datum: Any
    wanted: Mapping[str, Refusal]


@dataclass(frozen=True)
class DataRoom:
    """Data that the same checkers judge.

    Attributes:
        checkers: by name, the weakest first.
        originals: undamaged data by name, which every checker must accept.
        prepare: writes once, into a directory, the files that checkers read.
    """

    name: str
    checkers: Mapping[str, Checker]
    originals: Mapping[str, Any]
    mutants: tuple[DataMutant, ...]
    prepare: Callable[[Path], object] = lambda _: None


@dataclass(frozen=True)
class DataOutcome:
    """What became of a data mutant: ``refusals`` by checker, None where it was accepted; ``error`` a foreign one."""

    room: DataRoom
    mutant: DataMutant
    refusals: Mapping[str, Refusal | None]
    error: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The checkers that refused it."""
        return tuple(checker for checker, refusal in self.refusals.items() if refusal is not None)

    @property
    def passed(self) -> bool:
        return not self.problem

    @property
    def problem(self) -> str:
        """Why the mutant fails, or nothing."""
        if self.error:
            return self.error
        for checker, wanted in self.mutant.wanted.items():
            found = self.refusals[checker]
            if found is None:
                return f"accepted by {checker}"
            if not found.is_for(wanted):
                return f"refused by {checker} with {found}; expected {wanted}"
        return ""


def judge(room: DataRoom, mutant: DataMutant, files: Path) -> DataOutcome:
    """Have every checker of a room judge a mutant."""
    refusals: dict[str, Refusal | None] = {}
    for name, checker in room.checkers.items():
        with tempfile.TemporaryDirectory() as place:
            try:
                refusals[name] = checker(mutant.datum, files, Path(place))
            except Exception as error:  # noqa: BLE001 - that a checker answers with any other is the fault looked for
                return DataOutcome(room, mutant, refusals, f"{name} raised {type(error).__name__}: {error}")
    return DataOutcome(room, mutant, refusals)


def run_data_rooms(
    rooms: Sequence[DataRoom], *, names: Sequence[str] = (), tell: Callable[[DataOutcome], None] = lambda _: None
) -> list[DataOutcome]:
    """Judge the mutants of rooms, or those named, and return the outcomes in order.

    A room with an original that a checker does not accept has one outcome, which says so.
    """
    outcomes: list[DataOutcome] = []
    for room in rooms:
        mutants = [mutant for mutant in room.mutants if not names or mutant.name in names]
        if not mutants:
            continue
        with tempfile.TemporaryDirectory() as directory:
            files = Path(directory)
            room.prepare(files)
            unwell = _unwell(room, files)
            for mutant in mutants:
                outcomes.append(unwell or judge(room, mutant, files))
                tell(outcomes[-1])
                if unwell:
                    break
    return outcomes


def _unwell(room: DataRoom, files: Path) -> DataOutcome | None:
    for name, datum in room.originals.items():
        outcome = judge(room, DataMutant(name, "nothing", datum, {}), files)
        refused = [f"refused by {checker} with {outcome.refusals[checker]}" for checker in outcome.labels]
        if outcome.error or refused:
            fault = f"campaign error: undamaged, and {outcome.error or refused[0]}"
            return DataOutcome(room, outcome.mutant, outcome.refusals, fault)
    return None


def data_faults_of(rooms: Iterable[DataRoom]) -> list[str]:
    """Return what is wrong with the data of a campaign, judging nothing."""
    faults = []
    for room in rooms:
        names = Counter(mutant.name for mutant in room.mutants)
        faults += [f"{room.name}: {name}: {count} mutants of one name" for name, count in names.items() if count > 1]
        if not room.originals:
            faults.append(f"{room.name}: no undamaged data")
        for mutant in room.mutants:
            if not mutant.wanted:
                faults.append(f"{room.name}: {mutant.name}: no checker is to refuse it")
            unknown = set(mutant.wanted) - set(room.checkers)
            faults += [f"{room.name}: {mutant.name}: no checker {name}" for name in sorted(unknown)]
    return faults
