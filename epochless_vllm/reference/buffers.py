"""Every buffer a forward pass writes to, allocated once. Computing allocates no array beyond these; NumPy itself takes
up to three buffers of 8,192 elements at a time, a constant of 96 KiB.

With L layers, K key heads, D head size, P positions, T rows, H hidden, I intermediate, Q query heads, V vocabulary,
R rank and Z = min(T, max(1, 2**22 // V)) rows of logits at a time, the float32 elements are

    keys, values        2 L K P D
    cosines, sines      P D
    hidden states       T (2 H + 2 Q D + 2 K D + 3 I)      hidden, normed, q, context, k, v, gate, up, scratch
    rotation            T Q D
    scores              T P + T T                           one head's, and the causal mask
    adapters            T R + max(T max(H, I, Q D), Z V)
    logits              Z V
    sums                T Q

and with float64 accumulation 8 bytes times T X + 64 X + T max(64, Q), X = max(H, I, Q D, P, R); rounding takes
another 40 KiB (bfloat16) or 16 KiB (float16). For long contexts the cache dominates: 8 L K D bytes a position. Knows
shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.errors import ReplayError
from epochless_vllm.reference.arithmetic import Arithmetic, WideArithmetic
from epochless_vllm.reference.config import ModelConfig
from epochless_vllm.reference.rounding import Rounding

Array = NDArray[np.float32]

LOGIT_ELEMENTS = 1 << 22  # 16 MiB of logits at a time


@dataclass(frozen=True)
class Limits:
    """What a forward pass is sized for.

    Attributes:
        positions: tokens of the longest sequence, prompt included.
        rows: positions computed at a time by a prefill.
        rank: largest rank of an adapter; 0 for the base model alone.
        accumulation: see arithmetic.py.
    """

    positions: int
    rows: int = 128
    rank: int = 64
    accumulation: Literal["float32", "float64"] = "float32"


@dataclass(frozen=True)
class Buffers:
    """The arrays themselves, shapes in the letters of the module's sum; those without a shape are cut to fit by use."""

    keys: Array  # (L, K, P, D), as are the values
    values: Array
    cosines: Array  # (P, D / 2), as are the sines
    sines: Array
    hidden: Array  # (T, H)
    normed: Array  # (T, H)
    q: Array  # (T, Q D)
    context: Array  # (T, Q D)
    k: Array  # (T, K D)
    v: Array  # (T, K D)
    gate: Array  # (T, I)
    up: Array  # (T, I)
    scratch: Array  # (T, I)
    rotation: Array
    scores: Array
    mask: Array  # (T, T)
    low_rank: Array
    delta: Array
    logits: Array  # (Z, V)
    sums: Array
    arithmetic: Arithmetic = field(repr=False)

    @property
    def byte_size(self) -> int:
        """Bytes of all arrays, the arithmetic's scratch included."""
        arrays = [getattr(self, each.name) for each in fields(self) if each.name != "arithmetic"]
        return sum(int(array.nbytes) for array in arrays) + self.arithmetic.scratch_bytes


def allocate(config: ModelConfig, limits: Limits, rounding: Rounding = "float32") -> Buffers:
    """Return the buffers of a model for the given limits.

    Args:
        rounding: the server's dtype; see rounding.py.

    Raises:
        ReplayError: more positions than the model's rotary embedding is defined for, or no room for one.
    """
    positions, rows = limits.positions, limits.rows
    if not 0 < positions <= config.rope.limit or rows < 1 or limits.rank < 0:
        raise ReplayError(
            f"{positions} positions in steps of {rows}: this model computes 1 to {config.rope.limit} positions; is the "
            "receipt of another model?",
            positions=positions,
            limit=config.rope.limit,
        )
    rows = min(rows, positions)
    widest = max(config.hidden, config.intermediate, config.query_size)
    logit_rows = min(rows, max(1, LOGIT_ELEMENTS // config.vocab))
    arithmetic = Arithmetic(rounding)
    if limits.accumulation == "float64":
        arithmetic = WideArithmetic(rows, max(widest, positions, limits.rank), rows * config.heads, rounding)
    cosines, sines = config.rope.table(config.head_dim, positions)
    arithmetic.round(cosines)
    arithmetic.round(sines)

    def zeros(*shape: int) -> Array:
        return np.zeros(shape, np.float32)

    return Buffers(
        keys=zeros(config.layers, config.kv_heads, positions, config.head_dim),
        values=zeros(config.layers, config.kv_heads, positions, config.head_dim),
        cosines=cosines,
        sines=sines,
        hidden=zeros(rows, config.hidden),
        normed=zeros(rows, config.hidden),
        q=zeros(rows, config.query_size),
        context=zeros(rows, config.query_size),
        k=zeros(rows, config.kv_size),
        v=zeros(rows, config.kv_size),
        gate=zeros(rows, config.intermediate),
        up=zeros(rows, config.intermediate),
        scratch=zeros(rows, config.intermediate),
        rotation=zeros(rows * config.query_size),
        scores=zeros(rows * positions),
        mask=np.triu(np.full((rows, rows), -np.inf, np.float32), 1),
        low_rank=zeros(rows * limits.rank),
        delta=zeros(max(rows * widest, logit_rows * config.vocab) if limits.rank else 0),
        logits=zeros(logit_rows, config.vocab),
        sums=zeros(rows * config.heads),
        arithmetic=arithmetic,
    )
