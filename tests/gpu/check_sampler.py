"""All checks and timings of the sampler on a GPU, in one run of under five minutes. Not yet run on any GPU.

    python -m tests.gpu.check_sampler [--output FILE]

Bits: the Triton kernels on the device against the NumPy reference, on short rows of every awkward kind and on whole
vocabularies. Times: the exact sampler beside vLLM's Gumbel kernel, vLLM's PyTorch sampler and, where it is installed,
FlashInfer, by CUDA events; the others are given logits already scaled where they do not scale themselves. Exit 1 on
any difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epochless_vllm.protocol.draws import seeded_key
from epochless_vllm.protocol.sampler_config import sampler_from_parameters
from epochless_vllm.sampling import parameter_row, sample_rows, warm_up
from tests.sampling.cases import Batch, batches
from tests.sampling.equality import reference_columns

SHAPES = [(vocabulary, rows) for vocabulary in (32_000, 151_936, 256_000) for rows in (1, 8, 64, 256)]
FILTERS: dict[str, dict[str, float]] = {
    "unfiltered": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
}
BIT_CHECKS = (
    {"seed": 301, "rows": 20_000, "rows_per_batch": 200},
    {"seed": 302, "rows": 400, "rows_per_batch": 10, "vocabularies": (2047, 2048, 2049, 20_001)},
    {"seed": 303, "rows": 64, "rows_per_batch": 2, "vocabularies": (151_936,)},
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    warm_up("cuda")
    print(f"start-up self-test passed, {time.perf_counter() - started:.0f} s with compilation", flush=True)
    differences = []
    for check in BIT_CHECKS:
        found = device_differences(batches(**check))
        differences += found
        print(f"{check['rows']} rows of {check.get('vocabularies', 'up to 256')}: {len(found)} differences", flush=True)
    for difference in differences[:20]:
        print(difference)
    timings = [measured for shape in SHAPES for measured in measure_shape(*shape)]
    seconds = time.perf_counter() - started
    print(f"{seconds:.0f} s in all")
    if options.output:
        report = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "differences": differences,
            "timings": timings,
            "seconds": seconds,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if differences else 0


def device_differences(made: Iterable[Batch]) -> list[str]:
    """Return a line for each row the device draws other than the NumPy reference."""
    lines = []
    for number, batch in enumerate(made):
        parameters_BP = np.tile(parameter_row(batch.config), (len(batch.logits), 1))
        logits_BV = torch.from_numpy(batch.logits).cuda()
        tokens, records = sample_rows(logits_BV, parameters_BP, batch.keys, batch.positions)
        found = np.vstack([tokens.cpu().numpy(), records.cpu().numpy().T])
        expected = reference_columns(batch)
        for row in np.flatnonzero((found != expected).any(axis=0))[:5]:
            lines.append(f"batch {number} row {row}: {found[:, row].tolist()} != {expected[:, row].tolist()}")
    return lines


def measure_shape(vocabulary: int, rows: int) -> list[dict[str, Any]]:
    logits_BV = torch.randn((rows, vocabulary), device="cuda") * 3
    measured = []
    for name, filters in FILTERS.items():
        calls = {"exact": exact_call(logits_BV, filters), **rival_calls(logits_BV, filters)}
        figures = {who: median_microseconds(call) for who, call in calls.items()}
        print(f"{vocabulary:>7} x {rows:<3} {name:<21} " + "  ".join(f"{w} {us:.0f}" for w, us in figures.items()))
        measured.append({"vocabulary": vocabulary, "rows": rows, "case": name, "microseconds": figures})
    return measured


def exact_call(logits_BV: torch.Tensor, filters: dict[str, float]) -> Callable[[], object]:
    rows = len(logits_BV)
    parameters_BP = np.tile(parameter_row(sampler_from_parameters(temperature=0.8, **filters)), (rows, 1))
    keys_B2 = np.array([seeded_key(seed=row, prompt_index=0, choice_index=0) for row in range(rows)], dtype=np.uint32)
    positions_B = np.arange(rows, dtype=np.int64)
    return lambda: sample_rows(logits_BV, parameters_BP, keys_B2, positions_B)


def rival_calls(logits_BV: torch.Tensor, filters: dict[str, float]) -> dict[str, Callable[[], object]]:
    rows, calls = len(logits_BV), {}
    top_k = torch.full((rows,), int(filters["top_k"]), dtype=torch.int32, device="cuda") if "top_k" in filters else None
    top_p = torch.full((rows,), filters["top_p"], device="cuda") if "top_p" in filters else None
    try:
        from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    except ImportError:
        print("vLLM is not installed: its samplers are not timed")
    else:
        native = TopKTopPSampler()
        calls["vllm pytorch"] = lambda: native.forward_native(logits_BV.clone(), {}, top_k, top_p)
        if not filters:
            index = torch.arange(rows, dtype=torch.int32, device="cuda")
            temperature = torch.full((rows,), 0.8, device="cuda")
            seeds = torch.arange(rows, dtype=torch.int64, device="cuda")
            calls["vllm gumbel"] = lambda: gumbel_sample(
                logits_BV, index, temperature, seeds, seeds, apply_temperature=True
            )
    try:
        import flashinfer
    except ImportError:
        return calls
    if "top_k" in filters and "top_p" in filters:
        calls["flashinfer"] = lambda: flashinfer.sampling.top_k_top_p_sampling_from_logits(logits_BV, top_k, top_p)
    elif "top_k" in filters:
        calls["flashinfer"] = lambda: flashinfer.sampling.top_k_sampling_from_probs(logits_BV.softmax(-1), top_k)
    elif "top_p" in filters:
        calls["flashinfer"] = lambda: flashinfer.sampling.top_p_sampling_from_probs(logits_BV.softmax(-1), top_p)
    else:
        calls["flashinfer"] = lambda: flashinfer.sampling.sampling_from_logits(logits_BV)
    return calls


def median_microseconds(call: Callable[[], object]) -> float:
    for _ in range(5):
        call()
    samples = []
    for _ in range(30):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        call()
        ended.record()
        ended.synchronize()
        samples.append(begun.elapsed_time(ended) * 1e3)
    return statistics.median(samples)


if __name__ == "__main__":
    sys.exit(main())
