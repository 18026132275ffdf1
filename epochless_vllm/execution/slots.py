"""The resident adapters of one linear layer, packed for the kernel when a slot is written.

A layer may be several projections side by side (q, k, v or gate, up) that share their input: each is a *slice* of the
output. Slot weights are kept in float32 at each slice's true rank (rounded up to the kernel's step of four): all
slices' A rows one under the other, so that one shrink serves them all, and B transposed, so that the expansion reads
along the output. Nothing is repacked when another slot changes. Knows no rows and no adapter ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

RANK_STEP = 4  # ranks the kernel takes at a time; the rows that round a rank up are zero
BLOCK_OUTPUTS = 256  # output columns of one task: B's block stays in the first-level cache while rows pass

Factors = tuple[torch.Tensor, torch.Tensor]


class SlotWeights:
    """Packed weights of one layer.

    Attributes:
        a_SKI: float32 [slot, ranks of all slices, input].
        b_SRO: float32 [slot, rank, output]; a slice uses its own columns of as many rows as it has ranks.
        offsets_SP: int64 [slot, slices + 1], where each slice's ranks begin in K; equal neighbours mean no adapter.
        blocks_B3: int64 [block, 3], (first column, end column, slice).
    """

    def __init__(self, *, num_slots: int, max_rank: int, input_size: int, output_sizes: Sequence[int]) -> None:
        slices = len(output_sizes)
        step_rank = round_rank(max_rank)
        # Never-written pages are never touched: a rank below the maximum costs address space, not memory.
        self.a_SKI = np.empty((num_slots, step_rank * slices, input_size), dtype=np.float32)
        self.b_SRO = np.empty((num_slots, step_rank, sum(output_sizes)), dtype=np.float32)
        self.offsets_SP = np.zeros((num_slots, slices + 1), dtype=np.int64)
        self.blocks_B3 = _block_outputs(output_sizes)
        self.is_live = False
        self._max_rank = max_rank
        self._starts = [0, *np.cumsum(output_sizes).tolist()]

    def write(self, slot: int, slices: Sequence[Factors | None]) -> None:
        """Replace a slot's adapter.

        Args:
            slices: per slice (A, B), shaped (rank, input) and (output, rank), of any float dtype; None for a slice
                without an adapter.

        Raises:
            ValueError: a shape does not fit the layer; the slot is left empty.
        """
        self.clear(slot)
        if len(slices) != len(self._starts) - 1:
            raise ValueError(f"layer has {len(self._starts) - 1} slices, got {len(slices)}")
        for index, factors in enumerate(slices):
            if factors is not None:
                self._check(index, *factors)
        offsets = self.offsets_SP[slot].copy()
        for index, factors in enumerate(slices):
            begin = offsets[index]
            offsets[index + 1] = begin
            if factors is None:
                continue
            factor_a, factor_b = factors
            rank = factor_a.shape[0]
            offsets[index + 1] += round_rank(rank)
            columns = slice(self._starts[index], self._starts[index + 1])
            self.a_SKI[slot, begin : begin + rank] = factor_a.float().numpy()
            self.a_SKI[slot, begin + rank : offsets[index + 1]] = 0
            self.b_SRO[slot, :rank, columns] = factor_b.float().numpy().T
            self.b_SRO[slot, rank : round_rank(rank), columns] = 0
        self.offsets_SP[slot] = offsets
        self.is_live = bool(self.offsets_SP[:, -1].any())

    def clear(self, slot: int) -> None:
        """Empty a slot; its weights are overwritten with zeros, so a retired adapter leaves no copy here."""
        offsets = self.offsets_SP[slot]
        for index in range(len(self._starts) - 1):
            begin, end = offsets[index], offsets[index + 1]
            self.a_SKI[slot, begin:end] = 0
            self.b_SRO[slot, : end - begin, self._starts[index] : self._starts[index + 1]] = 0
        self.offsets_SP[slot] = 0
        self.is_live = bool(self.offsets_SP[:, -1].any())

    def _check(self, index: int, factor_a: torch.Tensor, factor_b: torch.Tensor) -> None:
        rank = factor_a.shape[0]
        outputs = self._starts[index + 1] - self._starts[index]
        if rank > self._max_rank:
            raise ValueError(f"slice {index}: rank {rank} is above the layer's maximum {self._max_rank}")
        if factor_a.shape != (rank, self.a_SKI.shape[2]) or factor_b.shape != (outputs, rank):
            raise ValueError(
                f"slice {index}: A {tuple(factor_a.shape)} and B {tuple(factor_b.shape)} do not fit a layer of "
                f"{self.a_SKI.shape[2]} inputs and {outputs} outputs"
            )


def round_rank(rank: int) -> int:
    """Return the rank rounded up to the kernel's step."""
    return -(-rank // RANK_STEP) * RANK_STEP


def _block_outputs(output_sizes: Sequence[int]) -> np.ndarray:
    blocks: list[tuple[int, int, int]] = []
    start = 0
    for index, size in enumerate(output_sizes):
        blocks += [(o, min(o + BLOCK_OUTPUTS, start + size), index) for o in range(start, start + size, BLOCK_OUTPUTS)]
        start += size
    return np.array(blocks, dtype=np.int64).reshape(-1, 3)
