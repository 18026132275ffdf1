"""Hashing beside the thread that reads and writes: by a thread of its own while a core is idle, else by that one.

The thread is behind every other for a core, and would be waited for where none is idle. Knows nothing of what is done.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

NICENESS = 10  # relative to the thread that is helped: a core that serves gives this one a tenth of it at most
_LOAD = Path("/proc/loadavg")
# Of the process before it gave its threads cores of their own.
_CORES: set[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def helper() -> Executor:
    """Return what runs what it is given in that order, for the length of a ``with`` block."""
    return _thread() if has_idle_core() else _Inline()


def has_idle_core() -> bool:
    """Return whether fewer threads than cores run or want to at this moment; no where the system does not say."""
    try:
        runnable, _, _ = _LOAD.read_text().split()[3].partition("/")
    except OSError:
        return False
    return int(runnable) < (os.cpu_count() or 1)


class _Inline(Executor):
    """Runs what it is given at once, in the thread that gives it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for, as from a thread
            future.set_exception(error)
        return future


def _thread() -> ThreadPoolExecutor:
    cores = _CORES | os.sched_getaffinity(0)
    niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def stay_behind() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, niceness + NICENESS))
        # A publishing thread may be kept off the cores that serve; while those are idle, they shorten its work.
        with contextlib.suppress(OSError):  # the process's first thread may have ended, or a core may be gone
            os.sched_setaffinity(0, cores | os.sched_getaffinity(os.getpid()))

    return ThreadPoolExecutor(1, thread_name_prefix="epochless-hash", initializer=stay_behind)
