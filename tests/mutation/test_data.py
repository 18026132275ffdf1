"""The data of the campaign are of every kind, each is caught by whom it should be, and what is not a catch fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation.data import DataMutant, DataOutcome, DataRoom, Refusal, data_faults_of, run_data_rooms
from tests.mutation.data_rooms import DATA_ROOMS, receipts
from tests.mutation.matrix import describe, render
from tests.mutation.rooms import ROOMS
from tests.verify.bases import NAMES

BY_NAME = {room.name: room for room in DATA_ROOMS}


def test_data_mutants_have_names_of_their_own_and_a_refusal_each() -> None:
    assert data_faults_of(DATA_ROOMS) == []
    assert len({room.name for room in (*ROOMS, *DATA_ROOMS)}) == len(ROOMS) + len(DATA_ROOMS)


def test_receipts_ledgers_and_patches_are_damaged() -> None:
    counts = {
        name: len(BY_NAME[f"data: {name}"].mutants)
        for name in (
            "receipts",
            "receipts at random",
            "journal",
            "receipt sink",
            "pin of the patch",
            "patches",
            "patched trees",
        )
    }
    assert all(count >= 12 for count in counts.values()), counts
    assert len(counts) == len(DATA_ROOMS)


def test_each_layer_of_the_receipt_verifier_refuses_what_no_weaker_one_does() -> None:
    room = BY_NAME["data: receipts"]
    # One of each code: signed anew by the server itself, and rehashed by someone without its key.
    kinds = {(each.name.rpartition(", ")[2], each.wanted[receipts.CLIENT].code): each for each in room.mutants}
    chosen = [kinds["rehashed", "signature"], *(each for (variant, _), each in kinds.items() if variant == "resigned")]
    outcomes = run_data_rooms([replace(room, mutants=tuple(chosen))])
    assert all(outcome.passed for outcome in outcomes)
    first = Counter(outcome.labels[0] for outcome in outcomes)
    # Well-formed and truly signed, and refused by a relation inside the receipt: nothing simpler sees these.
    assert first[receipts.ITSELF] >= 9
    # Well-formed and consistent: only the signature tells.
    assert first[receipts.SIGNED] == 1
    # Well-formed, consistent and truly signed: only who knows what was sent and received can tell.
    assert [outcome.labels == (receipts.CLIENT,) for outcome in outcomes].count(True) >= 9


# What is not a catch.


def is_even(datum: int, *_: Path) -> Refusal | None:
    if datum < 0:
        raise KeyError("negative")
    return Refusal("odd", f"{datum} is odd") if datum % 2 else None


def is_small(datum: int, *_: Path) -> Refusal | None:
    return Refusal("large", "ten or more") if datum >= 10 else None


WANTED = {"is even": Refusal("odd", "3 is")}
MUTANT = DataMutant("three", "number", 3, WANTED)
ROOM = DataRoom("numbers", {"is small": is_small, "is even": is_even}, {"two": 2}, (MUTANT,))


def outcome_of(mutant: DataMutant, room: DataRoom = ROOM) -> DataOutcome:
    (outcome,) = run_data_rooms([replace(room, mutants=(mutant,))])
    return outcome


def test_a_data_mutant_is_caught_by_the_checkers_that_refuse_it() -> None:
    outcome = outcome_of(MUTANT)
    assert (outcome.passed, outcome.labels) == (True, ("is even",))
    assert outcome_of(replace(MUTANT, datum=13, wanted={"is even": Refusal("odd")})).labels == ("is small", "is even")
    assert describe(outcome).startswith("ok   numbers: three")


@pytest.mark.parametrize(
    ("mutant", "problem"),
    [
        (replace(MUTANT, datum=4), "accepted by is even"),
        (replace(MUTANT, datum=14), "accepted by is even"),  # whatever another checker says of it
        (
            replace(MUTANT, wanted={"is even": Refusal("prime")}),
            "refused by is even with odd: 3 is odd; expected prime",
        ),
        (replace(MUTANT, datum=5), "refused by is even with odd: 5 is odd; expected odd: 3 is"),
        (replace(MUTANT, datum=-3), "is even raised KeyError: 'negative'"),
    ],
    ids=["an honest datum", "refused by another", "another code", "other words", "a foreign exception"],
)
def test_a_data_mutant_that_is_no_catch_fails(mutant: DataMutant, problem: str) -> None:
    outcome = outcome_of(mutant)
    assert (outcome.passed, outcome.problem) == (False, problem)
    assert describe(outcome).startswith("FAIL numbers: three")


def honest_receipts() -> Iterator[DataMutant]:
    room = BY_NAME["data: receipts"]
    for name, datum in room.originals.items():
        if name in NAMES:
            yield DataMutant(name, name, datum, {receipts.CLIENT: Refusal("root_mismatch")})


def test_an_honest_receipt_posing_as_a_mutant_is_reported_as_accepted() -> None:
    outcomes = run_data_rooms([replace(BY_NAME["data: receipts"], originals={}, mutants=tuple(honest_receipts()))])
    assert len(outcomes) == len(NAMES)
    assert {outcome.problem for outcome in outcomes} == {f"accepted by {receipts.CLIENT}"}


@pytest.mark.parametrize(
    ("datum", "fault"), [(3, "refused by is even with odd: 3 is odd"), (-2, "is even raised KeyError: 'negative'")]
)
def test_undamaged_data_that_are_not_accepted_are_an_error_of_the_campaign(datum: int, fault: str) -> None:
    room = replace(ROOM, originals={"two": 2, "x": datum}, mutants=(MUTANT, replace(MUTANT, name="again")))
    (outcome,) = run_data_rooms([room])
    assert (outcome.passed, outcome.mutant.name) == (False, "x")
    assert outcome.problem == f"campaign error: undamaged, and {fault}"


def test_files_are_prepared_once_a_room_and_each_checker_has_a_place_of_its_own() -> None:
    seen: list[tuple[str, list[str]]] = []

    def look(datum: int, files: Path, place: Path) -> Refusal | None:
        seen.append(((files / "made").read_text(), [path.name for path in place.iterdir()]))
        (place / "left").touch()
        return is_even(datum)

    room = replace(
        ROOM, checkers={"is even": look, "twice": look}, prepare=lambda files: (files / "made").write_text("x")
    )
    assert outcome_of(MUTANT, room).labels == ("is even", "twice")
    assert seen == [("x", [])] * 4


def test_data_that_do_not_fit_together_are_named() -> None:
    mutants = (
        MUTANT,
        MUTANT,
        replace(MUTANT, name="none", wanted={}),
        replace(MUTANT, name="x", wanted={"y": Refusal("z")}),
    )
    assert data_faults_of([replace(ROOM, originals={}, mutants=mutants)]) == [
        "numbers: three: 2 mutants of one name",
        "numbers: no undamaged data",
        "numbers: none: no checker is to refuse it",
        "numbers: x: no checker y",
    ]


def test_the_matrix_says_which_checkers_refuse_a_datum_and_which_was_the_first() -> None:
    large = DataMutant("thirteen", "number", 13, {"is even": Refusal("odd")})
    text = render(
        [outcome_of(MUTANT), outcome_of(large), outcome_of(replace(MUTANT, name="four", datum=4))], ["numbers"]
    )
    for line in (
        "| three | `number` | 2 | odd: 3 is |",
        "| thirteen | `number` | 1 2 | odd |",
        "| four | `number` |  | accepted by is even |",
        "| 1 | is small | 1 | 1 |",
        "| 2 | is even | 2 | 1 |",
        "2 passed, 1 failed",
    ):
        assert f"{line}\n" in text
