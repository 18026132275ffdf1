"""Rounding of float32 arrays to the values of a narrower dtype, and where a 16-bit server does it to what it computes.

A server in bfloat16 or float16 sums in float32 and rounds whatever a module hands on. ``Rounder`` repeats that at
these points, those of vLLM's layers in eager mode (its own definition of RMSNorm, ``vllm/ir/ops/layernorm.py``):

    embedding           as stored                                           weights.py
    RMSNorm             the quotient, then its product with the gain        arithmetic.normalize
    residual            the sum, after the norm has read it unrounded       forward.py
    linear              the base's output, bias included; again with the adapter's delta added, itself in float32
    adapter             B, then its product with the scaling                lora.py
    rotary embedding    the table; the turned pair, once                    buffers.py, forward.py
    attention           its result; neither scores nor their softmax
    silu(gate) * up     the factor, then the product                        arithmetic.gate
    logits              as any linear; the sampler widens them

Each point counts: a server that leaves out one of them, or adds one, takes another path after a few layers, and its
errors are then as large as if nothing had been repeated. GPU kernels that read the rounded residual, or round the
softmax, are such servers. Knows no layers.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Rounding = Literal["float32", "bfloat16", "float16"]
Array = NDArray[np.float32]

CHUNK = 1 << 13  # elements rounded at a time; 32 KiB of scratch stay in the first-level cache


class Rounder:
    """Rounds arrays in place to the nearest values of one dtype, ties to even, and allocates nothing.

    NaN stays NaN; beyond the dtype's range lies infinity. Not safe to share between threads.
    """

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding
        self._bits = np.empty(CHUNK if rounding == "bfloat16" else 0, np.uint32)
        self._undefined = np.empty(self._bits.size, np.bool_)
        self._half = np.empty(CHUNK if rounding == "float16" else 0, np.float16)
        self.scratch_bytes = self._bits.nbytes + self._undefined.nbytes + self._half.nbytes

    def round(self, array: Array) -> None:
        """Round a C-contiguous array in place.

        Raises:
            ValueError: the array is not contiguous; a copy of it would be rounded instead.
        """
        if self.rounding == "float32":
            return
        if not array.flags.c_contiguous:
            raise ValueError("only a C-contiguous array is rounded in place")
        flat = array.reshape(-1)
        for begin in range(0, flat.size, CHUNK):
            piece = flat[begin : begin + CHUNK]
            if self.rounding == "bfloat16":
                self._to_bfloat16(piece)
            else:
                half = self._half[: piece.size]
                with np.errstate(over="ignore"):  # infinity, for a server as well
                    half[...] = piece
                piece[...] = half

    def _to_bfloat16(self, piece: Array) -> None:
        undefined, odd = self._undefined[: piece.size], self._bits[: piece.size]
        np.isnan(piece, out=undefined)  # adding to a NaN's bits would make a number of it
        bits = piece.view(np.uint32)
        np.right_shift(bits, np.uint32(16), out=odd)
        odd &= np.uint32(1)
        bits += odd
        bits += np.uint32(0x7FFF)
        bits &= np.uint32(0xFFFF0000)
        if undefined.any():
            np.copyto(piece, np.float32(np.nan), where=undefined)
