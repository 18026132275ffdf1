"""The slow plain truth about rows of different revisions, in float64, one row and one projection at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epochless_vllm.execution.slots import SlotWeights


@dataclass(frozen=True)
class Layer:
    """A layer for tests: per slot and slice its (A, B), or None."""

    inputs: int
    outputs: tuple[int, ...]
    max_rank: int
    slots: tuple[tuple[tuple[torch.Tensor, torch.Tensor] | None, ...], ...]

    def pack(self) -> SlotWeights:
        """Return the layer as the kernel reads it, every slot written."""
        dtypes = {factors[0].dtype for slices in self.slots for factors in slices if factors is not None}
        weights = SlotWeights(
            num_slots=len(self.slots),
            max_rank=self.max_rank,
            input_size=self.inputs,
            output_sizes=self.outputs,
            dtype=dtypes.pop() if dtypes else torch.float32,
        )
        for slot, slices in enumerate(self.slots):
            weights.write(slot, slices)
        return weights


def make_layer(
    seed: int,
    *,
    inputs: int,
    outputs: Sequence[int],
    ranks: Sequence[Sequence[int]],
    max_rank: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Layer:
    """Return a layer with random factors; ``ranks[slot][slice]`` 0 means no adapter there."""
    generator = torch.Generator().manual_seed(seed)

    def factors(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if rank == 0:
            return None
        factor_a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        return factor_a.to(dtype), torch.randn(size, rank, generator=generator).to(dtype)

    slots = tuple(tuple(factors(rank, size) for rank, size in zip(row, outputs, strict=True)) for row in ranks)
    return Layer(inputs, tuple(outputs), max_rank, slots)


def expected_rows(y_NO: torch.Tensor, x_NI: torch.Tensor, layer: Layer, slots_N: Sequence[int]) -> np.ndarray:
    """Return in float64 what ``y`` must become."""
    result_NO = y_NO.double().numpy().copy()
    for row, slot in enumerate(slots_N):
        if slot < 0:
            continue
        left = 0
        for size, factors in zip(layer.outputs, layer.slots[slot], strict=True):
            if factors is not None:
                factor_a, factor_b = (factor.double().numpy() for factor in factors)
                delta = factor_b @ (factor_a @ x_NI[row].double().numpy())
                width = max(0, min(size, result_NO.shape[1] - left))
                result_NO[row, left : left + width] += delta[:width]
            left += size
    return result_NO
