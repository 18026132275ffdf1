"""What a wish to publish or to retire means in a committed state.

Pure; which events may follow which state is protocol/publication.py's question.
"""

from __future__ import annotations

from epochless_vllm.errors import HeadRetirementError, RetiredRevisionError, StepConflictError, UnknownRevisionError
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.names import parse_step
from epochless_vllm.protocol.publication import Publication, State, Status


def choose_step(state: State, policy: str, revision_id: RevisionId, step: int | None) -> int:
    """Return the step a publication takes; None asks for the head's if the content is the same, else for the next.

    Raises:
        StepConflictError: the policy has other content under the step.
    """
    if step is None:
        head = state.head(policy)
        if head is not None and head.revision_id == revision_id:
            return head.step
        highest = state.publications.highest_step(policy)
        return 1 if highest is None else parse_step(highest + 1)
    taken = state.publication_at(policy, step)
    if taken is not None and taken.revision_id != revision_id:
        raise StepConflictError(
            f"{policy} has {taken.revision_id} under step {step}; publish other content under another step",
            policy=policy,
            step=step,
            revision_id=taken.revision_id,
        )
    return step


def find_standing(state: State, policy: str, step: int) -> Publication | None:
    """Return the publication that already serves a policy's step, or None."""
    found = state.publication_at(policy, step)
    if found is None or not state.is_held(found) or state.status(policy, found.revision_id) is not Status.LIVE:
        return None
    return found


def check_retirable(state: State, policy: str, revision_id: RevisionId) -> None:
    """Raise unless a policy's revision may be retired.

    Raises:
        UnknownRevisionError, RetiredRevisionError: there is nothing to retire.
        HeadRetirementError: it is the head, and older revisions of the policy are live.
    """
    status = state.status(policy, revision_id)
    if status is None:
        raise UnknownRevisionError(f"policy {policy} never had {revision_id}", policy=policy, revision_id=revision_id)
    if status is Status.RETIRED:
        raise RetiredRevisionError(f"{policy}@{revision_id} is retired", policy=policy, revision_id=revision_id)
    others = any(
        key[0] == policy and key[1] != revision_id and not holding.draining for key, holding in state.holdings.items()
    )
    if state.heads[policy].revision_id == revision_id and others:
        raise HeadRetirementError(
            f"{policy}@{revision_id} is the head and older revisions are live; publish its successor first, or retire "
            "the whole policy",
            policy=policy,
            revision_id=revision_id,
        )
