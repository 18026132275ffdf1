"""The rules of publication against an oracle that rescans its whole log, and the promises they are for."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochless_vllm.errors import IllegalTransitionError
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.publication import (
    MAX_LORA_INT_ID,
    Aborted,
    Committed,
    EpochBegan,
    Event,
    Intended,
    Intent,
    Quarantined,
    RetireBegan,
    Retired,
    State,
    Status,
    apply,
)
from tests.protocol.event_log import EventLog

A, B, C = (RevisionId("sha256:" + letter * 64) for letter in "abc")
POLICIES = ("p", "q")
STEPS = (0, 1, 2)


def fold(*events: Event, state: State | None = None) -> State:
    for event in events:
        state = apply(state or State(), event)
    return state or State()


def publish(state: State, policy: str, step: int, revision_id: RevisionId) -> State:
    engine_id = state.adapters.get(revision_id, state.last_lora_int_id + 1)
    transaction = state.last_transaction_id + 1
    intent = Intent(transaction, policy, step, revision_id, engine_id)
    return fold(Intended(intent), Committed(transaction, state.sequence + 1), state=state)


def retire(state: State, policy: str, revision_id: RevisionId) -> State:
    return fold(RetireBegan(policy, revision_id), Retired(policy, revision_id), state=state)


def answers(state: State) -> dict[str, object]:
    """Everything a state can be asked, as plain values."""
    pairs = list(itertools.product(POLICIES, (A, B, C)))
    return {
        "epoch": state.epoch,
        "sequence": state.sequence,
        "last": (state.last_transaction_id, state.last_lora_int_id),
        "intents": sorted(state.intents),
        "statuses": {pair: state.status(*pair) for pair in pairs},
        "bindings": dict(state.bindings),
        "heads": {policy: state.head(policy) for policy in POLICIES},
        "at_step": {(p, s): state.publication_at(p, s) for p in POLICIES for s in STEPS},
        "held": [state.is_held(publication) for publication in state.publications.values()],
        "highest": {policy: state.publications.highest_step(policy) for policy in POLICIES},
        "prefixes": {p: state.publications.revisions_with_prefix(p, "sha256:") for p in POLICIES},
        "adapters": dict(state.adapters),
        "quarantine": dict(state.quarantine),
        "policies": state.policies(),
    }


def expected_answers(log: EventLog) -> dict[str, object]:
    pairs = list(itertools.product(POLICIES, (A, B, C)))
    commits = log.commits()
    statuses = {pair: log.status(*pair) for pair in pairs}
    intents = [e.intent for e in log.events if isinstance(e, Intended)]
    steps = {p: [c.intent.step for c in commits if c.intent.policy == p] for p in POLICIES}
    return {
        "epoch": sum(isinstance(e, EpochBegan) for e in log.events),
        "sequence": len(commits),
        "last": (len(intents), max((i.lora_int_id for i in intents), default=0)),
        "intents": sorted(i.transaction_id for i in log.undecided()),
        "statuses": statuses,
        "bindings": {pair: status for pair, status in statuses.items() if status},
        "heads": {policy: log.head(policy) for policy in POLICIES},
        "at_step": {(p, s): log.at_step(p, s) for p in POLICIES for s in STEPS},
        "held": [c.phase != "retired" for c in commits],
        "highest": {policy: max(steps[policy], default=None) for policy in POLICIES},
        "prefixes": {p: sorted({c.intent.revision_id for c in commits if c.intent.policy == p}) for p in POLICIES},
        "adapters": {c.intent.revision_id: c.intent.lora_int_id for c in log.held()},
        "quarantine": log.quarantined(),
        "policies": sorted({c.intent.policy for c in log.held()}),
    }


def in_sequences(found: dict[str, object]) -> dict[str, object]:
    """Publications replaced by their sequences, statuses by their words."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return getattr(value, "sequence", getattr(value, "value", value))

    return {key: plain(value) for key, value in found.items()}


@st.composite
def likely_events(draw: st.DrawFn, state: State) -> Event:
    """An event that is often legal in a state, and often just not."""
    policy, step = draw(st.sampled_from(POLICIES)), draw(st.sampled_from(STEPS))
    revision_id = draw(st.sampled_from((A, B, C)))
    slip = draw(st.sampled_from((0, 0, 0, 0, 0, 1, -1)))
    pending = {i.revision_id: i.lora_int_id for i in state.intents.values()}
    engine_id = state.adapters.get(revision_id, pending.get(revision_id, state.last_lora_int_id + 1))
    transaction = draw(st.sampled_from([*state.intents, state.last_transaction_id]))
    events: list[Event] = [
        EpochBegan(state.epoch + 1 + slip),
        Intended(Intent(state.last_transaction_id + 1 + slip, policy, step, revision_id, engine_id)),
        Intended(Intent(state.last_transaction_id + 1, policy, step, revision_id, engine_id + slip)),
        Committed(transaction, state.sequence + 1),
        Committed(transaction, state.sequence + 1 + slip),
        Aborted(transaction, "why"),
        RetireBegan(policy, revision_id),
        Retired(policy, revision_id),
        Quarantined(revision_id, "rank", "why"),
    ]
    # Retiring takes two events on one binding: drawn blindly, it would hardly ever get to the second.
    for key, holding in state.holdings.items():
        events.append(Retired(*key) if holding.draining else RetireBegan(*key))
    chosen: Event = draw(st.sampled_from(events))
    return chosen


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_every_event_is_allowed_and_applied_as_the_rescanning_oracle_says(data: st.DataObject) -> None:
    state, log, past = State(), EventLog(), []
    for _ in range(data.draw(st.integers(1, 30))):
        event = data.draw(likely_events(state))
        if log.allows(event):
            past.append((state, answers(state)))
            state, log = apply(state, event), EventLog([*log.events, event])
            assert in_sequences(answers(state)) == expected_answers(log)
        else:
            before = answers(state)
            with pytest.raises(IllegalTransitionError):
                apply(state, event)
            assert answers(state) == before
    for earlier, known in past:
        assert answers(earlier) == known
    assert fold(*log.events) == state


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_two_futures_of_one_state_do_not_touch_each_other(data: st.DataObject) -> None:
    trunk = State()
    for step, revision_id in enumerate(data.draw(st.lists(st.sampled_from((A, B, C)), max_size=3))):
        trunk = publish(trunk, "p", step, revision_id)
    first, second = trunk, trunk
    lefts, rights = data.draw(st.lists(st.sampled_from((A, B, C)), max_size=3)), []
    for step, left in enumerate(lefts):
        first = publish(first, "q", step, left)
        rights.append(data.draw(st.sampled_from((A, B, C))))
        second = publish(second, "q", step, rights[-1])
    for state, revision_ids in ((first, lefts), (second, rights), (trunk, [])):
        alone = State()
        for publication in trunk.publications.values():
            alone = publish(alone, publication.policy, publication.step, publication.revision_id)
        for step, revision_id in enumerate(revision_ids):
            alone = publish(alone, "q", step, revision_id)
        assert answers(state) == answers(alone)


def test_without_its_head_a_policy_falls_back_to_the_latest_that_is_left() -> None:
    state = publish(publish(publish(publish(State(), "p", 1, A), "p", 2, B), "q", 1, C), "p", 3, A)
    for revision_id, expected in ((A, 2), (B, None)):
        state = retire(state, "p", revision_id)
        head = state.head("p")
        assert (head.step if head else None) == expected
    assert state.policies() == ["q"]


def test_states_and_their_maps_cannot_be_changed() -> None:
    state = publish(State(), "p", 1, A)
    with pytest.raises(FrozenInstanceError):
        state.epoch = 3  # type: ignore[misc]
    for mapping in (state.adapters, state.holdings, state.heads, state.publications, state.bindings):
        with pytest.raises(TypeError):
            mapping["x"] = 1  # type: ignore[index]


def test_head_is_the_latest_publication_and_old_content_rolls_back() -> None:
    state = publish(publish(publish(State(), "p", 1, A), "p", 2, B), "p", 3, A)
    head = state.head("p")
    assert head is not None
    assert (head.step, head.revision_id, head.lora_int_id, head.sequence) == (3, A, 1, 3)
    assert state.adapters == {A: 1, B: 2}


def test_engine_ids_are_shared_by_policies_and_never_reused() -> None:
    state = publish(publish(State(), "p", 1, A), "q", 1, A)
    assert state.adapters == {A: 1}
    state = retire(state, "p", A)
    assert state.adapters == {A: 1}
    state = retire(state, "q", A)
    assert state.adapters == {}
    assert publish(state, "p", 1, A).adapters == {A: 2}


def test_an_aborted_engine_id_is_not_given_to_another_revision() -> None:
    state = fold(Intended(Intent(1, "p", 1, A, 1)), Aborted(1, "rank lied"))
    assert publish(state, "p", 1, B).adapters == {B: 2}


def test_engine_ids_end_before_the_engine_would_wrap_them() -> None:
    state = State(last_lora_int_id=MAX_LORA_INT_ID)
    with pytest.raises(IllegalTransitionError, match="new store"):
        fold(Intended(Intent(1, "p", 1, A, MAX_LORA_INT_ID + 1)), state=state)
    last = State(last_lora_int_id=MAX_LORA_INT_ID - 1)
    assert publish(last, "p", 1, A).adapters == {A: MAX_LORA_INT_ID}


def test_a_draining_binding_cannot_begin_to_retire_again() -> None:
    state = fold(RetireBegan("p", A), state=publish(State(), "p", 1, A))
    with pytest.raises(IllegalTransitionError, match="draining, not live"):
        fold(RetireBegan("p", A), state=state)


def test_a_quarantine_ends_with_the_adapter_it_was_of() -> None:
    state = fold(Quarantined(A, "tp1", "no memory"), state=publish(State(), "p", 1, A))
    assert retire(state, "p", A).quarantine == {}


def test_without_its_head_a_policy_falls_back_to_the_latest_it_holds() -> None:
    state = publish(publish(publish(publish(State(), "p", 1, A), "p", 2, B), "p", 3, C), "q", 1, C)
    head = retire(state, "p", C).head("p")
    assert head is not None
    assert head.revision_id == B


def test_the_latest_publication_of_a_step_or_a_revision_is_the_one_that_is_found() -> None:
    state = publish(retire(publish(State(), "p", 1, A), "p", A), "p", 1, A)
    for found in (state.publication_at("p", 1), state.publications.of_revision("p", A)):
        assert found is not None
        assert found.sequence == 2


def test_a_policy_is_not_known_before_its_first_publication() -> None:
    before = publish(State(), "p", 1, A)
    after = publish(before, "q", 1, A)
    assert (before.publications.knows("q"), after.publications.knows("q")) == (False, True)


def test_a_prefix_finds_the_revisions_that_open_with_it_and_not_those_behind_them() -> None:
    state = publish(publish(publish(State(), "p", 1, A), "p", 2, B), "p", 3, C)
    assert state.publications.revisions_with_prefix("p", "sha256:bb") == [B]


def test_a_retired_publication_stays_retired_when_its_content_comes_back() -> None:
    state = retire(publish(publish(State(), "q", 1, A), "p", 1, A), "p", A)
    again = publish(state, "p", 2, A)  # under the engine id that policy q kept alive
    assert again.adapters == {A: 1}
    assert not again.is_held(again.publications[2])
    assert again.is_held(again.publications[3])


def test_publishing_again_lifts_the_quarantine_of_every_policy() -> None:
    state = fold(Quarantined(A, "tp1", "no memory"), state=publish(publish(State(), "p", 1, A), "q", 1, A))
    assert set(state.bindings.values()) == {Status.QUARANTINED}
    assert set(publish(state, "p", 2, A).bindings.values()) == {Status.LIVE}


def test_an_engine_id_is_not_given_up_while_a_publication_counts_on_it() -> None:
    state = fold(Intended(Intent(2, "p", 2, A, 1)), RetireBegan("p", A), state=publish(State(), "p", 1, A))
    with pytest.raises(IllegalTransitionError, match="prepared again"):
        fold(Retired("p", A), state=state)


def test_a_state_is_not_copied_for_the_next_event() -> None:
    state = State()
    for step in range(5_000):
        state = publish(state, "p", step, RevisionId(f"sha256:{step:064x}"))
        if step:
            state = retire(state, "p", RevisionId(f"sha256:{step - 1:064x}"))
    tracemalloc.start()
    try:
        retire(publish(state, "p", 5_000, A), "p", RevisionId(f"sha256:{4_999:064x}"))
        (_, peak) = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000  # bytes; one copy of 5,000 publications' sequences alone is larger
