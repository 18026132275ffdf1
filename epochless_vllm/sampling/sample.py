"""``sample_rows``: the exact sampler over a batch, on whatever device the logits are.

Promises equal tokens and records from every implementation, whatever the batch around a row, and leaves the logits
as they were. Knows no requests: the caller brings a parameter row, a key and a position for each row of logits.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epochless_vllm.protocol.draws import Purpose
from epochless_vllm.sampling.rows import DRAW, KEPT, LO, MAX_VOCABULARY, PARAMETERS, RECORD, STATUS, W
from epochless_vllm.sampling.tables import build_tables
from epochless_vllm.sampling.team import run_task, team_size

_SERIAL_LOGITS = 1 << 14  # below it, waking the team costs more than it saves


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
    if logits_BV.is_cuda and _has("triton"):
        from epochless_vllm.sampling.triton_path import sample_rows_triton

        return Sampled(*sample_rows_triton(logits_BV, parameters_BP, keys_B2, positions_B, purpose))
    if logits_BV.device.type == "cpu" and _has("numba"):
        return _sample_rows_compiled(logits_BV, parameters_BP, keys_B2, positions_B, purpose)
    from epochless_vllm.sampling.torch_path import sample_rows_torch

    return Sampled(*sample_rows_torch(logits_BV, parameters_BP, keys_B2, positions_B, purpose))


@lru_cache(maxsize=4)
def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@lru_cache(maxsize=1)
def _tables() -> NDArray[np.int64]:
    return build_tables()


def _sample_rows_compiled(
    logits_BV: Tensor,
    parameters_BP: NDArray[np.int64],
    keys_B2: NDArray[np.uint32],
    positions_B: NDArray[np.int64],
    purpose: int,
) -> Sampled:
    from epochless_vllm.sampling import tasks
    from epochless_vllm.sampling.filters import BLOCK

    rows, vocabulary = logits_BV.shape
    blocks = -(-vocabulary // BLOCK)
    parameters_BP = np.ascontiguousarray(parameters_BP, dtype=np.int64)
    keys_B2 = np.ascontiguousarray(keys_B2, dtype=np.uint32)
    positions_B = np.ascontiguousarray(positions_B, dtype=np.int64)
    sampled = Sampled(torch.empty(rows, dtype=torch.int64), torch.empty((rows, RECORD), dtype=torch.int64))
    peaks_BN = torch.empty((rows, blocks), dtype=torch.int32)
    sums_BN = torch.empty((rows, blocks), dtype=torch.int64)
    team = team_size() if rows * vocabulary >= _SERIAL_LOGITS else 1
    whole_rows = team == 1 or rows >= 2 * team
    for phase in (tasks.ROW_PHASES,) if whole_rows else (tasks.PEAKS_PHASE, tasks.SUMS_PHASE, tasks.FINISH_PHASE):
        fields = (
            0, phase, logits_BV.data_ptr(), logits_BV.stride(0), rows, vocabulary, blocks, _address(parameters_BP),
            _address(keys_B2), _address(positions_B), int(purpose), _address(_tables()),
            sampled.tokens.data_ptr(), sampled.records.data_ptr(), peaks_BN.data_ptr(), sums_BN.data_ptr(),
        )  # fmt: skip
        job = np.array(fields, dtype=np.int64)
        run_task(tasks.TASK, _address(job), parallel=team > 1 and (rows > 1 or phase != tasks.FINISH_PHASE))
    return sampled


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
