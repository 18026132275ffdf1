"""Rounds of messages to all ranks: sent, repeated until a deadline, answers examined one rank at a time.

Promises that a rank which refuses, lies, answers out of turn or not at all is named, with the reason, and that no
wait outlasts the deadline by more than one call. Knows no journal: what an outcome means is coordinator.py's affair.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from epochless_vllm.durable import crash_point
from epochless_vllm.errors import EncodingError, PublicationError, RankRefusalError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.publication.participant import REFUSED

FIRST_POLL_S = 0.001  # after a poll that did not wait, or whose wait was over
SLOWEST_POLL_S = 0.005  # each poll that does not wait may interrupt the engine's steps for a moment
WAIT_MS = 500  # how long a rank may keep a poll until it has loaded; a rank that died is noticed by its channel
MAX_RECEIPT_BYTES = 16 << 10  # a receipt holds a few digests

Receipts = dict[str, dict[str, Any]]


class Ranks(Protocol):
    """All workers of all engines of a deployment, as the coordinator sees them."""

    def names(self) -> tuple[str, ...]:
        """Return the name of every rank that must take part."""

    def call(self, message: dict[str, Any]) -> Mapping[str, dict[str, Any]]:
        """Send a message to every rank and return the replies of ``Participant.handle`` by rank.

        A rank that did not answer is missing. Never raises for a rank's failure.
        """

    def holders(self, lora_int_id: int) -> int:
        """Return how many requests, admitted anywhere and not finished, may still use the id; negative: unknown."""

    def holders_of(self, lora_int_ids: Sequence[int]) -> Mapping[int, int]:
        """Return ``holders`` of each id, for one message: what counts is the wait for the engine's step."""

    def expected_registered(self, revision_id: RevisionId) -> str | None:
        """Return the registered_digest every rank must report, computed apart from them; None: not checked."""


@dataclass(frozen=True)
class Failure:
    """Why a rank did not do what a message asked."""

    rank: str
    code: str
    reason: str


@dataclass
class _Answers:
    """One rank-by-rank look at the replies to one message."""

    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)


class Rounds:
    """Sends messages and sorts their answers; any thread may."""

    def __init__(self, ranks: Ranks, *, deadline_s: float) -> None:
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._serials = itertools.count(1)

    def ask(self, message: dict[str, Any]) -> _Answers:
        """Send a message once."""
        serial = next(self._serials)
        replies = self._ranks.call({**message, "serial": serial})
        answers = _Answers()
        expected = self._ranks.names()
        for rank in expected:
            _sort(answers, rank, replies.get(rank), kind=str(message["kind"]), serial=serial)
        for rank in sorted(set(replies) - set(expected)):
            answers.failures.append(Failure(rank, "unexpected_rank", "answered and is not a rank of this deployment"))
        return answers

    def tell(self, message: dict[str, Any], *, deadline_s: float | None = None) -> list[Failure]:
        """Send a message until every rank has acknowledged it; return the ranks that refused or stayed silent."""
        pause = _Pause(self._deadline_s if deadline_s is None else deadline_s)
        while True:
            answers = self.ask(message)
            if answers.failures or not answers.silent:
                return answers.failures
            if not pause.wait():
                return [Failure(rank, "no_answer", reason) for rank, reason in answers.silent.items()]

    def prepare(self, order: dict[str, Any]) -> Receipts:
        """Have every rank prepare a revision; return one examined receipt per rank.

        Raises:
            RankRefusalError: a rank found the adapter at fault.
            PublicationError: a rank failed, lied, answered out of turn, or not before the deadline.
        """
        pause = _Pause(self._deadline_s)
        begun: set[str] = set()
        receipts: Receipts = {}
        expected: dict[str, str | None] = {"source_digest": order["revision_id"]}
        if not self._ranks.names():
            raise error_from(Failure("none", "no_ranks", "the deployment has no ranks"), order["revision_id"])
        while True:
            # Beginning again is harmless for the ranks that have begun, and reaches one that missed it.
            kind = "prepare_poll" if begun.issuperset(self._ranks.names()) else "prepare_begin"
            wait = {"wait_ms": min(WAIT_MS, pause.left_ms())} if kind == "prepare_poll" else {}
            answers = self.ask({**order, "kind": kind, **wait})
            crash_point("prepare.sent")
            if answers.failures:
                worst = min(answers.failures, key=lambda failure: failure.code != REFUSED)
                raise error_from(worst, order["revision_id"])
            if "registered_digest" not in expected:  # computed here while the ranks load
                expected["registered_digest"] = self._ranks.expected_registered(order["revision_id"])
            for rank, reply in answers.done.items():
                if kind == "prepare_begin":
                    begun.add(rank)
                elif reply.get("done") is True:
                    receipts[rank] = self._examine(rank, reply.get("receipt"), expected)
            waiting = [rank for rank in self._ranks.names() if rank not in receipts]
            if not waiting:
                return receipts
            if kind == "prepare_begin" and not answers.silent:
                continue
            if not pause.wait():
                rank = next((rank for rank in waiting if rank in answers.silent), waiting[0])
                reason = answers.silent.get(rank, "still preparing")
                late = Failure(rank, "deadline", f"{reason} after {self._deadline_s:g} s")
                raise error_from(late, order["revision_id"], waiting=waiting)

    def _examine(self, rank: str, receipt: object, expected: Mapping[str, str | None]) -> dict[str, Any]:
        fault = _fault_of(receipt, rank, expected)
        if fault is not None:
            raise error_from(fault, RevisionId(str(expected["source_digest"])))
        assert isinstance(receipt, dict)  # or it had been at fault
        return receipt


class _Pause:
    """Waits between polls, longer each time after the first, and says when the deadline has passed."""

    def __init__(self, deadline_s: float) -> None:
        self._end = time.monotonic() + deadline_s
        self._next_s = FIRST_POLL_S

    def left_ms(self) -> int:
        """Return the whole milliseconds until the deadline."""
        return max(0, int(1000 * (self._end - time.monotonic())))

    def wait(self) -> bool:
        """Sleep and return True, or return False at once when the deadline has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._next_s, left))
        self._next_s = min(self._next_s * 1.5, SLOWEST_POLL_S)
        return True


def error_from(failure: Failure, revision_id: RevisionId, **fields: Any) -> PublicationError:
    """Return the error that names a rank's failure to prepare."""
    facts = {"rank": failure.rank, "reason": failure.reason, "reason_code": failure.code, "revision_id": revision_id}
    if failure.code == REFUSED:
        return RankRefusalError(
            f"{revision_id}: refused by {failure.rank}: {failure.reason}; correct the adapter, the revisions before it "
            "serve on",
            **facts,
            **fields,
        )
    return PublicationError(
        f"{revision_id}: not published, {failure.rank}: {failure.reason}; the revisions before it serve on, retry when "
        "the rank is well",
        **facts,
        **fields,
    )


def _fault_of(receipt: object, rank: str, expected: Mapping[str, str | None]) -> Failure | None:
    if not isinstance(receipt, dict) or receipt.get("rank") != rank:
        return Failure(rank, "malformed", "its receipt is missing or another rank's")
    try:
        size = len(encode_canonical(receipt))
    except EncodingError as error:
        return Failure(rank, "malformed", f"its receipt is {error.message}")
    if size > MAX_RECEIPT_BYTES:
        return Failure(rank, "malformed", f"its receipt has {size} bytes")
    for name, wanted in expected.items():
        if wanted is not None and receipt.get(name) != wanted:
            return Failure(rank, "wrong_digest", f"its {name} is {str(receipt.get(name))[:80]}, expected {wanted}")
    return None


def _sort(answers: _Answers, rank: str, reply: object, *, kind: str, serial: int) -> None:
    if reply is None:
        answers.silent[rank] = "no answer"
    elif not isinstance(reply, dict) or not isinstance(reply.get("ok"), bool):
        answers.failures.append(Failure(rank, "malformed", "its answer is not a reply"))
    elif "serial" in reply and reply["serial"] != serial:
        # A reply to an earlier message, late or delivered twice: this one is still to come.
        answers.silent[rank] = f"no answer but a late one (message {reply['serial']} of {serial})"
    elif not reply["ok"]:
        reason = str(reply.get("reason", "no reason given"))
        answers.failures.append(Failure(rank, str(reply.get("code", "failed")), reason))
    elif "serial" not in reply or reply.get("rank") != rank or reply.get("kind") != kind:
        answers.failures.append(Failure(rank, "out_of_step", f"answered {kind} with a reply to something else"))
    else:
        answers.done[rank] = reply
