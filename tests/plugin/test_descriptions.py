"""Status answers stay bounded, and lose nothing that is served."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from epochless_vllm.errors import AmbiguousRevisionError, UnknownRevisionError
from epochless_vllm.plugin.descriptions import describe_policies, describe_revision
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.publication import (
    Committed,
    EpochBegan,
    Intended,
    Intent,
    Quarantined,
    RetireBegan,
    Retired,
    State,
    apply,
)


def revision(number: int) -> RevisionId:
    return RevisionId(f"sha256:{number:064x}")


def published(state: State, policy: str, step: int, number: int) -> State:
    held = state.adapters.get(revision(number), state.last_lora_int_id + 1)
    transaction = state.last_transaction_id + 1
    state = apply(state, Intended(Intent(transaction, policy, step, revision(number), held)))
    return apply(state, Committed(transaction, state.sequence + 1))


def retired(state: State, policy: str, number: int) -> State:
    return apply(apply(state, RetireBegan(policy, revision(number))), Retired(policy, revision(number)))


@pytest.fixture
def state() -> State:
    """500 steps of ``p``, of which the last three, the tenth and a quarantined twentieth are held; 20 policies gone."""
    state = apply(State(), EpochBegan(1))
    for number in range(20):
        state = retired(published(state, f"run-{number}", 1, 9000), f"run-{number}", 9000)
    for step in range(1, 501):
        state = published(state, "p", step, step)
        if step > 3 and step - 3 not in (10, 20):
            state = retired(state, "p", step - 3)
    return apply(state, Quarantined(revision(20), "engine0/rank1", "its slots read back otherwise"))


def test_everything_held_is_listed_and_of_the_retired_the_newest(state: State) -> None:
    (policy,) = describe_policies(state, "p")["policies"]
    assert [item["step"] for item in policy["revisions"]] == [*range(500, 489, -1), 20, 10]
    statuses = {item["step"]: item["status"] for item in policy["revisions"]}
    assert [step for step, status in statuses.items() if status == "live"] == [500, 499, 498, 10]
    assert statuses[20] == "quarantined"
    assert policy["revisions"][-2]["rank"] == "engine0/rank1"
    assert (policy["head"], policy["more"]) == (revision(500), 500 - 13)


def test_policies_that_hold_nothing_are_counted_beyond_the_newest(state: State) -> None:
    described = describe_policies(state)
    assert [item["policy"] for item in described["policies"]] == ["p", *sorted(f"run-{n}" for n in range(12, 20))]
    assert described["more_policies"] == 12
    assert len(json.dumps(described)) < 12_000


def test_content_published_again_and_again_is_listed_up_to_a_bound(state: State) -> None:
    for step in range(1, 201):
        state = published(state, "q", step, 7777)
    (policy,) = describe_policies(state, "q")["policies"]
    assert [item["step"] for item in policy["revisions"]] == list(range(200, 136, -1))
    assert policy["more"] == 136


def test_a_publication_retired_and_made_again_counts_once_as_live() -> None:
    state = apply(State(), EpochBegan(1))
    state = published(published(state, "p", 1, 1), "p", 2, 2)
    state = published(retired(state, "p", 1), "p", 3, 1)
    (policy,) = describe_policies(state, "p")["policies"]
    assert [(i["step"], i["status"]) for i in policy["revisions"]] == [(3, "live"), (2, "live"), (1, "retired")]
    assert policy["more"] == 0


@pytest.mark.parametrize(
    ("named", "status"),
    [("250", "retired"), (revision(250), "retired"), (revision(500), "live"), ("20", "quarantined")],
)
def test_what_is_only_counted_is_found_by_step_and_digest(state: State, named: str, status: str) -> None:
    described = describe_revision(state, "p", named)
    assert described["status"] == status
    assert named in (described["revision_id"], str(described["step"]))


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda state: describe_policies(state, "nobody"), UnknownRevisionError),
        (lambda state: describe_revision(state, "p", "501"), UnknownRevisionError),
        (lambda state: describe_revision(state, "nobody", "1"), UnknownRevisionError),
        (lambda state: describe_revision(state, "p", "sha256:" + "f" * 12), UnknownRevisionError),
        (lambda state: describe_revision(state, "p", "sha256:" + "0" * 12), AmbiguousRevisionError),
    ],
)
def test_unknown_and_ambiguous_names_are_refused(
    state: State, ask: Callable[[State], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ask(state)
