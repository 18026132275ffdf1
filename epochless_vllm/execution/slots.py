"""The resident adapters of one linear layer, packed for the kernel when a slot is written.

A layer may be several projections side by side (q, k, v or gate, up) that share their input: each is a *slice* of the
output. Slot weights are kept at each slice's true rank (rounded up to the kernel's step of four): all slices' A rows
one under the other, so that one shrink serves them all, and B transposed, so that the expansion reads along the
output. bfloat16 stays bfloat16, every other dtype becomes float32. Nothing is repacked when another slot changes.
Knows no rows and no adapter ids.
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
        dtype: torch.bfloat16 (its bits, in uint16) or torch.float32.
        a_SKI: [slot, ranks of all slices, input].
        b_SRO: [slot, rank, output]; a slice uses its own columns of as many rows as it has ranks.
        offsets_SP: int64 [slot, slices + 1], where each slice's ranks begin in K; equal neighbours mean no adapter.
        row_products: products that a row of the largest resident adapter takes, which is also that adapter's size; 0
            when no slot is written.
        blocks_B3: int64 [block, 3], (first column, end column, slice).
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_rank: int,
        input_size: int,
        output_sizes: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        stored = stored_dtype(self.dtype)
        slices = len(output_sizes)
        step_rank = round_rank(max_rank)
        # Never-written pages are never touched: a rank below the maximum costs address space, not memory.
        self.a_SKI = np.empty((num_slots, step_rank * slices, input_size), dtype=stored)
        self.b_SRO = np.empty((num_slots, step_rank, sum(output_sizes)), dtype=stored)
        self.offsets_SP = np.zeros((num_slots, slices + 1), dtype=np.int64)
        self.blocks_B3 = _block_outputs(output_sizes)
        self.row_products = 0
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
            self.a_SKI[slot, begin : begin + rank] = array_of(factor_a.to(self.dtype))
            self.a_SKI[slot, begin + rank : offsets[index + 1]] = 0
            self.b_SRO[slot, :rank, columns] = array_of(factor_b.to(self.dtype)).T
            self.b_SRO[slot, rank : round_rank(rank), columns] = 0
        self.offsets_SP[slot] = offsets
        self._measure()

    def clear(self, slot: int) -> None:
        """Empty a slot; its weights are overwritten with zeros, so a retired adapter leaves no copy here."""
        offsets = self.offsets_SP[slot]
        for index in range(len(self._starts) - 1):
            begin, end = offsets[index], offsets[index + 1]
            self.a_SKI[slot, begin:end] = 0
            self.b_SRO[slot, : end - begin, self._starts[index] : self._starts[index + 1]] = 0
        self.offsets_SP[slot] = 0
        self._measure()

    def check(self, slot: int, slices: Sequence[Factors | None]) -> None:
        """Compare what the kernel will read of a slot with the adapter it should hold, bit for bit.

        Args:
            slices: as for ``write``.

        Raises:
            ValueError: a slice holds other weights, another rank, or anything where it should be empty.
        """
        for index, factors in enumerate(slices):
            begin, end = self.offsets_SP[slot, index : index + 2]
            rank = 0 if factors is None else factors[0].shape[0]
            if end - begin != round_rank(rank):
                raise ValueError(f"slice {index} of slot {slot} holds rank {end - begin}, not {rank}")
            if factors is None:
                continue
            a_KI = self.a_SKI[slot, begin:end]
            b_RO = self.b_SRO[slot, : end - begin, self._starts[index] : self._starts[index + 1]]
            wanted = (array_of(factor.to(self.dtype)) for factor in factors)
            for name, held, right in zip("AB", (a_KI, b_RO), (next(wanted), next(wanted).T), strict=True):
                if held[rank:].any() or not np.array_equal(_bits(held[:rank]), _bits(right)):
                    raise ValueError(f"{name} of slice {index} of slot {slot} is not what was written")

    def _measure(self) -> None:
        ranks_SP = np.diff(self.offsets_SP, axis=1)
        per_rank_P = np.diff(self._starts) + self.a_SKI.shape[2]
        self.row_products = int((ranks_SP @ per_rank_P).max())

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


def stored_dtype(dtype: torch.dtype) -> type[np.generic]:
    """Return the NumPy dtype that holds torch.float32 or torch.bfloat16."""
    return np.uint16 if dtype == torch.bfloat16 else np.float32


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a float32 or bfloat16 tensor as an array of its ``stored_dtype``."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32) if array.dtype == np.float32 else array


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
