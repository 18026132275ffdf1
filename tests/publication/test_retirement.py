"""Retiring: nothing is removed while used, nothing stays when unused, every step may be repeated."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from epochless_vllm.errors import HeadRetirementError, RetiredRevisionError, StorageFullError, UnknownRevisionError
from epochless_vllm.protocol.publication import RetireBegan, Retired, Status
from epochless_vllm.protocol.resolution import resolve_model
from epochless_vllm.publication.coordinator import Coordinator
from tests.publication.conftest import MakeService, Revisions, Service
from tests.publication.fakes import altered, dead, silent
from tests.publication.test_coordinator import FailingAppends


@pytest.fixture
def service(make_service: MakeService, revisions: Revisions) -> Service:
    """Policy p: revisions 0, 1, 2; policy q: revision 0."""
    made = make_service(deadline_s=20.0)
    for index in range(3):
        made.coordinator.publish(revisions[index], "p", index + 1)
    made.coordinator.publish(revisions[0], "q", 1)
    return made


def held(service: Service) -> set[int]:
    """The engine ids that any rank holds."""
    return {engine_id for installer in service.ranks.installers.values() for engine_id in installer.registered}


def test_a_revision_in_use_drains_with_its_count_and_goes_after_its_last_request(
    service: Service, revisions: Revisions
) -> None:
    service.ranks.in_flight[2] = 3
    (draining,) = service.coordinator.retire("p", revisions[1])
    assert (draining.publication.step, draining.in_flight) == (2, 3)
    with pytest.raises(RetiredRevisionError):
        resolve_model(service.journal.state, "p@2")
    for left in (3, 2, 1):
        service.ranks.in_flight[2] = left
        assert service.coordinator.pump_retirements() == 1
        assert held(service) == {1, 2, 3}
    service.ranks.in_flight[2] = 0
    assert service.coordinator.pump_retirements() == 0
    assert held(service) == {1, 3}
    assert service.journal.state.status("p", revisions[1]) is Status.RETIRED
    assert service.journal.receipts(2) == {}


def test_the_engine_is_asked_once_for_all_that_drain(
    service: Service, revisions: Revisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    holders_of = service.ranks.holders_of
    monkeypatch.setattr(service.ranks, "holders_of", lambda ids: asked.append(list(ids)) or holders_of(ids))
    service.ranks.in_flight.update({1: 1, 2: 1})
    for index in range(2):
        service.coordinator.retire("p", revisions[index])
    service.coordinator.retire("q", None)
    assert service.coordinator.pump_retirements() == 2  # q's hold on the adapter of 1 ends, p's waits
    assert asked == [[1, 2]]
    assert held(service) == {1, 2, 3}
    service.ranks.in_flight.clear()
    assert service.coordinator.pump_retirements() == 0
    assert held(service) == {3}


def test_retiring_twice_reports_again_and_then_says_gone(service: Service, revisions: Revisions) -> None:
    service.ranks.in_flight[2] = 1
    first = service.coordinator.retire("p", revisions[1])
    assert service.coordinator.retire("p", revisions[1]) == first
    service.ranks.in_flight.clear()
    service.coordinator.pump_retirements()
    with pytest.raises(RetiredRevisionError):
        service.coordinator.retire("p", revisions[1])


def test_an_unknown_number_of_holders_keeps_the_revision(service: Service, revisions: Revisions) -> None:
    service.ranks.in_flight[2] = -1  # a front end did not answer
    service.coordinator.retire("p", revisions[1])
    assert service.coordinator.pump_retirements() == 1
    assert held(service) == {1, 2, 3}


def test_only_the_last_binding_of_a_revision_removes_it(service: Service, revisions: Revisions) -> None:
    service.ranks.in_flight[1] = 4  # of either policy: they share the adapter
    service.coordinator.retire("q", revisions[0])
    assert service.coordinator.pump_retirements() == 0
    assert service.journal.state.status("q", revisions[0]) is Status.RETIRED
    service.coordinator.retire("p", revisions[0])
    assert service.coordinator.pump_retirements() == 1
    service.ranks.in_flight.clear()
    assert service.coordinator.pump_retirements() == 0
    assert held(service) == {2, 3}


def test_the_head_cannot_go_while_older_revisions_live(service: Service, revisions: Revisions) -> None:
    for _ in range(2):
        with pytest.raises(HeadRetirementError) as caught:
            service.coordinator.retire("p", revisions[2])
        assert caught.value.status == 409
        service.coordinator.retire("p", revisions[0])
    service.coordinator.retire("p", revisions[1])  # draining ones do not count
    service.coordinator.retire("p", revisions[2])
    assert service.coordinator.pump_retirements() == 0
    assert held(service) == {1}


def test_a_policy_without_a_revision_named_is_retired_whole(service: Service, revisions: Revisions) -> None:
    service.ranks.in_flight[3] = 2
    drained = service.coordinator.retire("p", None)
    assert [(d.publication.step, d.in_flight) for d in drained] == [(1, 0), (2, 0), (3, 2)]
    assert service.coordinator.pump_retirements() == 1
    assert held(service) == {1, 3}  # q still serves the first
    service.ranks.in_flight.clear()
    assert service.coordinator.pump_retirements() == 0
    assert service.journal.state.head("p") is None
    with pytest.raises(RetiredRevisionError):
        service.coordinator.retire("p", None)


def test_what_never_was_cannot_be_retired(service: Service, revisions: Revisions) -> None:
    for arguments in (("r", None), ("r", revisions[0]), ("q", revisions[1])):
        with pytest.raises(UnknownRevisionError):
            service.coordinator.retire(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("acted", [True, False])
def test_a_rank_that_does_not_confirm_the_removal_is_named_and_asked_again(
    service: Service, revisions: Revisions, acted: bool
) -> None:
    service.ranks.faults["tp1"] = silent("retire") if acted else dead("retire")
    service.coordinator.retire("p", revisions[1])
    for _ in range(2):
        assert service.coordinator.pump_retirements() == 1
        assert service.coordinator.retirement_failures[revisions[1]].rank == "tp1"
    with pytest.raises(RetiredRevisionError):
        resolve_model(service.journal.state, "p@2")
    service.ranks.faults.clear()
    assert service.coordinator.pump_retirements() == 0
    assert service.coordinator.retirement_failures == {}
    assert held(service) == {1, 3}


def test_a_rank_that_refuses_the_removal_is_named(service: Service, revisions: Revisions) -> None:
    service.ranks.faults["tp2"] = altered(
        "retire", lambda r: {**r, "ok": False, "code": "failed", "reason": "device lost"}
    )
    service.coordinator.retire("p", revisions[1])
    assert service.coordinator.pump_retirements() == 1
    assert service.coordinator.retirement_failures[revisions[1]].reason == "device lost"


@pytest.mark.parametrize("kind", [RetireBegan, Retired])
def test_a_retirement_that_cannot_be_journalled_changes_nothing_and_heals(
    service: Service, revisions: Revisions, kind: type
) -> None:
    journal = FailingAppends(service.journal.path)
    coordinator = Coordinator(revisions.store, journal, service.ranks, keep=None, capacity=100, deadline_s=20)
    journal.failing = (kind,)
    if kind is Retired:
        coordinator.retire("p", revisions[1])
    with pytest.raises(StorageFullError) as caught:
        coordinator.retire("p", revisions[1]) if kind is RetireBegan else coordinator.pump_retirements()
    assert caught.value.status == 507
    expected = Status.LIVE if kind is RetireBegan else Status.DRAINING
    assert journal.state.status("p", revisions[1]) is expected
    if kind is RetireBegan:
        assert resolve_model(journal.state, "p@2") is not None
        assert held(service) == {1, 2, 3}
    journal.failing = ()
    coordinator.retire("p", revisions[1])
    assert coordinator.pump_retirements() == 0
    assert held(service) == {1, 3}
    journal.close()


def test_a_quarantined_revision_can_be_retired(service: Service, revisions: Revisions) -> None:
    service.coordinator.quarantine(revisions[1], "tp0", "x")
    service.coordinator.retire("p", revisions[1])
    assert service.coordinator.pump_retirements() == 0
    assert service.journal.state.quarantine == {}


def test_two_hundred_cycles_leave_nothing_in_ranks_or_maps(make_service: MakeService, revisions: Revisions) -> None:
    service = make_service(keep=1, capacity=3, deadline_s=20.0)
    for cycle in range(200):
        service.coordinator.publish(revisions[cycle % 5], "p", None)
        service.coordinator.pump_retirements()
    state = service.journal.state
    assert len(state.holdings) == len(state.adapters) == len(state.heads) == 1
    assert state.intents == state.quarantine == {}
    for installer, participant in zip(
        service.ranks.installers.values(), service.ranks.participants.values(), strict=True
    ):
        assert len(installer.registered) == len(participant._held) == 1
        assert participant._candidates == {}
    kept = service.journal._connection.execute("SELECT count(*) FROM receipts").fetchone()
    assert kept == (1,)
    assert service.coordinator.retirement_failures == {}


def test_no_request_is_admitted_to_a_draining_revision_at_any_moment(service: Service, revisions: Revisions) -> None:
    """The removal itself sees a state in which nobody can be admitted any more."""
    seen: list[Any] = []

    def look(message: dict[str, Any], deliver: Any) -> Any:
        if message["kind"] == "retire":
            seen.append(service.journal.state.status("p", revisions[1]))
        return deliver(message)

    service.ranks.faults["tp0"] = look
    service.coordinator.retire("p", revisions[1])
    service.coordinator.pump_retirements()
    assert seen == [Status.DRAINING]


def asked_in_between(service: Service, meanwhile: Any) -> int:
    """Pump retirements; do something while the engines count; return what goes on draining."""
    asked, answer, count = threading.Event(), threading.Event(), service.ranks.holders_of

    def count_late(ids: Any) -> dict[int, int]:
        counts = count(ids)
        asked.set()
        assert answer.wait(60)
        return counts

    service.ranks.holders_of = count_late  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        pumped = threads.submit(service.coordinator.pump_retirements)
        assert asked.wait(60)
        service.ranks.holders_of = count  # type: ignore[method-assign]
        done = threads.submit(meanwhile)
        try:
            done.result(60)
        finally:
            answer.set()
        return pumped.result(60)


def test_a_publication_does_not_wait_until_the_engines_have_counted(
    make_service: MakeService, service: Service, revisions: Revisions
) -> None:
    service.ranks.in_flight[2] = 1
    service.coordinator.retire("p", revisions[1])
    assert asked_in_between(service, lambda: service.coordinator.publish(revisions[2], "q", 2)) == 1
    assert service.journal.state.head("q").revision_id == revisions[2]  # type: ignore[union-attr]


def test_what_drains_only_since_the_engines_counted_is_not_removed(service: Service, revisions: Revisions) -> None:
    service.coordinator.retire("p", revisions[1])

    def retire_another() -> None:
        service.coordinator.retire("p", revisions[0])
        service.coordinator.retire("q", None)
        service.ranks.in_flight[1] = 1  # admitted before, by a front end that had not seen it

    assert asked_in_between(service, retire_another) == 1  # p's hold on it went: q's kept the adapter
    assert held(service) == {1, 3}
    service.ranks.in_flight[1] = 0
    assert service.coordinator.pump_retirements() == 0
    assert held(service) == {3}
