"""Batches that a sampler gets wrong: ties, both zeros, masks, saturated and refused rows, extreme filters.

A batch has one sampler, so that the references can treat it whole; everything follows from a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters

TEMPERATURES = (0.0, 0.01, 0.05, 0.3, 0.6, 0.7, 1.0, 1.5, 2.0, 40.0, 256.0)
TOP_PS = (1e-300, 5e-324, 0.01, 0.1, 0.5, 0.9, 0.95, 1 - 2**-53)
MIN_PS = (1e-300, 0.001, 0.05, 0.5, 1.0)
VOCABULARIES = (1, 2, 3, 7, 63, 64, 65, 128, 200, 255, 256)


@dataclass(frozen=True)
class Batch:
    """Rows of one sampler, with a key and a position each."""

    config: SamplerConfig
    logits: NDArray[np.float32]
    keys: NDArray[np.uint32]
    positions: NDArray[np.int64]


def batches(
    *, seed: int, rows: int, rows_per_batch: int, vocabularies: tuple[int, ...] = VOCABULARIES
) -> Iterator[Batch]:
    """Yield batches until they hold ``rows`` rows."""
    generator = np.random.default_rng(seed)
    while rows > 0:
        count = min(rows, rows_per_batch)
        yield _batch(generator, count, int(generator.choice(vocabularies)))
        rows -= count


def _batch(generator: np.random.Generator, rows: int, vocabulary: int) -> Batch:
    temperature = float(generator.choice(TEMPERATURES))
    parameters: dict[str, float] = {}
    if generator.random() < 0.4:
        parameters["top_p"] = float(generator.choice(TOP_PS))
    if generator.random() < 0.3:
        parameters["min_p"] = float(generator.choice(MIN_PS))
    top_k = int(generator.choice([1, 2, 5, 50, vocabulary, vocabulary + 1])) if generator.random() < 0.4 else 0
    return Batch(
        config=sampler_from_parameters(temperature=temperature, top_k=top_k, **parameters),
        logits=_logits(generator, rows, vocabulary),
        keys=generator.integers(0, 1 << 32, (rows, 2), dtype=np.uint32),
        positions=generator.integers(0, 1 << int(generator.integers(1, 62)), rows),
    )


def _logits(generator: np.random.Generator, rows: int, vocabulary: int) -> NDArray[np.float32]:
    shape = (rows, vocabulary)
    logits_BV = (generator.standard_normal(shape) * generator.choice([0.1, 1, 3, 5, 20])).astype(np.float32)
    kind = generator.integers(0, 12)
    if kind == 0:  # ties of three values, two of them zeros
        logits_BV = generator.choice(np.array([0.0, -0.0, 1.0], dtype=np.float32), size=shape)
    elif kind == 1:
        logits_BV = np.round(logits_BV)
    elif kind == 2:  # a grammar's mask
        logits_BV[generator.random(shape) < 0.5] = -np.inf
    elif kind == 3:  # a mask of the lowest finite value
        logits_BV[generator.random(shape) < 0.5] = -3.4e38
    elif kind == 4:
        logits_BV[:] = generator.choice([-1.5, 0.0, 700.0])
    elif kind == 5:  # a refused row here and there
        logits_BV[generator.random(shape) < 0.5 / vocabulary] = generator.choice([np.nan, -np.nan, np.inf])
        logits_BV[: rows // 4] = -np.inf
    elif kind == 6:  # forced tokens, beyond saturation
        for value in generator.choice([8192.0, 9000.0, 9001.0, 3e38], size=3):
            logits_BV[np.arange(rows), generator.integers(0, vocabulary, rows)] = value
    elif kind == 7:  # everything below saturation
        logits_BV -= generator.choice([8180.0, 9000.0, 1e30])
    elif kind == 8:  # one token left
        logits_BV[:] = -np.inf
        logits_BV[np.arange(rows), generator.integers(0, vocabulary, rows)] = generator.choice([-3.4e38, -9e3, 0, 9e3])
    elif kind == 9:  # halves of a quantum, where rounding goes to even
        logits_BV = ((np.floor(logits_BV * 64) + 0.5) / 65536).astype(np.float32)
    elif kind == 10:  # subnormal logits
        logits_BV *= np.float32(1e-41)
    return logits_BV
