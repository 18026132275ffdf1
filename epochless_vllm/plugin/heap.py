"""Gives memory that a rank's allocator keeps back to the system.

glibc's allocator returns only what is free at the end of its heap. Steps of ever other sizes leave holes between blocks
that live on, and the process grows by hundreds of megabytes though it holds nothing more; stock vLLM's does the same.
Promises a bounded cost: at most one pass in ``PERIOD_S``. Does nothing under an allocator without ``malloc_trim``.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

PERIOD_S = 30.0  # a pass takes 10 to 20 ms for a heap of 600 MB

_last: float | None = None


def give_back(clock: Callable[[], float] = time.monotonic) -> bool:
    """Return what the allocator does not use to the system, unless it was done lately; say whether it was now.

    Args:
        clock: seconds.
    """
    global _last
    now = clock()
    if _last is not None and now - _last < PERIOD_S:
        return False
    _last = now
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True
