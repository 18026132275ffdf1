"""Wrong samplers, one edit each, and whether the comparison with the NumPy reference tells them from the right one.

    python -m tests.sampling.mutants

The compiled path's functions run uncompiled here (``NUMBA_DISABLE_JIT=1`` is set before numba is imported), with
blocks and buckets of a few entries so that short rows exercise every boundary. Torch's path runs as it is. A mutant
counts only if its snippet occurs exactly once and the edited module still imports. Exit 1 if any mutant survives or
the unedited sampler fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TypeAlias

os.environ["NUMBA_DISABLE_JIT"] = "1"

import numpy as np
import torch

import epochless_vllm.sampling.kernels  # noqa: F401  # loads the modules that are replaced by edited ones
from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters
from epochless_vllm.reference import sampler
from epochless_vllm.sampling.rows import parameter_row
from epochless_vllm.sampling.tables import build_tables
from tests.sampling.boundaries import boundary_rows, scalar_difference
from tests.sampling.cases import Batch, batches
from tests.sampling.equality import reference_columns

PACKAGE = "epochless_vllm.sampling"
SOURCES = Path(__file__).parent.parent.parent / "epochless_vllm" / "sampling"
COMPILED = ("rows", "arithmetic", "filters", "kernels")
SMALL = {"BLOCK = 1024": "BLOCK = 8", "_GROUP = 64": "_GROUP = 3", "_BUCKETS_LOG2 = 12": "_BUCKETS_LOG2 = 3"}


Edges: TypeAlias = "tuple[np.ndarray, SamplerConfig, list[int], np.ndarray]"


@dataclass(frozen=True)
class Mutant:
    module: str
    before: str
    after: str


MUTANTS = [
    # The identity: rounding, temperature, tables, weights.
    Mutant("arithmetic", "np.rint(min(max(logit", "np.trunc(min(max(logit"),
    Mutant("arithmetic", "min(max(logit, -LIMIT), LIMIT)", "max(logit, -LIMIT)"),
    Mutant("arithmetic", "+ ((1 << shift) >> 1)) >> shift", ") >> shift"),
    Mutant("arithmetic", "tables[1, exponent & 255]", "tables[1, (exponent >> 8) & 255]"),
    Mutant("arithmetic", "(PRODUCT_SHIFT + (exponent >> 16))", "(PRODUCT_SHIFT + (exponent >> 17))"),
    Mutant("arithmetic", "if logit == -np.inf:", "if logit == np.inf:"),
    Mutant("arithmetic", "np.float32(logit + np.float32(0)).view", "np.float32(logit).view"),
    Mutant("rows", "_ZERO_OCTAVES = WEIGHT_BITS + 1", "_ZERO_OCTAVES = WEIGHT_BITS - 1"),
    # Draws.
    Mutant("arithmetic", "for _ in range(10):", "for _ in range(7):"),
    Mutant("arithmetic", "lane = index & 3", "lane = 3 - (index & 3)"),
    Mutant("arithmetic", "np.uint64(index >> 2)", "np.uint64(index & 0xFFFFFFFF) >> np.uint64(2)"),
    Mutant("arithmetic", "np.uint64(word_0), np.uint64(word_1)", "np.uint64(word_1), np.uint64(word_0)"),
    Mutant("arithmetic", "np.uint64(purpose), np.uint64(0)\n", "np.uint64(0), np.uint64(purpose + 1)\n"),
    # Mapping and record.
    Mutant("arithmetic", "high = (draw + 1) * (total >> 32)", "high = draw * (total >> 32)"),
    Mutant("arithmetic", "        return high - 1\n", "        return high\n"),
    Mutant("arithmetic", "if part == total:", "if part < 0:"),
    Mutant("arithmetic", "if part >= total:", "if part > total:"),
    Mutant("kernels", "while below + weights[i] <= target:", "while below + weights[i] < target:"),
    Mutant("kernels", "while below + weight <= target:", "while below + weight < target:"),
    Mutant("kernels", "weight_of(logits_V[block * BLOCK]", "weight_of(logits_V[0]"),
    Mutant("kernels", "record[KEPT] = normalised(total, whole)", "record[KEPT] = _WHOLE"),
    Mutant("kernels", "return np.int64(ids[i]), total", "return np.int64(i), total"),
    # Refusals and greedy.
    Mutant("kernels", "highest if lowest >= NEGATIVE_INFINITY_KEY else NON_FINITE_KEY", "highest"),
    Mutant("kernels", "if peak_key > LARGEST_FINITE_KEY:\n        record", "if False:\n        record"),
    Mutant("kernels", "distance = cap if block_V[j] == -np.inf else distance", "distance = distance"),
    Mutant("kernels", "    if parameters[GREEDY]:\n        record", "    if False:\n        record"),
    Mutant("kernels", "!= peak_key:\n        block += 1", "!= peak_key:\n        block += 2"),
    # Filters.
    Mutant("filters", "keys[i] > cut or (tied and ties > 0)", "keys[i] >= cut"),
    Mutant("filters", "keys[i] > cut or (tied and ties > 0)", "keys[i] > cut"),
    Mutant("filters", "while reached + histogram[bucket] < need:", "while reached + histogram[bucket] <= need:"),
    Mutant("filters", "(need - reached + tie - 1) // tie", "(need - reached) // tie"),
    Mutant("filters", "if weights[i] >= least_weight:", "if weights[i] > least_weight:"),
    Mutant("filters", "least_weight, parameters, tables) - 1)", "least_weight, parameters, tables) + 1)"),
    Mutant("filters", "    if groups < top_k:\n        return LOWEST_KEY\n", ""),
    Mutant("kernels", "(whole - need) // logits_V.shape[0] + 1", "(whole - need) // 2 + 1"),
    Mutant("kernels", "if 0 < top_k < kept:", "if 0 < top_k < kept - 1:"),
    Mutant("kernels", "if least_weight > 1 or 0 < top_k < logits_V.shape[0]:", "if False:"),
    Mutant("arithmetic", "np.int64(kept) + (1 if low", "np.int64(kept) + (0 if low"),
    Mutant("arithmetic", "np.int64(high >> rest) + (1 if dropped else 0)", "np.int64(high >> rest)"),
    Mutant("rows", "-((-config.min_p.numerator << WEIGHT_BITS)", "((config.min_p.numerator << WEIGHT_BITS)"),
    # The torch path.
    Mutant("torch_path", ".round().to(torch.int64)", ".trunc().to(torch.int64)"),
    Mutant("torch_path", ".where(~masked_BV, cap_B1)", ""),
    Mutant("torch_path", "+ ((1 << shift_B1) >> 1)) >> shift_B1", ") >> shift_B1"),
    Mutant("torch_path", "for _ in range(10):", "for _ in range(9):"),
    Mutant("torch_path", "(logits_BV + 0.0).view(torch.int32)", "logits_BV.view(torch.int32)"),
    Mutant("torch_path", "key_BV * -(1 << 22) + ids_V", "key_BV * -(1 << 22) - ids_V"),
    Mutant("torch_path", "sums_BV - sorted_BV < need_B[:, None]", "sums_BV < need_B[:, None]"),
    Mutant("torch_path", "ids_V < top_k_B1", "ids_V <= top_k_B1"),
    Mutant("torch_path", "- (dropped_B == 0).to(torch.int64)", ""),
    Mutant("torch_path", "kept + (dropped != 0)", "kept"),
    Mutant("torch_path", "torch.where(whole_B, 1 << 32, quotient_B)", "quotient_B"),
    Mutant("torch_path", "share_B = _normalised(total_B, whole_B)", "share_B = torch.full_like(w_B, 1 << 32)"),
    Mutant("torch_path", "cumulative_BV > _target", "cumulative_BV >= _target"),
]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try one mutant in so many")
    mutants = MUTANTS[:: parser.parse_args(arguments).every]
    made = list(batches(seed=78, rows=800, rows_per_batch=2, vocabularies=(1, 2, 9, 24, 40)))
    wanted = [(batch, reference_columns(batch)) for batch in made]
    edges = [_expected_edges(*row) for row in boundary_rows()]
    problems = [f"unedited {path} path: {found}" for path in PATHS if (found := _difference(path, None, wanted, edges))]
    for mutant in mutants:
        path = "torch" if mutant.module == "torch_path" else "compiled"
        found = _difference(path, mutant, wanted, edges)
        print(f"{'caught  ' if found else 'SURVIVED'} {mutant.module}: {mutant.after!r}  {found}")
        if not found:
            problems.append(f"survived: {mutant}")
    print(f"{len(mutants)} mutants, {len(problems)} problems")
    return 1 if problems else 0


def _expected_edges(logits_V: np.ndarray, config: SamplerConfig, draws: list[int]) -> Edges:
    logits_BV = np.tile(logits_V, (len(draws), 1))
    return logits_BV, config, draws, np.stack(sampler.sample_rows(logits_BV, config, np.array(draws)))


def _difference(path: str, mutant: Mutant | None, wanted: list[tuple[Batch, np.ndarray]], edges: list[Edges]) -> str:
    """Return the first sign that an edited sampler is not the recipe's: from rows, edges of tokens or scalars."""
    engine = PATHS[path](mutant)
    try:
        with np.errstate(all="ignore"):  # scalars wrap and divide here as the compiled code does
            if found := scalar_difference(*engine.scalars()) or engine.least_weight_difference():
                return found
            for number, (batch, expected) in enumerate(wanted):
                if (engine.columns(batch) != expected).any():
                    return f"rows of batch {number}"
            for logits_BV, config, draws, expected in edges:
                if (engine.columns_of_draws(logits_BV, config, draws) != expected).any():
                    return "edges of tokens"
            return ""
    except (IndexError, OverflowError, ZeroDivisionError) as error:  # an edit may walk off an array
        return type(error).__name__


class _Torch:
    """Torch's path, edited."""

    def __init__(self, mutant: Mutant | None) -> None:
        self.module = _edited("torch_path", mutant, {})

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

    def least_weight_difference(self) -> str:
        return ""  # made by rows.py, which the other path checks


class _Compiled:
    """The functions of the compiled path, edited and uncompiled."""

    def __init__(self, mutant: Mutant | None) -> None:
        honest = {name: sys.modules[f"{PACKAGE}.{name}"] for name in COMPILED}
        self.modules: dict[str, types.ModuleType] = {}
        for name in COMPILED:  # in order, so that each imports the edited ones before it
            self.modules[name] = sys.modules[f"{PACKAGE}.{name}"] = _edited(name, mutant, SMALL)
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

    def least_weight_difference(self) -> str:
        rows = self.modules["rows"]
        for min_p in (2.0**-60, 0.05, 0.5, 1.0):
            least = int(rows.parameter_row(sampler_from_parameters(temperature=1.0, min_p=min_p))[rows.MIN_WEIGHT])
            if not Fraction(least - 1, 2**40) < Fraction(min_p) <= Fraction(least, 2**40):
                return f"least weight of min_p {min_p}"
        return ""


PATHS = {"compiled": _Compiled, "torch": _Torch}


def _edited(name: str, mutant: Mutant | None, small: dict[str, str]) -> types.ModuleType:
    source = (SOURCES / f"{name}.py").read_text()
    for before, after in small.items():
        source = source.replace(before, after)
    if mutant is not None and mutant.module == name:
        assert source.count(mutant.before) == 1, f"{mutant.before!r} occurs {source.count(mutant.before)} times"
        source = source.replace(mutant.before, mutant.after)
    module = types.ModuleType(f"{PACKAGE}.{name}")
    exec(compile(source, name, "exec"), module.__dict__)
    return module


if __name__ == "__main__":
    sys.exit(main())
