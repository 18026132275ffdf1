"""What an allocator keeps of freed memory goes back to the system, and not too often."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from epochless_vllm.plugin import heap

BLOCK, BLOCKS = 60_000, 2000  # below the size from which glibc maps each block by itself

# Blocks with a small one behind each: freeing them leaves holes, and the heap as large as it was.
HOLES = f"""
import ctypes
from epochless_vllm.plugin import heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def resident():
    rollup = open("/proc/self/smaps_rollup").read()
    return 1024 * int(rollup.partition("Private_Dirty:")[2].split()[0])

blocks = []
for _ in range({BLOCKS}):
    block = libc.malloc({BLOCK})
    ctypes.memset(block, 1, {BLOCK})
    blocks.append(block)
    libc.malloc(100)
full = resident()
for block in blocks:
    libc.free(block)
freed = resident()
assert heap.give_back()
print(full, freed, resident())
"""

glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc's allocator")


@glibc
def test_holes_in_the_heap_go_back_to_the_system() -> None:
    result = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    full, freed, after = map(int, result.stdout.split())
    held = BLOCK * BLOCKS
    assert freed > full - held // 10, "the allocator gave it back by itself: nothing was shown"
    assert after < full - held * 9 // 10


@glibc
def test_a_pass_is_made_once_in_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_last", None)
    times = iter([100.0, 100.0 + heap.PERIOD_S / 2, 100.0 + heap.PERIOD_S, 101.0 + heap.PERIOD_S])
    assert [heap.give_back(lambda: next(times)) for _ in range(4)] == [True, False, True, False]
