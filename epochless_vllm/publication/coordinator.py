"""Publishes revisions to all ranks or none, retires them, and brings back after a restart what was committed.

Synchronous and thread-safe; processes that share a store take turns by a file lock. The journal decides: a revision is
published from the moment its Committed event is durable and not before, whatever the ranks hold. Knows ranks only
through the ``Ranks`` port, and adapters only by their names in a store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from epochless_vllm.durable import crash_point, exclusive_lock
from epochless_vllm.errors import (
    ConflictError,
    EpochlessError,
    IllegalTransitionError,
    QuarantinedRevisionError,
    RetiredRevisionError,
    StaleEpochError,
    StoreError,
    UndecidedError,
    UnknownRevisionError,
)
from epochless_vllm.protocol.digests import parse_digest
from epochless_vllm.protocol.events import MAX_TEXT
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.names import parse_policy, parse_step
from epochless_vllm.protocol.publication import (
    Aborted,
    Committed,
    Intended,
    Intent,
    Publication,
    Quarantined,
    RetireBegan,
    Status,
)
from epochless_vllm.publication.decisions import check_retirable, choose_step, find_standing
from epochless_vllm.publication.journal import Journal
from epochless_vllm.publication.recovery import Recovered, Revisions, recover_adapters
from epochless_vllm.publication.retirement import Draining, Retirement
from epochless_vllm.publication.rounds import Failure, Ranks, Receipts, Rounds

__all__ = ["Coordinator", "Draining", "Published", "Ranks", "Recovered", "Revisions"]

ABORT_S = 2.0  # the ranks hear of an abort again before the next publication, so the caller need not wait for one


@dataclass(frozen=True)
class Published:
    """A committed publication, each rank's receipt, and whether an earlier call had made it."""

    publication: Publication
    receipts: Receipts
    repeated: bool


class Coordinator:
    """Decides for one store. Every process that publishes has its own."""

    def __init__(
        self,
        store: Revisions,
        journal: Journal,
        ranks: Ranks,
        *,
        keep: int | None,
        capacity: int,
        deadline_s: float = 60.0,
    ) -> None:
        """Join a store's journal to the ranks.

        Args:
            keep: live revisions a policy keeps; older ones are retired by themselves. None: all are kept.
            capacity: adapters the ranks' registry holds.
            deadline_s: how long ranks may take to prepare or to acknowledge, in seconds.
        """
        self._store = store
        self._journal = journal
        self._ranks = ranks
        self._rounds = Rounds(ranks, deadline_s=deadline_s)
        self._retirement = Retirement(journal, ranks, self._rounds, keep=keep, capacity=capacity)
        self._capacity = capacity
        self._deadline_s = deadline_s
        self._turn = threading.Lock()
        self._unheard: list[dict[str, Any]] = []  # aborts some rank has not acknowledged

    # Publishing

    def publish(self, revision_id: RevisionId, policy: str, step: int | None) -> Published:
        """Make a stored revision the policy's head, on all ranks or none.

        Args:
            step: the trainer's integer. None: the head again if it has this content, else the next step.

        Raises:
            InvalidRequestError, EncodingError: an argument is malformed.
            UnknownRevisionError: the store does not hold the revision.
            StepConflictError: the policy has other content under that step.
            CapacityError: the registry is full. ConflictError: an earlier binding still drains; retry.
            RankRefusalError: a rank found the adapter at fault. PublicationError: a rank failed; ``rank`` names it.
            StorageFullError: the journal cannot be written. UndecidedError: nor can its outcome be read.
            QuarantinedRevisionError: committed, but a rank did not acknowledge; it serves nobody.
        """
        parse_policy(policy)
        parse_digest(revision_id)
        if step is not None:
            parse_step(step)
        with self._take_turn():
            if not self._store.has(revision_id):
                raise UnknownRevisionError(
                    f"revision {revision_id} is not in the store; add the adapter first", revision_id=revision_id
                )
            step = choose_step(self._journal.state, policy, revision_id, step)
            earlier = find_standing(self._journal.state, policy, step)
            if earlier is not None:
                return Published(earlier, self._journal.receipts(earlier.sequence), repeated=True)
            self._make_way(policy, revision_id)
            return self._transact(policy, step, revision_id)

    def _make_way(self, policy: str, revision_id: RevisionId) -> None:
        state = self._journal.state
        if revision_id not in state.adapters:
            if len(state.adapters) >= self._capacity:
                self._retirement.make_room(policy, revision_id)
            return
        if state.status(policy, revision_id) is Status.DRAINING:
            self._retirement.pump()
            state = self._journal.state
        draining = state.status(policy, revision_id) is Status.DRAINING
        if not draining and revision_id not in state.quarantine:
            return
        in_flight = self._ranks.holders(state.adapters[revision_id])
        # A revision is prepared anew only once nothing uses what a rank holds of it.
        if draining or in_flight != 0:
            raise ConflictError(
                f"{revision_id} is {'draining' if draining else 'quarantined'} with {in_flight} requests in flight; "
                "retry when they end",
                revision_id=revision_id,
                in_flight=in_flight,
                retryable=True,
            )

    def _transact(self, policy: str, step: int, revision_id: RevisionId) -> Published:
        state = self._journal.state
        lora_int_id = state.adapters.get(revision_id, state.last_lora_int_id + 1)
        intent = Intent(state.last_transaction_id + 1, policy, step, revision_id, lora_int_id)
        state = self._journal.append(Intended(intent))
        crash_point("intend")
        order = self._message("prepare_begin", intent)
        if revision_id in state.quarantine:
            order["reload"] = True
        try:
            receipts = self._rounds.prepare(order)
        except BaseException as error:
            self._abort(intent, str(error))
            raise
        crash_point("prepare.done")
        committed = Committed(intent.transaction_id, state.sequence + 1)
        surplus = [RetireBegan(*key) for key in self._retirement.beyond_keep(policy, coming=revision_id)]
        try:
            state = self._journal.append(committed, *surplus, receipts=receipts)
        except UndecidedError:
            raise  # it may be committed: the ranks keep what they have prepared
        except EpochlessError as error:
            self._abort(intent, error.message)
            raise
        crash_point("decide")
        failures = self._rounds.tell(self._message("commit", intent))
        if failures:
            raise self._quarantine_unacknowledged(intent, failures[0])
        crash_point("commit.reply")
        return Published(state.publications[committed.sequence], receipts, repeated=False)

    def _abort(self, intent: Intent, reason: str) -> None:
        # An intent without a decision counts as aborted: what cannot be recorded now is recorded before the next
        # publication or at the next start, whichever comes first.
        with suppress(StoreError, StaleEpochError):
            self._journal.append(Aborted(intent.transaction_id, _clip(reason)))
        crash_point("abort")
        self._tell_abort(intent)

    def _tell_abort(self, intent: Intent) -> None:
        message = self._message("abort", intent)
        if self._rounds.tell(message, deadline_s=min(ABORT_S, self._deadline_s)):
            self._unheard.append(message)

    def _quarantine_unacknowledged(self, intent: Intent, failure: Failure) -> QuarantinedRevisionError:
        reason = f"did not acknowledge the commit: {failure.reason}"
        self.quarantine(intent.revision_id, failure.rank, reason)
        return QuarantinedRevisionError(
            f"{intent.revision_id}: committed, and quarantined because {failure.rank} {reason}; publish it again",
            revision_id=intent.revision_id,
            rank=failure.rank,
            reason=reason,
        )

    # Retiring

    def retire(self, policy: str, revision_id: RevisionId | None) -> list[Draining]:
        """Stop admitting requests to one revision of a policy, or to all of them; repeating reports again.

        Raises:
            UnknownRevisionError, RetiredRevisionError: there is nothing of that name to retire.
            HeadRetirementError: it is the head, and older revisions of the policy are live.
            StorageFullError: it cannot be journalled; everything stays live.
        """
        with self._take_turn():
            state = self._journal.state
            held = [key for key in state.holdings if key[0] == policy]
            if revision_id is not None:
                check_retirable(state, policy, revision_id)
                held = [(policy, revision_id)]
            elif not held:
                gone = RetiredRevisionError if state.publications.knows(policy) else UnknownRevisionError
                raise gone(f"policy {policy} holds no revision", policy=policy)
            live = [key for key in held if not state.holdings[key].draining]
            if live:
                self._retirement.begin(live)
            return [self._retirement.draining(key) for key in held]

    def pump_retirements(self) -> int:
        """Remove the draining revisions that nothing uses any more; return how many bindings go on draining.

        Publications wait for a removal, and not for the engines' answer that there is nothing to remove.

        Raises:
            StoreError: a removal is not recorded; it is repeated by the next call.
        """
        state = self._journal.refresh()
        in_flight = self._retirement.count_holders(state)
        if not (self._unheard or state.intents or self._retirement.has_ended(state, in_flight)):
            return sum(holding.draining for holding in state.holdings.values())
        with self._take_turn():
            return self._retirement.pump(in_flight)

    @property
    def retirement_failures(self) -> dict[RevisionId, Failure]:
        """What stood in the way of the last attempt to remove each revision that still drains."""
        return dict(self._retirement.failures)

    # Faults and restarts

    def quarantine(self, revision_id: RevisionId, rank: str, reason: str) -> None:
        """Stop serving a revision that a rank failed to activate; at once, also during a publication.

        Raises:
            StoreError: it is not recorded; the caller must refuse the revision by itself.
        """
        if revision_id in self._journal.refresh().quarantine:
            return
        try:
            self._journal.append(Quarantined(revision_id, _clip(rank), _clip(reason)))
        except IllegalTransitionError:  # retired meanwhile: it serves nobody already
            return

    def recover(self) -> Recovered:
        """Have every rank prepare what is committed and not retired; call it in a new epoch before serving.

        Raises:
            ConfigurationError: the registry is smaller than what is committed.
            StoreError: a policy's head cannot be served; ``revision_id``, ``rank`` and ``reason`` say why.
        """
        with self._take_turn():
            return recover_adapters(self._store, self._journal, self._rounds, self._retirement, self._capacity)

    def rank_status(self) -> dict[str, dict[str, Any]]:
        """Return what each rank reports of itself; a rank that does not answer is named with the reason."""
        answers = self._rounds.ask({"kind": "status"})
        silent = [Failure(rank, "no_answer", reason) for rank, reason in answers.silent.items()]
        failed = {
            failure.rank: {"ok": False, "code": failure.code, "reason": failure.reason}
            for failure in answers.failures + silent
        }
        return {**answers.done, **failed}

    # Turns and messages

    @contextmanager
    def _take_turn(self) -> Iterator[None]:
        with self._turn, exclusive_lock(self._journal.path.with_name("publish.lock")):
            self._journal.check_writable()
            self._journal.refresh()
            self._sweep()
            yield

    def _sweep(self) -> None:
        """Decide what a process left undecided: nobody else is publishing while this one has its turn."""
        for intent in self._journal.state.intents.values():
            self._journal.append(Aborted(intent.transaction_id, "its publisher stopped before it was decided"))
            self._tell_abort(intent)
        self._unheard = [message for message in self._unheard if self._rounds.tell(message, deadline_s=0.0)]

    def _message(self, kind: str, intent: Intent) -> dict[str, Any]:
        return {
            "kind": kind,
            "epoch": self._journal.epoch,
            "transaction_id": intent.transaction_id,
            "revision_id": intent.revision_id,
            "lora_int_id": intent.lora_int_id,
        }


def _clip(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")[:MAX_TEXT]
