"""Errors of one, and proof that the comparisons of these tests can see them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from epochless_vllm.reference import sampler
from epochless_vllm.sampling import arithmetic, kernels, parameter_row, tables, torch_path
from tests.sampling.boundaries import boundary_rows, scalar_difference

ROOT = Path(__file__).parent.parent.parent


def by_row(function: Callable[..., torch.Tensor]) -> Callable[..., int]:
    return lambda *values: int(function(*(torch.tensor([value]) for value in values)))


def test_compiled_scalars_are_exact_at_their_edges() -> None:
    assert scalar_difference(arithmetic.normalised, arithmetic.target_of, arithmetic.share_of) == ""


def test_torch_scalars_are_exact_at_their_edges() -> None:
    functions = (torch_path._normalised, torch_path._target, torch_path.share_of)
    assert scalar_difference(*map(by_row, functions)) == ""


def test_scalars_off_by_one_are_seen() -> None:
    honest = (arithmetic.normalised, arithmetic.target_of, arithmetic.share_of)
    for wrong in range(3):
        functions = list(honest)
        functions[wrong] = lambda *values, wrong=wrong: honest[wrong](*values) - 1
        assert scalar_difference(*functions)


def test_the_first_and_last_draw_of_every_token_pick_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_tables, record = tables.build_tables(), np.zeros(5, dtype=np.int64)
    for logits_V, config, draws in boundary_rows():
        rows, parameters = len(draws), parameter_row(config)
        logits_BV = np.tile(logits_V, (rows, 1))
        expected = np.stack(sampler.sample_rows(logits_BV, config, np.array(draws)))
        assert (expected[1] <= draws).all()
        assert (draws < expected[1] + expected[2]).all()

        monkeypatch.setattr(torch_path, "draw_words", lambda *_, draws=draws: torch.tensor(draws))
        tokens, records = torch_path.sample_rows_torch(
            torch.from_numpy(logits_BV), np.tile(parameters, (rows, 1)),
            np.zeros((rows, 2), dtype=np.uint32), np.zeros(rows, dtype=np.int64), 0,
        )  # fmt: skip
        assert (np.vstack([tokens, records.T]) == expected).all()

        peaks_N, sums_N = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)
        kernels.store_peaks(logits_V, 0, 1, peaks_N)
        kernels.store_sums(logits_V, 0, 1, parameters, weight_tables, peaks_N[0], sums_N)
        for number, draw in enumerate(draws):
            if config.filtered:
                token = kernels._finish_filtered(
                    logits_V, peaks_N, np.int32(0), parameters, weight_tables, sums_N[0], draw, record
                )
            else:
                token = kernels._finish_unfiltered(
                    logits_V, sums_N, np.int32(0), parameters, weight_tables, sums_N[0], draw, record
                )
            assert (token, record[0], record[1]) == tuple(expected[:3, number])


def test_the_python_of_the_compiled_path_gives_the_reference_in_blocks_of_a_few_tokens() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/sampling/uncompiled.py"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
