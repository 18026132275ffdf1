"""The linear layer over rows of different revisions: ``y[row] += B·A·x[row]`` with each row's own A and B.

Promises: float32 products and sums whatever the model's dtype, rounded to it once; rows without an adapter keep their
bits; a number of torch operations that depends on neither rows nor live slots. Knows no engine.
"""

from __future__ import annotations

import torch

from epochless_vllm.execution.kernel import add_rows
from epochless_vllm.execution.rows import RowPlan
from epochless_vllm.execution.slots import SlotWeights, array_of

# Measured on one core; they decide only where waking the other threads begins to pay.
NANOSECONDS_PER_PRODUCT = 0.05
NANOSECONDS_PER_WEIGHT = 0.3  # read from memory, once per slot; between bfloat16 and float32
SERIAL_NANOSECONDS = 50_000


def add_adapters(y_NO: torch.Tensor, x_NI: torch.Tensor, weights: SlotWeights, plan: RowPlan) -> None:
    """Add every planned row's adapter delta to ``y_NO`` in place.

    Args:
        y_NO: output of the base layer, [rows, outputs]. More columns than the layer has are left alone, fewer cut the
            delta (a vocabulary may be padded differently).
        x_NI: input of the base layer, [rows, inputs].

    Raises:
        ValueError: the tensors have fewer rows than the plan, or another input size.
    """
    if not weights.row_products or not plan.num_slots:
        return
    if min(len(x_NI), len(y_NO)) < plan.num_rows:
        raise ValueError(f"the plan covers {plan.num_rows} rows, x has {len(x_NI)} and y has {len(y_NO)}")
    if x_NI.shape[1] != weights.a_SKI.shape[2]:
        raise ValueError(f"the layer has {weights.a_SKI.shape[2]} inputs, x has {x_NI.shape[1]}")
    # The kernel reads the dtype of the weights. Widening a 16-bit float and narrowing it again is exact, so rows nobody
    # adds to keep their bits on the way through float32 too.
    dtype = weights.dtype if x_NI.dtype == y_NO.dtype == weights.dtype else torch.float32
    x = x_NI.to(dtype).contiguous()
    y = y_NO.to(dtype).contiguous()
    add_rows(
        array_of(y),
        array_of(x),
        weights.a_SKI,
        weights.b_SRO,
        weights.offsets_SP,
        weights.blocks_B3,
        plan.rows,
        plan.tiles,
        _is_little_work(weights, plan),
    )
    if y.data_ptr() != y_NO.data_ptr():
        y_NO.copy_(y)


def _is_little_work(weights: SlotWeights, plan: RowPlan) -> bool:
    per_product = len(plan.rows) * NANOSECONDS_PER_PRODUCT + plan.num_slots * NANOSECONDS_PER_WEIGHT
    # Threads that must be waited for cost more than they save on little work, and far more on a crowded machine.
    return weights.row_products * per_product < SERIAL_NANOSECONDS
