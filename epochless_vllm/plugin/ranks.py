"""The coordinator's port to the ranks: by their channels, or by whatever connects this process to its engines.

Promises one reply per rank that answered within the deadline, and never an exception for a rank's failure: a partial
failure is the coordinator's business. What changes an engine's slots goes by the engine, which answers between two
steps; vLLM's own broadcast returns the first engine's answer only, so each engine is asked by name.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from epochless_vllm.errors import ChannelError
from epochless_vllm.plugin.background import short_turns, step_aside
from epochless_vllm.plugin.channel import Channel
from epochless_vllm.plugin.expectations import DTYPE_OF_TORCH, expect_registered
from epochless_vllm.plugin.logs import logger
from epochless_vllm.plugin.worker import LOAD_EARLY, rank_name
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.store.revisions import RevisionStore

CALL_TIMEOUT_S = 30.0  # one call is a message and a short step-thread action; longer means the engine is lost
ANNOUNCE_TIMEOUT_S = 2.0  # a rank that is slower to take note gains nothing by it
LOOK_S = 0.5  # how often a waiting call looks whether anybody is left to answer it

# What no step of the engine has to wait for: nothing of it touches a slot. Preparing a quarantined revision again does.
BESIDE_STEPS = frozenset({"prepare_begin", "prepare_poll", "commit"})


class Transport(Protocol):
    """Calls a method of every engine core this process is connected to."""

    def call(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Return each engine's result or the exception it ended with, by engine index."""


class CoreTransport:
    """Inside an engine core: calls that core itself."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._index = core.vllm_config.parallel_config.data_parallel_index

    def call(self, method: str, *arguments: Any) -> dict[int, Any]:
        return {self._index: getattr(self._core, method)(*arguments)}


class SyncTransport:
    """In a process with a synchronous client: ``LLM`` over an engine core process."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def call(self, method: str, *arguments: Any) -> dict[int, Any]:
        try:
            return {0: self._client.call_utility(method, *arguments)}
        except Exception as error:  # noqa: BLE001  # reported as this engine's answer; the coordinator decides
            return {0: error}


class AsyncTransport:
    """In an API server: the client lives on an event loop, the coordinator in a thread of its own."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def call(self, method: str, *arguments: Any) -> dict[int, Any]:
        if self._loop.is_closed():
            return self._nobody("this server has stopped")
        future = asyncio.run_coroutine_threadsafe(self._call_all(method, arguments), self._loop)
        end = time.monotonic() + CALL_TIMEOUT_S
        while True:
            try:
                return future.result(max(0.0, min(LOOK_S, end - time.monotonic())))
            except concurrent.futures.TimeoutError:
                # vLLM never answers a call to an engine that died meanwhile, and a loop that stopped runs no call; a
                # thread that waits for either would keep the process from ending.
                gone = "this server is stopping" if not self._loop.is_running() else self._engine_died()
                if gone is None and time.monotonic() < end:
                    continue
                future.cancel()
                return {} if gone is None else self._nobody(gone)

    def _engine_died(self) -> str | None:
        resources = getattr(self._client, "resources", None)
        return "the engine died" if getattr(resources, "engine_dead", False) else None

    def _nobody(self, reason: str) -> dict[int, Any]:
        return {int.from_bytes(engine, "little"): RuntimeError(reason) for engine in self._client.core_engines}

    async def _call_all(self, method: str, arguments: tuple[Any, ...]) -> dict[int, Any]:
        engines = list(self._client.core_engines)
        results = await asyncio.gather(
            *(self._client._call_utility_async(method, *arguments, engine=engine) for engine in engines),
            return_exceptions=True,
        )
        return {int.from_bytes(engine, "little"): result for engine, result in zip(engines, results, strict=True)}


class EngineRanks:
    """The Ranks port over a transport.

    Attributes:
        dtype: of the ranks' registries: ``F32``, ``BF16`` or ``F16``.
    """

    def __init__(self, transport: Transport, vllm_config: Any, store: RevisionStore) -> None:
        parallel = vllm_config.parallel_config
        self._transport = transport
        self._store = store
        self._size = parallel.world_size
        self.dtype = DTYPE_OF_TORCH[str(vllm_config.lora_config.lora_dtype)]
        local = isinstance(transport, CoreTransport)
        self._engines = [parallel.data_parallel_index] if local else list(range(parallel.data_parallel_size))
        # One thread, so that the expectation is computed while the ranks load.
        self._expecting = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="epochless-expectation", initializer=step_aside
        )
        self._expected: dict[str, concurrent.futures.Future[str]] = {}
        self._channel: Channel | None = None
        self._channel_lock = threading.RLock()  # what is being written is announced outside the coordinator's turn

    def names(self) -> tuple[str, ...]:
        """Return every rank that must take part in a publication."""
        return tuple(rank_name(engine, rank) for engine in self._engines for rank in range(self._size))

    def call(self, message: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Send a message to every rank; a rank that did not answer is missing from the result."""
        if message["kind"] == "prepare_begin":
            self._expect(message["revision_id"])
        elif message["kind"] in ("commit", "abort"):
            self.forget_expected(message["revision_id"])
        if message["kind"] in BESIDE_STEPS and not message.get("reload"):
            return self._ask_ranks(message)
        return self._ask_engines("epochless_call", message)

    def announce(self, staged: str) -> None:
        """Let every rank load a revision while it is written, by the name it has in the store until then.

        A rank that does not hear of it, or cannot, loads the revision when it is told to prepare it; so do all before
        their channels are open.
        """
        with self._channel_lock:
            replies = {}
            if self._channel is not None:
                replies = self._ask_channel({"kind": LOAD_EARLY, "staged": staged}, patience_s=ANNOUNCE_TIMEOUT_S)
        for rank, reply in replies.items():
            if not reply.get("ok"):
                logger.warning("%s does not load early what is being written: %s", rank, reply.get("reason"))

    def _ask_ranks(self, message: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Send a message by the ranks' channels; by new ones where one had ended."""
        with self._channel_lock:
            known = self._channel is not None
            replies = self._ask_channel(message)
            if known and self._channel is None:  # repeating a message is harmless
                replies = self._ask_channel(message)
            return replies

    def _ask_channel(self, message: dict[str, Any], *, patience_s: float = CALL_TIMEOUT_S) -> dict[str, dict[str, Any]]:
        if self._channel is None:
            found = self._ask_engines("epochless_address")
            if any("address" not in reply for reply in found.values()) or set(found) != set(self.names()):
                return {rank: reply for rank, reply in found.items() if "address" not in reply}
            try:
                self._channel = Channel({rank: reply["address"] for rank, reply in found.items()})
            except ChannelError as end:
                return {rank: _lost(rank, end) for rank in self.names()}
        timeout_s = patience_s + message.get("wait_ms", 0) / 1000
        replies: dict[str, dict[str, Any]] = {}
        for rank, reply in self._channel.ask(message, timeout_s=timeout_s).items():
            replies[rank] = _lost(rank, reply) if isinstance(reply, ChannelError) else _checked(reply, rank)
        if any(reply.get("code") == ChannelError.code for reply in replies.values()):
            self._channel.close()
            self._channel = None
        return replies

    def _ask_engines(self, method: str, *arguments: Any) -> dict[str, dict[str, Any]]:
        """Call a method of every engine that answers rank by rank, in order."""
        replies: dict[str, dict[str, Any]] = {}
        for engine, result in self._transport.call(method, *arguments).items():
            for rank in range(self._size):
                name = rank_name(engine, rank)
                if isinstance(result, BaseException):
                    reason = f"{type(result).__name__}: {result}"
                    replies[name] = {"ok": False, "rank": name, "code": "engine_failed", "reason": reason}
                elif rank < len(result):
                    replies[name] = _checked(result[rank], name)
        return replies

    def holders(self, lora_int_id: int) -> int:
        """Return the requests that hold an adapter in any engine; an engine that did not answer counts as one."""
        return self.holders_of([lora_int_id])[lora_int_id]

    def holders_of(self, lora_int_ids: Sequence[int]) -> dict[int, int]:
        """Return ``holders`` of each adapter, for one call of every engine."""
        ids = list(lora_int_ids)
        counts = dict.fromkeys(ids, len(self._engines))
        for answer in self._transport.call("epochless_holders", ids).values():
            if not isinstance(answer, BaseException):
                for lora_int_id, held in zip(ids, answer, strict=True):
                    counts[lora_int_id] += int(held) - 1
        return counts

    def note_expected(self, revision_id: str, registered: str) -> None:
        """Take the registered digest of a revision about to be published from whoever has just computed it here."""
        known: concurrent.futures.Future[str] = concurrent.futures.Future()
        known.set_result(registered)
        self._expected[revision_id] = known

    def forget_expected(self, revision_id: str) -> None:
        """Compute the digest again if it is asked for again."""
        self._expected.pop(revision_id, None)

    def _expect(self, revision_id: str) -> None:
        if revision_id not in self._expected:
            self._expected[revision_id] = self._expecting.submit(self._compute_expected, revision_id)

    def _compute_expected(self, revision_id: str) -> str:
        with short_turns():
            return expect_registered(self._store.read(RevisionId(revision_id)), self.dtype)

    def expected_registered(self, revision_id: str) -> str | None:
        """Return the registered digest every rank must report, computed here from the adapter's bytes.

        Raises:
            DigestMismatchError: the store's bytes changed.
        """
        self._expect(revision_id)
        return self._expected.pop(revision_id).result()


def _lost(rank: str, end: ChannelError) -> dict[str, Any]:
    return {"ok": False, "rank": rank, "code": end.code, "reason": f"its channel ended: {end}"}


def _checked(reply: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a reply, or a failure where another rank's reply stands in its place: the executor is out of step."""
    if reply.get("rank", name) != name:
        reason = f"the executor delivered the reply of {reply['rank']}; restart the server"
        return {"ok": False, "rank": name, "code": "out_of_step", "reason": reason}
    return {**reply, "rank": name}
