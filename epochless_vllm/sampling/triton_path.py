"""Launches of the Triton kernels: which run depends only on which filters the batch has, so nothing is read back.

Checked in Triton's interpreter (``TRITON_INTERPRET=1`` before Triton is imported); not yet run on a GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from epochless_vllm.sampling import triton_kernels as kernels
from epochless_vllm.sampling.rows import GREEDY, MIN_WEIGHT, RECORD, TOP_K, TOP_P, TOP_P_SHIFT
from epochless_vllm.sampling.tables import build_tables
from epochless_vllm.sampling.torch_path import share_of

BLOCK = 2048  # logits to a program and to a stored sum
_BUCKETS = 2048
_LEVELS = ((32, 21), (21, 10), (10, 0))  # bits of the order key, most significant first, a histogram each


def sample_rows_triton(
    logits_BV: Tensor,
    parameters_BP: NDArray[np.int64],
    keys_B2: NDArray[np.uint32],
    positions_B: NDArray[np.int64],
    purpose: int,
) -> tuple[Tensor, Tensor]:
    """Return (tokens ``[B]``, records ``[B, 5]``), as ``sample_rows`` does."""
    device, (rows, vocabulary) = logits_BV.device, logits_BV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    sizes = {"BLOCK": BLOCK, "BLOCKS_P2": triton.next_power_of_2(blocks)}
    by_top_k = (parameters_BP[:, TOP_K] > 0) & (parameters_BP[:, TOP_K] < vocabulary)
    by_top_p = parameters_BP[:, TOP_P_SHIFT] > 0
    filtered = bool(by_top_k.any() or by_top_p.any() or (parameters_BP[:, MIN_WEIGHT] > 0).any())

    parameters = torch.as_tensor(np.ascontiguousarray(parameters_BP), device=device)
    keys = torch.as_tensor(np.ascontiguousarray(keys_B2).view(np.int64)[:, 0], device=device)
    positions = torch.as_tensor(np.ascontiguousarray(positions_B), device=device)
    peaks = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    whole, above, ties = torch.zeros((3, rows, blocks), dtype=torch.int64, device=device)
    state = _fresh_state(torch.zeros(rows, dtype=torch.int64, device=device))
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    records = torch.empty((rows, RECORD), dtype=torch.int64, device=device)

    logits = (logits_BV, logits_BV.stride(0), vocabulary)
    weighing = (parameters, _tables(device), peaks, blocks)
    grid = (rows, blocks)
    kernels.peaks_kernel[grid](*logits, peaks, blocks, BLOCK=BLOCK)
    if by_top_k.any():
        state = _fresh_state(torch.where(torch.as_tensor(by_top_k, device=device), parameters[:, TOP_K], 0))
        _select(logits, weighing, state, grid, sizes, by_mass=False)
    kernels.masses_kernel[grid](*logits, *weighing, state, whole, above, ties, **sizes)
    if by_top_p.any():
        total = above.sum(dim=1) + state[:, kernels.TIES.value] * state[:, kernels.TIE_WEIGHT.value]
        need = share_of(parameters[:, TOP_P], parameters[:, TOP_P_SHIFT], total)
        chosen = torch.as_tensor(by_top_p, device=device) & (parameters[:, GREEDY] == 0)
        state[:, kernels.NEED.value] = torch.where(chosen, need, 0)
        state[:, kernels.REACHED.value] = state[:, kernels.PREFIX.value] = 0
        _select(logits, weighing, state, grid, sizes, by_mass=True)
        kernels.masses_kernel[grid](*logits, *weighing, state, whole, above, ties, **sizes)
    kernels.draw_kernel[(rows,)](
        *logits, parameters, _tables(device), keys, positions, int(purpose), peaks, blocks, state,
        whole, above, ties, tokens, records, FILTERED=filtered, **sizes,
    )  # fmt: skip
    return tokens, records


def _fresh_state(need_B: Tensor) -> Tensor:
    state = need_B.new_zeros((len(need_B), kernels.STATE.value))
    state[:, kernels.NEED.value] = need_B
    state[:, kernels.CUT.value] = kernels.LOWEST_KEY.value  # below every logit: everything is kept
    return state


def _select(
    logits: tuple[Any, ...],
    weighing: tuple[Any, ...],
    state: Tensor,
    grid: tuple[int, int],
    sizes: dict[str, int],
    *,
    by_mass: bool,
) -> None:
    """Set the cut of every row whose state has a need."""
    parameters, tables, peaks, blocks = weighing
    histogram = torch.zeros((grid[0], _BUCKETS), dtype=torch.int64, device=state.device)
    for above, below in _LEVELS:
        kernels.histogram_kernel[grid](
            *logits, *weighing, state, histogram, ABOVE=above, BELOW=below, BY_MASS=by_mass, BUCKETS=_BUCKETS, **sizes
        )
        kernels.narrow_kernel[(grid[0],)](
            state, histogram, parameters, tables, peaks, blocks, BITS=above - below, LAST=below == 0, BY_MASS=by_mass,
            BLOCKS_P2=sizes["BLOCKS_P2"], BUCKETS=_BUCKETS,
        )  # fmt: skip


@lru_cache(maxsize=8)  # one entry a device
def _tables(device: torch.device) -> Tensor:
    return torch.as_tensor(build_tables(), device=device)
