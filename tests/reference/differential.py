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
from tests.reference.cases import FAMILY_SHAPES, LORA_AXES, SEED_SHAPES, SHAPES, make_tokens, write_adapter, write_model

TOLERANCE = 1e-4

# Every shape and every axis at least twice, each axis on shapes of different kinds; the command runs the whole grid.
FAST_CASES = (
    ("tiny", "none"), ("tiny", "r8"), ("tiny", "patterns"), ("gqa-2x", "none"), ("gqa-2x", "r16"),
    ("gqa-2x", "query-value"), ("gqa-4x", "r1"), ("gqa-4x", "rslora"), ("gqa-4x", "attention"), ("mqa", "none"),
    ("mqa", "alpha"), ("mqa", "last-layer"), ("untied-cls", "none"), ("untied-cls", "rslora"), ("untied-cls", "head"),
    ("full-context", "alpha"), ("full-context", "mlp"), ("full-context", "r1"), ("qwen2", "none"), ("qwen2", "r16"),
    ("qwen2", "head"), ("qwen3", "none"), ("qwen3", "attention"), ("qwen3", "r8"), ("llama-biases", "mlp"),
    ("rope-linear", "none"), ("rope-dynamic", "none"), ("rope-llama3", "query-value"), ("rope-yarn", "last-layer"),
)  # fmt: skip
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


def engine_logits(model: Path, adapter: Path | None, tokens: list[int], **limits: object) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the engine's logits (positions, vocab) by each way of computing them."""
    base = load_model(model)
    factors = None if adapter is None else adapter_from_directory(adapter, base.config)
    for name, options in (
        ("by position", {}),
        ("batched", {"rows": 7}),
        ("batched, wide", {"rows": 16, "accumulation": "float64"}),
    ):
        engine = Engine(base, Limits(len(tokens), **(options | limits)))  # type: ignore[arg-type]
        if name == "by position":
            yield name, np.stack([engine.step(token, factors).copy() for token in tokens])
        else:
            yield name, np.concatenate([rows.copy() for _, rows in engine.prefill(tokens, factors)])


def main() -> int:
    """Run the whole grid; return the exit status."""
    from tests.reference.oracle import oracle_logits

    failed, worst = 0, Comparison(0.0, 0.0, 0.0, 0)
    with tempfile.TemporaryDirectory() as scratch:
        for shape, axis in ALL_CASES:
            model, adapter = write_case(Path(scratch), shape, axis)
            tokens = make_tokens(SHAPES[shape])
            oracle = oracle_logits(model, adapter, tokens)
            results = {way: compare(logits, oracle) for way, logits in engine_logits(model, adapter, tokens)}
            poorest = max(results.values(), key=lambda result: (result.argmax_flips, result.worst_ratio))
            worst = max(worst, poorest, key=lambda result: result.worst_ratio)
            agrees = all(result.agrees for result in results.values())
            failed += not agrees
            print(
                f"{'ok  ' if agrees else 'FAIL'} {shape:13} {axis:12} worst error/tolerance {poorest.worst_ratio:.3f} "
                f"({poorest.worst_error:.2e} of {poorest.largest:.2f}), argmax flips {poorest.argmax_flips}",
                flush=True,
            )
    print(f"worst error/tolerance {worst.worst_ratio:.3f}, tolerance {TOLERANCE} + {TOLERANCE} |oracle|")
    print(f"{len(ALL_CASES) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
