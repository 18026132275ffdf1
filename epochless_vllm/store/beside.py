"""A thread that hashes while another reads and writes: behind that one for a core, and on any core of the process.

Knows nothing of what the thread does.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 10  # relative to the thread that is helped: a core that serves gives this one a tenth of it at most
_CORES = os.sched_getaffinity(0)  # of the process before it gave its threads cores of their own


def helper() -> ThreadPoolExecutor:
    """Return one thread that runs what it is given in that order, for the length of a ``with`` block."""
    cores = _CORES | os.sched_getaffinity(0)
    niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def stay_behind() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, niceness + NICENESS))
        # A publishing thread may be kept off the cores that serve; while those are idle, they shorten its work.
        with contextlib.suppress(OSError):  # the process's first thread may have ended, or a core may be gone
            os.sched_setaffinity(0, cores | os.sched_getaffinity(os.getpid()))

    return ThreadPoolExecutor(1, thread_name_prefix="epochless-hash", initializer=stay_behind)
