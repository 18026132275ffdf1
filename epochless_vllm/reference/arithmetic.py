"""The few operations a forward pass is made of, each writing into a buffer it is given.

Operands and results are float32. Accumulation is float32 (BLAS) or, with ``WideArithmetic``, float64: every sum of a
product, a norm or a softmax is then taken in float64 and rounded once. Where a 16-bit server rounds, so does ``round``
(rounding.py); in float32 it does nothing. Knows no layers, heads or adapters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.reference.rounding import Rounder, Rounding

Array = NDArray[np.float32]

BLOCK = 64  # outputs widened at a time; 64 rows of 4,096 float64 weights are 2 MiB


class Arithmetic:
    """float32 throughout. Shapes: T rows, I inputs, O outputs.

    Args:
        rounding: the dtype in which the server hands on what it computes.
    """

    def __init__(self, rounding: Rounding = "float32") -> None:
        rounder = Rounder(rounding)
        self.round = rounder.round
        self.scratch_bytes = rounder.scratch_bytes

    def product(self, x_TI: Array, weight_OI: Array, out_TO: Array) -> None:
        """Write ``x @ weight.T``."""
        np.matmul(x_TI, weight_OI.T, out=out_TO)

    def sum_rows(self, x_TI: Array, out_T: Array) -> None:
        """Write the sum of each row."""
        np.add.reduce(x_TI, axis=1, out=out_T)


class WideArithmetic(Arithmetic):
    """float32 operands and results, float64 sums.

    Args:
        rows, inputs: the largest T and I of a product; a sum of rows may have another shape of no more elements.
        sums: the most rows a sum may have.
    """

    def __init__(self, rows: int, inputs: int, sums: int, rounding: Rounding = "float32") -> None:
        super().__init__(rounding)
        self._x = np.empty(rows * inputs, np.float64)
        self._weight = np.empty(BLOCK * inputs, np.float64)
        self._out = np.empty(max(rows * BLOCK, sums), np.float64)
        self.scratch_bytes += self._x.nbytes + self._weight.nbytes + self._out.nbytes

    def product(self, x_TI: Array, weight_OI: Array, out_TO: Array) -> None:
        (rows, inputs), outputs = x_TI.shape, weight_OI.shape[0]
        x = self._x[: rows * inputs].reshape(rows, inputs)
        x[...] = x_TI
        for begin in range(0, outputs, BLOCK):
            count = min(BLOCK, outputs - begin)
            weight = self._weight[: count * inputs].reshape(count, inputs)
            weight[...] = weight_OI[begin : begin + count]
            out = self._out[: rows * count].reshape(rows, count)
            np.matmul(x, weight.T, out=out)
            out_TO[:, begin : begin + count] = out

    def sum_rows(self, x_TI: Array, out_T: Array) -> None:
        rows, inputs = x_TI.shape
        x = self._x[: rows * inputs].reshape(rows, inputs)
        x[...] = x_TI
        np.add.reduce(x, axis=1, out=self._out[:rows])
        out_T[...] = self._out[:rows]


def normalize(sums: Arithmetic, x_TI: Array, gain_I: Array, epsilon: float, out_TI: Array, scale_T: Array) -> None:
    """Write each row divided by its root mean square, times ``gain``. ``out`` may not be ``x``."""
    np.multiply(x_TI, x_TI, out=out_TI)
    sums.sum_rows(out_TI, scale_T)
    scale_T /= np.float32(x_TI.shape[1])
    scale_T += np.float32(epsilon)
    np.sqrt(scale_T, out=scale_T)
    np.divide(x_TI, scale_T[:, None], out=out_TI)
    sums.round(out_TI)
    out_TI *= gain_I
    sums.round(out_TI)


def softmax(sums: Arithmetic, scores_TN: Array, scale_T: Array) -> None:
    """Replace each row by its softmax."""
    np.maximum.reduce(scores_TN, axis=1, out=scale_T)
    scores_TN -= scale_T[:, None]
    np.exp(scores_TN, out=scores_TN)
    sums.sum_rows(scores_TN, scale_T)
    scores_TN /= scale_T[:, None]


def gate(gate_TI: Array, up_TI: Array, scratch_TI: Array, arithmetic: Arithmetic) -> None:
    """Replace ``gate`` by ``silu(gate) * up``."""
    np.negative(gate_TI, out=scratch_TI)
    np.exp(scratch_TI, out=scratch_TI)
    scratch_TI += np.float32(1)
    gate_TI /= scratch_TI
    arithmetic.round(gate_TI)
    gate_TI *= up_TI
    arithmetic.round(gate_TI)


def rotate(x_THD: Array, cosines_TF: Array, sines_TF: Array, first_THF: Array, second_THF: Array) -> None:
    """Turn each head's pairs (f, f + D/2) in place by their position's angle; the last two are scratch."""
    half = x_THD.shape[2] // 2
    left, right = x_THD[:, :, :half], x_THD[:, :, half:]
    cosines, sines = cosines_TF[:, None, :], sines_TF[:, None, :]
    np.multiply(left, cosines, out=first_THF)
    np.multiply(right, sines, out=second_THF)
    first_THF -= second_THF
    np.multiply(left, sines, out=second_THF)
    right *= cosines
    right += second_THF
    left[...] = first_THF
