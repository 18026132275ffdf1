"""Pure rules of publication: which events may follow which state, and the state they lead to.

``apply`` is total over events: it returns the next state or raises IllegalTransitionError, and never half of either.
Knows no disk, no rank, no clock: see publication/journal.py and publication/coordinator.py for those.

Terms: a *publication* is one committed (policy, step, revision) with its sequence. A *binding* is a policy's hold on
a revision. An *adapter* is a revision inside the engine under one ``lora_int_id``, shared by its bindings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

from epochless_vllm.errors import IllegalTransitionError
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.names import lora_name_from

MAX_LORA_INT_ID = (1 << 31) - 1  # the engine keeps ids in 32-bit signed arrays


class Status(str, Enum):
    """Where a binding stands."""

    LIVE = "live"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


@dataclass(frozen=True)
class Publication:
    """One committed (policy, step, revision); ``sequence`` orders all publications of a store."""

    policy: str
    step: int
    revision_id: RevisionId
    lora_int_id: int
    sequence: int

    @property
    def lora_name(self) -> str:
        return lora_name_from(self.policy, self.revision_id)


@dataclass(frozen=True)
class Intent:
    """A publication being prepared; it has no sequence before commit."""

    transaction_id: int
    policy: str
    step: int
    revision_id: RevisionId
    lora_int_id: int


@dataclass(frozen=True)
class EpochBegan:
    """A server started on the store; every intent it finds is aborted by its own event afterwards."""

    epoch: int


@dataclass(frozen=True)
class Intended:
    intent: Intent


@dataclass(frozen=True)
class Committed:
    transaction_id: int
    sequence: int


@dataclass(frozen=True)
class Aborted:
    transaction_id: int
    reason: str


@dataclass(frozen=True)
class RetireBegan:
    policy: str
    revision_id: RevisionId


@dataclass(frozen=True)
class Retired:
    policy: str
    revision_id: RevisionId


@dataclass(frozen=True)
class Quarantined:
    revision_id: RevisionId
    rank: str
    reason: str


Event = EpochBegan | Intended | Committed | Aborted | RetireBegan | Retired | Quarantined
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
        sequence: the last allocated sequence.
        last_transaction_id: the last allocated transaction.
        last_lora_int_id: the last allocated engine id; ids are never reused.
        intents: undecided transactions by id.
        publications: every committed publication by sequence, retired ones included.
        bindings: status by (policy, revision_id).
        adapters: engine id by revision_id, for revisions with a binding that is not retired.
        quarantine: (rank, reason) by revision_id.
    """

    epoch: int = 0
    sequence: int = 0
    last_transaction_id: int = 0
    last_lora_int_id: int = 0
    intents: Mapping[int, Intent] = field(default_factory=_empty)
    publications: Mapping[int, Publication] = field(default_factory=_empty)
    bindings: Mapping[BindingKey, Status] = field(default_factory=_empty)
    adapters: Mapping[RevisionId, int] = field(default_factory=_empty)
    quarantine: Mapping[RevisionId, tuple[str, str]] = field(default_factory=_empty)

    def head(self, policy: str) -> Publication | None:
        """Return the policy's publication of highest sequence whose binding is not retired, or None."""
        heads = [p for p in self.publications.values() if p.policy == policy and self.is_held(p)]
        return max(heads, key=lambda p: p.sequence, default=None)

    def is_held(self, publication: Publication) -> bool:
        """Whether the publication's binding is live, draining or quarantined under the same engine id."""
        status = self.bindings.get((publication.policy, publication.revision_id), Status.RETIRED)
        same = self.adapters.get(publication.revision_id) == publication.lora_int_id
        return status is not Status.RETIRED and same

    def publication_at(self, policy: str, step: int) -> Publication | None:
        """Return the policy's latest publication of that step, retired ones included, or None."""
        found = [p for p in self.publications.values() if p.policy == policy and p.step == step]
        return max(found, key=lambda p: p.sequence, default=None)

    def policies(self) -> list[str]:
        """Return the policies that hold a revision, sorted."""
        return sorted({policy for (policy, _), status in self.bindings.items() if status is not Status.RETIRED})


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
        status = state.bindings.get((event.policy, event.revision_id))
        _require(
            status in (Status.LIVE, Status.QUARANTINED), f"{event.policy}@{event.revision_id} is {status}, not live"
        )
        return replace(state, bindings=_with(state.bindings, (event.policy, event.revision_id), Status.DRAINING))
    if isinstance(event, Retired):
        return _apply_retired(state, event)
    return _apply_quarantined(state, event)


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
    _require(state.bindings.get(key) is not Status.DRAINING, f"{intent.policy}@{intent.revision_id} is draining")
    held = state.adapters.get(intent.revision_id)
    _require(held in (None, intent.lora_int_id), f"{intent.revision_id} is held under engine id {held}")
    publication = Publication(intent.policy, intent.step, intent.revision_id, intent.lora_int_id, event.sequence)
    return replace(
        state,
        sequence=event.sequence,
        intents=_without(state.intents, event.transaction_id),
        publications=_with(state.publications, event.sequence, publication),
        bindings=_with(state.bindings, key, Status.LIVE),
        adapters=_with(state.adapters, intent.revision_id, intent.lora_int_id),
        quarantine=_without(state.quarantine, intent.revision_id),
    )


def _apply_retired(state: State, event: Retired) -> State:
    key = (event.policy, event.revision_id)
    _require(state.bindings.get(key) is Status.DRAINING, f"{event.policy}@{event.revision_id} is not draining")
    bindings = _with(state.bindings, key, Status.RETIRED)
    others = any(
        revision_id == event.revision_id and status is not Status.RETIRED
        for (_, revision_id), status in bindings.items()
    )
    if others:
        return replace(state, bindings=bindings)
    return replace(
        state,
        bindings=bindings,
        adapters=_without(state.adapters, event.revision_id),
        quarantine=_without(state.quarantine, event.revision_id),
    )


def _apply_quarantined(state: State, event: Quarantined) -> State:
    _require(event.revision_id in state.adapters, f"{event.revision_id} is not in the engine")
    bindings = {
        key: Status.QUARANTINED if key[1] == event.revision_id and status is Status.LIVE else status
        for key, status in state.bindings.items()
    }
    return replace(
        state,
        bindings=MappingProxyType(bindings),
        quarantine=_with(state.quarantine, event.revision_id, (event.rank, event.reason)),
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IllegalTransitionError(message)


def _with(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    return MappingProxyType({**mapping, key: value})


def _without(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    return MappingProxyType({k: v for k, v in mapping.items() if k != key})
