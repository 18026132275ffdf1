"""Draws many rows by every implementation and counts where they differ: equal bits or a listed row.

    python -m tests.sampling.equality --rows 1000000
    python -m tests.sampling.equality --rows 10000 --plain
    TRITON_INTERPRET=1 python -m tests.sampling.equality --rows 10000 --triton
    python -m tests.sampling.equality --rows 64 --vocabulary 151936 --plain-rows 4

NumPy's reference is the standard; numba's and torch's paths are always compared. Exit 1 on a difference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from epochless_vllm.reference import philox, sampler, sampler_plain
from epochless_vllm.sampling import parameter_row, sample_rows
from epochless_vllm.sampling.torch_path import sample_rows_torch
from tests.sampling.cases import VOCABULARIES, Batch, batches

FIELDS = sampler.Records._fields


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--rows-per-batch", type=int, default=500)
    parser.add_argument("--vocabulary", type=int, help="of every row; mixed up to 256 without")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="check every row in pure Python too")
    parser.add_argument("--plain-rows", type=int, default=0, help="check so many rows of each batch in pure Python")
    parser.add_argument("--triton", action="store_true", help="check Triton's interpreter too")
    parser.add_argument("--triton-block", type=int, default=2048)
    options = parser.parse_args(arguments)
    vocabularies = (options.vocabulary,) if options.vocabulary else VOCABULARIES
    made = batches(
        seed=options.seed, rows=options.rows, rows_per_batch=options.rows_per_batch, vocabularies=vocabularies
    )
    plain_rows = options.rows_per_batch if options.plain else options.plain_rows
    if options.triton:
        from epochless_vllm.sampling import triton_path

        triton_path.BLOCK = options.triton_block
    compared, differences = compare_batches(made, plain_rows=plain_rows, triton=options.triton)
    for difference in differences[:20]:
        print(difference)
    names = ["numpy", "numba", "torch"] + ["python"] * bool(plain_rows) + ["triton interpreted"] * options.triton
    print(f"{compared} rows, {' = '.join(names)}: {len(differences)} differences")
    return 1 if differences else 0


def compare_batches(made: Iterable[Batch], *, plain_rows: int = 0, triton: bool = False) -> tuple[int, list[str]]:
    """Return how many rows were compared and a line for each difference."""
    compared, differences = 0, []
    for number, batch in enumerate(made):
        expected = reference_columns(batch)
        for name, columns in engine_columns(batch, triton=triton).items():
            for row in np.flatnonzero((columns != expected).any(axis=0))[:5]:
                differences.append(f"batch {number} row {row} {name}: {_pairs(columns[:, row], expected[:, row])}")
        for row in range(min(plain_rows, len(batch.logits))):
            draw = philox.draw(tuple(map(int, batch.keys[row])), int(batch.positions[row]))
            plain = sampler_plain.sample_row(batch.logits[row].tolist(), batch.config, draw)
            columns = np.array([getattr(plain, field) for field in FIELDS], dtype=np.int64)
            if (columns != expected[:, row]).any():
                differences.append(f"batch {number} row {row} python: {_pairs(columns, expected[:, row])}")
        compared += len(batch.logits)
    return compared, differences


def reference_columns(batch: Batch) -> np.ndarray:
    """Return the NumPy reference's records of a batch as ``[6, B]``."""
    draws_B = philox.draws(batch.keys, batch.positions)
    with np.errstate(invalid="ignore"):  # refused rows are part of the batch
        return np.stack(sampler.sample_rows(batch.logits, batch.config, draws_B))


def engine_columns(batch: Batch, *, triton: bool = False) -> dict[str, np.ndarray]:
    """Return each serving path's records of a batch as ``[6, B]``."""
    logits_BV = torch.from_numpy(batch.logits)
    parameters_BP = np.tile(parameter_row(batch.config), (len(logits_BV), 1))
    call = (logits_BV, parameters_BP, batch.keys, batch.positions, 0)
    results = {"numba": sample_rows(*call), "torch": sample_rows_torch(*call)}
    if triton:
        from epochless_vllm.sampling.triton_path import sample_rows_triton

        results["triton"] = sample_rows_triton(*call)
    return {name: np.vstack([tokens.numpy(), records.numpy().T]) for name, (tokens, records) in results.items()}


def _pairs(actual: np.ndarray, expected: np.ndarray) -> str:
    return ", ".join(f"{name} {a} != {e}" for name, a, e in zip(FIELDS, actual, expected, strict=True) if a != e)


if __name__ == "__main__":
    sys.exit(main())
