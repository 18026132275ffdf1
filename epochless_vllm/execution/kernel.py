"""The numba kernel: each row's delta from its own slot's weights, at true rank, in float32.

One call serves all rows, slots and slices of a layer. Within it a tile of rows of one slot reads that slot's weights
once, and no weight of any other slot: a NaN in one adapter cannot reach a row of another. The order of additions for a
row is fixed by the layer and its adapter, never by its neighbours or the thread count, so a delta is the same bits in
every batch. Knows no torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import config, njit, prange, set_num_threads  # type: ignore[import-untyped]

# torch's kernels run on the OpenMP pool; a second pool would spin against it for the same cores.
config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

# Reordering a dot product's additions is allowed, as vector units need it; assuming away NaN and infinity is not.
_DOT_MATH = {"reassoc", "contract", "nsz"}


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
            h0 += x[i] * a0[i]
            h1 += x[i] * a1[i]
            h2 += x[i] * a2[i]
            h3 += x[i] * a3[i]
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
                delta[o] += (h0 * b0[o] + h1 * b1[o]) + (h2 * b2[o] + h3 * b3[o])
        y = y_NO[rows_M[m], left:right]
        for o in range(right - left):
            y[o] += delta[o]


@njit(parallel=True)  # type: ignore[untyped-decorator]
def add_rows(
    y_NO: Any, x_NI: Any, a_SKI: Any, b_SRO: Any, offsets_SP: Any, blocks_B3: Any, rows_M: Any, tiles_T3: Any
) -> None:
    """Add to each planned row of ``y`` the delta of its slot; see SlotWeights and RowPlan for the arrays.

    ``y`` and ``x`` are C-contiguous float32; columns of the blocks beyond y's width are left out.
    """
    tiles = tiles_T3.shape[0]
    last = offsets_SP.shape[1] - 1
    most_ranks = 0
    for slot in range(offsets_SP.shape[0]):
        most_ranks = max(most_ranks, offsets_SP[slot, last])
    h_MK = np.empty((rows_M.shape[0], most_ranks), np.float32)
    quads = most_ranks // 4
    for task in prange(tiles * quads):
        tile, k = task // quads, task % quads * 4
        slot = tiles_T3[tile, 2]
        if k < offsets_SP[slot, last]:
            _shrink_tile(x_NI, a_SKI[slot], k, rows_M, tiles_T3[tile, 0], tiles_T3[tile, 1], h_MK)
    blocks = blocks_B3.shape[0]
    for task in prange(tiles * blocks):
        tile, block = task // blocks, task % blocks
        slot = tiles_T3[tile, 2]
        left, right, part = blocks_B3[block, 0], min(blocks_B3[block, 1], y_NO.shape[1]), blocks_B3[block, 2]
        begin = offsets_SP[slot, part]
        ranks = offsets_SP[slot, part + 1] - begin
        if ranks > 0 and left < right:
            first, end = tiles_T3[tile, 0], tiles_T3[tile, 1]
            _expand_tile(y_NO, b_SRO[slot], left, right, ranks, begin, rows_M, first, end, h_MK)


def use_threads(count: int) -> None:
    """Run later calls from this thread on ``count`` threads, or as many as numba was started with."""
    set_num_threads(min(count, config.NUMBA_NUM_THREADS))


def compile_kernel() -> None:
    """Compile now (seconds), so that no request waits for it; a second call does nothing."""
    if not add_rows.signatures:
        one = np.zeros((1, 1), np.float32)
        none = np.zeros((0, 3), np.int64)
        add_rows(
            one,
            one,
            np.zeros((1, 4, 1), np.float32),
            np.zeros((1, 4, 1), np.float32),
            np.zeros((1, 2), np.int64),
            none,
            np.zeros(0, np.int64),
            none,
        )
