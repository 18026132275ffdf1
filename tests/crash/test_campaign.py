"""The fast part of the crash campaign, and proof that the campaign notices a server that does not recover."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from epochless_vllm.publication.coordinator import Coordinator
from epochless_vllm.publication.recovery import Recovered
from epochless_vllm.store.revisions import RevisionStore
from tests.crash.campaign import Scenario, World, make_world, run, scenarios
from tests.publication.conftest import MEMORY

KILLED = {"ingest.rename", "decide", "retire.remove", "rank.register"}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        yield make_world(Path(directory))


@pytest.fixture
def place(world: World) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=world.directory) as directory:
        yield Path(directory)


def is_fast(scenario: Scenario) -> bool:
    """Each point once by exit, a few by SIGKILL; of the ranks, the middle one."""
    if scenario.process in ("tp0", "tp2"):
        return False
    return scenario.manner != "kill" or scenario.point in KILLED


PLACEHOLDER = World(Path(), ["0", "1", "2", "3"], ["0", "1", "2", "3"], [])
FAST = [scenario.name for scenario in scenarios(PLACEHOLDER) if is_fast(scenario)]


def find(world: World, name: str) -> Scenario:
    return next(scenario for scenario in scenarios(world) if scenario.name == name)


@pytest.mark.parametrize("name", FAST)
def test_a_cut_loses_nothing_committed_and_shows_nothing_uncommitted(world: World, place: Path, name: str) -> None:
    assert run(world, find(world, name), place).problems == []


def test_scenarios_have_names_of_their_own() -> None:
    names = [scenario.name for scenario in scenarios(PLACEHOLDER)]
    assert len(set(names)) == len(names)
    assert len(FAST) > 25


@pytest.mark.parametrize(
    ("target", "attribute", "mutant", "name", "problem"),
    [
        (Coordinator, "recover", lambda self: Recovered(()), "publish-server-decide-exit", "holds"),
        (RevisionStore, "clear_incoming", lambda self: (), "ingest-server-ingest.copy-exit", "leftovers"),
        (Coordinator, "_sweep", lambda self: None, "publish-server-intend-exit", None),
    ],
)
def test_the_campaign_notices_a_server_that_does_not_recover(
    world: World,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: type,
    attribute: str,
    mutant: object,
    name: str,
    problem: str | None,
) -> None:
    """The last one is no fault: the new epoch aborts what the sweep would have found."""
    monkeypatch.setattr(target, attribute, mutant)
    problems = run(world, find(world, name), place).problems
    assert (problems == []) if problem is None else (problem in problems[0])
