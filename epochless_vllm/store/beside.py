"""Work done in order by a thread beside the one that gives it, or by that one where the other gets no core.

Promises each action once, one at a time, in the order given. The thread is behind every other for a core; who has
waited ``PATIENCE_S`` for it does what is left without it. Knows nothing of what is done.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType

NICENESS = 5  # relative to the thread that is helped
PATIENCE_S = 0.005  # an action takes a millisecond or two; where no core is idle it may take fifty
# Of the process before it gave its threads cores of their own.
_CORES: set[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


class Helper:
    """A ``with`` block beside which a thread works. One thread gives and waits."""

    def __init__(self) -> None:
        self._actions: deque[Callable[[], None]] = deque()
        self._turn = threading.Lock()  # held while an action runs, whoever runs it
        self._wakes: SimpleQueue[bool] = SimpleQueue()  # True for each action, False at the end
        self._given = self._done = 0  # the one is the giver's, the other of who has the turn
        self._failure: BaseException | None = None
        self._alone = False

    def __enter__(self) -> Helper:
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        # A publishing thread may be kept off the cores that serve; while those are idle, they shorten its work.
        cores = _CORES | os.sched_getaffinity(0)
        standing = (min(19, niceness + NICENESS), cores)
        threading.Thread(target=self._work, args=standing, name="epochless-helper", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for what was given, or drop it where the block failed; nothing of it runs later."""
        try:
            if kind is None:
                self.wait()
        finally:
            with self._turn:  # nothing runs now, and nothing will
                self._alone = True
            self._wakes.put(False)

    def give(self, action: Callable[[], None]) -> None:
        """Have an action done, by the end of the block at the latest."""
        self._given += 1
        self._actions.append(action)
        self._wakes.put(True)

    def wait(self, left: int = 0) -> None:
        """Return once at most ``left`` actions are not done; some of them may be done here.

        Raises:
            BaseException: what an action raised; those after it are dropped.
        """
        while self._has_more_than(left):
            if not self._turn.acquire(timeout=PATIENCE_S):
                self._alone = True  # the thread ends with the action it is in
                self._turn.acquire()
            try:
                if self._has_more_than(left):
                    self._do_next()
            finally:
                self._turn.release()
        if self._failure is not None:
            raise self._failure

    def _has_more_than(self, left: int) -> bool:
        return self._given - self._done > (0 if self._alone else left)

    def _work(self, niceness: int, cores: set[int]) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        with contextlib.suppress(OSError):  # the process's first thread may have ended, or a core may be gone
            os.sched_setaffinity(0, cores | os.sched_getaffinity(os.getpid()))
        while self._wakes.get():
            with self._turn:
                if self._alone:
                    return
                if self._actions:  # or the giver was quicker
                    self._do_next()

    def _do_next(self) -> None:
        action = self._actions.popleft()
        try:
            if self._failure is None:
                action()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._failure = error
        finally:
            self._done += 1
