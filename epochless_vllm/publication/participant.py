"""A rank's side of a publication: prepares, commits, aborts and retires adapters when told to.

``Participant.handle`` takes and returns plain JSON types and never raises: an exception inside a collective call would
leave the engine's executor out of step with its ranks. Repeating a message changes nothing, and messages may come from
several threads. Knows no torch and no engine: an Installer does the work.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from epochless_vllm.durable import crash_point
from epochless_vllm.errors import EpochlessError
from epochless_vllm.protocol.manifest import RevisionId

REFUSED = "refused"  # the adapter's fault: the same bytes cannot succeed
MAX_REASON = 300  # characters; a reason travels, is journalled and shown


@dataclass(frozen=True)
class PrepareOrder:
    """What to load, and the id to register it under."""

    epoch: int
    transaction_id: int
    revision_id: RevisionId
    lora_int_id: int


class Loaded(Protocol):
    """An adapter read, checked and ready to register."""

    @property
    def receipt(self) -> dict[str, Any]:
        """``rank``, ``source_digest``, ``registered_digest`` and whatever else belongs to the evidence."""


class Installer(Protocol):
    """What the engine's worker does for a participant."""

    def load(self, order: PrepareOrder) -> Loaded:
        """Read and check an adapter, in a background thread. May raise EpochlessError; status 422 refuses it."""

    def register(self, loaded: Loaded) -> None:
        """Put a loaded adapter where requests can use it; must be short. Raises: nothing is left."""

    def remove(self, lora_int_id: int) -> dict[str, Any]:
        """Remove an adapter, zero its slot, wait for the device; between two steps. Returns a receipt."""

    def held(self) -> dict[int, str]:
        """Return revision_id by lora_int_id of what is registered."""


class _Phase(str, Enum):
    LOADING = "loading"
    LOADED = "loaded"
    REGISTERED = "registered"
    FAILED = "failed"


@dataclass
class _Candidate:
    """An adapter some transaction has asked for and none has decided. The lock guards what the thread writes."""

    order: PrepareOrder
    transactions: set[int]
    phase: _Phase = _Phase.LOADING
    loaded: Loaded | None = None
    failure: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    settled: threading.Event = field(default_factory=threading.Event)  # set when the thread has ended


@dataclass(frozen=True)
class _Held:
    revision_id: str
    receipt: dict[str, Any]


class Participant:
    """One rank's state machine. One message at a time: whatever thread brings one waits for the others."""

    def __init__(self, rank: str, installer: Installer) -> None:
        self.rank = rank
        self._installer = installer
        self._lock = threading.Lock()
        self._epoch = 0
        self._decided = 0  # the highest transaction committed or aborted; transactions are decided in order
        self._candidates: dict[int, _Candidate] = {}
        self._held: dict[int, _Held] = {}

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a message: ``{"ok": true, ...}`` or ``{"ok": false, "code", "reason", ...}``.

        A ``prepare_poll`` that says ``wait_ms`` is answered once the adapter is loaded, or after so many milliseconds;
        the thread that runs the engine's steps passes none on.
        Every reply repeats the message's kind and serial, and names the rank, so that a reply which arrives late or
        twice is recognised.
        """
        echo = {"rank": self.rank}
        try:
            echo.update({key: message[key] for key in ("kind", "serial") if key in message})
            self._wait_for_load(message)
            with self._lock:
                return {**self._answer(message), **echo}
        except Exception as error:  # noqa: BLE001 - see the module's docstring; the coordinator aborts on the reply
            return {**_failure_from(error), **echo}

    def _wait_for_load(self, message: dict[str, Any]) -> None:
        if message["kind"] == "prepare_poll" and message.get("wait_ms"):
            candidate = self._candidates.get(message["lora_int_id"])
            if candidate is not None:
                candidate.settled.wait(message["wait_ms"] / 1000)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        handlers = {
            "prepare_begin": self._begin,
            "prepare_poll": self._poll,
            "commit": self._commit,
            "abort": self._abort,
            "retire": self._retire,
        }
        kind = message["kind"]
        if kind == "status":
            return self._describe()
        if kind not in handlers:
            return _refusal("unknown_message", f"message of unknown kind {kind!r}")
        epoch = message["epoch"]
        if epoch < self._epoch:
            return _refusal("stale_epoch", f"epoch {epoch} is over; this rank follows epoch {self._epoch}")
        if epoch > self._epoch:
            self._enter_epoch(epoch)
        order = PrepareOrder(epoch, message["transaction_id"], message["revision_id"], message["lora_int_id"])
        return handlers[kind](order, message)

    def _enter_epoch(self, epoch: int) -> None:
        # What the earlier server left undecided was aborted by the later one's first act.
        for lora_int_id in list(self._candidates):
            self._drop(lora_int_id)
        self._epoch, self._decided = epoch, 0

    def _begin(self, order: PrepareOrder, message: dict[str, Any]) -> dict[str, Any]:
        if 0 < order.transaction_id <= self._decided:
            return _refusal("decided", f"transaction {order.transaction_id} is decided already")
        held = self._held.get(order.lora_int_id)
        candidate = self._candidates.get(order.lora_int_id)
        for known in (held.revision_id if held else None, candidate.order.revision_id if candidate else None):
            if known not in (None, order.revision_id):
                return _refusal("conflict", f"id {order.lora_int_id} is taken by {known}")
        if (
            candidate is not None
            and candidate.phase is _Phase.FAILED
            and order.transaction_id > max(candidate.transactions)
        ):
            self._drop(order.lora_int_id)  # an earlier transaction's failure, whose abort was lost
            candidate = None
        if candidate is not None:
            candidate.transactions.add(order.transaction_id)
        elif held is None or message.get("reload") is True:
            self._start(order)
        return {"ok": True}

    def _start(self, order: PrepareOrder) -> None:
        candidate = _Candidate(order, {order.transaction_id})
        self._candidates[order.lora_int_id] = candidate
        name = f"epochless-load-{order.lora_int_id}"
        threading.Thread(target=self._load, args=(candidate,), name=name, daemon=True).start()

    def _load(self, candidate: _Candidate) -> None:
        try:
            loaded = self._installer.load(candidate.order)
            crash_point("rank.load")
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread; the next poll tells
            with candidate.lock:
                candidate.phase, candidate.failure = _Phase.FAILED, _failure_from(error)
        else:
            with candidate.lock:
                candidate.phase, candidate.loaded = _Phase.LOADED, loaded
        candidate.settled.set()

    def _poll(self, order: PrepareOrder, message: dict[str, Any]) -> dict[str, Any]:
        candidate = self._candidates.get(order.lora_int_id)
        held = self._held.get(order.lora_int_id)
        if candidate is None or order.transaction_id not in candidate.transactions:
            if held is None or held.revision_id != order.revision_id:
                return _refusal("unknown_transaction", f"transaction {order.transaction_id} was not begun here")
            return {"ok": True, "done": True, "receipt": held.receipt}
        with candidate.lock:
            phase, loaded = candidate.phase, candidate.loaded
        if phase is _Phase.LOADING:
            return {"ok": True, "done": False}
        if phase is _Phase.FAILED:
            return dict(candidate.failure)
        assert loaded is not None  # the thread sets it together with the phase
        if phase is _Phase.LOADED:
            self._register(candidate, loaded)
        return {"ok": True, "done": True, "receipt": loaded.receipt}

    def _register(self, candidate: _Candidate, loaded: Loaded) -> None:
        lora_int_id = candidate.order.lora_int_id
        try:
            if self._held.pop(lora_int_id, None) is not None:  # prepared again after a quarantine
                self._installer.remove(lora_int_id)
            self._installer.register(loaded)
        except Exception as error:
            candidate.phase, candidate.failure = _Phase.FAILED, _failure_from(error)
            raise
        candidate.phase = _Phase.REGISTERED
        crash_point("rank.register")

    def _commit(self, order: PrepareOrder, message: dict[str, Any]) -> dict[str, Any]:
        candidate = self._candidates.get(order.lora_int_id)
        if candidate is not None and order.transaction_id in candidate.transactions:
            if candidate.phase is not _Phase.REGISTERED or candidate.loaded is None:
                return _refusal("not_prepared", f"id {order.lora_int_id} is {candidate.phase.value}, not registered")
            del self._candidates[order.lora_int_id]
            self._held[order.lora_int_id] = _Held(order.revision_id, candidate.loaded.receipt)
        elif order.lora_int_id not in self._held:
            return _refusal("not_prepared", f"id {order.lora_int_id} was not prepared here")
        self._decided = max(self._decided, order.transaction_id)
        crash_point("rank.commit")
        return {"ok": True}

    def _abort(self, order: PrepareOrder, message: dict[str, Any]) -> dict[str, Any]:
        candidate = self._candidates.get(order.lora_int_id)
        if candidate is not None:
            candidate.transactions.discard(order.transaction_id)
            if not candidate.transactions:
                self._drop(order.lora_int_id)
        self._decided = max(self._decided, order.transaction_id)
        return {"ok": True}

    def _retire(self, order: PrepareOrder, message: dict[str, Any]) -> dict[str, Any]:
        lora_int_id = order.lora_int_id
        if self._installer.held().get(lora_int_id, order.revision_id) != order.revision_id:
            return _refusal("conflict", f"id {lora_int_id} is taken by {self._installer.held()[lora_int_id]}")
        self._candidates.pop(lora_int_id, None)
        self._held.pop(lora_int_id, None)
        receipt: dict[str, Any] = {"absent": True}
        if lora_int_id in self._installer.held():
            receipt = self._installer.remove(lora_int_id)
        crash_point("rank.remove")
        return {"ok": True, "receipt": receipt}

    def _drop(self, lora_int_id: int) -> None:
        candidate = self._candidates.pop(lora_int_id)
        if candidate.phase is _Phase.REGISTERED:
            self._installer.remove(lora_int_id)

    def _describe(self) -> dict[str, Any]:
        held = [
            {"lora_int_id": lora_int_id, "revision_id": revision_id, **self._standing(lora_int_id)}
            for lora_int_id, revision_id in sorted(self._installer.held().items())
        ]
        loading = [i for i, c in self._candidates.items() if c.phase in (_Phase.LOADING, _Phase.LOADED)]
        return {"ok": True, "epoch": self._epoch, "held": held, "loading": sorted(loading)}

    def _standing(self, lora_int_id: int) -> dict[str, Any]:
        held = self._held.get(lora_int_id)
        return {"committed": held is not None, "receipt": held.receipt if held else None}


def _refusal(code: str, reason: str) -> dict[str, Any]:
    return {"ok": False, "code": code, "reason": reason[:MAX_REASON]}


def _failure_from(error: Exception) -> dict[str, Any]:
    if isinstance(error, EpochlessError):
        code = REFUSED if error.status == 422 else error.code
        return {**_refusal(code, error.message), "error": error.code}
    return _refusal("failed", f"{type(error).__name__}: {error}")
