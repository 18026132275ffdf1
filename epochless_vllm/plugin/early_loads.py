"""Adapters that a rank loads while the store still writes them, before anybody has named or decided anything.

A publication that follows finds its adapter built and named by its own bytes; one that does not has cost some memory
for ``KEEP_S``. Promises never to fail a publication: what goes wrong here happens again, and is told, when the revision
is loaded. Knows no transactions.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from epochless_vllm.errors import EpochlessError
from epochless_vllm.plugin.background import short_turns, step_aside
from epochless_vllm.plugin.loading import Assembled
from epochless_vllm.plugin.logs import logger

MAX_LOADS = 2  # at a time, each with an adapter's memory: one arriving while another is being decided
KEEP_S = 30.0  # an adapter that nobody asked for
WAIT_S = 20.0  # for one whose last bytes are written; within a publication's deadline it could be loaded once more


class _Load:
    def __init__(self, staged: str) -> None:
        self.staged = staged
        self.assembled: Assembled | None = None
        self.ended = threading.Event()
        self.taken = threading.Event()


class EarlyLoads:
    """The early loads of one rank. Any thread may call."""

    def __init__(
        self, assemble: Callable[[str], Assembled], is_staged: Callable[[str], bool], is_idle: Callable[[], bool]
    ) -> None:
        """Load by these calls.

        Args:
            assemble: builds what has that name in the store while it is written.
            is_staged: whether it still is.
            is_idle: whether the engine leaves its cores to others.
        """
        self._assemble = assemble
        self._is_idle = is_idle
        self._is_staged = is_staged
        self._lock = threading.Lock()
        self._loads: list[_Load] = []  # the oldest first

    def begin(self, staged: str) -> None:
        """Begin to load what is being written under a name; does nothing while enough are loading.

        Raises:
            RuntimeError: this process can have no more threads.
        """
        with self._lock:
            if len(self._loads) == MAX_LOADS:
                ended = [load for load in self._loads if load.ended.is_set()]
                if not ended:
                    return
                self._forget(ended[0])
            load = _Load(staged)
            self._loads.append(load)
        arguments = (weakref.ref(self), load)
        try:
            threading.Thread(target=_run_and_keep, args=arguments, name="epochless-early-load", daemon=True).start()
        except RuntimeError:
            load.ended.set()
            self.give_up(load)
            raise

    def take(self, revision_id: str) -> Assembled | None:
        """Return the adapter of a revision that is written, and forget it here; None: load it."""
        loads = list(self._loads)
        for load in sorted(loads, key=lambda load: not load.ended.is_set()):
            if not load.ended.is_set() and not self._is_staged(load.staged):
                load.ended.wait(WAIT_S)
            assembled = load.assembled
            if assembled is not None and assembled.stored.manifest.revision_id == revision_id:
                with self._lock:
                    if load in self._loads:
                        self._forget(load)
                        return assembled
        return None

    def _forget(self, load: _Load) -> None:
        self._loads.remove(load)
        load.taken.set()

    def run(self, load: _Load) -> None:
        """Load, in the thread that is for it."""
        try:
            step_aside(idle=self._is_idle())
            with short_turns():
                load.assembled = self._assemble(load.staged)
        except EpochlessError as error:
            logger.debug("an adapter was not loaded early: %s", error.message)
        finally:
            load.ended.set()
            if load.assembled is None:
                self.give_up(load)

    def give_up(self, load: _Load) -> None:
        """Forget a load unless it was taken."""
        with self._lock:
            if load in self._loads:
                self._forget(load)


def _run_and_keep(loads: weakref.ref[EarlyLoads], load: _Load) -> None:
    """Load, and keep what was loaded for a while; meanwhile the worker and its weights may go."""
    if (alive := loads()) is not None:
        alive.run(load)
        del alive
        load.taken.wait(KEEP_S)
    if (alive := loads()) is not None:
        alive.give_up(load)
