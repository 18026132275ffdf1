"""The sampler against the NumPy reference with every boundary in reach: compiled functions uncompiled, small blocks.

    NUMBA_DISABLE_JIT=1 python -m pytest tests/sampling/uncompiled.py

Not collected by itself: numba must not have been imported before. test_boundaries.py runs it in a process of its own,
and so does the mutation campaign. Torch's path runs as it is.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

import pytest

os.environ["NUMBA_DISABLE_JIT"] = "1"

import numba
import numpy as np
import torch

import epochless_vllm.sampling.kernels  # noqa: F401  # loads the modules that are replaced by small ones
from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters
from epochless_vllm.reference import sampler
from epochless_vllm.sampling.rows import MIN_WEIGHT, parameter_row
from epochless_vllm.sampling.tables import build_tables
from tests.sampling.boundaries import boundary_rows, scalar_difference
from tests.sampling.cases import Batch, batches
from tests.sampling.equality import reference_columns

assert numba.config.DISABLE_JIT, "numba was imported before: set NUMBA_DISABLE_JIT=1"
PACKAGE = "epochless_vllm.sampling"
SOURCES = Path(__file__).parent.parent.parent / "epochless_vllm" / "sampling"
COMPILED = ("rows", "arithmetic", "filters", "kernels")
SMALL = {"BLOCK = 1024": "BLOCK = 8", "_GROUP = 64": "_GROUP = 3", "_BUCKETS_LOG2 = 12": "_BUCKETS_LOG2 = 3"}


class _Torch:
    """Torch's path as it is."""

    def __init__(self) -> None:
        self.module = _load("torch_path", {})

    def columns(self, batch: Batch) -> np.ndarray:
        parameters_BP = np.tile(parameter_row(batch.config), (len(batch.logits), 1))
        call = (torch.from_numpy(batch.logits), parameters_BP, batch.keys, batch.positions, 0)
        tokens, records = self.module.sample_rows_torch(*call)
        return np.vstack([tokens.numpy(), records.numpy().T])

    def columns_of_draws(self, logits_BV: np.ndarray, config: SamplerConfig, draws: list[int]) -> np.ndarray:
        honest, self.module.draw_words = self.module.draw_words, lambda *_: torch.tensor(draws)
        rows = len(draws)
        batch = Batch(config, logits_BV, np.zeros((rows, 2), dtype=np.uint32), np.zeros(rows, dtype=np.int64))
        columns = self.columns(batch)
        self.module.draw_words = honest
        return columns

    def scalars(self) -> list[Callable[..., int]]:
        functions = (self.module._normalised, self.module._target, self.module.share_of)
        return [lambda *values, f=f: int(f(*(torch.tensor([value]) for value in values))) for f in functions]


class _Compiled:
    """The functions of the compiled path, uncompiled and with small blocks."""

    def __init__(self) -> None:
        honest = {name: sys.modules[f"{PACKAGE}.{name}"] for name in COMPILED}
        self.modules: dict[str, types.ModuleType] = {}
        for name in COMPILED:  # in order, so that each imports the small ones before it
            self.modules[name] = sys.modules[f"{PACKAGE}.{name}"] = _load(name, SMALL)
        sys.modules.update({f"{PACKAGE}.{name}": module for name, module in honest.items()})
        self.tables = build_tables()

    def columns(self, batch: Batch) -> np.ndarray:
        return self._columns(batch.logits, batch.config, batch.keys, batch.positions)

    def columns_of_draws(self, logits_BV: np.ndarray, config: SamplerConfig, draws: list[int]) -> np.ndarray:
        honest = self.modules["kernels"].draw_of
        self.modules["kernels"].draw_of = lambda word_0, word_1, index, purpose: np.int64(index)
        columns = self._columns(logits_BV, config, np.zeros((len(draws), 2), dtype=np.uint32), np.array(draws))
        self.modules["kernels"].draw_of = honest
        return columns

    def _columns(
        self, logits_BV: np.ndarray, config: SamplerConfig, keys_B2: np.ndarray, positions_B: np.ndarray
    ) -> np.ndarray:
        kernels, block = self.modules["kernels"], self.modules["filters"].BLOCK
        parameters, columns = self.modules["rows"].parameter_row(config), []
        for logits_V, words, position in zip(logits_BV, keys_B2, positions_B, strict=True):
            blocks = -(-len(logits_V) // block)
            peaks_N, sums_N = np.zeros(blocks, dtype=np.int32), np.zeros(blocks, dtype=np.int64)
            record = np.zeros(5, dtype=np.int64)
            kernels.store_peaks(logits_V, 0, blocks, peaks_N)
            kernels.store_sums(logits_V, 0, blocks, parameters, self.tables, kernels.row_peak(peaks_N), sums_N)
            token = kernels.finish_row(logits_V, peaks_N, sums_N, parameters, self.tables, words, position, 0, record)
            columns.append([token, *record])
        return np.array(columns).T

    def scalars(self) -> list[Callable[..., int]]:
        arithmetic = self.modules["arithmetic"]
        functions = (arithmetic.normalised, arithmetic.target_of, arithmetic.share_of)
        return [lambda *values, f=f: int(f(*(np.int64(value) for value in values))) for f in functions]


def _load(name: str, small: dict[str, str]) -> types.ModuleType:
    source = (SOURCES / f"{name}.py").read_text()
    for before, after in small.items():
        source = source.replace(before, after)
    module = types.ModuleType(f"{PACKAGE}.{name}")
    exec(compile(source, name, "exec"), module.__dict__)
    return module


Sampler: TypeAlias = "_Torch | _Compiled"


@pytest.fixture(scope="module", params=[_Compiled, _Torch], ids=["compiled", "torch"])
def path(request: pytest.FixtureRequest) -> Sampler:
    made: Sampler = request.param()
    return made


@pytest.fixture(autouse=True)
def _wrapping() -> Iterator[None]:
    with np.errstate(all="ignore"):  # scalars wrap and divide here as the compiled code does
        yield


def test_rows_are_the_references(path: Sampler) -> None:
    for batch in batches(seed=78, rows=800, rows_per_batch=2, vocabularies=(1, 2, 9, 24, 40)):
        assert (path.columns(batch) == reference_columns(batch)).all()


def test_the_first_and_last_draw_of_every_token_pick_it(path: Sampler) -> None:
    for logits_V, config, draws in boundary_rows():
        logits_BV = np.tile(logits_V, (len(draws), 1))
        expected = np.stack(sampler.sample_rows(logits_BV, config, np.array(draws)))
        assert (path.columns_of_draws(logits_BV, config, draws) == expected).all()


def test_scalars_are_exact_at_their_edges(path: Sampler) -> None:
    assert scalar_difference(*path.scalars()) == ""


def test_the_least_weight_of_min_p_is_rounded_up() -> None:
    for min_p in (2.0**-60, 0.05, 0.5, 1.0):
        least = int(parameter_row(sampler_from_parameters(temperature=1.0, min_p=min_p))[MIN_WEIGHT])
        assert Fraction(least - 1, 2**40) < Fraction(min_p) <= Fraction(least, 2**40)
