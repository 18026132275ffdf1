"""``sample_rows``: the exact sampler over a batch, on whatever device the logits are.

Promises equal tokens and records from every implementation, whatever the batch around a row, and leaves the logits
as they were. Knows no requests: the caller brings a parameter row, a key and a position for each row of logits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epochless_vllm.protocol.draws import Purpose
from epochless_vllm.sampling.rows import DRAW, KEPT, LO, MAX_VOCABULARY, PARAMETERS, STATUS, W


class Sampled(NamedTuple):
    """What was drawn, a row per row of logits. Columns are int64 views; nothing exceeds 2**32.

    ``lo`` and ``w`` are the drawn token's place in the cumulative, out of 2**32: its behaviour probability is exactly
    ``w / 2**32``, and ``lo <= draw < lo + w``. ``kept`` is the filters' share of the unfiltered mass, out of 2**32.
    A greedy row has ``w = 2**32`` and no draw. A row whose ``status`` is not ``OK`` was refused: token 0, ``w = 0``.
    """

    tokens: Tensor
    records: Tensor

    @property
    def lo(self) -> Tensor:
        return self.records[:, LO]

    @property
    def w(self) -> Tensor:
        return self.records[:, W]

    @property
    def draw(self) -> Tensor:
        return self.records[:, DRAW]

    @property
    def kept(self) -> Tensor:
        return self.records[:, KEPT]

    @property
    def status(self) -> Tensor:
        return self.records[:, STATUS]


def sample_rows(
    logits_BV: Tensor,
    parameters_BP: NDArray[np.int64],
    keys_B2: NDArray[np.uint32],
    positions_B: NDArray[np.int64],
    purpose: int = Purpose.SAMPLE,
) -> Sampled:
    """Draw one token from each row of logits.

    Args:
        logits_BV: after all logits processors, not scaled by temperature; float32 with adjacent columns is read in
            place, anything else is copied once. ``-inf`` masks a token.
        parameters_BP: ``parameter_row`` of each row's sampler.
        keys_B2: each row's ``DrawKey``.
        positions_B: the index of the token to be drawn among its choice's generated tokens.
        purpose: which of the key's streams to draw from.
    """
    rows, vocabulary = logits_BV.shape
    assert vocabulary <= MAX_VOCABULARY, f"{vocabulary} logits a row"
    assert parameters_BP.shape == (rows, PARAMETERS), parameters_BP.shape
    assert keys_B2.shape == (rows, 2), keys_B2.shape
    assert positions_B.shape == (rows,), positions_B.shape
    if logits_BV.dtype != torch.float32 or logits_BV.stride(1) != 1:
        logits_BV = logits_BV.to(torch.float32).contiguous()
    return Sampled(*_path(logits_BV.device.type)(logits_BV, parameters_BP, keys_B2, positions_B, int(purpose)))


@lru_cache(maxsize=4)
def _path(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the fastest implementation for a device; the first call for one compiles it."""
    if device_type == "cuda" and importlib.util.find_spec("triton"):
        from epochless_vllm.sampling.triton_path import sample_rows_triton

        return sample_rows_triton
    if device_type == "cpu" and importlib.util.find_spec("numba"):
        from epochless_vllm.sampling.cpu_path import sample_rows_cpu

        return sample_rows_cpu
    from epochless_vllm.sampling.torch_path import sample_rows_torch

    return sample_rows_torch
