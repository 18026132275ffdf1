"""Threads that publish while others serve: behind them for a core, and quick to hand the interpreter back.

Says whether any works in this process. Knows nothing of what the threads do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

NICENESS = 5  # relative to the process: where a core is shared, serving goes first, and publishing still moves
SWITCH_INTERVAL_S = 5e-5  # a few hundred operations a step then lose little even if each has to wait

_count_lock = threading.Lock()
_working = 0  # threads inside ``short_turns``
_usual_interval = 0.0  # seconds; Python's, while any is inside


def is_working() -> bool:
    """Return whether a thread of this process is publishing, or sealing receipts, beside its step loop."""
    return _working > 0


def bound_cores() -> set[int]:
    """Return the cores that VLLM_CPU_OMP_THREADS_BIND names for the ranks' threads; none where it names none."""
    cores: set[int] = set()
    for part in os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "").replace("|", ",").split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return set()
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def step_aside(*, idle: bool = False) -> None:
    """Put the calling thread behind the process's other threads, and on cores that no rank computes on, if any.

    Args:
        idle: no rank computes at the moment: on any core.
    """
    behind = min(19, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), behind)
    _move_off(set() if idle else bound_cores() or os.sched_getaffinity(os.getpid()))


def leave_ranks_their_cores() -> None:
    """Keep the calling thread off the cores that ranks are bound to by name.

    An engine core that waits for its ranks spins; where a scheduler puts it on a rank's core, it takes half of it.
    """
    if cores := bound_cores():
        _move_off(cores)


def _move_off(cores: set[int]) -> None:
    others = set(range(os.cpu_count() or 1)) - cores
    if others:
        with contextlib.suppress(OSError):  # a container may own fewer cores than it sees; the niceness remains
            os.sched_setaffinity(0, others)


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Let the other threads of this process take the interpreter back at once while this one works.

    A step loop gives the interpreter up at every operation it launches; at Python's default it would wait 5 ms each.
    """
    global _working, _usual_interval
    with _count_lock:
        if _working == 0:
            _usual_interval = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual_interval, SWITCH_INTERVAL_S))
        _working += 1
    try:
        yield
    finally:
        with _count_lock:
            _working -= 1
            if _working == 0:
                sys.setswitchinterval(_usual_interval)
