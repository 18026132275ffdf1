"""A rank's state machine: every message in every order, repeated, stale, broken; never an exception."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochless_vllm.errors import DigestMismatchError, RefusedAdapterError
from epochless_vllm.publication.participant import MAX_REASON, Participant, PrepareOrder
from tests.protocol.test_publication import A, B


class Receipt:
    def __init__(self, order: PrepareOrder) -> None:
        self.order = order
        self.receipt = {"rank": "tp0", "source_digest": order.revision_id, "registered_digest": "r"}


class Recorder:
    """An installer that notes what happens to it, and loads only when told to."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.done: list[tuple[str, int]] = []
        self.registered: dict[int, str] = {}
        self.load_error: Exception | None = None
        self.register_error: Exception | None = None

    def load(self, order: PrepareOrder) -> Receipt:
        self.gate.wait()
        self.done.append(("load", order.lora_int_id))
        if self.load_error is not None:
            raise self.load_error
        return Receipt(order)

    def register(self, loaded: Any) -> None:
        if self.register_error is not None:
            raise self.register_error
        assert loaded.order.lora_int_id not in self.registered
        self.done.append(("register", loaded.order.lora_int_id))
        self.registered[loaded.order.lora_int_id] = loaded.order.revision_id

    def remove(self, lora_int_id: int) -> dict[str, Any]:
        self.done.append(("remove", lora_int_id))
        del self.registered[lora_int_id]
        return {"rank": "tp0"}

    def held(self) -> dict[int, str]:
        return dict(self.registered)


@pytest.fixture
def installer() -> Recorder:
    return Recorder()


@pytest.fixture
def participant(installer: Recorder) -> Participant:
    return Participant("tp0", installer)


def message(kind: str, transaction: int = 1, engine_id: int = 1, revision_id: str = A, **fields: Any) -> dict[str, Any]:
    base = {"kind": kind, "epoch": 1, "transaction_id": transaction, "revision_id": revision_id, "serial": 7}
    return {**base, "lora_int_id": engine_id, **fields}


def poll(participant: Participant, *arguments: Any, **fields: Any) -> dict[str, Any]:
    """Poll until the loading thread has said its word."""
    while True:
        reply = participant.handle(message("prepare_poll", *arguments, **fields))
        if reply.get("done") is not False:
            return reply


def prepare(participant: Participant, *arguments: Any, **fields: Any) -> dict[str, Any]:
    begun = participant.handle(message("prepare_begin", *arguments, **fields))
    return poll(participant, *arguments, **fields) if begun["ok"] else begun


def test_prepare_loads_beside_the_steps_and_registers_within_a_poll(
    participant: Participant, installer: Recorder
) -> None:
    installer.gate.clear()
    assert participant.handle(message("prepare_begin")) == {
        "ok": True,
        "rank": "tp0",
        "kind": "prepare_begin",
        "serial": 7,
    }
    assert participant.handle(message("prepare_poll"))["done"] is False
    assert installer.done == []
    installer.gate.set()
    reply = poll(participant)
    assert (reply["done"], reply["receipt"]["source_digest"]) == (True, A)
    assert installer.done == [("load", 1), ("register", 1)]
    assert participant.handle(message("commit"))["ok"]


def test_a_poll_that_waits_is_answered_when_the_load_ends(participant: Participant, installer: Recorder) -> None:
    installer.gate.clear()
    participant.handle(message("prepare_begin"))
    replies: list[dict[str, Any]] = []
    waiting = threading.Thread(
        target=lambda: replies.append(participant.handle(message("prepare_poll", wait_ms=600_000)))
    )
    waiting.start()
    assert participant.handle(message("status"))["loading"] == [1]  # who waits keeps nobody else waiting
    installer.gate.set()
    waiting.join(60)
    assert [reply["done"] for reply in replies] == [True]
    assert participant.handle(message("prepare_poll", wait_ms=600_000))["done"] is True


@pytest.mark.parametrize("error", [RefusedAdapterError("no"), MemoryError()])
def test_a_poll_that_waits_is_answered_when_the_load_fails(
    participant: Participant, installer: Recorder, error: Exception
) -> None:
    installer.load_error = error
    participant.handle(message("prepare_begin"))
    assert participant.handle(message("prepare_poll", wait_ms=600_000))["ok"] is False


def test_a_poll_waits_no_longer_than_it_says(participant: Participant, installer: Recorder) -> None:
    installer.gate.clear()
    participant.handle(message("prepare_begin"))
    assert participant.handle(message("prepare_poll", wait_ms=1))["done"] is False
    assert participant.handle(message("prepare_poll", 9, 9, wait_ms=600_000))["code"] == "unknown_transaction"
    installer.gate.set()


def test_messages_from_several_threads_are_handled_one_at_a_time(participant: Participant, installer: Recorder) -> None:
    inside, most = [0], [0]
    held = installer.held

    def slow_held() -> dict[int, str]:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.002)
        inside[0] -= 1
        return held()

    installer.held = slow_held  # type: ignore[method-assign]
    threads = [threading.Thread(target=participant.handle, args=(message("status"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1]


def test_every_message_may_come_twice(participant: Participant, installer: Recorder) -> None:
    for kind in ("prepare_begin", "prepare_begin"):
        assert participant.handle(message(kind))["ok"]
    assert poll(participant) == poll(participant)
    for kind in ("commit", "commit"):
        assert participant.handle(message(kind))["ok"]
    assert prepare(participant, 2)["done"] is True  # the same revision, for another publication
    assert participant.handle(message("commit", 2))["ok"]
    for kind in ("retire", "retire"):
        assert participant.handle(message(kind, 0))["ok"]
    assert installer.done == [("load", 1), ("register", 1), ("remove", 1)]


@pytest.mark.parametrize("stage", ["loading", "loaded", "registered"])
def test_abort_leaves_nothing_at_any_stage(participant: Participant, installer: Recorder, stage: str) -> None:
    if stage == "loading":
        installer.gate.clear()
    participant.handle(message("prepare_begin"))
    if stage == "registered":
        poll(participant)
    for _ in range(2):
        assert participant.handle(message("abort"))["ok"]
    installer.gate.set()
    assert installer.registered == {}
    assert participant.handle(message("prepare_poll"))["code"] == "unknown_transaction"
    assert participant.handle(message("commit"))["code"] == "not_prepared"
    assert participant.handle(message("prepare_begin"))["code"] == "decided"


def test_abort_of_a_second_publication_keeps_the_committed_adapter(
    participant: Participant, installer: Recorder
) -> None:
    prepare(participant)
    participant.handle(message("commit"))
    assert prepare(participant, 2)["done"] is True
    participant.handle(message("abort", 2))
    assert installer.registered == {1: A}


def test_two_undecided_publications_of_a_revision_share_it_until_both_are_aborted(
    participant: Participant, installer: Recorder
) -> None:
    prepare(participant, 1)
    prepare(participant, 2)
    participant.handle(message("abort", 1))
    assert installer.registered == {1: A}
    participant.handle(message("abort", 2))
    assert installer.registered == {}


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (RefusedAdapterError("tensor x is consumed by no module"), "refused", "tensor x is consumed by no module"),
        (
            DigestMismatchError("changed", expected="a", actual="b", subject="c"),
            "digest_mismatch",
            "changed",
        ),
        (RuntimeError("out of memory"), "failed", "RuntimeError: out of memory"),
        (ValueError("x" * 10_000), "failed", ("ValueError: " + "x" * 10_000)[:MAX_REASON]),
    ],
)
@pytest.mark.parametrize("where", ["load", "register"])
def test_a_failure_is_a_reply_with_its_code_and_reason(
    participant: Participant, installer: Recorder, where: str, error: Exception, code: str, reason: str
) -> None:
    setattr(installer, f"{where}_error", error)
    for _ in range(2):
        reply = prepare(participant)
        assert (reply["ok"], reply["code"], reply["reason"], reply["rank"]) == (False, code, reason, "tp0")
    assert installer.registered == {}
    assert participant.handle(message("commit"))["code"] == "not_prepared"
    assert participant.handle(message("abort"))["ok"]


def test_a_failure_whose_abort_was_lost_does_not_spoil_the_next_attempt(
    participant: Participant, installer: Recorder
) -> None:
    installer.load_error = RuntimeError("first")
    prepare(participant, 1)
    installer.load_error = None
    assert prepare(participant, 2)["done"] is True


def test_a_failure_stands_for_as_long_as_its_transaction(participant: Participant, installer: Recorder) -> None:
    installer.load_error = RuntimeError("first")
    prepare(participant)
    installer.load_error = None
    assert prepare(participant)["ok"] is False
    assert installer.done == [("load", 1)]


def test_a_poll_is_answered_only_to_who_began(participant: Participant, installer: Recorder) -> None:
    prepare(participant, 1)
    assert participant.handle(message("prepare_poll", 2))["code"] == "unknown_transaction"
    participant.handle(message("commit", 1))
    assert participant.handle(message("prepare_poll", 2))["receipt"]["source_digest"] == A  # it is here
    assert participant.handle(message("prepare_poll", 2, 1, B))["code"] == "unknown_transaction"


def test_decisions_of_an_earlier_epoch_do_not_bind_a_later_one(participant: Participant) -> None:
    participant.handle(message("abort", 5))
    assert prepare(participant, 3, epoch=2)["done"] is True


def test_a_lower_epoch_is_refused_and_changes_nothing(participant: Participant, installer: Recorder) -> None:
    prepare(participant, epoch=3)
    for kind in ("prepare_begin", "prepare_poll", "commit", "abort", "retire"):
        assert participant.handle(message(kind, epoch=2))["code"] == "stale_epoch"
    assert installer.registered == {1: A}
    assert participant.handle(message("commit", epoch=3))["ok"]


def test_a_higher_epoch_drops_what_is_undecided_and_keeps_what_is_committed(
    participant: Participant, installer: Recorder
) -> None:
    prepare(participant, 1, 1, A)
    participant.handle(message("commit", 1, 1, A))
    prepare(participant, 2, 2, B)
    assert installer.registered == {1: A, 2: B}
    assert prepare(participant, 0, 1, A, epoch=2)["done"] is True  # recovery asks for what is committed
    assert installer.registered == {1: A}
    assert participant.handle(message("commit", 2, 2, B, epoch=2))["code"] == "not_prepared"


def test_a_transaction_cannot_begin_after_it_was_decided(participant: Participant, installer: Recorder) -> None:
    participant.handle(message("abort", 5))
    assert participant.handle(message("prepare_begin", 5))["code"] == "decided"
    assert prepare(participant, 6)["done"] is True
    participant.handle(message("commit", 6))
    assert participant.handle(message("prepare_begin", 6, 2, B))["code"] == "decided"


def test_an_engine_id_belongs_to_one_revision(participant: Participant, installer: Recorder) -> None:
    prepare(participant, 1, 1, A)
    assert participant.handle(message("prepare_begin", 2, 1, B))["code"] == "conflict"
    participant.handle(message("commit", 1, 1, A))
    for kind in ("prepare_begin", "retire"):
        assert participant.handle(message(kind, 2, 1, B))["code"] == "conflict"
    assert installer.registered == {1: A}


def test_a_reload_replaces_the_adapter_within_one_poll(participant: Participant, installer: Recorder) -> None:
    prepare(participant)
    participant.handle(message("commit"))
    assert prepare(participant, 2, reload=True)["done"] is True
    participant.handle(message("commit", 2))
    assert installer.done == [("load", 1), ("register", 1), ("load", 1), ("remove", 1), ("register", 1)]


def test_a_reload_that_fails_to_load_leaves_the_adapter_alone(participant: Participant, installer: Recorder) -> None:
    prepare(participant)
    participant.handle(message("commit"))
    installer.load_error = RuntimeError("disk")
    assert prepare(participant, 2, reload=True)["ok"] is False
    participant.handle(message("abort", 2))
    assert installer.registered == {1: A}


def test_retiring_what_is_absent_succeeds_and_says_so(participant: Participant) -> None:
    assert participant.handle(message("retire", 0))["receipt"] == {"absent": True}


def test_what_was_retired_is_loaded_again_when_it_is_published_again(
    participant: Participant, installer: Recorder
) -> None:
    for transaction in (1, 2):
        assert prepare(participant, transaction)["done"] is True
        participant.handle(message("commit", transaction))
        assert installer.registered == {1: A}
        participant.handle(message("retire", 0))
    assert installer.done.count(("load", 1)) == 2


def test_a_removal_that_fails_is_reported_and_may_be_tried_again(
    participant: Participant, installer: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(participant)
    participant.handle(message("commit"))
    with monkeypatch.context() as patch:
        patch.setattr(installer, "remove", lambda engine_id: 1 / 0)
        assert participant.handle(message("retire", 0))["ok"] is False
    reply = participant.handle(message("retire", 0))
    assert reply["receipt"] == {"rank": "tp0"}
    assert installer.registered == {}


def test_status_tells_what_is_held_and_what_is_loading(participant: Participant, installer: Recorder) -> None:
    prepare(participant)
    participant.handle(message("commit"))
    prepare(participant, 2, 2, B)
    installer.gate.clear()
    participant.handle(message("prepare_begin", 3, 3, B))
    reply = participant.handle({"kind": "status", "serial": 1})
    assert [(held["lora_int_id"], held["committed"]) for held in reply["held"]] == [(1, True), (2, False)]
    assert (reply["epoch"], reply["loading"]) == (1, [3])
    installer.gate.set()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["kind", "epoch", "transaction_id", "revision_id", "lora_int_id", "serial", "reload"]), JUNK
    )
    | JUNK,
    st.sampled_from(["prepare_begin", "prepare_poll", "commit", "abort", "retire", "status", "x"]),
)
def test_no_message_raises(content: Any, kind: str) -> None:
    participant = Participant("tp0", Recorder())
    for candidate in (content, {**content, "kind": kind} if isinstance(content, dict) else kind):
        reply = participant.handle(candidate)
        assert isinstance(reply["ok"], bool)
        assert reply["rank"] == "tp0"
        json.dumps(reply)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prepare", "prepare_begin", "prepare_poll", "commit", "abort", "retire"]),
            st.integers(1, 3),
            st.sampled_from([(1, A), (2, B)]),
            st.sampled_from([1, 1, 1, 2]),
        ),
        max_size=12,
    )
)
def test_what_is_registered_is_what_was_committed_or_is_undecided(
    script: list[tuple[str, int, tuple[int, str], int]],
) -> None:
    """Against a model of what the coordinator may rely on, not of how the participant works."""
    installer = Recorder()
    participant = Participant("tp0", installer)
    committed: set[int] = set()
    for kind, transaction, (engine_id, revision_id), epoch in script:
        arguments = (transaction, engine_id, revision_id)
        before = set(installer.registered)
        if kind == "prepare":
            reply = prepare(participant, *arguments, epoch=epoch)
        else:
            reply = participant.handle(message(kind, *arguments, epoch=epoch))
        after = set(installer.registered)
        if kind == "commit" and reply["ok"]:
            committed.add(engine_id)
        if kind == "retire" and reply["ok"]:
            committed.discard(engine_id)
            assert engine_id not in after
        assert committed <= after  # what is committed is never lost but by retiring
        if not reply["ok"] and reply.get("code") == "stale_epoch":
            assert after == before
        if after - before:
            assert kind in ("prepare", "prepare_poll")
    # A later server's first message leaves exactly the committed ones.
    participant.handle(message("abort", 9, 9, A, epoch=3))
    assert set(installer.registered) == committed
