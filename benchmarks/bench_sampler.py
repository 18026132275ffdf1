"""What does exact sampling cost on the CPU, against the function vLLM samples with?

    python benchmarks/bench_sampler.py [--quick] [--output benchmarks/results/sampler.json]

Stock is ``TopKTopPSampler.forward_cpu`` of the pinned vLLM, compiled and warm, on torch's threads as they are. It gets
logits already divided by their temperature; exact gets raw logits and scales them itself. Stock and exact take turns,
sample by sample, because other work on the machine comes and goes; each figure is a median, with the minimum beside
it, and a ratio compares two medians or two minima of the same cell. Needs vLLM on CPU; takes about six minutes.

On a machine that others keep busy, compare the CPU time of one thread instead, which they disturb little:

    OMP_NUM_THREADS=1 TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) python benchmarks/bench_sampler.py --cpu-time
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numba
import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from epochless_vllm.protocol.draws import seeded_key
from epochless_vllm.protocol.sampler_config import sampler_from_parameters
from epochless_vllm.sampling import parameter_row, sample_rows, warm_up

VOCABULARIES = (32_000, 151_936, 256_000)
BATCHES = (1, 8, 64)
TEMPERATURE = 0.8
# case -> (filters, whether every row has a seed, the ratio to stay under)
CASES: dict[str, tuple[dict[str, float], bool, float]] = {
    "unseeded": ({}, False, 0.5),
    "seeded": ({}, True, 0.1),
    "top-p 0.95": ({"top_p": 0.95}, False, 0.3),
    "top-k 50": ({"top_k": 50}, False, 0.3),
    "top-k 50, top-p 0.95": ({"top_k": 50, "top_p": 0.95}, False, 0.3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time a cell")
    parser.add_argument("--cpu-time", action="store_true", help="compare CPU time, of one thread")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.cpu_time and os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("--cpu-time needs OMP_NUM_THREADS=1: a thread that spins at a barrier uses CPU time too")
    clock = time.process_time if options.cpu_time else time.perf_counter
    warm_up()
    started, cells = time.time(), []
    budget_s = 0.4 if options.quick else 3.0
    for vocabulary in VOCABULARIES:
        for rows in BATCHES:
            for case in CASES:
                cell = measure_cell(vocabulary, rows, case, budget_s, clock)
                cells.append(cell)
                print(line_of(cell), flush=True)
    missed = [cell for cell in cells if cell["ratio_of_minima"] > cell["limit"]]
    print(f"{len(cells)} cells, {len(missed)} over their limit by their minima")
    if options.output:
        report = {
            "machine": machine(),
            "clock": clock.__name__,
            "seconds": round(time.time() - started),
            "cells": cells,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if missed else 0


def measure_cell(vocabulary: int, rows: int, case: str, budget_s: float, clock: Callable[[], float]) -> dict[str, Any]:
    filters, seeded, limit = CASES[case]
    logits = torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(rows)) * 3
    stock_seconds, exact_seconds = [], []
    stock, exact = stock_call(logits, filters, seeded, clock), exact_call(logits, filters, clock)
    for call in (stock, exact, stock, exact):
        call()
    busy_before, begun, spent_before = busy_seconds(), time.perf_counter(), clock()
    own_before = time.process_time()
    while clock() - spent_before < budget_s or len(stock_seconds) < 5:
        stock_seconds.append(stock())
        exact_seconds.append(exact())
    elapsed = time.perf_counter() - begun
    others = busy_seconds() - busy_before - (time.process_time() - own_before)
    figures = {
        f"{name}_us": {"median": micro(statistics.median(samples)), "min": micro(min(samples))}
        for name, samples in (("stock", stock_seconds), ("exact", exact_seconds))
    }
    return {
        "vocabulary": vocabulary,
        "rows": rows,
        "case": case,
        **figures,
        "ratio_of_medians": round(statistics.median(exact_seconds) / statistics.median(stock_seconds), 4),
        "ratio_of_minima": round(min(exact_seconds) / min(stock_seconds), 4),
        "limit": limit,
        "samples": len(stock_seconds),
        "others_share_of_machine": round(max(0.0, others) / elapsed / (os.cpu_count() or 1), 3),
    }


def stock_call(
    logits: torch.Tensor, filters: dict[str, float], seeded: bool, clock: Callable[[], float]
) -> Callable[[], float]:
    rows = len(logits)
    sampler = TopKTopPSampler()
    scaled = logits / TEMPERATURE
    generators = {row: torch.Generator().manual_seed(row) for row in range(rows)} if seeded else {}
    top_k = torch.full((rows,), int(filters["top_k"]), dtype=torch.int32) if "top_k" in filters else None
    top_p = torch.full((rows,), filters["top_p"]) if "top_p" in filters else None

    def run() -> float:
        mine = scaled.clone() if filters else scaled  # filters write into the logits
        begun = clock()
        sampler.forward_cpu(mine, generators, top_k, top_p)
        return clock() - begun

    return run


def exact_call(logits: torch.Tensor, filters: dict[str, float], clock: Callable[[], float]) -> Callable[[], float]:
    rows = len(logits)
    config = sampler_from_parameters(temperature=TEMPERATURE, **filters)
    parameters = np.tile(parameter_row(config), (rows, 1))
    keys = np.array([seeded_key(seed=row, prompt_index=0, choice_index=0) for row in range(rows)], dtype=np.uint32)
    positions = np.arange(rows, dtype=np.int64)

    def run() -> float:
        positions[:] += 1
        begun = clock()
        sample_rows(logits, parameters, keys, positions)
        return clock() - begun

    return run


def busy_seconds() -> float:
    """Return the seconds all cores together have been busy since boot; 0 where the kernel does not say."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:  # not Linux
        return 0.0
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].split(":")[1].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


def micro(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def line_of(cell: dict[str, Any]) -> str:
    figures = " ".join(f"{cell[name]['median']:>9.0f} ({cell[name]['min']:.0f})" for name in ("stock_us", "exact_us"))
    shape = f"{cell['vocabulary']:>7} x {cell['rows']:<3} {cell['case']:<21}"
    return (
        f"{shape} {figures}  ratio {cell['ratio_of_medians']:.3f}"
        f" (minima {cell['ratio_of_minima']:.3f}, limit {cell['limit']})"
    )


if __name__ == "__main__":
    sys.exit(main())
