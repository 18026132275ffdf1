"""Pure rules of publication: which events may follow which state, and the state they lead to.

``apply`` is total over events: it returns the next state or raises IllegalTransitionError, and never half of either.
It costs no more for a store's millionth publication than for its first. Knows no disk, no rank, no clock: see
publication/journal.py and publication/coordinator.py for those.

Terms: a *publication* is one committed (policy, step, revision) with its sequence. A *binding* is a policy's hold on
a revision. An *adapter* is a revision inside the engine under one ``lora_int_id``, shared by its bindings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from epochless_vllm.errors import IllegalTransitionError
from epochless_vllm.protocol.events import (
    Aborted,
    Committed,
    EpochBegan,
    Event,
    Intended,
    Intent,
    Quarantined,
    RetireBegan,
    Retired,
)
from epochless_vllm.protocol.history import History, Publication, publication_from_intent
from epochless_vllm.protocol.manifest import RevisionId

__all__ = [
    "MAX_LORA_INT_ID",
    "STORE_RANK",
    "Aborted",
    "BindingKey",
    "Committed",
    "EpochBegan",
    "Event",
    "Holding",
    "Intended",
    "Intent",
    "Publication",
    "Quarantined",
    "RetireBegan",
    "Retired",
    "State",
    "Status",
    "apply",
]

MAX_LORA_INT_ID = (1 << 31) - 1  # the engine keeps ids in 32-bit signed arrays
STORE_RANK = "store"  # the rank a quarantine names when the revision's bytes are gone from the store


class Status(str, Enum):
    """Where a binding stands."""

    LIVE = "live"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


class Holding(NamedTuple):
    """A binding that is not retired: the sequences of its first and its latest publication."""

    first: int
    last: int
    draining: bool = False


BindingKey = tuple[str, RevisionId]
K = TypeVar("K")
V = TypeVar("V")


def _empty() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class State:
    """The committed state of a store. All maps are read-only.

    Attributes:
        epoch: grows at each start of a server.
        last_transaction_id: the last allocated transaction.
        last_lora_int_id: the last allocated engine id; ids are never reused.
        intents: undecided transactions by id.
        publications: every committed publication by sequence, retired ones included.
        holdings: the bindings that are not retired, by (policy, revision_id).
        heads: by policy, the publication of highest sequence whose binding is not retired.
        adapters: engine id by revision_id, for revisions with a binding that is not retired.
        quarantine: (rank, reason) by revision_id.
    """

    epoch: int = 0
    last_transaction_id: int = 0
    last_lora_int_id: int = 0
    intents: Mapping[int, Intent] = field(default_factory=_empty)
    publications: History = field(default_factory=History)
    holdings: Mapping[BindingKey, Holding] = field(default_factory=_empty)
    heads: Mapping[str, Publication] = field(default_factory=_empty)
    adapters: Mapping[RevisionId, int] = field(default_factory=_empty)
    quarantine: Mapping[RevisionId, tuple[str, str]] = field(default_factory=_empty)

    @property
    def sequence(self) -> int:
        """The last allocated sequence."""
        return len(self.publications)

    @property
    def bindings(self) -> Mapping[BindingKey, Status]:
        """Status by (policy, revision_id) of every binding there ever was."""
        return _Bindings(self)

    def status(self, policy: str, revision_id: RevisionId) -> Status | None:
        """Return the status of a binding, or None for one that never was."""
        holding = self.holdings.get((policy, revision_id))
        if holding is None:
            return Status.RETIRED if self.publications.of_revision(policy, revision_id) else None
        if holding.draining:
            return Status.DRAINING
        return Status.QUARANTINED if revision_id in self.quarantine else Status.LIVE

    def head(self, policy: str) -> Publication | None:
        """Return the policy's publication of highest sequence whose binding is not retired, or None."""
        return self.heads.get(policy)

    def is_held(self, publication: Publication) -> bool:
        """Whether the publication is not retired. One that was stays so, also if its content is published again."""
        holding = self.holdings.get((publication.policy, publication.revision_id))
        return holding is not None and holding.first <= publication.sequence

    def publication_at(self, policy: str, step: int) -> Publication | None:
        """Return the policy's latest publication of that step, retired ones included, or None."""
        return self.publications.at_step(policy, step)

    def policies(self) -> list[str]:
        """Return the policies that hold a revision, sorted."""
        return sorted(self.heads)


class _Bindings(Mapping[BindingKey, Status]):
    """A view: nothing is kept for a retired binding but its publications."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __getitem__(self, key: BindingKey) -> Status:
        status = self._state.status(*key)
        if status is None:
            raise KeyError(key)
        return status

    def __iter__(self) -> Iterator[BindingKey]:
        return iter(dict.fromkeys((p.policy, p.revision_id) for p in self._state.publications.values()))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def apply(state: State, event: Event) -> State:
    """Return the state after an event.

    Raises:
        IllegalTransitionError: the event is not allowed in this state.
    """
    if isinstance(event, EpochBegan):
        _require(event.epoch == state.epoch + 1, f"epoch {event.epoch} does not follow {state.epoch}")
        return replace(state, epoch=event.epoch)
    if isinstance(event, Intended):
        return _apply_intended(state, event.intent)
    if isinstance(event, Committed):
        return _apply_committed(state, event)
    if isinstance(event, Aborted):
        _require(event.transaction_id in state.intents, f"transaction {event.transaction_id} is not undecided")
        return replace(state, intents=_without(state.intents, event.transaction_id))
    if isinstance(event, RetireBegan):
        return _apply_retire_began(state, event)
    if isinstance(event, Retired):
        return _apply_retired(state, event)
    _require(event.revision_id in state.adapters, f"{event.revision_id} is not in the engine")
    return replace(state, quarantine=_with(state.quarantine, event.revision_id, (event.rank, event.reason)))


def _apply_intended(state: State, intent: Intent) -> State:
    _require(intent.transaction_id == state.last_transaction_id + 1, "transaction ids are consecutive")
    held = state.adapters.get(intent.revision_id)
    pending = [other.lora_int_id for other in state.intents.values() if other.revision_id == intent.revision_id]
    known = held if held is not None else (pending[0] if pending else None)
    expected = known if known is not None else state.last_lora_int_id + 1
    _require(intent.lora_int_id == expected, f"engine id {intent.lora_int_id}; the rules give {expected}")
    _require(expected <= MAX_LORA_INT_ID, "engine ids are exhausted; start a new store")
    _check_step(state, intent)
    return replace(
        state,
        last_transaction_id=intent.transaction_id,
        last_lora_int_id=max(state.last_lora_int_id, intent.lora_int_id),
        intents=_with(state.intents, intent.transaction_id, intent),
    )


def _check_step(state: State, intent: Intent) -> None:
    taken = state.publication_at(intent.policy, intent.step)
    _require(
        taken is None or taken.revision_id == intent.revision_id,
        f"{intent.policy} already has other content under step {intent.step}",
    )


def _apply_committed(state: State, event: Committed) -> State:
    intent = state.intents.get(event.transaction_id)
    if intent is None:
        raise IllegalTransitionError(f"transaction {event.transaction_id} is not undecided")
    _require(event.sequence == state.sequence + 1, f"sequence {event.sequence} does not follow {state.sequence}")
    _check_step(state, intent)
    key = (intent.policy, intent.revision_id)
    holding = state.holdings.get(key)
    _require(holding is None or not holding.draining, f"{intent.policy}@{intent.revision_id} is draining")
    held = state.adapters.get(intent.revision_id)
    _require(held in (None, intent.lora_int_id), f"{intent.revision_id} is held under engine id {held}")
    publication = publication_from_intent(intent, event.sequence)
    return replace(
        state,
        intents=_without(state.intents, event.transaction_id),
        publications=state.publications.extended(publication),
        holdings=_with(state.holdings, key, Holding(holding.first if holding else event.sequence, event.sequence)),
        heads=_with(state.heads, intent.policy, publication),
        adapters=_with(state.adapters, intent.revision_id, intent.lora_int_id),
        # Every rank has prepared the revision anew, for all its bindings.
        quarantine=_without(state.quarantine, intent.revision_id),
    )


def _apply_retire_began(state: State, event: RetireBegan) -> State:
    status = state.status(event.policy, event.revision_id)
    _require(
        status in (Status.LIVE, Status.QUARANTINED),
        f"{event.policy}@{event.revision_id} is {status.value if status else 'unknown'}, not live",
    )
    key = (event.policy, event.revision_id)
    return replace(state, holdings=_with(state.holdings, key, state.holdings[key]._replace(draining=True)))


def _apply_retired(state: State, event: Retired) -> State:
    key = (event.policy, event.revision_id)
    holding = state.holdings.get(key)
    _require(holding is not None and holding.draining, f"{event.policy}@{event.revision_id} is not draining")
    holdings = _without(state.holdings, key)
    state = replace(state, holdings=holdings, heads=_heads_without(state, event, holdings))
    if any(revision_id == event.revision_id for _, revision_id in holdings):
        return state
    # The engine id ends here; a publication that counts on it would bring it back to life.
    undecided = any(intent.revision_id == event.revision_id for intent in state.intents.values())
    _require(not undecided, f"{event.revision_id} is being prepared again")
    return replace(
        state,
        adapters=_without(state.adapters, event.revision_id),
        quarantine=_without(state.quarantine, event.revision_id),
    )


def _heads_without(state: State, event: Retired, holdings: Mapping[BindingKey, Holding]) -> Mapping[str, Publication]:
    if state.heads[event.policy].revision_id != event.revision_id:
        return state.heads
    last = max((holding.last for (policy, _), holding in holdings.items() if policy == event.policy), default=None)
    if last is None:
        return _without(state.heads, event.policy)
    return _with(state.heads, event.policy, state.publications[last])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IllegalTransitionError(message)


def _with(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    return MappingProxyType({**mapping, key: value})


def _without(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    return MappingProxyType({k: v for k, v in mapping.items() if k != key})
