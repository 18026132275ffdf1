"""The exact sampler on the CPU: prepares a job for the compiled task and chooses how the team shares it.

Importing this module compiles the task, or loads it from numba's cache.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epochless_vllm.sampling.filters import BLOCK
from epochless_vllm.sampling.rows import RECORD
from epochless_vllm.sampling.tables import build_tables
from epochless_vllm.sampling.tasks import FINISH_PHASE, JOB, PEAKS_PHASE, ROW_PHASES, SUMS_PHASE, TASK
from epochless_vllm.sampling.team import run_task, team_size

# Logits that the team must take off this thread, some 150 microseconds of its time, to be worth waking: what is saved
# is small beside a step of any model, and a team waits for its slowest thread.
_WORTH_SHARING = 1 << 17

_TABLES = torch.from_numpy(build_tables())
_Job = ctypes.c_int64 * JOB


def sample_rows_cpu(
    logits_BV: Tensor,
    parameters_BP: NDArray[np.int64],
    keys_B2: NDArray[np.uint32],
    positions_B: NDArray[np.int64],
    purpose: int,
) -> tuple[Tensor, Tensor]:
    """Return (tokens ``[B]``, records ``[B, 5]``), as ``sample_rows`` does."""
    rows, vocabulary = logits_BV.shape
    blocks = -(-vocabulary // BLOCK)
    # Named, so that what the job points into outlives it.
    parameters_BP = np.ascontiguousarray(parameters_BP, dtype=np.int64)
    keys_B2 = np.ascontiguousarray(keys_B2, dtype=np.uint32)
    positions_B = np.ascontiguousarray(positions_B, dtype=np.int64)
    tokens_B = torch.empty(rows, dtype=torch.int64)
    records_BR = torch.empty((rows, RECORD), dtype=torch.int64)
    sums_and_peaks = torch.empty(rows * blocks * 12, dtype=torch.uint8)  # int64 sums, then int32 peaks
    sums = sums_and_peaks.data_ptr()
    team = team_size()
    if rows * vocabulary * (team - 1) < _WORTH_SHARING * team:
        team = 1
    job = _Job(
        0, ROW_PHASES, logits_BV.data_ptr(), logits_BV.stride(0), rows, vocabulary, blocks, _address(parameters_BP),
        _address(keys_B2), _address(positions_B), purpose, _TABLES.data_ptr(), tokens_B.data_ptr(),
        records_BR.data_ptr(), sums + rows * blocks * 8, sums,
    )  # fmt: skip
    if team == 1 or rows >= 2 * team:
        run_task(TASK, job, parallel=team > 1)
    else:
        for phase in (PEAKS_PHASE, SUMS_PHASE, FINISH_PHASE):
            job[0], job[1] = 0, phase
            run_task(TASK, job, parallel=rows > 1 or phase != FINISH_PHASE)
    return tokens_B, records_BR


def _address(array: NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
