"""What a status answer says of policies and revisions, bounded however long a store has been published to.

Everything that is served, drains or is quarantined is listed, and of what is retired the newest few; the rest is
counted, and found one by one under its digest or step. Knows the committed state only.
"""

from __future__ import annotations

import itertools
from typing import Any

from epochless_vllm.errors import AmbiguousRevisionError, UnknownRevisionError
from epochless_vllm.protocol.publication import Publication, State, Status

RETIRED_SHOWN = 8  # of each policy's retired publications, and of the policies that hold nothing any more
HELD_SHOWN = 64  # of the steps one revision that is not retired was published under


def describe_policies(state: State, policy: str | None = None) -> dict[str, Any]:
    """Return ``policies`` and ``more_policies``, the number of those without a revision that are not listed.

    Each policy has its ``head``, its ``revisions``, newest first, and ``more``, the number of those not listed.

    Raises:
        UnknownRevisionError: ``policy`` was never published to.
    """
    if policy is not None:
        if not state.publications.knows(policy):
            raise UnknownRevisionError(f"policy {policy}: does not exist; GET /v1/policies lists them", policy=policy)
        return {"policies": [_describe_policy(state, policy)], "more_policies": 0}
    empty = [name for name in state.publications.policies() if name not in state.heads]
    names = sorted([*state.heads, *empty[:RETIRED_SHOWN]])
    described = [_describe_policy(state, name) for name in names]
    return {"policies": described, "more_policies": max(0, len(empty) - RETIRED_SHOWN)}


def describe_revision(state: State, policy: str, revision: str) -> dict[str, Any]:
    """Return the newest publication of a revision, given by digest, prefix of a digest, or step.

    Raises:
        UnknownRevisionError, AmbiguousRevisionError.
    """
    history = state.publications
    if revision.isdigit():
        found = history.at_step(policy, int(revision))
    else:
        candidates = history.revisions_with_prefix(policy, revision)
        if len(candidates) > 1:
            raise AmbiguousRevisionError(
                f"policy {policy}: {len(candidates)} revisions begin with {revision}; give more digits",
                candidates=candidates[:RETIRED_SHOWN],
            )
        found = history.of_revision(policy, candidates[0]) if candidates else None
    if found is None:
        raise UnknownRevisionError(f"policy {policy}: has no revision {revision}", model=f"{policy}@{revision}")
    return {"policy": policy, **_describe_publication(state, found)}


def _describe_policy(state: State, policy: str) -> dict[str, Any]:
    history = state.publications
    held = [
        publication
        for (holder, revision_id), holding in state.holdings.items()
        if holder == policy
        for publication in itertools.islice(
            itertools.takewhile(
                lambda p, first=holding.first: p.sequence >= first,  # type: ignore[misc]  # bound at once
                history.all_of_revision(policy, revision_id),
            ),
            HELD_SHOWN,
        )
    ]
    retired = itertools.islice((p for p in history.of_policy(policy) if not state.is_held(p)), RETIRED_SHOWN)
    listed = sorted([*held, *retired], key=lambda publication: -publication.sequence)
    head = state.head(policy)
    return {
        "policy": policy,
        "head": head.revision_id if head else None,
        "revisions": [_describe_publication(state, publication) for publication in listed],
        "more": history.count_of_policy(policy) - len(listed),
    }


def _describe_publication(state: State, publication: Publication) -> dict[str, Any]:
    head = state.head(publication.policy)
    held = state.is_held(publication)
    status = (state.status(publication.policy, publication.revision_id) if held else None) or Status.RETIRED
    described: dict[str, Any] = {
        "revision_id": publication.revision_id,
        "step": publication.step,
        "sequence": publication.sequence,
        "lora_int_id": publication.lora_int_id,
        "status": status.value,
        "head": head is not None and head.sequence == publication.sequence,
    }
    if status is Status.QUARANTINED and publication.revision_id in state.quarantine:
        described["rank"], described["reason"] = state.quarantine[publication.revision_id]
    return described
