"""Hands the rows of a batch to threads: the one compiled entry point of the CPU sampler.

A job is a vector of addresses and sizes, ``JOB`` fields long. A team of threads takes tickets from it until none is
left. A batch smaller than the team runs three times, over chunks of its rows for peaks and for sums and then over
rows; a larger one runs once, each row in all its phases while it is in cache. Importing this module compiles the
kernels, some ten seconds, or loads them from numba's cache: see cpu_path.py, which fills jobs in.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numba import carray, cfunc, types
from numba.extending import intrinsic

from epochless_vllm.sampling import arithmetic, filters, kernels, rows, tables
from epochless_vllm.sampling.arithmetic import jit
from epochless_vllm.sampling.kernels import finish_row, row_peak, store_peaks, store_sums
from epochless_vllm.sampling.rows import PARAMETERS, RECORD
from epochless_vllm.sampling.tables import ENTRIES
from epochless_vllm.sampling.team import Task, task_from_address

CHUNK_BLOCKS = 8  # blocks to a ticket: 32 KiB of logits

# Fields of a job, in the order cpu_path.py fills them in.
(
    TICKET, PHASE, LOGITS, STRIDE, ROWS, VOCABULARY, BLOCKS, ROW_PARAMETERS, KEYS, POSITIONS, PURPOSE, TABLES,
    TOKENS, RECORDS, PEAKS, SUMS,
) = range(16)  # fmt: skip
JOB = 16

# Values of the phase field.
PEAKS_PHASE, SUMS_PHASE, FINISH_PHASE, ROW_PHASES = range(4)


@intrinsic
def _take_ticket(typing_context, job):
    def generate(context, builder, signature, arguments):
        counter = builder.gep(arguments[0], [context.get_constant(types.int64, TICKET)])
        return builder.atomic_rmw("add", counter, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@jit
def _run_phase(job, phase, row, first, last):
    logits_V = carray(_pointer(job[LOGITS] + row * job[STRIDE] * 4), (job[VOCABULARY],), np.float32)
    parameters = carray(_pointer(job[ROW_PARAMETERS] + row * PARAMETERS * 8), (PARAMETERS,), np.int64)
    weight_tables = carray(_pointer(job[TABLES]), (2, ENTRIES), np.int64)
    peaks_N = carray(_pointer(job[PEAKS] + row * job[BLOCKS] * 4), (job[BLOCKS],), np.int32)
    sums_N = carray(_pointer(job[SUMS] + row * job[BLOCKS] * 8), (job[BLOCKS],), np.int64)
    if phase == PEAKS_PHASE:
        store_peaks(logits_V, first, last, peaks_N)
    elif phase == SUMS_PHASE:
        store_sums(logits_V, first, last, parameters, weight_tables, row_peak(peaks_N), sums_N)
    else:
        words = carray(_pointer(job[KEYS] + row * 8), (2,), np.uint32)
        positions_B = carray(_pointer(job[POSITIONS]), (job[ROWS],), np.int64)
        tokens_B = carray(_pointer(job[TOKENS]), (job[ROWS],), np.int64)
        record = carray(_pointer(job[RECORDS] + row * RECORD * 8), (RECORD,), np.int64)
        index, purpose = positions_B[row], job[PURPOSE]
        tokens_B[row] = finish_row(logits_V, peaks_N, sums_N, parameters, weight_tables, words, index, purpose, record)


def _compile_task() -> Task:
    # numba's cache watches this file alone. The values a function closes over are part of its key, so the sources of
    # all that is compiled here go in as one.
    modules = (arithmetic, filters, kernels, rows, tables)
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    fingerprint = int.from_bytes(hashlib.sha256(sources).digest()[:7], "big")

    def run(address):
        job = carray(address, (JOB,))
        phase, blocks = job[PHASE], job[BLOCKS]
        by_row = phase >= FINISH_PHASE or fingerprint < 0  # never below zero: read only to be closed over
        chunk = blocks if by_row else CHUNK_BLOCKS
        chunks = (blocks + chunk - 1) // chunk
        ticket = _take_ticket(address)
        while ticket < job[ROWS] * chunks:
            row, first = ticket // chunks, ticket % chunks * chunk
            last = min(first + chunk, blocks)
            if phase == ROW_PHASES:
                _run_phase(job, PEAKS_PHASE, row, first, last)
                _run_phase(job, SUMS_PHASE, row, first, last)
                _run_phase(job, FINISH_PHASE, row, first, last)
            else:
                _run_phase(job, phase, row, first, last)
            ticket = _take_ticket(address)

    signature = types.void(types.CPointer(types.int64))
    try:
        compiled = cfunc(signature, cache=True, error_model="numpy")(run)
    except RuntimeError:  # numba finds no directory it may write its cache to: compile for this process alone
        compiled = cfunc(signature, error_model="numpy")(run)
    return task_from_address(compiled.address, compiled)


TASK = _compile_task()
