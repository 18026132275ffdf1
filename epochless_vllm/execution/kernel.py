"""The numba kernel: each row's delta from its own slot's weights, at true rank, in float32.

Activations and weights are float32, or bfloat16 kept in uint16 as the upper half of a float32; all arithmetic is
float32. One call serves all rows, slots and slices of a layer. Within it a tile of rows of one slot reads that slot's
weights once, and no weight of any other slot: a NaN in one adapter cannot reach a row of another. The order of
additions for a row is fixed by the layer and its adapter, never by its neighbours or the thread count, so a delta is
the same bits in every batch. Knows no torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import config, njit, prange, threading_layer, types  # type: ignore[import-untyped]
from numba.extending import overload  # type: ignore[import-untyped]
from numba.np.ufunc import parallel  # type: ignore[import-untyped]

# torch's kernels run on the OpenMP pool; a second pool would spin against it for the same cores.
config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# Reordering a dot product's additions is allowed, as vector units need it; assuming away NaN and infinity is not.
_DOT_MATH = {"reassoc", "contract", "nsz"}


def _wide(value: Any) -> Any:
    raise NotImplementedError("exists compiled only")


@overload(_wide, strict=False)  # type: ignore[untyped-decorator]
def _wide_of(value: Any) -> Any:
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


def _rounded(value: Any, like: Any) -> Any:
    raise NotImplementedError("exists compiled only")


@overload(_rounded, strict=False)  # type: ignore[untyped-decorator]
def _rounded_to(value: Any, like: Any) -> Any:
    def round_to_bfloat16(value: Any, like: Any) -> Any:
        bits = np.float32(value).view(np.uint32)
        if value != value:  # NaN, which rounding could turn into zero
            return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
        even = (bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))

    return round_to_bfloat16 if like == types.uint16 else lambda value, like: value


@njit(fastmath=_DOT_MATH)  # type: ignore[untyped-decorator]
def _shrink_tile(x_NI: Any, a_KI: Any, k: int, rows_M: Any, first: int, end: int, h_MK: Any) -> None:
    """Four ranks of ``h = x·Aᵀ`` for the rows of one tile.

    Every row takes this one path: a second path for groups of rows would add in another order.
    """
    a0, a1, a2, a3 = a_KI[k], a_KI[k + 1], a_KI[k + 2], a_KI[k + 3]
    for m in range(first, end):
        x = x_NI[rows_M[m]]
        h0 = h1 = h2 = h3 = np.float32(0)
        for i in range(x.shape[0]):
            value = _wide(x[i])
            h0 += value * _wide(a0[i])
            h1 += value * _wide(a1[i])
            h2 += value * _wide(a2[i])
            h3 += value * _wide(a3[i])
        h_MK[m, k], h_MK[m, k + 1], h_MK[m, k + 2], h_MK[m, k + 3] = h0, h1, h2, h3


@njit(fastmath={"contract"})  # type: ignore[untyped-decorator]
def _expand_tile(
    y_NO: Any,
    b_RO: Any,
    left: int,
    right: int,
    ranks: int,
    k: int,
    rows_M: Any,
    first: int,
    end: int,
    h_MK: Any,
) -> None:
    """``y += h·Bᵀ`` over columns left..right, the delta summed before it meets y."""
    delta = np.empty(right - left, np.float32)
    for m in range(first, end):
        delta[:] = 0
        for r in range(0, ranks, 4):
            b0, b1 = b_RO[r, left:right], b_RO[r + 1, left:right]
            b2, b3 = b_RO[r + 2, left:right], b_RO[r + 3, left:right]
            h0, h1, h2, h3 = h_MK[m, k + r], h_MK[m, k + r + 1], h_MK[m, k + r + 2], h_MK[m, k + r + 3]
            for o in range(right - left):
                delta[o] += (h0 * _wide(b0[o]) + h1 * _wide(b1[o])) + (h2 * _wide(b2[o]) + h3 * _wide(b3[o]))
        y = y_NO[rows_M[m], left:right]
        for o in range(right - left):
            y[o] = _rounded(_wide(y[o]) + delta[o], y[o])


@njit  # type: ignore[untyped-decorator]
def _shrink_task(task: int, x_NI: Any, a_SKI: Any, offsets_SP: Any, rows_M: Any, tiles_T3: Any, h_MK: Any) -> None:
    quads = h_MK.shape[1] // 4
    first, end, slot = tiles_T3[task // quads]
    k = task % quads * 4
    if k < offsets_SP[slot, -1]:
        _shrink_tile(x_NI, a_SKI[slot], k, rows_M, first, end, h_MK)


@njit  # type: ignore[untyped-decorator]
def _expand_task(
    task: int, y_NO: Any, b_SRO: Any, offsets_SP: Any, blocks_B3: Any, rows_M: Any, tiles_T3: Any, h_MK: Any
) -> None:
    first, end, slot = tiles_T3[task // len(blocks_B3)]
    left, right, part = blocks_B3[task % len(blocks_B3)]
    right = min(right, y_NO.shape[1])
    begin = offsets_SP[slot, part]
    ranks = offsets_SP[slot, part + 1] - begin
    if ranks > 0 and left < right:
        _expand_tile(y_NO, b_SRO[slot], left, right, ranks, begin, rows_M, first, end, h_MK)


@njit(parallel=True)  # type: ignore[untyped-decorator]
def add_rows(
    y_NO: Any,
    x_NI: Any,
    a_SKI: Any,
    b_SRO: Any,
    offsets_SP: Any,
    blocks_B3: Any,
    rows_M: Any,
    tiles_T3: Any,
    on_one_thread: bool,
) -> None:
    """Add to each planned row of ``y`` the delta of its slot; see SlotWeights and RowPlan for the arrays.

    ``y`` and ``x`` are C-contiguous; columns of the blocks beyond y's width are left out.
    """
    h_MK = np.empty((len(rows_M), offsets_SP[:, -1].max()), np.float32)
    shrinks, expansions = len(tiles_T3) * (h_MK.shape[1] // 4), len(tiles_T3) * len(blocks_B3)
    if on_one_thread:
        for task in range(shrinks):
            _shrink_task(task, x_NI, a_SKI, offsets_SP, rows_M, tiles_T3, h_MK)
        for task in range(expansions):
            _expand_task(task, y_NO, b_SRO, offsets_SP, blocks_B3, rows_M, tiles_T3, h_MK)
    else:
        for task in prange(shrinks):
            _shrink_task(task, x_NI, a_SKI, offsets_SP, rows_M, tiles_T3, h_MK)
        for task in prange(expansions):
            _expand_task(task, y_NO, b_SRO, offsets_SP, blocks_B3, rows_M, tiles_T3, h_MK)


def compile_kernel(dtype: Any, threads: int) -> None:
    """Compile now (seconds), so that no request waits for it; a second call does nothing.

    Args:
        dtype: NumPy dtype of activations and weights: float32, or uint16 for bfloat16.
        threads: how many torch uses; numba's pool, if not started yet, becomes as large.
    """
    if not _has_pool():
        # Starting the pool sets the thread count of the OpenMP runtime that torch shares. Left to itself numba counts
        # the cores its importing thread may use: one in a worker bound to its cores, twice torch's with hyperthreads.
        parallel.NUM_THREADS = threads
    one, four, none = np.zeros((1, 1), dtype), np.zeros((1, 4, 1), dtype), np.zeros((0, 3), np.int64)
    add_rows(one, one, four, four, np.zeros((1, 2), np.int64), none, np.zeros(0, np.int64), none, True)


def _has_pool() -> bool:
    try:
        threading_layer()
    except ValueError:  # numba's way to say that it has started no threads
        return False
    return True
