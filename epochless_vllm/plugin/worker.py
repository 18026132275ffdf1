"""Seam: one rank's side of publication, on vLLM's worker.

Adds three methods to the worker that a collective RPC reaches by name, and opens the rank's channel, by which the same
messages come beside the steps, and word of what the store is writing. None ever raises: an exception there leaves the
executor's replies out of step. Adapters enter the CPU registry only and are pinned there; ``add_lora`` is never used,
since it activates at once and may evict a slot in use. Dies when upstream stages adapters without activating them.
"""

from __future__ import annotations

import os
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin.channel import Listener
from epochless_vllm.plugin.installer import LoRAInstaller
from epochless_vllm.publication.participant import Participant

LOAD_EARLY = "load_early"  # the kind of a message that decides nothing, and so is not the participant's
_ATTRIBUTE = "_epochless_rank"


class Rank:
    """The participant, the installer and the channel of one worker."""

    def __init__(self, worker: Any) -> None:
        parallel = worker.vllm_config.parallel_config
        self.name = rank_name(parallel.data_parallel_index, worker.rank)
        self.installer = LoRAInstaller(worker, self.name)
        self.participant = Participant(self.name, self.installer)
        self.listener = Listener(_handle_weakly(self))
        weakref.finalize(worker, self.listener.close)


def _handle_weakly(rank: Rank) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what answers the rank's messages, for a thread that must not keep the worker and its weights alive."""
    weak = weakref.ref(rank)

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        alive = weak()
        if alive is None:
            return {"ok": False, "code": "rank_ended", "reason": "the worker has ended"}
        if message.get("kind") == LOAD_EARLY:
            return _load_early(alive, message)
        return alive.participant.handle(message)

    return handle


def _load_early(rank: Rank, message: dict[str, Any]) -> dict[str, Any]:
    try:
        rank.installer.load_early(str(message["staged"]))
    except Exception as error:  # noqa: BLE001  # the channel's other end loses nothing but time
        return {"ok": False, "rank": rank.name, "code": "not_loaded_early", "reason": _describe(error)}
    return {"ok": True, "rank": rank.name}


def rank_name(engine_index: int, rank: int) -> str:
    """Return the name of a rank in receipts and errors."""
    return f"engine{engine_index}/rank{rank}"


def _rank_of(worker: Any) -> Rank:
    rank = getattr(worker, _ATTRIBUTE, None)
    if rank is None:
        rank = Rank(worker)
        setattr(worker, _ATTRIBUTE, rank)
    return rank


def epochless_call(self: Any, message: dict[str, Any]) -> dict[str, Any]:
    """Handle one publication message between two steps, without waiting for a load; never raises."""
    try:
        return _rank_of(self).participant.handle({**message, "wait_ms": 0})
    except Exception as error:  # noqa: BLE001  # a raise would leave the executor's replies out of step for good
        return _failure(self, error)


def epochless_address(self: Any) -> dict[str, Any]:
    """Return ``address``, where this rank listens for messages that need no step; never raises."""
    try:
        rank = _rank_of(self)
        return {"ok": True, "rank": rank.name, "address": rank.listener.address}
    except Exception as error:  # noqa: BLE001  # as above
        return _failure(self, error)


def epochless_activate(self: Any, lora_int_ids: list[int], in_step: list[int]) -> dict[str, Any]:
    """Copy adapters into slots and read them back; never raises.

    Args:
        lora_int_ids: adapters to activate.
        in_step: adapters of the coming step, whose slots must not be evicted.

    Returns:
        ``ok``, ``rank`` and, per id, ``slot_digest`` or a ``reason``.
    """
    try:
        rank = _rank_of(self)
        results = {str(i): rank.installer.activate(i, in_step) for i in lora_int_ids}
        return {"ok": all(r["ok"] for r in results.values()), "rank": rank.name, "results": results}
    except Exception as error:  # noqa: BLE001  # as above
        return _failure(self, error)


def _failure(worker: Any, error: Exception) -> dict[str, Any]:
    rank = getattr(worker, _ATTRIBUTE, None)
    name = rank.name if rank is not None else f"rank {getattr(worker, 'rank', '?')} of process {os.getpid()}"
    return {"ok": False, "rank": name, "code": "rank_failed", "reason": _describe(error)}


def _describe(error: Exception) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def install() -> None:
    """Add the three methods to ``WorkerBase``.

    Raises:
        SeamError: the target is missing, or a name is taken by something else.
    """
    from vllm.v1.worker import worker_base

    if not hasattr(worker_base, "WorkerBase"):
        raise SeamError("vllm.v1.worker.worker_base has no WorkerBase", target="WorkerBase")
    for method in (epochless_call, epochless_address, epochless_activate):
        setattr(worker_base.WorkerBase, method.__name__, method)
