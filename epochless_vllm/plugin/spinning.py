"""Seam: how a process waits for the next message of a shared-memory queue where its spinning takes from a publication.

vLLM's reader spins for a second after each message before it waits on a socket. Each look takes the interpreter, so a
thread that loads an adapter beside it gives the interpreter away at every read and hash, a thousand times, and takes
three times as long. A reader that waits for a long step takes a core, too: on a host whose other cores serve, more than
a quarter of the one that is left to publish on. Here the reader waits on the socket at once while a thread of this
process publishes, and for a moment after it had to share its core; a millisecond at a time, since of two notifications
in quick succession the second may be dropped, which vLLM's second of spinning hides. Dies when upstream's reader spins
without the interpreter, and not where others want its core.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin.background import is_working

LOOK_MS = 1  # the longest that a message without notification waits
SHARED_S = 0.0003  # a yield takes a microsecond on a core of one's own, and another thread's turn where it is shared
APART_S = 0.005  # off the core that turned out to be shared, before the next look at it

_APART_UNTIL = "epochless_apart_until"  # an attribute of a reader: monotonic seconds
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
    """Wait for data as vLLM does; without spinning while this process publishes, or others want its core."""
    assert _original is not None  # this function is reached through ``install`` only
    began = time.monotonic()
    if not is_working() and began >= getattr(self, _APART_UNTIL, 0.0):
        spins, turns = began <= self.last_read + self.busy_loop_s, _turns()
        _original(self, timeout_ms)
        if spins and (ended := time.monotonic()) - began > SHARED_S and _turns() > turns:
            setattr(self, _APART_UNTIL, ended + APART_S)
        return
    spins_s = self.busy_loop_s
    self.busy_loop_s = -1.0  # the last read is always longer ago
    try:
        _original(self, LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS))
    finally:
        self.busy_loop_s = spins_s


def _turns() -> int:
    """Return how often this thread has lost its core while it could run; waiting for the interpreter does not count."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
