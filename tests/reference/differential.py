"""The reference engine against transformers and peft: every logit of a full context, both ways of computing.

    python -m tests.reference.differential            the whole grid, one line a case, last line `N passed, N failed`

A case agrees when |error| <= 1e-4 + 1e-4 |oracle| at every logit and the argmax is the same at every position.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from epochless_vllm.reference.buffers import Limits
from epochless_vllm.reference.forward import Engine
from epochless_vllm.reference.lora import adapter_from_directory
from epochless_vllm.reference.model import load_model
from epochless_vllm.reference.sequences import replay_mixture
from tests.reference.cases import (
    FAMILY_SHAPES,
    LORA_AXES,
    MIXTURE_AXES,
    MIXTURE_SHAPE,
    SEED_SHAPES,
    SHAPES,
    make_mixture,
    make_tokens,
    write_adapter,
    write_model,
)

TOLERANCE = 1e-4
MIXTURE_RUNS = ((1, 0), (7, 15), (64, 0))  # rows at a time, and the first position whose logits are wanted

# Every shape and every axis at least once, each axis on shapes of different kinds; the command runs the whole grid.
_FAST = {
    "tiny": "none r8 patterns", "gqa-2x": "none r16 query-value", "gqa-4x": "r1 rslora attention",
    "mqa": "none alpha last-layer", "untied-cls": "none rslora head", "full-context": "r1 alpha mlp",
    "qwen2": "none r16 head", "qwen3": "none r8 attention", "llama-biases": "mlp", "bf16": "none",
    "fp16-shards": "r8", "rope-linear": "none", "rope-dynamic": "none", "rope-llama3": "query-value",
    "rope-yarn": "last-layer",
}  # fmt: skip
FAST_CASES = tuple((shape, axis) for shape, axes in _FAST.items() for axis in axes.split())
ALL_CASES = tuple((shape, axis) for shape in SEED_SHAPES for axis in LORA_AXES) + tuple(
    (shape, axis) for shape in FAMILY_SHAPES for axis in ("none", "r8", "rslora", "query-value", "head")
)


@dataclass(frozen=True)
class Comparison:
    """Worst |error| / tolerance of a case, its worst error, and positions whose argmax differs."""

    worst_ratio: float
    worst_error: float
    largest: float
    argmax_flips: int

    @property
    def agrees(self) -> bool:
        return self.worst_ratio <= 1 and self.argmax_flips == 0


def compare(logits: np.ndarray, oracle: np.ndarray) -> Comparison:
    """Return how far logits are from an oracle's; a value that is not finite is infinitely far."""
    error = np.abs(logits.astype(np.float64) - oracle)
    error[~np.isfinite(error)] = np.inf
    ratio = error / (TOLERANCE + TOLERANCE * np.abs(oracle))
    flips = int(np.count_nonzero(logits.argmax(axis=1) != oracle.argmax(axis=1)))
    return Comparison(float(ratio.max()), float(error.max()), float(np.abs(oracle).max()), flips)


def write_case(directory: Path, shape: str, axis: str) -> tuple[Path, Path | None]:
    """Write the model and the adapter of a case; return their directories."""
    model = directory / shape
    if not model.exists():
        write_model(model, SHAPES[shape])
    return model, write_adapter(directory / f"{shape}+{axis}", SHAPES[shape], axis)


def engine_logits(model: Path, adapter: Path | None, tokens: list[int]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the engine's logits (positions, vocab) by each way of computing them."""
    base = load_model(model)
    factors = None if adapter is None else adapter_from_directory(adapter, base.config)
    engine = Engine(base, Limits(len(tokens)))
    yield "by position", np.stack([engine.step(token, factors).copy() for token in tokens])
    engine = Engine(base, Limits(len(tokens), rows=7))
    yield "batched", collect(engine.prefill(tokens, factors))
    engine = Engine(base, Limits(len(tokens), rows=16, accumulation="float64"))
    yield "batched, wide", collect(engine.prefill(tokens, factors))


def collect(items: Iterator[tuple[int, np.ndarray]], first: int = 0) -> np.ndarray:
    """Return the rows of a prefill that must name its positions in order from ``first``."""
    blocks = []
    for position, logits in items:
        assert position == first, f"position {position}, expected {first}"
        first += len(logits)
        blocks.append(logits.copy())
    return np.concatenate(blocks)


def write_mixture(directory: Path) -> tuple[Path, list[Path], list[int]]:
    """Write the mixture's model and adapters; return them and its tokens."""
    cases = [write_case(directory, MIXTURE_SHAPE, axis) for axis in MIXTURE_AXES]
    return cases[0][0], [adapter for _, adapter in cases if adapter is not None], make_tokens(SHAPES[MIXTURE_SHAPE])


def mixture_by_engine(model: Path, adapters: list[Path], tokens: list[int], rows: int, logits_from: int) -> np.ndarray:
    """Return the engine's logits of the mixture, computed so many rows at a time, from a position on."""
    base = load_model(model)
    loaded = [adapter_from_directory(adapter, base.config) for adapter in adapters]
    cached, sampled = ([None if at is None else loaded[at] for at in each] for each in make_mixture(len(tokens)))
    engine = Engine(base, Limits(len(tokens), rows=rows))
    return collect(replay_mixture(engine, tokens, cached, sampled, logits_from=logits_from), first=logits_from)


def main() -> int:
    """Run the whole grid; return the exit status."""
    from tests.reference.oracle import mixture_logits, oracle_logits

    reports: list[Comparison] = []

    def report(name: str, results: list[Comparison]) -> None:
        poorest = max(results, key=lambda result: (result.argmax_flips, result.worst_ratio))
        reports.append(poorest)
        print(
            f"{'ok  ' if poorest.agrees else 'FAIL'} {name:27} worst error/tolerance {poorest.worst_ratio:.3f} "
            f"({poorest.worst_error:.2e} of {poorest.largest:.2f}), argmax flips {poorest.argmax_flips}",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as scratch:
        for shape, axis in ALL_CASES:
            model, adapter = write_case(Path(scratch), shape, axis)
            tokens = make_tokens(SHAPES[shape])
            oracle = oracle_logits(model, adapter, tokens)
            report(f"{shape} {axis}", [compare(logits, oracle) for _, logits in engine_logits(model, adapter, tokens)])
        model, adapters, tokens = write_mixture(Path(scratch))
        oracle = mixture_logits(model, adapters, tokens, *make_mixture(len(tokens)))
        report(
            "mixture",
            [
                compare(mixture_by_engine(model, adapters, tokens, rows, first), oracle[first:])
                for rows, first in MIXTURE_RUNS
            ],
        )
    failed = sum(not result.agrees for result in reports)
    print(f"worst error/tolerance {max(result.worst_ratio for result in reports):.3f} of 1e-4 + 1e-4 |oracle|")
    print(f"{len(reports) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
