"""Publishing: all ranks or none, every failure named, old revisions untouched, repeats harmless."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.errors import (
    CapacityError,
    ConflictError,
    EncodingError,
    InvalidRequestError,
    PublicationError,
    QuarantinedRevisionError,
    RankRefusalError,
    StaleEpochError,
    StepConflictError,
    StorageFullError,
    UndecidedError,
    UnknownRevisionError,
)
from epochless_vllm.protocol.publication import Aborted, Committed, Event, Intended, Intent, State, Status
from epochless_vllm.protocol.resolution import resolve_model
from epochless_vllm.publication.coordinator import Coordinator
from epochless_vllm.publication.journal import Journal, JournalView
from epochless_vllm.store.revisions import RevisionStore
from tests.publication.conftest import MakeService, Revisions, Service
from tests.publication.fakes import (
    Fault,
    altered,
    dead,
    deaf_once,
    expected_registered,
    make_ranks,
    muted,
    one_behind,
    refuse,
    run_processes,
    silent,
    twice,
)

PATIENT = {"deadline_s": 20.0}  # for publications that must succeed on a busy machine


@pytest.fixture
def service(make_service: MakeService, revisions: Revisions) -> Service:
    """A service whose policy p serves revisions 0 and 1."""
    made = make_service(**PATIENT)
    for step in (1, 2):
        made.coordinator.publish(revisions[step - 1], "p", step)
    return made


def everything(service: Service) -> Any:
    """What must not change when a publication fails: bindings, heads, and every byte the ranks hold."""
    state = service.journal.refresh()
    held = {rank: dict(installer.registered) for rank, installer in service.ranks.installers.items()}
    return dict(state.bindings), dict(state.heads), dict(state.adapters), held


def test_a_publication_is_held_by_every_rank_with_its_receipts(
    make_service: MakeService, revisions: Revisions, journal_path: Path
) -> None:
    service = make_service(**PATIENT)
    view = JournalView(journal_path)
    published = service.coordinator.publish(revisions[0], "team/p", 7)
    publication = published.publication
    assert (publication.policy, publication.step, publication.sequence, publication.lora_int_id) == ("team/p", 7, 1, 1)
    assert publication.lora_name == f"team/p@{revisions[0]}"
    assert not published.repeated
    for rank in ("tp0", "tp1", "tp2"):
        assert published.receipts[rank] == {
            "rank": rank,
            "source_digest": revisions[0],
            "registered_digest": expected_registered(revisions.store.root, revisions[0]),
        }
        assert service.ranks.held()[rank] == {1: revisions[0]}
    assert service.journal.receipts(1) == published.receipts
    assert resolve_model(view.current(), "team/p") == publication
    view.close()


def test_the_ranks_hold_the_real_bytes_each_its_shard(service: Service, revisions: Revisions) -> None:
    whole = {name: bytes(view) for name, view in revisions.store.read(revisions[0]).tensors.items()}
    shards = [installer.registered[1].tensors for installer in service.ranks.installers.values()]
    for name, content in whole.items():
        joined = bytearray(len(content))
        for index, shard in enumerate(shards):
            joined[index::3] = shard[name]
        assert bytes(joined) == content


@pytest.mark.parametrize("step", [1, 2, None])
def test_the_same_content_under_the_same_step_is_the_same_publication(
    service: Service, revisions: Revisions, step: int | None
) -> None:
    service.ranks.sent.clear()
    index = 0 if step == 1 else 1
    again = service.coordinator.publish(revisions[index], "p", step)
    assert again.repeated
    assert again.publication == service.journal.state.publications[index + 1]
    assert set(again.receipts) == {"tp0", "tp1", "tp2"}
    assert service.ranks.sent == []


def test_other_content_under_a_step_is_a_conflict(service: Service, revisions: Revisions) -> None:
    before = everything(service)
    with pytest.raises(StepConflictError) as caught:
        service.coordinator.publish(revisions[2], "p", 1)
    assert caught.value.fields["revision_id"] == revisions[0]
    assert everything(service) == before


def test_old_content_under_a_new_step_is_a_rollback_and_loads_nothing(service: Service, revisions: Revisions) -> None:
    loads = [len(installer.loads) for installer in service.ranks.installers.values()]
    published = service.coordinator.publish(revisions[0], "p", 3)
    assert (published.publication.sequence, published.publication.lora_int_id) == (3, 1)
    assert service.journal.state.head("p") == published.publication
    assert [len(installer.loads) for installer in service.ranks.installers.values()] == loads


def test_a_revision_is_shared_by_policies_under_one_engine_id(service: Service, revisions: Revisions) -> None:
    assert service.coordinator.publish(revisions[0], "q", 1).publication.lora_int_id == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [([None, None, None], [1, 2, 3]), ([10, None], [10, 11]), ([10, 5, None], [10, 5, 11]), ([0, None], [0, 1])],
)
def test_without_a_step_the_next_one_is_taken(
    make_service: MakeService, revisions: Revisions, given: list[int | None], expected: list[int]
) -> None:
    service = make_service(**PATIENT)
    found = [service.coordinator.publish(revisions[i], "p", step).publication.step for i, step in enumerate(given)]
    assert found == expected


def test_arguments_are_checked_before_anything_happens(service: Service, revisions: Revisions) -> None:
    before = everything(service)
    for arguments in ((revisions[0], "../p", 1), (revisions[0], "p", -1), (revisions[0], "p", True)):
        with pytest.raises(InvalidRequestError):
            service.coordinator.publish(*arguments)
    with pytest.raises(EncodingError):
        service.coordinator.publish("sha256:short", "p", 1)  # type: ignore[arg-type]
    with pytest.raises(UnknownRevisionError, match="add the adapter"):
        service.coordinator.publish("sha256:" + "0" * 64, "p", 9)  # type: ignore[arg-type]
    assert everything(service) == before


# Ranks that fail

FAULTS: dict[str, tuple[Fault, type[PublicationError], str]] = {
    "dies in prepare": (dead("prepare_begin"), PublicationError, "no answer"),
    "dies while polled": (dead("prepare_poll"), PublicationError, "no answer"),
    "never answers": (silent(), PublicationError, "no answer"),
    "answers one behind": (one_behind(), PublicationError, "late one"),
    "lies about the source": (
        altered("prepare_poll", lambda r: r.get("receipt", {}).update(source_digest="sha256:" + "0" * 64)),
        PublicationError,
        "source_digest",
    ),
    "lies about what it registered": (
        altered("prepare_poll", lambda r: r.get("receipt", {}).update(registered_digest="sha256:" + "0" * 64)),
        PublicationError,
        "registered_digest",
    ),
    "signs as another rank": (
        altered("prepare_poll", lambda r: r.get("receipt", {}).update(rank="tp0")),
        PublicationError,
        "another rank's",
    ),
    "answers as another rank": (
        altered("prepare_begin", lambda r: r.update(rank="tp0")),
        PublicationError,
        "something",
    ),
    "answers another message": (
        altered("prepare_begin", lambda r: r.update(kind="abort")),
        PublicationError,
        "something",
    ),
    "sends no receipt": (altered("prepare_poll", lambda r: {**r, "receipt": None, "done": True}), PublicationError, ""),
    "sends a huge receipt": (
        altered("prepare_poll", lambda r: r.get("receipt", {}).update(more="x" * 20_000)),
        PublicationError,
        "bytes",
    ),
    "sends a receipt with a float": (
        altered("prepare_poll", lambda r: r.get("receipt", {}).update(seconds=0.5)),
        PublicationError,
        "canonical",
    ),
    "sends no reply at all": (altered("prepare_begin", lambda r: ["ok"]), PublicationError, "not a reply"),
    "is told of a dead engine": (
        altered("prepare_begin", lambda r: {"ok": False, "code": "engine_dead", "reason": "engine 1 died"}),
        PublicationError,
        "engine 1 died",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_rank_aborts_everywhere_and_is_named(
    make_service: MakeService, revisions: Revisions, name: str
) -> None:
    fault, kind, reason = FAULTS[name]
    service = make_service(deadline_s=20.0)
    service.coordinator.publish(revisions[0], "p", 1)
    before = everything(service)
    if name in ("dies in prepare", "dies while polled", "never answers", "answers one behind"):
        quick = Coordinator(revisions.store, service.journal, service.ranks, keep=None, capacity=100, deadline_s=0.5)
        service = Service(quick, service.journal, service.ranks)
    service.ranks.faults["tp1"] = fault
    with pytest.raises(kind, match="tp1") as caught:
        service.coordinator.publish(revisions[1], "p", 2)
    assert type(caught.value) is kind
    assert caught.value.fields["rank"] == "tp1"
    assert reason in caught.value.fields["reason"]
    assert service.journal.refresh().intents == {}
    del service.ranks.faults["tp1"]
    service.coordinator.pump_retirements()  # a rank that did not hear of the abort hears of it now
    assert everything(service) == before
    healthy = make_service(join=True, ranks=service.ranks, **PATIENT)
    assert healthy.coordinator.publish(revisions[1], "p", 2).publication.lora_int_id == 3


def test_a_rank_that_refuses_the_adapter_is_422_naming_the_tensor(service: Service, revisions: Revisions) -> None:
    before = everything(service)
    service.ranks.installers["tp2"].on_load = refuse
    with pytest.raises(RankRefusalError, match=r"tp2: tensor x.lora_A.weight is consumed by no module") as caught:
        service.coordinator.publish(revisions[2], "p", 3)
    assert caught.value.status == 422
    assert everything(service) == before


def test_a_refusal_counts_for_more_than_another_ranks_failure(service: Service, revisions: Revisions) -> None:
    failed = {"ok": False, "code": "failed", "reason": "no memory"}
    service.ranks.faults["tp0"] = altered("prepare_begin", lambda reply: {**reply, **failed})
    service.ranks.faults["tp1"] = altered("prepare_begin", lambda reply: {**reply, **failed, "code": "refused"})
    with pytest.raises(RankRefusalError, match="tp1"):
        service.coordinator.publish(revisions[2], "p", 3)


def test_a_rank_that_fails_to_register_is_named(service: Service, revisions: Revisions) -> None:
    before = everything(service)

    def fail(shard: Any) -> None:
        raise RuntimeError("out of memory")

    service.ranks.installers["tp1"].on_register = fail
    with pytest.raises(PublicationError, match=r"tp1: RuntimeError: out of memory"):
        service.coordinator.publish(revisions[2], "p", 3)
    assert everything(service) == before


def test_a_publication_takes_three_messages_and_its_poll_waits_for_the_load(
    service: Service, revisions: Revisions
) -> None:
    before = len(service.ranks.sent)
    service.coordinator.publish(revisions[2], "p", 3)
    sent = service.ranks.sent[before:]
    assert [message["kind"] for message in sent] == ["prepare_begin", "prepare_poll", "commit"]
    assert [message.get("wait_ms", 0) > 0 for message in sent] == [False, True, False]


def test_a_rank_that_stalls_past_the_deadline_is_named_and_its_late_load_is_dropped(
    make_service: MakeService, revisions: Revisions
) -> None:
    service = make_service(deadline_s=0.5)
    gate = threading.Event()
    service.ranks.installers["tp1"].on_load = lambda order: gate.wait() and None
    with pytest.raises(PublicationError, match=r"tp1: still preparing after 0\.5 s"):
        service.coordinator.publish(revisions[0], "p", 1)
    gate.set()
    assert service.ranks.held() == {"tp0": {}, "tp1": {}, "tp2": {}}


@pytest.mark.parametrize(
    "fault", [deaf_once("prepare_begin"), deaf_once("prepare_poll"), deaf_once("commit"), muted("commit", 3), twice()]
)
def test_lost_and_doubled_messages_do_not_fail_a_publication(
    service: Service, revisions: Revisions, fault: Fault
) -> None:
    service.ranks.faults["tp1"] = fault
    service.coordinator.publish(revisions[2], "p", 3)
    assert service.ranks.held()["tp1"] == {1: revisions[0], 2: revisions[1], 3: revisions[2]}
    assert service.coordinator.rank_status()["tp1"]["held"][2]["committed"]


def test_an_abort_that_a_rank_missed_reaches_it_with_the_next_turn(service: Service, revisions: Revisions) -> None:
    before = everything(service)
    service.ranks.faults["tp1"] = dead("abort")
    registered = threading.Event()
    service.ranks.installers["tp1"].on_register = lambda shard: registered.set()
    service.ranks.installers["tp2"].on_load = lambda order: registered.wait(30) and None
    service.ranks.installers["tp2"].on_register = lambda shard: 1 // 0 and None
    quick = Coordinator(revisions.store, service.journal, service.ranks, keep=None, capacity=100, deadline_s=2.0)
    with pytest.raises(PublicationError, match="tp2"):
        quick.publish(revisions[2], "p", 3)
    assert revisions[2] in service.ranks.held()["tp1"].values()
    service.ranks.faults.clear()
    quick.pump_retirements()
    assert everything(service) == before


def test_a_rank_that_is_not_of_the_deployment_aborts(service: Service, revisions: Revisions) -> None:
    call = service.ranks.call
    service.ranks.call = lambda message: {**call(message), "tp9": {"ok": True}}  # type: ignore[method-assign]
    with pytest.raises(PublicationError, match="tp9"):
        service.coordinator.publish(revisions[2], "p", 3)


def test_no_ranks_publish_nothing(make_service: MakeService, revisions: Revisions) -> None:
    service = make_service(ranks=make_ranks(revisions.store, ()))
    with pytest.raises(PublicationError, match="no ranks"):
        service.coordinator.publish(revisions[0], "p", 1)
    assert service.journal.state.publications == {}


def test_an_exception_of_the_port_itself_aborts_and_is_passed_on(service: Service, revisions: Revisions) -> None:
    before = everything(service)
    service.ranks.expected_registered = lambda revision_id: 1 // 0  # type: ignore[method-assign, return-value]
    with pytest.raises(ZeroDivisionError):
        service.coordinator.publish(revisions[2], "p", 3)
    assert everything(service) == before


@pytest.mark.parametrize(
    "fault", [dead("commit"), altered("commit", lambda r: {**r, "ok": False, "code": "x", "reason": "y"})]
)
def test_a_rank_that_does_not_acknowledge_the_commit_quarantines_the_revision(
    make_service: MakeService, revisions: Revisions, fault: Fault
) -> None:
    service = make_service(deadline_s=1.0)
    service.coordinator.publish(revisions[0], "p", 1)
    service.ranks.faults["tp1"] = fault
    with pytest.raises(QuarantinedRevisionError, match="tp1") as caught:
        service.coordinator.publish(revisions[1], "p", 2)
    assert caught.value.fields["rank"] == "tp1"
    assert service.journal.state.status("p", revisions[1]) is Status.QUARANTINED
    assert service.journal.state.status("p", revisions[0]) is Status.LIVE
    assert resolve_model(service.journal.state, "p@1") is not None
    del service.ranks.faults["tp1"]
    again = service.coordinator.publish(revisions[1], "p", 2)  # the same call, once the rank is well
    assert (again.repeated, again.publication.lora_int_id, again.publication.sequence) == (False, 2, 3)
    assert service.journal.state.status("p", revisions[1]) is Status.LIVE


def test_a_quarantined_revision_is_loaded_anew_once_nothing_uses_it(service: Service, revisions: Revisions) -> None:
    service.coordinator.quarantine(revisions[1], "tp2", "read-back differs")
    service.coordinator.quarantine(revisions[1], "tp0", "also here")
    assert service.journal.state.quarantine == {revisions[1]: ("tp2", "read-back differs")}
    service.ranks.in_flight[2] = 1
    with pytest.raises(ConflictError) as caught:
        service.coordinator.publish(revisions[1], "p", None)
    assert caught.value.fields["retryable"]
    service.ranks.in_flight.clear()
    published = service.coordinator.publish(revisions[1], "p", None)
    assert (published.publication.step, published.publication.sequence) == (2, 3)
    assert service.ranks.installers["tp0"].loads.count(revisions[1]) == 2
    assert service.ranks.installers["tp0"].removed == [2]
    assert service.ranks.held()["tp0"] == {1: revisions[0], 2: revisions[1]}


def test_quarantining_what_is_gone_is_nothing(service: Service, revisions: Revisions) -> None:
    service.coordinator.quarantine(revisions[7], "tp0", "x")
    assert service.journal.state.quarantine == {}


def test_status_names_each_rank_and_what_is_wrong_with_it(service: Service, revisions: Revisions) -> None:
    service.ranks.faults["tp1"] = silent("status")
    status = service.coordinator.rank_status()
    assert [held["revision_id"] for held in status["tp0"]["held"]] == [revisions[0], revisions[1]]
    assert status["tp1"] == {"ok": False, "code": "no_answer", "reason": "no answer"}


# The journal


class FailingAppends(Journal):
    """Raises an error instead of recording events of some kinds."""

    failing: tuple[type, ...] = ()
    error: Exception = StorageFullError("disk full", path="journal.sqlite")

    def append(self, *events: Event, **options: Any) -> State:
        if any(isinstance(event, self.failing) for event in events):
            raise self.error
        return super().append(*events, **options)


@pytest.fixture
def failing(make_service: MakeService, revisions: Revisions, journal_path: Path) -> Service:
    service = make_service(**PATIENT)
    service.coordinator.publish(revisions[0], "p", 1)
    journal = FailingAppends(journal_path)
    coordinator = Coordinator(revisions.store, journal, service.ranks, keep=None, capacity=100, deadline_s=20)
    return Service(coordinator, journal, service.ranks)


@pytest.mark.parametrize("kinds", [(Intended,), (Committed,), (Committed, Aborted), (Intended, Committed, Aborted)])
def test_a_full_disk_leaves_everything_as_it_was_and_heals(
    failing: Service, revisions: Revisions, kinds: tuple[type, ...]
) -> None:
    before = everything(failing)
    failing.journal.failing = kinds  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(StorageFullError):
            failing.coordinator.publish(revisions[1], "p", 2)
        assert everything(failing) == before
    failing.journal.failing = ()  # type: ignore[attr-defined]
    failing.coordinator.publish(revisions[1], "p", 2)
    assert failing.journal.refresh().intents == {}
    assert set(failing.ranks.held()["tp0"].values()) == {revisions[0], revisions[1]}


def test_an_undecided_commit_leaves_the_ranks_as_they_are(failing: Service, revisions: Revisions) -> None:
    failing.journal.failing, failing.journal.error = (Committed,), UndecidedError("?", path="x")  # type: ignore[attr-defined]
    with pytest.raises(UndecidedError):
        failing.coordinator.publish(revisions[1], "p", 2)
    assert "abort" not in [message["kind"] for message in failing.ranks.sent]
    assert failing.ranks.held()["tp0"] == {1: revisions[0], 2: revisions[1]}


def test_a_server_whose_epoch_is_over_publishes_nothing(
    service: Service, make_service: MakeService, revisions: Revisions
) -> None:
    later = make_service(**PATIENT)
    before = everything(later)
    for attempt in (
        lambda: service.coordinator.publish(revisions[2], "p", 3),
        lambda: service.coordinator.retire("p", None),
        lambda: service.coordinator.quarantine(revisions[0], "tp0", "x"),
    ):
        with pytest.raises(StaleEpochError):
            attempt()
    assert everything(later) == before


def test_what_another_process_left_undecided_is_aborted_before_the_next_publication(
    service: Service, make_service: MakeService, revisions: Revisions
) -> None:
    """The other API server dies after every rank prepared; this one goes on in the same epoch."""
    intent = Intent(3, "p", 3, revisions[2], 3)
    service.journal.append(Intended(intent))
    for kind in ("prepare_begin", "prepare_poll"):
        order = {"epoch": 1, "transaction_id": 3, "revision_id": revisions[2], "lora_int_id": 3}
        while not service.ranks.call({"kind": kind, **order})["tp0"].get("done", kind == "prepare_begin"):
            pass
    other = make_service(join=True, ranks=service.ranks, **PATIENT)
    published = other.coordinator.publish(revisions[3], "p", 3)
    assert published.publication.lora_int_id == 4
    assert service.ranks.held()["tp0"] == {1: revisions[0], 2: revisions[1], 4: revisions[3]}
    assert other.journal.state.intents == {}


# Many at once


def test_twenty_parallel_publications_of_one_digest_load_it_once(
    make_service: MakeService, revisions: Revisions
) -> None:
    service = make_service(**PATIENT)
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda _: service.coordinator.publish(revisions[0], "p", 1), range(20)))
    assert sorted(published.repeated for published in found) == [False] + [True] * 19
    assert {published.publication for published in found} == {service.journal.state.publications[1]}
    assert [installer.loads for installer in service.ranks.installers.values()] == [[revisions[0]]] * 3


def test_twenty_parallel_publications_of_different_digests_end_at_the_highest_sequence(
    make_service: MakeService, revisions: Revisions
) -> None:
    service = make_service(**PATIENT)
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda i: service.coordinator.publish(revisions[i], "p", None), range(20)))
    assert sorted(p.publication.sequence for p in found) == list(range(1, 21))
    assert sorted(p.publication.step for p in found) == list(range(1, 21))
    last = max(found, key=lambda p: p.publication.sequence).publication
    assert service.journal.state.head("p") == last
    assert set(service.ranks.held()["tp1"].values()) == set(revisions.ids[:20])


def _begin(path: Path) -> None:
    journal = Journal(path)
    journal.begin_epoch()
    journal.close()


def _publish_in_process(root: Path, path: Path, revision_ids: list[Any]) -> None:
    """One of several API servers; its rank stands for the engines they all share."""
    store, journal = RevisionStore(root), Journal(path)
    coordinator = Coordinator(store, journal, make_ranks(store, ("tp0",)), keep=None, capacity=100, deadline_s=20)
    for revision_id in revision_ids:
        publication = coordinator.publish(revision_id, "p", None).publication
        assert publication.revision_id == revision_id
        assert journal.state.head("p") == publication
    journal.close()


def test_several_api_servers_take_turns_and_see_each_others_publications(
    revisions: Revisions, journal_path: Path
) -> None:
    run_processes(_begin, [(journal_path,)])
    shares = [revisions.ids[index::3][:4] for index in range(3)]
    run_processes(_publish_in_process, [(revisions.store.root, journal_path, share) for share in shares])
    state = Journal(journal_path, read_only=True).state
    assert [(p.sequence, p.step) for p in state.publications.values()] == [(n, n) for n in range(1, 13)]
    assert {p.revision_id for p in state.publications.values()} == set(revisions.ids[:12])
    assert state.last_transaction_id == 12
    assert state.head("p") == state.publications[12]


# Capacity


def test_a_full_registry_refuses_and_says_who_holds_it(make_service: MakeService, revisions: Revisions) -> None:
    service = make_service(capacity=2, **PATIENT)
    service.coordinator.publish(revisions[0], "p", 1)
    service.coordinator.publish(revisions[1], "q", 1)
    before = everything(service)
    service.ranks.in_flight[1] = 5
    with pytest.raises(CapacityError) as caught:
        service.coordinator.publish(revisions[2], "p", 2)
    assert caught.value.status == 409
    holders = {holder["policy"]: holder for holder in caught.value.fields["holders"]}
    assert (holders["p"]["in_flight"], holders["p"]["status"], holders["q"]["lora_int_id"]) == (5, "live", 2)
    assert everything(service) == before
    service.coordinator.publish(revisions[0], "q", 2)  # a revision already held needs no room


def test_keep_retires_the_oldest_beyond_it_in_the_very_commit(make_service: MakeService, revisions: Revisions) -> None:
    service = make_service(keep=2, capacity=10, **PATIENT)
    for index in range(4):
        service.coordinator.publish(revisions[index], "p", None)
    service.coordinator.publish(revisions[9], "q", None)
    state = service.journal.state
    statuses = [state.bindings["p", revisions[index]] for index in range(4)]
    assert statuses == [Status.DRAINING, Status.DRAINING, Status.LIVE, Status.LIVE]
    assert state.bindings["q", revisions[9]] is Status.LIVE
    assert service.coordinator.pump_retirements() == 0
    assert set(service.ranks.held()["tp0"].values()) == {revisions[2], revisions[3], revisions[9]}


def test_a_rollback_makes_a_revision_young_again(make_service: MakeService, revisions: Revisions) -> None:
    service = make_service(keep=2, **PATIENT)
    for index, step in ((0, 1), (1, 2), (0, 3), (2, 4)):
        service.coordinator.publish(revisions[index], "p", step)
    bindings = service.journal.state.bindings
    assert bindings["p", revisions[0]] is Status.LIVE
    assert bindings["p", revisions[1]] is Status.DRAINING


def test_a_trainer_that_never_unloads_publishes_forever(make_service: MakeService, revisions: Revisions) -> None:
    service = make_service(keep=2, capacity=4, **PATIENT)
    for _ in range(3):
        for index in range(8):
            published = service.coordinator.publish(revisions[index], "p", None)
            service.ranks.in_flight = {published.publication.lora_int_id - 1: 3}  # long rollouts on the last one
    assert service.journal.state.sequence == 24
    assert len(service.ranks.held()["tp0"]) <= 4


def test_a_full_registry_of_long_rollouts_refuses_until_one_ends(
    make_service: MakeService, revisions: Revisions
) -> None:
    service = make_service(keep=2, capacity=3, **PATIENT)
    service.ranks.in_flight = dict.fromkeys(range(1, 9), 1)
    for index in range(3):
        service.coordinator.publish(revisions[index], "p", None)
    with pytest.raises(CapacityError):
        service.coordinator.publish(revisions[3], "p", None)
    assert service.journal.state.status("p", revisions[1]) is Status.LIVE  # draining it would have helped nobody
    assert service.journal.state.head("p").revision_id == revisions[2]  # type: ignore[union-attr]
    service.ranks.in_flight[1] = 0
    service.coordinator.publish(revisions[3], "p", None)
    assert set(service.ranks.held()["tp0"].values()) == {revisions[1], revisions[2], revisions[3]}


def test_room_is_made_by_the_oldest_unused_revision_and_never_by_the_head(
    make_service: MakeService, revisions: Revisions
) -> None:
    service = make_service(keep=2, capacity=2, **PATIENT)
    for index in range(3):
        service.coordinator.publish(revisions[index], "p", None)
    assert set(service.ranks.held()["tp0"].values()) == {revisions[1], revisions[2]}


def test_the_only_place_is_not_taken_from_the_head(make_service: MakeService, revisions: Revisions) -> None:
    service = make_service(keep=1, capacity=1, **PATIENT)
    service.coordinator.publish(revisions[0], "p", 1)
    with pytest.raises(CapacityError):
        service.coordinator.publish(revisions[1], "p", 2)
    assert service.journal.state.status("p", revisions[0]) is Status.LIVE


def test_a_draining_revision_is_published_again_once_it_has_drained(service: Service, revisions: Revisions) -> None:
    service.ranks.in_flight[1] = 2
    service.coordinator.retire("p", revisions[0])
    with pytest.raises(ConflictError) as caught:
        service.coordinator.publish(revisions[0], "p", 1)
    assert (caught.value.fields["in_flight"], caught.value.fields["retryable"]) == (2, True)
    service.ranks.in_flight.clear()
    again = service.coordinator.publish(revisions[0], "p", 1).publication
    assert (again.lora_int_id, again.sequence, again.step) == (3, 3, 1)
    assert service.ranks.held()["tp0"] == {2: revisions[1], 3: revisions[0]}


def test_publishing_to_another_policy_saves_a_draining_adapter(service: Service, revisions: Revisions) -> None:
    service.ranks.in_flight[1] = 2
    service.coordinator.retire("p", revisions[0])
    published = service.coordinator.publish(revisions[0], "q", 1)
    assert published.publication.lora_int_id == 1
    service.ranks.in_flight.clear()
    assert service.coordinator.pump_retirements() == 0
    assert service.journal.state.status("p", revisions[0]) is Status.RETIRED
    assert service.ranks.held()["tp0"] == {1: revisions[0], 2: revisions[1]}
