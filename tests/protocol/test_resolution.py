"""Which revision a model string means: every form, every order of precedence, every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from epochless_vllm.errors import (
    AmbiguousRevisionError,
    EpochlessError,
    InvalidRequestError,
    QuarantinedRevisionError,
    RetiredRevisionError,
    UnknownRevisionError,
    WeightVersionNotReadyError,
)
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.publication import STORE_RANK, Quarantined, RetireBegan, State
from epochless_vllm.protocol.resolution import (
    VersionConstraint,
    find_pinned,
    parse_constraint,
    resolve_model,
    unknown_model,
)
from tests.protocol.test_publication import fold, publish, retire

R1, R2, R3 = (RevisionId("sha256:" + head * 12 + tail * 52) for head, tail in (("a", "1"), ("a", "2"), ("b", "3")))


@pytest.fixture
def state() -> State:
    """Policy p: R1 at step 10, R2 at 20, R3 at 30 (the head). Policy p-v20: R1 at step 1."""
    built = State()
    for step, revision_id in ((10, R1), (20, R2), (30, R3)):
        built = publish(built, "p", step, revision_id)
    return publish(built, "p-v20", 1, R1)


def step_of(state: State, model: str, constraint: VersionConstraint | None = None) -> tuple[str, int]:
    found = resolve_model(state, model, constraint)
    assert found is not None
    return found.policy, found.step


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("p", ("p", 30)),
        (f"p@{R1}", ("p", 10)),
        (f"p@{R3[:19]}", ("p", 30)),
        ("p@20", ("p", 20)),
        ("p-v10", ("p", 10)),
        ("p-v20", ("p-v20", 1)),  # an exact policy name comes first
        ("p-v20-v1", ("p-v20", 1)),
    ],
)
def test_each_form_of_model_string_finds_its_revision(state: State, model: str, expected: tuple[str, int]) -> None:
    assert step_of(state, model) == expected


@pytest.mark.parametrize("model", ["x", "x@1", "x-v1", f"x@{R1}", "", "p@", "P", "p@sha256", "p@1@2"])
def test_strings_that_name_no_policy_are_left_to_the_caller(state: State, model: str) -> None:
    assert resolve_model(state, model) is None


@pytest.mark.parametrize("model", ["p@11", "p-v11", f"p@sha256:{'c' * 64}", f"p@sha256:{'c' * 12}"])
def test_unknown_steps_and_digests_of_a_known_policy_are_404(state: State, model: str) -> None:
    with pytest.raises(UnknownRevisionError):
        resolve_model(state, model)


def test_a_prefix_of_two_live_revisions_is_409_with_candidates(state: State) -> None:
    with pytest.raises(AmbiguousRevisionError) as caught:
        resolve_model(state, f"p@{R1[:19]}")
    assert caught.value.fields["candidates"] == [R1, R2]


def test_a_retired_revision_does_not_make_a_live_prefix_ambiguous(state: State) -> None:
    assert step_of(retire(state, "p", R1), f"p@{R1[:19]}") == ("p", 20)


@pytest.mark.parametrize("model", ["p@10", "p-v10", f"p@{R1}", f"p@{R1[:25]}"])
@pytest.mark.parametrize("finished", [False, True])
def test_pins_of_draining_and_retired_revisions_are_410(state: State, model: str, finished: bool) -> None:
    state = retire(state, "p", R1) if finished else fold(RetireBegan("p", R1), state=state)
    with pytest.raises(RetiredRevisionError) as caught:
        resolve_model(state, model)
    assert caught.value.fields["revision_id"] == R1
    assert step_of(state, "p") == ("p", 30)


def test_a_policy_whose_revisions_are_all_retired_is_410_until_published_again(state: State) -> None:
    for revision_id in (R1, R2, R3):
        state = retire(state, "p", revision_id)
    for model in ("p", "p@30"):
        with pytest.raises(RetiredRevisionError):
            resolve_model(state, model)
    state = publish(state, "p", 40, R2)
    assert step_of(state, "p") == ("p", 40)
    assert step_of(state, f"p@{R2}") == ("p", 40)
    with pytest.raises(RetiredRevisionError):
        resolve_model(state, "p@20")  # that publication is over; the content lives on under step 40


def test_a_quarantined_revision_is_503_naming_the_rank_and_others_serve(state: State) -> None:
    state = fold(Quarantined(R3, "engine0.tp1", "read-back differs"), state=state)
    with pytest.raises(QuarantinedRevisionError) as caught:
        resolve_model(state, "p")
    assert (caught.value.status, caught.value.fields["rank"]) == (503, "engine0.tp1")
    assert step_of(state, "p@20") == ("p", 20)


def test_a_revision_whose_bytes_are_gone_is_410_with_the_reason(state: State) -> None:
    state = fold(Quarantined(R1, STORE_RANK, "adapter_model.safetensors: missing"), state=state)
    for model in ("p@10", "p-v20"):
        with pytest.raises(RetiredRevisionError, match="missing") as caught:
            resolve_model(state, model)
        assert caught.value.status == 410


def test_what_cannot_serve_can_still_be_found_to_be_retired(state: State) -> None:
    state = fold(Quarantined(R3, "tp1", "x"), RetireBegan("p", R1), state=state)
    for model, step in (("p@30", 30), (f"p@{R3}", 30), ("p-v10", 10), (f"p@{R1}", 10)):
        found = find_pinned(state, model)
        assert found is not None
        assert found.step == step
    assert find_pinned(state, "p") is find_pinned(state, "x@1") is None
    with pytest.raises(UnknownRevisionError):
        find_pinned(state, "p@11")


@pytest.mark.parametrize(
    ("model", "constraint", "step"),
    [
        ("p", {"min_version": 30}, 30),
        ("p", {"min_version": 1}, 30),
        ("p", {"exact_version": 10}, 10),
        ("p@20", {"exact_version": 20}, 20),
        ("p@20", {"min_version": 20}, 20),
        (f"p@{R1}", {"min_version": 5}, 10),
    ],
)
def test_met_constraints_resolve(state: State, model: str, constraint: dict[str, int], step: int) -> None:
    assert step_of(state, model, parse_constraint(constraint)) == ("p", step)


@pytest.mark.parametrize(
    ("model", "constraint", "retryable", "applied"),
    [
        ("p", {"min_version": 31}, True, 30),
        ("p", {"exact_version": 31}, True, 30),
        ("p", {"exact_version": 15}, False, 30),
        ("p@20", {"exact_version": 10}, False, 20),
        ("p@20", {"min_version": 25}, False, 20),
    ],
)
def test_unmet_constraints_are_409_and_say_whether_waiting_helps(
    state: State, model: str, constraint: dict[str, int], retryable: bool, applied: int
) -> None:
    with pytest.raises(WeightVersionNotReadyError) as caught:
        resolve_model(state, model, parse_constraint(constraint))
    fields = caught.value.fields
    assert caught.value.status == 409
    assert (fields["retryable"], fields["applied"], fields["target_version"]) == (
        retryable,
        applied,
        next(iter(constraint.values())),
    )


def test_an_exact_version_that_is_retired_is_410(state: State) -> None:
    with pytest.raises(RetiredRevisionError):
        resolve_model(retire(state, "p", R1), "p", VersionConstraint(exact_version=10))


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        3,
        "min_version",
        {"min_version": 1, "exact_version": 1},
        {"min_version": "1"},
        {"min_version": True},
        {"other": 1},
        {"exact_version": -1},
        {"exact_version": 1.0},
        {"exact_version": None},
    ],
)
def test_malformed_constraints_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_constraint(value)
    assert str(caught.value.fields["field"]).startswith("weight_version")


def test_an_absent_constraint_is_none() -> None:
    assert parse_constraint(None) is None


@pytest.mark.parametrize("model", ["p", "p@10", "p@11", f"p@sha256:{'a' * 12}"])
def test_every_refusal_repeats_the_model_string(state: State, model: str) -> None:
    state = fold(Quarantined(R3, "tp0", "x"), RetireBegan("p", R1), RetireBegan("p", R2), state=state)
    with pytest.raises(EpochlessError) as caught:
        resolve_model(state, model)
    assert caught.value.message.startswith(f"model {model}: ")
    assert caught.value.describe()["model"] == model


@pytest.mark.parametrize("model", ["p@", "p@020", "p@-1", "p@sha256:zz", f"p@sha256:{'A' * 64}", "p@latest"])
def test_a_pin_of_a_known_policy_that_is_none_is_told_how_pins_are_spelled(state: State, model: str) -> None:
    assert resolve_model(state, model) is None
    message = unknown_model(state, model).message
    assert model in message
    assert "p@sha256:<12 or more lowercase hexadecimal digits> or p@<step>" in message
    assert "no policy of that name" in unknown_model(state, "q@1").message
