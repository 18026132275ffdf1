"""A restart: the recovered set is the committed set, whatever the server before was doing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.errors import (
    ConfigurationError,
    PublicationError,
    QuarantinedRevisionError,
    RetiredRevisionError,
    StoreError,
)
from epochless_vllm.protocol.publication import STORE_RANK, Intended, Intent, Status
from epochless_vllm.protocol.resolution import resolve_model
from epochless_vllm.publication.coordinator import Coordinator
from epochless_vllm.publication.journal import Journal
from epochless_vllm.publication.recovery import AHEAD
from epochless_vllm.store.revisions import RevisionStore
from tests.publication.conftest import MakeService, Revisions, Service
from tests.publication.fakes import add_revisions, make_ranks, refuse


@pytest.fixture
def earlier(make_service: MakeService, revisions: Revisions) -> Service:
    """A server that published four revisions, retired one, and died while another drained and a fifth was prepared."""
    service = make_service(deadline_s=20.0)
    for index in range(4):
        service.coordinator.publish(revisions[index], "p", index + 1)
    service.coordinator.publish(revisions[2], "q", 1)
    service.coordinator.retire("p", revisions[0])
    service.coordinator.pump_retirements()
    service.ranks.in_flight[2] = 1
    service.coordinator.retire("p", revisions[1])
    service.journal.append(Intended(Intent(6, "p", 5, revisions[4], 5)))
    return service


def test_every_rank_holds_exactly_what_is_committed(
    earlier: Service, make_service: MakeService, revisions: Revisions
) -> None:
    service = make_service(deadline_s=20.0)
    recovered = service.coordinator.recover()
    assert set(recovered.prepared) == {revisions[2], revisions[3]}
    assert recovered.quarantined == {}
    assert service.ranks.held() == {rank: {3: revisions[2], 4: revisions[3]} for rank in ("tp0", "tp1", "tp2")}
    state = service.journal.state
    assert state.intents == {}
    assert state.head("p") == earlier.journal.state.head("p")
    assert state.status("p", revisions[1]) is Status.RETIRED  # its last request died with the server
    for status in service.coordinator.rank_status().values():
        assert all(held["committed"] for held in status["held"])
    assert service.coordinator.publish(revisions[4], "p", 5).publication.lora_int_id == 6


def test_recovering_twice_changes_nothing(earlier: Service, make_service: MakeService, revisions: Revisions) -> None:
    first = make_service(deadline_s=20.0)
    first.coordinator.recover()
    state = first.journal.state
    again = make_service(join=True, ranks=first.ranks, deadline_s=20.0)
    assert set(again.coordinator.recover().prepared) == {revisions[2], revisions[3]}
    assert again.journal.state == state
    assert [len(installer.loads) for installer in first.ranks.installers.values()] == [2, 2, 2]


def test_ranks_read_ahead_of_what_is_examined_and_never_far(make_service: MakeService, revisions: Revisions) -> None:
    earlier = make_service()
    for index in range(5):
        earlier.coordinator.publish(revisions[index], "p", index + 1)
    service = make_service(deadline_s=20.0)
    assert len(service.coordinator.recover().prepared) == 5
    # Of each message, how many revisions are begun and not committed once it was sent.
    unsettled: set[str] = set()
    most = 0
    for message in service.ranks.sent:
        if message["kind"] == "commit":
            unsettled.discard(message["revision_id"])
        else:
            unsettled.add(message["revision_id"])
        most = max(most, len(unsettled))
    assert most == 1 + AHEAD
    assert [len(installer.loads) for installer in service.ranks.installers.values()] == [5, 5, 5]


def test_an_empty_store_recovers_nothing(make_service: MakeService) -> None:
    service = make_service()
    assert service.coordinator.recover().prepared == ()
    assert service.ranks.sent == []


class Damageable:
    """A store of its own, for tests that damage it, and servers on it."""

    def __init__(self, directory: Path) -> None:
        self.store = RevisionStore(directory / "store")
        self.ids = add_revisions(self.store, directory, 3)
        service = self.start()
        for index in range(3):
            service.coordinator.publish(self.ids[index], "p", index + 1)
        service.journal.close()

    def start(self, **options: Any) -> Service:
        journal = Journal(self.store.root / "journal.sqlite")
        journal.begin_epoch()
        ranks = make_ranks(self.store)
        settings = {"keep": None, "capacity": 10, "deadline_s": 20.0, **options}
        return Service(Coordinator(self.store, journal, ranks, **settings), journal, ranks)

    def files(self, index: int) -> Path:
        return self.store.root / "revisions" / self.ids[index].removeprefix("sha256:")


@pytest.fixture
def damageable(tmp_path: Path) -> Damageable:
    return Damageable(tmp_path)


def flip(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


def empty(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    path.chmod(0o600)
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, empty, shutil.rmtree], ids=lambda damage: damage.__name__)
def test_damage_to_an_older_revision_is_410_with_the_reason_and_the_others_serve(
    damageable: Damageable, damage: Any
) -> None:
    damage(damageable.files(0))
    service = damageable.start()
    recovered = service.coordinator.recover()
    assert set(recovered.prepared) == set(damageable.ids[1:])
    assert recovered.quarantined[damageable.ids[0]][0] == STORE_RANK
    with pytest.raises(RetiredRevisionError, match="cannot be served any more"):
        resolve_model(service.journal.state, "p@1")
    assert resolve_model(service.journal.state, "p") is not None
    # It stays so over restarts, until the adapter is added and published again.
    service.journal.close()
    again = damageable.start()
    assert set(again.coordinator.recover().prepared) == set(damageable.ids[1:])
    shutil.rmtree(damageable.files(0), ignore_errors=True)
    add_revisions(damageable.store, damageable.store.root.parent, 1)
    assert again.coordinator.publish(damageable.ids[0], "p", 4).publication.lora_int_id == 1
    assert again.ranks.held()["tp2"][1] == damageable.ids[0]
    assert resolve_model(again.journal.state, "p@1") is not None
    again.journal.close()


@pytest.mark.parametrize("damage", [flip, empty, shutil.rmtree], ids=lambda damage: damage.__name__)
def test_damage_to_a_head_refuses_to_start(damageable: Damageable, damage: Any) -> None:
    for index in (0, 2):
        damage(damageable.files(index))
    service = damageable.start()
    with pytest.raises(StoreError, match="head of p") as caught:
        service.coordinator.recover()
    assert caught.value.fields["rank"] == STORE_RANK
    assert caught.value.fields["revision_id"] == damageable.ids[2]
    # The operator restores the bytes and starts again: until then nothing is held against any revision.
    assert service.journal.state.quarantine == {}
    service.journal.close()


def test_a_rank_that_cannot_prepare_an_older_revision_quarantines_it(
    earlier: Service, make_service: MakeService, revisions: Revisions
) -> None:
    earlier.coordinator.publish(revisions[5], "q", 2)  # so that revision 2 is no head
    service = make_service(deadline_s=20.0)
    installer = service.ranks.installers["tp1"]
    installer.on_load = lambda order: refuse(order) if order.revision_id == revisions[2] else None
    recovered = service.coordinator.recover()
    assert recovered.quarantined[revisions[2]][0] == "tp1"
    assert revisions[2] not in service.ranks.held()["tp0"].values()
    with pytest.raises(QuarantinedRevisionError, match="tp1"):
        resolve_model(service.journal.state, "p@3")


def test_a_rank_that_is_gone_at_start_is_held_against_no_revision(
    earlier: Service, make_service: MakeService, revisions: Revisions
) -> None:
    """It dies between the heads and an older revision."""
    earlier.coordinator.publish(revisions[5], "q", 2)
    service = make_service(deadline_s=1.0)
    gone = [False]

    def die(message: dict[str, Any], deliver: Any) -> Any:
        gone[0] = gone[0] or message.get("revision_id") == revisions[2]
        return None if gone[0] else deliver(message)

    service.ranks.faults["tp1"] = die
    with pytest.raises(StoreError, match="tp1"):
        service.coordinator.recover()
    assert service.journal.state.quarantine == {}
    assert len(make_service(deadline_s=20.0).coordinator.recover().prepared) == 3


def test_a_rank_that_cannot_prepare_a_head_refuses_to_start_naming_it(
    earlier: Service, make_service: MakeService, revisions: Revisions
) -> None:
    service = make_service(deadline_s=20.0)
    installer = service.ranks.installers["tp2"]
    installer.on_load = lambda order: refuse(order) if order.revision_id == revisions[3] else None
    with pytest.raises(StoreError, match="tp2") as caught:
        service.coordinator.recover()
    assert caught.value.fields["policies"] == ["p"]


def test_a_smaller_keep_retires_the_surplus_before_preparing(
    earlier: Service, make_service: MakeService, revisions: Revisions
) -> None:
    service = make_service(keep=1, deadline_s=20.0)
    assert set(service.coordinator.recover().prepared) == {revisions[2], revisions[3]}  # the heads of q and of p
    assert service.journal.state.status("p", revisions[2]) is Status.RETIRED


def test_a_registry_smaller_than_what_is_committed_refuses_to_start(
    earlier: Service, make_service: MakeService
) -> None:
    with pytest.raises(ConfigurationError, match="--max-cpu-loras") as caught:
        make_service(capacity=1).coordinator.recover()
    assert caught.value.fields["flag"] == "--max-cpu-loras"


def test_a_quarantined_head_stays_quarantined_and_the_server_starts(
    earlier: Service, make_service: MakeService, revisions: Revisions
) -> None:
    earlier.coordinator.quarantine(revisions[3], "tp0", "read-back differs")
    service = make_service(deadline_s=20.0)
    assert revisions[3] not in service.coordinator.recover().prepared
    with pytest.raises(QuarantinedRevisionError):
        resolve_model(service.journal.state, "p")
    service.ranks.installers["tp1"].on_load = refuse
    with pytest.raises(PublicationError):
        service.coordinator.publish(revisions[3], "p", 4)
    assert service.journal.state.status("p", revisions[3]) is Status.QUARANTINED
