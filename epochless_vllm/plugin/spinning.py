"""Seam: how a process waits for the next message of a shared-memory queue while it publishes in the background.

vLLM's reader spins for a second after each message before it waits on a socket. Each look takes the interpreter, so a
thread that loads an adapter beside it gives the interpreter away at every read and hash, a thousand times, and takes
three times as long. Here the reader waits on the socket at once while a thread of this process publishes, a millisecond
at a time: of two notifications in quick succession the second may be dropped, which vLLM's second of spinning hides.
Dies when upstream's reader spins without the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin.background import is_working

LOOK_MS = 1  # the longest that a message without notification waits

_original: Callable[..., None] | None = None


def install() -> None:
    """Replace ``SpinCondition.wait``; a second call does nothing.

    Raises:
        SeamError: the target is missing.
    """
    global _original
    from vllm.distributed.device_communicators import shm_broadcast

    condition = getattr(shm_broadcast, "SpinCondition", None)
    if condition is None or not hasattr(condition, "wait"):
        raise SeamError("shm_broadcast has no SpinCondition.wait", target="SpinCondition.wait")
    if condition.wait is not wait:
        _original = condition.wait
        condition.wait = wait


def wait(self: Any, timeout_ms: int | None = None) -> None:
    """Wait for data as vLLM does; without spinning while this process publishes."""
    assert _original is not None  # this function is reached through ``install`` only
    if not is_working():
        _original(self, timeout_ms)
        return
    spins_s = self.busy_loop_s
    self.busy_loop_s = -1.0  # the last read is always longer ago
    try:
        _original(self, LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS))
    finally:
        self.busy_loop_s = spins_s
