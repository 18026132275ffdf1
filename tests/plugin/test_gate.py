"""The engine core's gate: who enters, who is told to come again, and when an adapter may leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.errors import EpochlessError, InvalidRequestError, RetiredRevisionError
from epochless_vllm.plugin import core as seam
from epochless_vllm.plugin.activation import DISTRUSTED, VERIFIED
from epochless_vllm.plugin.core import GATE, RevisionGate, epochless_address, epochless_call, epochless_holders
from epochless_vllm.protocol.publication import Holding, State

A, B = ("sha256:" + letter * 64 for letter in "ab")


def lora(lora_int_id: int, revision: str = A, policy: str = "policy") -> Any:
    return SimpleNamespace(lora_int_id=lora_int_id, lora_name=f"{policy}@{revision}")


class Core:
    """An engine core of two ranks, whose journal and scheduler hold what a test says."""

    def __init__(self, held: dict[int, str]) -> None:
        self.state = State(adapters={revision: lora_int_id for lora_int_id, revision in held.items()})
        self.read = 0
        self.sent: list[str] = []
        self.scheduler: Any = SimpleNamespace(requests={})
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
        setattr(self, GATE, RevisionGate(self.committed))
        setattr(self, VERIFIED, {1, 2})
        setattr(self, DISTRUSTED, set())

    def committed(self) -> State:
        self.read += 1
        return self.state

    @property
    def gate(self) -> RevisionGate:
        gate: RevisionGate = getattr(self, GATE)
        return gate

    def schedule(self, *adapters: int) -> None:
        requests = [SimpleNamespace(lora_request=lora(i) if i else None) for i in adapters]
        self.scheduler.requests = dict(enumerate(requests))

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        self.sent.append(args[0]["kind"] if args else method)
        return [{"ok": True, "rank": rank} for rank in range(2)]


def retire(core: Core, lora_int_id: int = 1) -> list[dict[str, Any]]:
    return epochless_call(core, {"kind": "retire", "lora_int_id": lora_int_id})


def test_what_the_journal_shows_as_committed_is_served_under_its_id_alone() -> None:
    core = Core({1: A})
    core.gate.check(lora(1))
    for asked in (lora(2, B), lora(2, A), lora(1, B)):
        with pytest.raises(InvalidRequestError, match="not published here"):
            core.gate.check(asked)


def test_a_publication_is_served_from_its_commit_on_and_looked_up_once() -> None:
    core = Core({})
    with pytest.raises(InvalidRequestError):
        core.gate.check(lora(1))
    core.state = State(adapters={A: 1})
    read = core.read
    for attempt in (core.gate.check, core.gate.enter, core.gate.check):
        attempt(lora(1))
    assert core.read == read + 1


def test_a_revision_in_quarantine_is_not_let_in() -> None:
    core = Core({})
    core.state = State(adapters={A: 1, B: 2}, quarantine={A: ("rank0", "stale")})
    core.gate.check(lora(2, B))
    with pytest.raises(InvalidRequestError, match="not published here"):
        core.gate.check(lora(1))


def test_a_request_of_another_revision_under_a_served_id_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        Core({1: A}).gate.check(lora(1, B))
    with pytest.raises(InvalidRequestError, match="lora_name"):
        Core({1: A}).gate.check(SimpleNamespace(lora_int_id=1, lora_name=A))


def test_nothing_is_removed_while_a_request_is_scheduled_or_on_its_way() -> None:
    core = Core({1: A})
    core.schedule(1, 0, 1)
    core.gate.enter(lora(1))
    assert epochless_holders(core, [1]) == [3]
    replies = retire(core)
    assert [(reply["ok"], reply["code"], reply["holders"]) for reply in replies] == [(False, "in_use", 3)] * 2
    assert core.sent == []
    core.gate.check(lora(1))  # it still serves
    core.schedule(0)
    assert retire(core)[0]["holders"] == 1
    core.gate.leave(1)
    core.schedule(0, 2)  # another adapter's request holds nothing of this one
    assert epochless_holders(core, [1]) == [0]
    assert all(reply["ok"] for reply in retire(core))
    assert core.sent == ["retire"]


def test_after_its_removal_a_late_request_is_told_that_it_came_too_late() -> None:
    core = Core({1: A, 2: B})
    retire(core)
    for attempt in (core.gate.check, core.gate.enter):
        with pytest.raises(RetiredRevisionError):
            attempt(lora(1))
    assert epochless_holders(core, [1]) == [0]
    core.gate.check(lora(2, B))


def test_the_gate_closes_before_the_ranks_are_told() -> None:
    core = Core({1: A})
    told = core.collective_rpc

    def late_arrival(method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        with pytest.raises(RetiredRevisionError):
            core.gate.enter(lora(1))
        return told(method, args)

    core.collective_rpc = late_arrival  # type: ignore[method-assign]
    assert retire(core)[0]["ok"]


def test_what_left_is_read_back_again_before_it_serves_again() -> None:
    core = Core({1: A, 2: B})
    getattr(core, DISTRUSTED).add(1)
    retire(core)
    assert getattr(core, VERIFIED) == {2}
    assert getattr(core, DISTRUSTED) == set()


def test_what_was_removed_stays_out_while_the_journal_still_shows_it() -> None:
    core = Core({1: A})
    assert retire(core)[0]["ok"]  # no request had named it before
    with pytest.raises(RetiredRevisionError):
        core.gate.check(lora(1))


def test_what_was_removed_and_published_again_before_that_was_recorded_is_served() -> None:
    core = Core({1: A})
    retire(core)  # and another engine, or the disk, failed
    core.state = State(adapters={A: 1}, holdings={("other", A): Holding(1, 1)})
    core.gate.check(lora(1))
    core.gate.enter(lora(1, policy="other"))
    core.gate.leave(1)
    assert retire(core)[0]["ok"]


def test_the_ranks_of_an_engine_say_where_they_listen() -> None:
    core = Core({})
    assert [reply["rank"] for reply in epochless_address(core)] == [0, 1]
    assert core.sent == ["epochless_address"]


def test_an_engine_that_has_no_scheduler_yet_holds_no_request() -> None:
    core = Core({1: A})
    core.scheduler = None
    assert epochless_holders(core, [1]) == [0]


class Engine:
    """What the seam wraps of an engine core."""

    def __init__(self, core: Core, config: dict[str, Any]) -> None:
        setattr(self, GATE, core.gate)
        self.vllm_config = SimpleNamespace(additional_config=config)
        self.fail = False

    def preprocess_add_request(self, request: Any) -> Any:
        if self.fail:
            raise KeyboardInterrupt
        return request

    def add_request(self, request: Any, wave: int = 0) -> None:
        if self.fail:
            raise KeyboardInterrupt

    def add_lora(self, lora_request: int) -> str:
        return "added"

    remove_lora = pin_lora = add_lora


def test_a_request_counts_from_the_gate_to_the_scheduler_and_no_longer_also_when_it_fails() -> None:
    core, wrapped = Core({1: A}), type("Wrapped", (Engine,), {})
    seam._wrap_requests(wrapped)
    engine, asked = wrapped(core, {}), SimpleNamespace(lora_request=lora(1))
    engine.preprocess_add_request(asked)
    assert core.gate.entering(1) == 1
    engine.add_request(asked)
    assert core.gate.entering(1) == 0
    engine.fail = True
    with pytest.raises(KeyboardInterrupt):
        engine.preprocess_add_request(asked)
    assert core.gate.entering(1) == 0
    core.gate.enter(lora(1))
    with pytest.raises(KeyboardInterrupt):
        engine.add_request(asked)
    assert core.gate.entering(1) == 0
    engine.fail = False
    engine.add_request(engine.preprocess_add_request(SimpleNamespace(lora_request=None)))


def test_adapters_enter_and_leave_by_publication_only() -> None:
    wrapped = type("Wrapped", (Engine,), {})
    seam._refuse_direct_adapters(wrapped)
    for name in ("add_lora", "remove_lora", "pin_lora"):
        with pytest.raises(EpochlessError, match=name):
            getattr(wrapped(Core({}), {"epochless": {"store": "/tmp"}}), name)(1)
        assert getattr(wrapped(Core({}), {}), name)(1) == "added"
