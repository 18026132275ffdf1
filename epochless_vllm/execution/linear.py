"""The linear layer over rows of different revisions: ``y[row] += B·A·x[row]`` with each row's own A and B.

Promises: float32 products and sums whatever the model's dtype, rounded to it once; rows without an adapter keep their
bits; a number of torch operations that depends on neither rows nor live slots. Knows no engine.
"""

from __future__ import annotations

import torch

from epochless_vllm.execution.kernel import add_rows
from epochless_vllm.execution.rows import RowPlan
from epochless_vllm.execution.slots import SlotWeights


def add_adapters(y_NO: torch.Tensor, x_NI: torch.Tensor, weights: SlotWeights, plan: RowPlan) -> None:
    """Add every planned row's adapter delta to ``y_NO`` in place.

    Args:
        y_NO: output of the base layer, [rows, outputs]. More columns than the layer has are left alone, fewer cut the
            delta (a vocabulary may be padded differently).
        x_NI: input of the base layer, [rows, inputs].

    Raises:
        ValueError: the tensors have fewer rows than the plan, or another input size.
    """
    if not weights.is_live or not len(plan.rows):
        return
    if min(len(x_NI), len(y_NO)) < plan.num_rows:
        raise ValueError(f"the plan covers {plan.num_rows} rows, x has {len(x_NI)} and y has {len(y_NO)}")
    if x_NI.shape[1] != weights.a_SKI.shape[2]:
        raise ValueError(f"the layer has {weights.a_SKI.shape[2]} inputs, x has {x_NI.shape[1]}")
    x = x_NI.to(torch.float32).contiguous()
    in_place = y_NO.dtype == torch.float32 and y_NO.is_contiguous()
    # Widening a 16-bit float and narrowing it again is exact, so rows nobody adds to keep their bits.
    y = y_NO if in_place else y_NO.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    add_rows(
        y.numpy(),
        x.numpy(),
        weights.a_SKI,
        weights.b_SRO,
        weights.offsets_SP,
        weights.blocks_B3,
        plan.rows,
        plan.tiles,
    )
    if not in_place:
        y_NO.copy_(y)
