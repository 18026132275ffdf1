"""Runs compiled tasks on torch's own OpenMP team.

The engine pins torch's OpenMP threads to its cores and sizes the team. A second pool, such as numba's, would be
pinned with the main thread to one core, or fight the first for all of them; and numba's OpenMP layer, where it
shares torch's runtime, sets the team's size for torch too. So the tasks here enter the runtime torch uses, by the
entry point compilers emit, with the team's size left as torch set it. Where there is no such entry point the calling
thread does all the work, with equal results.

Knows nothing of what a task does: a task takes tickets from a counter until none is left, so any number of threads
may run it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

_BUNDLED = ("libgomp*.so*", "libomp*.dylib")


class Task(NamedTuple):
    """A compiled ``void (*)(void *)``: its address, the same as a Python callable, and what owns the code."""

    address: int
    call: Callable[[ctypes.Array[Any]], Any]
    owner: object


def task_from_address(address: int, owner: object) -> Task:
    """Return the task at an address; calling it releases the interpreter lock."""
    return Task(address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), owner)


def team_size() -> int:
    """Return how many threads ``run_task`` uses at most."""
    return torch.get_num_threads() if _parallel_entry() else 1


def run_task(task: Task, job: ctypes.Array[Any], *, parallel: bool) -> None:
    """Run ``task(job)`` on every thread of the team, or on this one alone, and return when all are done."""
    entry = _parallel_entry() if parallel else None
    if entry is None:
        task.call(job)
    else:
        entry(task.address, job, 0, 0)  # 0 threads: as many as torch uses


@lru_cache(maxsize=1)
def _parallel_entry() -> Callable[[int, ctypes.Array[Any], int, int], None] | None:
    if not torch.backends.openmp.is_available():
        return None
    libraries = Path(os.path.dirname(torch.__file__), "lib")
    # A preloaded runtime comes first, as it does for torch. A bundled one counts only if torch has it open.
    attempts: list[tuple[str | None, int]] = [(None, ctypes.DEFAULT_MODE)]
    attempts += [(str(p), os.RTLD_NOLOAD | os.RTLD_LAZY) for glob in _BUNDLED for p in sorted(libraries.glob(glob))]
    for name, mode in attempts:
        try:
            entry = ctypes.CDLL(name, mode=mode).GOMP_parallel
        except (OSError, AttributeError):  # not open here, or a runtime without this entry point
            continue
        entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        entry.restype = None
        return entry
    return None
