"""Seam: the engine core's side of publication.

Adds the calls a front end makes, and a gate through which every request passes: a request whose adapter the journal
does not show as committed, and so held by every rank, or that was retired while the request travelled, is refused
alone, before it can reach the step loop (where a missing adapter would end the engine). Also reads back each adapter's
slots before its first step. Dies when upstream stages, drains and removes adapters by identity.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from epochless_vllm.errors import EpochlessError, InvalidRequestError, RetiredRevisionError, SeamError
from epochless_vllm.plugin.activation import forget_verified, guard_activation
from epochless_vllm.plugin.background import leave_ranks_their_cores
from epochless_vllm.plugin.options import options_of
from epochless_vllm.protocol.names import split_lora_name
from epochless_vllm.protocol.publication import State

GATE = "_epochless_gate"


class RevisionGate:
    """Which adapters this engine serves and how many requests hold each; requests enter from an input thread."""

    def __init__(self, committed: Callable[[], State]) -> None:
        """Serve what ``committed`` says is live, looked up when a request names an adapter for the first time."""
        self._lock = threading.Lock()
        self._committed = committed
        self._open: dict[int, str] = {}
        # What left this engine, and the journal's sequence then: a removal that failed elsewhere is not recorded, and
        # the adapter may be published again under its id.
        self._closed: dict[int, int] = {}
        self._entering: Counter[int] = Counter()

    def check(self, lora_request: Any) -> None:
        """Require that the adapter is served here.

        Raises:
            RetiredRevisionError: it was retired after the request was resolved.
            InvalidRequestError: the LoRARequest was not made by Epochless.
        """
        with self._lock:
            self._require_open(lora_request)

    def enter(self, lora_request: Any) -> None:
        """Admit a request on its way to the scheduler; ``leave`` must follow.

        Raises:
            RetiredRevisionError, InvalidRequestError: see ``check``.
        """
        with self._lock:
            self._require_open(lora_request)
            self._entering[lora_request.lora_int_id] += 1

    def _require_open(self, lora_request: Any) -> None:
        lora_int_id = lora_request.lora_int_id
        revision_id = split_lora_name(lora_request.lora_name)[1]
        if self._open.get(lora_int_id) == revision_id:
            return
        state = self._committed()
        live = state.adapters.get(revision_id) == lora_int_id and revision_id not in state.quarantine
        if live and (lora_int_id not in self._closed or _latest(state, revision_id) > self._closed[lora_int_id]):
            self._open[lora_int_id] = revision_id
            self._closed.pop(lora_int_id, None)
            return
        if lora_int_id in self._closed:
            raise RetiredRevisionError(f"{lora_request.lora_name} was retired before the request arrived")
        raise InvalidRequestError(
            f"lora_request: {lora_request.lora_name} (id {lora_int_id}) was not published here; "
            "obtain it from resolve()",
            field="lora_request",
        )

    def leave(self, lora_int_id: int) -> None:
        """Note that the scheduler now holds the request, or that it failed on the way."""
        with self._lock:
            self._entering[lora_int_id] -= 1

    def close(self, lora_int_id: int, scheduled: int) -> int:
        """Stop serving an adapter if nothing holds it; return the number of holders."""
        with self._lock:
            holders = scheduled + self._entering[lora_int_id]
            if holders == 0:
                self._open.pop(lora_int_id, None)
                self._closed[lora_int_id] = self._committed().sequence
            return holders

    def entering(self, lora_int_id: int) -> int:
        with self._lock:
            return self._entering[lora_int_id]


def _latest(state: State, revision_id: str) -> int:
    return max((holding.last for key, holding in state.holdings.items() if key[1] == revision_id), default=0)


def count_scheduled(core: Any, lora_int_id: int) -> int:
    """Return the requests the scheduler holds on an adapter: waiting, running, preempted or paused."""
    scheduler = getattr(core, "scheduler", None)
    if scheduler is None:  # during recovery the engine has no scheduler, and so no request
        return 0
    requests = scheduler.requests.values()
    return sum(1 for r in requests if r.lora_request is not None and r.lora_request.lora_int_id == lora_int_id)


def epochless_call(self: Any, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Send a publication message to every rank of this engine and return their replies, in rank order."""
    gate = getattr(self, GATE)
    if message["kind"] == "retire":
        holders = gate.close(message["lora_int_id"], count_scheduled(self, message["lora_int_id"]))
        if holders:
            size = self.vllm_config.parallel_config.world_size
            return [{"ok": False, "code": "in_use", "reason": f"{holders} requests hold it", "holders": holders}] * size
        forget_verified(self, message["lora_int_id"])
    replies: list[dict[str, Any]] = self.collective_rpc("epochless_call", args=(message,))
    return replies


def epochless_address(self: Any) -> list[dict[str, Any]]:
    """Return where each rank of this engine listens, in rank order."""
    addresses: list[dict[str, Any]] = self.collective_rpc("epochless_address")
    return addresses


def epochless_holders(self: Any, lora_int_ids: list[int]) -> list[int]:
    """Return the requests that hold each adapter here, those on their way to the scheduler included."""
    gate = getattr(self, GATE)
    return [gate.entering(lora_int_id) + count_scheduled(self, lora_int_id) for lora_int_id in lora_int_ids]


def install() -> None:
    """Add the calls and the gate to ``EngineCore``.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

    for name in ("preprocess_add_request", "add_request", "add_lora", "remove_lora", "pin_lora", "step"):
        if not hasattr(EngineCore, name):
            raise SeamError(f"EngineCore has no {name}", target=name)
    for process in (EngineCoreProc, DPEngineCoreProc):
        if "run_busy_loop" not in vars(process):
            raise SeamError(f"{process.__name__} has no run_busy_loop", target=f"{process.__name__}.run_busy_loop")
    if hasattr(EngineCore, "epochless_call"):
        return
    EngineCore.epochless_call = epochless_call
    EngineCore.epochless_address = epochless_address
    EngineCore.epochless_holders = epochless_holders
    _wrap_requests(EngineCore)
    _refuse_direct_adapters(EngineCore)
    guard_activation(EngineCore)
    _wrap_loop(EngineCoreProc)
    _wrap_loop(DPEngineCoreProc)


def _wrap_loop(process: Any) -> None:
    original = process.run_busy_loop

    def run_busy_loop(self: Any) -> None:
        leave_ranks_their_cores()  # not before the ranks were started: they would inherit it
        original(self)

    process.run_busy_loop = run_busy_loop


def _wrap_requests(engine_core: Any) -> None:
    preprocess, add = engine_core.preprocess_add_request, engine_core.add_request

    def preprocess_add_request(self: Any, request: Any) -> Any:
        gate = getattr(self, GATE, None)
        if gate is None or request.lora_request is None:
            return preprocess(self, request)
        gate.enter(request.lora_request)
        try:
            return preprocess(self, request)
        except BaseException:  # whatever ended it, the request is not on its way any more
            gate.leave(request.lora_request.lora_int_id)
            raise

    def add_request(self: Any, request: Any, request_wave: int = 0) -> None:
        gate = getattr(self, GATE, None)
        try:
            add(self, request, request_wave)
        finally:
            if gate is not None and request.lora_request is not None:
                gate.leave(request.lora_request.lora_int_id)

    engine_core.preprocess_add_request = preprocess_add_request
    engine_core.add_request = add_request


def _refuse_direct_adapters(engine_core: Any) -> None:
    for name in ("add_lora", "remove_lora", "pin_lora"):
        original = getattr(engine_core, name)

        def refuse(self: Any, argument: Any, *, name: str = name, original: Any = original) -> Any:
            if options_of(self.vllm_config.additional_config) is None:
                return original(self, argument)
            raise EpochlessError(f"{name}: adapters enter and leave by publish and retire only while Epochless is on")

        # vLLM converts a utility call's arguments by the method's annotations.
        refuse.__annotations__ = {"argument": original.__annotations__.get("lora_request", int)}
        setattr(engine_core, name, refuse)
