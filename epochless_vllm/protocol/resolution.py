"""Which revision a model string means, given a committed state. Pure: the caller supplies the state.

Order: exact policy name (its head) - ``policy@sha256:<hex>``, whole or a prefix - ``policy@<digits>`` and
``policy-v<digits>`` (an exact step). Base names are the caller's affair. Knows no requests, no engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from epochless_vllm.errors import (
    AmbiguousRevisionError,
    EpochlessError,
    InvalidRequestError,
    QuarantinedRevisionError,
    RetiredRevisionError,
    UnknownRevisionError,
    WeightVersionNotReadyError,
)
from epochless_vllm.protocol.names import ModelPin, parse_pin, parse_step
from epochless_vllm.protocol.publication import STORE_RANK, Publication, State, Status


@dataclass(frozen=True)
class VersionConstraint:
    """A request's ``weight_version``: exactly one of the two is set, both are steps."""

    min_version: int | None = None
    exact_version: int | None = None


def parse_constraint(value: object) -> VersionConstraint | None:
    """Return the constraint of a request's ``weight_version`` field; None for an absent field.

    Raises:
        InvalidRequestError: not an object with exactly one of ``min_version`` and ``exact_version``.
    """
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) != 1 or not set(value) <= {"min_version", "exact_version"}:
        raise InvalidRequestError(
            'weight_version: give {"min_version": n} or {"exact_version": n}, n an integer step', field="weight_version"
        )
    (key, step) = next(iter(value.items()))
    return VersionConstraint(**{key: parse_step(step, field=f"weight_version.{key}")})


def resolve_model(state: State, model: str, constraint: VersionConstraint | None = None) -> Publication | None:
    """Return the publication a model string means, or None when it names no policy at all.

    Raises:
        UnknownRevisionError: the policy exists, the step or digest does not.
        RetiredRevisionError, QuarantinedRevisionError: it exists and cannot serve.
        AmbiguousRevisionError: a digest prefix names several revisions.
        WeightVersionNotReadyError: the constraint is unmet; ``retryable`` says whether waiting can help.
        InvalidRequestError: the model string or constraint contradicts itself.
    """
    if state.publications.knows(model):
        publication: Publication | None = _resolve_policy(state, model, constraint)
    else:
        publication = find_pinned(state, model)
        if publication is not None and constraint is not None:
            _check_constraint(publication, constraint, pinned=True)
    if publication is not None:
        _check_serving(state, publication, model)
    return publication


def find_pinned(state: State, model: str) -> Publication | None:
    """Return the publication a pin names, whether it can serve or not; None when the string pins nothing known.

    Raises:
        UnknownRevisionError: the policy exists, the step or digest does not.
        AmbiguousRevisionError: a digest prefix names several revisions.
        InvalidRequestError: a digest prefix is too short.
    """
    pin = parse_pin(model)
    if pin is None or not state.publications.knows(pin.policy):
        return None
    return _resolve_pin(state, model, pin)


def unknown_model(state: State, model: str) -> UnknownRevisionError:
    """Return the error of a model string that names nothing; of a known policy's pin it says how pins are spelled."""
    policy, at, _ = model.partition("@")
    if at and state.publications.knows(policy):
        return UnknownRevisionError(
            f"model {model}: is no pin of policy {policy}; give {policy}@sha256:<12 or more lowercase hexadecimal "
            f"digits> or {policy}@<step>",
            model=model,
        )
    return UnknownRevisionError(
        f"The model `{model}` does not exist: no policy of that name; GET /v1/models lists what is served", model=model
    )


def _resolve_policy(state: State, policy: str, constraint: VersionConstraint | None) -> Publication:
    head = state.head(policy)
    if head is None:
        raise RetiredRevisionError(f"model {policy}: all its revisions are retired; publish one", model=policy)
    if constraint is None:
        return head
    if constraint.exact_version is not None:
        found = state.publication_at(policy, constraint.exact_version)
        if found is None:
            raise _not_ready(head, constraint.exact_version, retryable=constraint.exact_version > head.step)
        return found
    _check_constraint(head, constraint, pinned=False)
    return head


def _resolve_pin(state: State, model: str, pin: ModelPin) -> Publication:
    if pin.step is not None:
        found = state.publication_at(pin.policy, pin.step)
        if found is None:
            raise UnknownRevisionError(f"model {model}: policy {pin.policy} has no step {pin.step}", model=model)
        return found
    named = state.publications.revisions_with_prefix(pin.policy, f"sha256:{pin.hex_prefix}")
    if not named:
        raise UnknownRevisionError(f"model {model}: policy {pin.policy} has no such revision", model=model)
    # Live revisions decide ambiguity first: a tombstone must not make a live pin ambiguous.
    candidates = [revision_id for revision_id in named if (pin.policy, revision_id) in state.holdings] or named
    if len(candidates) > 1:
        raise AmbiguousRevisionError(
            f"model {model}: names {len(candidates)} revisions; give more digits", model=model, candidates=candidates
        )
    found = state.publications.of_revision(pin.policy, candidates[0])
    assert found is not None  # its revision was listed by these very publications
    return found


def _check_constraint(publication: Publication, constraint: VersionConstraint, *, pinned: bool) -> None:
    exact, least = constraint.exact_version, constraint.min_version
    if exact is not None and publication.step != exact:
        raise _not_ready(publication, exact, retryable=False)
    if least is not None and publication.step < least:
        raise _not_ready(publication, least, retryable=not pinned)  # a head moves on, a pin does not


def _not_ready(applied: Publication, wanted: int, *, retryable: bool) -> EpochlessError:
    advice = "retry after that step is published" if retryable else "waiting will not change that; ask for another"
    return WeightVersionNotReadyError(
        f"weight_version: {applied.policy} is at step {applied.step}, the request wants {wanted}; {advice}",
        type="WeightVersionNotReady",
        field="weight_version",
        retryable=retryable,
        applied=applied.step,
        target_version=wanted,
    )


def _check_serving(state: State, publication: Publication, model: str) -> None:
    status = state.status(publication.policy, publication.revision_id) if state.is_held(publication) else Status.RETIRED
    if status in (Status.RETIRED, Status.DRAINING):
        raise RetiredRevisionError(
            f"model {model}: {publication.lora_name} (step {publication.step}) is retired; "
            "use the policy name for its head",
            model=model,
            revision_id=publication.revision_id,
        )
    if status is Status.QUARANTINED:
        rank, reason = state.quarantine[publication.revision_id]
        facts = {"model": model, "revision_id": publication.revision_id, "rank": rank, "reason": reason}
        if rank == STORE_RANK:
            raise RetiredRevisionError(
                f"model {model}: {publication.lora_name} cannot be served any more: {reason}; publish it again", **facts
            )
        raise QuarantinedRevisionError(
            f"model {model}: {publication.lora_name} is quarantined by {rank}: {reason}; publish it again", **facts
        )
