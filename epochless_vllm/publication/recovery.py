"""A restart: every rank prepares again what the journal says is committed and not retired.

A policy's head that cannot be served stops the start; an older revision is quarantined and the others are served.
Called with the coordinator's lock held, in an epoch of its own. Knows no requests: none exist yet.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Protocol

from epochless_vllm.errors import ConfigurationError, EpochlessError, PublicationError, StoreError
from epochless_vllm.protocol.events import MAX_TEXT
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.publication import STORE_RANK, Quarantined
from epochless_vllm.publication.journal import Journal
from epochless_vllm.publication.retirement import Retirement
from epochless_vllm.publication.rounds import Failure, Rounds

RECOVERY = 0  # the transaction of these messages; the journal's own begin at 1
AHEAD = 2  # revisions the ranks read while another is examined; each is in memory once more until it is registered


class Revisions(Protocol):
    """The store, as far as publishing needs it."""

    def has(self, revision_id: RevisionId) -> bool: ...

    def read(self, revision_id: RevisionId) -> object:
        """Raise EpochlessError unless the revision's bytes are present and right."""


@dataclass(frozen=True)
class Recovered:
    """The revisions every rank holds again, and those that serve nobody: (rank, reason) by revision_id."""

    prepared: tuple[RevisionId, ...]
    quarantined: dict[RevisionId, tuple[str, str]] = field(default_factory=dict)


def recover_adapters(
    store: Revisions, journal: Journal, rounds: Rounds, retirement: Retirement, capacity: int
) -> Recovered:
    """Prepare and commit every adapter of the journal's state; see ``Coordinator.recover``."""
    for policy in journal.state.policies():
        if surplus := retirement.beyond_keep(policy):
            retirement.begin(surplus)
    retirement.pump()  # whatever drained lost its last request with the server before this one
    if len(journal.state.adapters) > capacity:
        raise ConfigurationError(
            f"the store holds {len(journal.state.adapters)} live revisions and the registry {capacity}; raise "
            "--max-cpu-loras, or lower --epochless-keep to retire the oldest",
            flag="--max-cpu-loras",
        )
    state = journal.state
    heads = {head.revision_id for head in state.heads.values()}
    prepared = []
    # Heads first: if one cannot be served, the start ends before anything is held against the others.
    ordered = sorted(state.adapters, key=lambda item: (item not in heads, state.adapters[item]))
    orders = [
        _order(journal, revision_id, state.adapters[revision_id])
        for revision_id in ordered
        if revision_id not in state.quarantine and not _is_leaving(journal, revision_id)
    ]
    coming = iter(orders[1:])
    for place, order in enumerate(orders):
        # What the ranks answer is looked at when it is the revision's turn: it is begun again then.
        for following in itertools.islice(coming, 1 if place else AHEAD):
            rounds.ask({**following, "kind": "prepare_begin"})
        revision_id = order["revision_id"]
        failure = _prepare(rounds, order)
        if failure is None:
            prepared.append(revision_id)
        else:
            _set_aside(store, journal, rounds, revision_id, failure)
    return Recovered(tuple(prepared), dict(journal.state.quarantine))


def _is_leaving(journal: Journal, revision_id: RevisionId) -> bool:
    return all(holding.draining for key, holding in journal.state.holdings.items() if key[1] == revision_id)


def _order(journal: Journal, revision_id: RevisionId, lora_int_id: int) -> dict[str, Any]:
    return {
        "epoch": journal.epoch,
        "transaction_id": RECOVERY,
        "revision_id": revision_id,
        "lora_int_id": lora_int_id,
    }


def _prepare(rounds: Rounds, order: dict[str, Any]) -> Failure | None:
    try:
        rounds.prepare(order)
    except EpochlessError as error:
        rounds.tell({**order, "kind": "abort"}, deadline_s=0.0)
        if isinstance(error, PublicationError):
            return Failure(error.fields["rank"], error.fields["reason_code"], error.fields["reason"])
        return Failure(STORE_RANK, error.code, error.message)  # the bytes are needed here too, to know what to expect
    failures = rounds.tell({**order, "kind": "commit"})
    return failures[0] if failures else None


def _set_aside(store: Revisions, journal: Journal, rounds: Rounds, revision_id: RevisionId, failure: Failure) -> None:
    """Quarantine a revision, unless it is a head or the fault is not its own.

    Raises:
        StoreError: the server cannot start.
    """
    rank, reason = failure.rank, failure.reason
    try:
        store.read(revision_id)
    except EpochlessError as error:  # not the rank's doing: the bytes themselves are gone or changed
        rank, reason = STORE_RANK, error.message
    heads = [policy for policy, head in journal.state.heads.items() if head.revision_id == revision_id]
    if heads:
        raise StoreError(
            f"{revision_id}, head of {', '.join(heads)}, cannot be served: {rank}: {reason}; restore the store from a "
            "copy, or repair the rank, and start again",
            revision_id=revision_id,
            policies=heads,
            rank=rank,
            reason=reason,
        )
    if rank != STORE_RANK:
        _check_ranks(rounds)
    journal.append(Quarantined(revision_id, rank[:MAX_TEXT], reason[:MAX_TEXT]))


def _check_ranks(rounds: Rounds) -> None:
    """A rank that is gone says nothing about the revision it was asked for."""
    answers = rounds.ask({"kind": "status"})
    unwell = [Failure(rank, "no_answer", reason) for rank, reason in answers.silent.items()] + answers.failures
    for failure in unwell:
        raise StoreError(
            f"{failure.rank} failed while committed revisions were prepared: {failure.reason}; repair the rank and "
            "start again",
            rank=failure.rank,
            reason=failure.reason,
        )
