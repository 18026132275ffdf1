"""The campaign's data fit the sources as they are, and its runner refuses what is not a catch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutation.data_rooms import DATA_ROOMS
from tests.mutation.matrix import README, describe, render
from tests.mutation.mutants import ROOT, Mutant, Room, faults_of
from tests.mutation.rooms import ROOMS
from tests.mutation.runner import Job, Outcome

# What the campaign is for: each of these has mutants.
EDITED = (
    "store/adapters", "store/safetensors", "store/lora_config", "protocol/publication", "protocol/events",
    "publication/journal", "publication/coordinator", "protocol/blocks", "plugin/block_keys", "sampling/kernels",
    "sampling/torch_path", "verify/checker", "verify/ed25519", "reference/forward", "verify/replay", "verify_patch",
    "patch/data/verify_patch", "tests/test_layers", "protocol/resolution", "plugin/draw_keys", "plugin/core",
    "protocol/manifest", "publication/rows", "publication/participant", "plugin/admission",
    "spec/check_citations", "spec/documents", "spec/ledger", "spec/sources", "spec/symbols", "spec/commands",
)  # fmt: skip


def test_every_mutant_is_one_edit_of_the_sources_as_they_are() -> None:
    assert faults_of(ROOMS) == []


def test_mutants_are_many_and_of_every_room() -> None:
    mutants = [mutant for room in ROOMS for mutant in room.mutants]
    assert sum(not mutant.equivalent for mutant in mutants) >= 120
    assert {mutant.module for mutant in mutants} >= set(EDITED)
    assert len({room.name for room in ROOMS}) == len(ROOMS)


@pytest.mark.skipif(not README.exists(), reason="python -m tests.mutation --write makes it")
def test_the_matrix_is_of_these_mutants() -> None:
    """When it is not: ``python -m tests.mutation --room ROOM --write``."""
    sections = README.read_text(encoding="utf-8").split("\n## ")[1:]
    found = {section.partition("\n")[0].lower(): section for section in sections}
    assert set(found) <= {room.name.lower() for room in (*ROOMS, *DATA_ROOMS)}
    named = {room.name: {(each.name, each.module) for each in room.mutants} for room in ROOMS}
    named |= {room.name: {(each.name, each.damages) for each in room.mutants} for room in DATA_ROOMS}
    for name, mutants in named.items():
        if section := found.get(name.lower()):
            rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
            cells = {tuple(cell.removeprefix("| ") for cell in row[:2]) for row in rows}
            assert not [each for each, where in mutants if (each, f"`{where}`") not in cells]


def test_a_room_that_is_run_again_renews_its_own_section() -> None:
    def outcome(room: Room, caught: str, equivalent: str = "") -> Outcome:
        return Outcome(room, replace(HONEST, name=f"m {caught}", equivalent=equivalent), (caught,) if caught else ())

    first, second = replace(ROOM, name="first room"), replace(ROOM, name="second room")
    order = [second.name, first.name]
    whole = render([outcome(first, "tests/a.py::a"), outcome(second, "tests/a.py::b")], order)
    assert whole.index("## Second room") < whole.index("## First room")
    assert whole.count("1 passed, 0 failed") == 2
    again = render([outcome(second, "tests/a.py::c"), outcome(second, "", "it commutes")], order, whole)
    assert "| m tests/a.py::a | `sums` | 1 |" in again
    assert "::b" not in again
    assert "| m tests/a.py::c | `sums` | 1 |" in again
    assert "| m  | `sums` | it commutes |" in again
    assert again.count("## ") == 2
    assert render([], order, again) == again
    assert render([], [first.name], again).count("## ") == 1


def test_data_that_do_not_fit_are_named(tmp_path: Path) -> None:
    (tmp_path / "epochless_vllm").mkdir()
    (tmp_path / "epochless_vllm" / "sums.py").write_text("a = 1\nb = 1\n")
    mutants = (
        Mutant("sums", "lost", "c = 1", ""),
        Mutant("sums", "twice", "= 1", "= 2"),
        Mutant("sums", "same", "a = 1", "a = 1"),
        Mutant("sums", "no Python", "a = 1", "a ="),
        Mutant("sums", "good", "a = 1", "a = 2"),
        Mutant("sums", "good", "b = 1", "b = 2"),
    )
    faults = faults_of([Room("sums", ("tests/none.py",), mutants)], tmp_path)
    for fault in ("occurs 0 times", "occurs 2 times", "changes nothing", "invalid syntax", "2 mutants of one name"):
        assert sum(fault in found for found in faults) == 1
    assert any("there is no tests/none.py" in found for found in faults)
    assert len(faults) == 6


SUM = "def add(a: int, b: int) -> int:\n    return a + b\n"
TESTS = """
import pytest
from epochless_vllm.sums import add

def test_sum():
    assert add(2, 2) == 4

@pytest.mark.parametrize("b", [0, 1])
def test_of_nothing(b):
    assert add(0, b) == b
"""
HONEST = Mutant("sums", "m", "a + b", "a * b")
ROOM = Room("sums", ("tests/test_sums.py",), ())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    root, place = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("job")
    for name, text in {"epochless_vllm/sums": SUM, "tests/test_sums": TESTS}.items():
        path = root / f"{name}.py"
        path.parent.mkdir()
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    job = Job(place, root=root)
    yield job
    job.close()


def run(job: Job, mutant: Mutant | None, room: Room = ROOM) -> Outcome:
    return job.run(room, mutant, job.tree)


def test_a_mutant_is_caught_by_the_tests_that_fail_and_the_sources_are_as_before(job: Job) -> None:
    assert run(job, None).error == ""
    outcome = run(job, HONEST)
    assert (outcome.passed, outcome.labels) == (True, ("test_of_nothing",))
    assert outcome.caught == ("tests/test_sums.py::test_of_nothing[1]",)
    assert run(job, None).error == ""
    assert (job.tree / "epochless_vllm" / "sums.py").read_text() == SUM
    by_parameter = run(job, HONEST, replace(ROOM, by_parameter=True))
    assert by_parameter.labels == ("1",)
    assert "ok" in describe(outcome)


def test_what_is_not_a_catch_is_refused(job: Job) -> None:
    survivor = replace(HONEST, new="b + a")
    for mutant, problem in (
        (survivor, "caught by nothing"),
        (replace(HONEST, new="a +"), "campaign error: does not import: SyntaxError"),
        (
            replace(HONEST, old="def add(", new="import nowhere\ndef add("),
            "campaign error: does not import: ModuleNotFo",
        ),
        (replace(HONEST, old="no such text"), "campaign error: its text occurs 0 times"),
        (replace(HONEST, only=frozenset({"test_sum"})), "caught by test_of_nothing; expected test_sum"),
        (replace(HONEST, equivalent="it is not"), "not equivalent: test_of_nothing"),
    ):
        outcome = run(job, mutant)
        assert not outcome.passed
        assert outcome.problem.startswith(problem)
        assert describe(outcome).startswith("FAIL")
    assert run(job, replace(survivor, equivalent="sums commute")).passed


def test_tests_that_do_not_load_or_fail_by_themselves_are_an_error_and_not_a_catch(job: Job) -> None:
    path = job.tree / "tests" / "test_sums.py"
    for text, problem in (
        (TESTS.replace("import add", "import add, lost"), "lost"),
        (TESTS.replace("== 4", "== 5"), "fails without a mutant"),
        ("", "pytest ended with 5"),
    ):
        path.write_text(text)
        assert problem in run(job, None).problem
    path.write_text(TESTS)


def test_the_package_and_the_repository_are_where_the_paths_say() -> None:
    assert (ROOT / HONEST.path).parent.is_dir()
    assert Mutant("tests/test_layers", "", "", "").path == "tests/test_layers.py"
    assert Mutant("spec/symbols", "", "", "").path == "spec/symbols.py"
    assert Mutant("verify_patch", "", "", "").path == "verify_patch.py"
