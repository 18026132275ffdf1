"""How a revision leaves the engine: no new admissions, wait for its last request, remove it everywhere, record it.

A binding is draining from the moment RetireBegan is durable, and nothing is removed while any request may still use
the adapter. Every step may be repeated. Called with the coordinator's lock held; knows no publishing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epochless_vllm.durable import crash_point
from epochless_vllm.errors import CapacityError
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.publication import BindingKey, Publication, RetireBegan, Retired, State
from epochless_vllm.publication.journal import Journal
from epochless_vllm.publication.rounds import Failure, Ranks, Rounds


@dataclass(frozen=True)
class Draining:
    """A binding that takes no new requests, and how many requests still hold its adapter (negative: unknown)."""

    publication: Publication
    in_flight: int


class Retirement:
    """Retires bindings of one journal on one set of ranks."""

    def __init__(self, journal: Journal, ranks: Ranks, rounds: Rounds, *, keep: int | None, capacity: int) -> None:
        self._journal = journal
        self._ranks = ranks
        self._rounds = rounds
        self._keep = keep
        self._capacity = capacity
        self.failures: dict[RevisionId, Failure] = {}  # what the last attempt at each removal met

    def begin(self, keys: list[BindingKey]) -> None:
        """Start to drain bindings, all or none.

        Raises:
            StoreError: nothing was recorded; all of them stay live.
        """
        self._journal.append(*(RetireBegan(*key) for key in keys))
        crash_point("retire.begin")

    def count_holders(self, state: State) -> Mapping[int, int]:
        """Return the requests in flight by engine id, of each adapter that drains in ``state``. Needs no lock."""
        ids = sorted({state.adapters[key[1]] for key in _draining(state)})
        return self._ranks.holders_of(ids) if ids else {}

    def has_ended(self, state: State, in_flight: Mapping[int, int]) -> bool:
        """Return whether a binding that drains in ``state`` may leave, by such a count."""
        return any(not _is_last(state, key) or in_flight[state.adapters[key[1]]] == 0 for key in _draining(state))

    def pump(self, in_flight: Mapping[int, int] | None = None) -> int:
        """Remove what nothing uses any more; return how many bindings go on draining.

        Args:
            in_flight: an earlier ``count_holders``; what drains only since then goes on draining.
        """
        state = self._journal.state
        if in_flight is None:
            in_flight = self.count_holders(state)
        draining = _draining(state)
        return len(draining) - sum([self._finish(key, in_flight) for key in draining])

    def draining(self, key: BindingKey) -> Draining:
        state = self._journal.state
        publication = state.publications[state.holdings[key].last]
        return Draining(publication, self._ranks.holders(publication.lora_int_id))

    def beyond_keep(self, policy: str, coming: RevisionId | None = None) -> list[BindingKey]:
        """Return the policy's oldest bindings beyond what it keeps, counting ``coming`` as its new head."""
        if self._keep is None:
            return []
        others = sorted(
            (holding.last, key)
            for key, holding in self._journal.state.holdings.items()
            if key[0] == policy and not holding.draining and key[1] != coming
        )
        if coming is None:
            others = others[:-1]  # without the head
        return [key for _, key in others[: max(0, len(others) - (self._keep - 1))]]

    def make_room(self, policy: str, revision_id: RevisionId) -> None:
        """Make sure one more adapter fits into the ranks' registry.

        Raises:
            CapacityError: it is full; ``holders`` lists who holds it.
        """
        self.pump()
        head = self._journal.state.head(policy)
        for key in self.beyond_keep(policy, coming=revision_id):
            if self._has_room():
                return
            # Draining a revision in use would take it from its clients and make no room for this publication.
            if (head is None or key[1] != head.revision_id) and self._frees_adapter(key):
                self.begin([key])
                self.pump()
        if not self._has_room():
            raise self._capacity_error()

    def _has_room(self) -> bool:
        return len(self._journal.state.adapters) < self._capacity

    def _frees_adapter(self, key: BindingKey) -> bool:
        state = self._journal.state
        return _is_last(state, key) and self._ranks.holders(state.adapters[key[1]]) == 0

    def _finish(self, key: BindingKey, in_flight: Mapping[int, int]) -> bool:
        state = self._journal.state
        revision_id = key[1]
        # Another policy's binding keeps the adapter; then there is nothing to wait for and nothing to remove.
        if _is_last(state, key):
            lora_int_id = state.adapters[revision_id]
            if in_flight.get(lora_int_id) != 0:
                return False
            # Each engine counts once more before its ranks remove: what came since then keeps the adapter.
            crash_point("retire.fence")
            if not self._remove(revision_id, lora_int_id):
                return False
            crash_point("retire.remove")
        self._journal.append(Retired(*key))
        crash_point("retire.decide")
        return True

    def _remove(self, revision_id: RevisionId, lora_int_id: int) -> bool:
        answers = self._rounds.ask(
            {
                "kind": "retire",
                "epoch": self._journal.epoch,
                "transaction_id": 0,
                "revision_id": revision_id,
                "lora_int_id": lora_int_id,
            }
        )
        self.failures.pop(revision_id, None)
        silent = [Failure(rank, "no_answer", reason) for rank, reason in answers.silent.items()]
        for failure in answers.failures + silent:
            self.failures.setdefault(revision_id, failure)
        return revision_id not in self.failures

    def _capacity_error(self) -> CapacityError:
        state = self._journal.state
        holders: list[dict[str, Any]] = [
            {
                "policy": policy,
                "revision_id": revision_id,
                "lora_int_id": state.adapters[revision_id],
                "status": state.bindings[policy, revision_id].value,
                "in_flight": self._ranks.holders(state.adapters[revision_id]),
            }
            for policy, revision_id in state.holdings
        ]
        return CapacityError(
            f"all {self._capacity} places for revisions are taken; retire one, wait for one to drain, or raise "
            "--max-cpu-loras",
            capacity=self._capacity,
            holders=holders,
            retryable=True,
        )


def _draining(state: State) -> list[BindingKey]:
    return [key for key, holding in state.holdings.items() if holding.draining]


def _is_last(state: State, key: BindingKey) -> bool:
    return not any(other[1] == key[1] and other != key for other in state.holdings)
