"""The configurations in which the reference engine's defects show, each against logits computed once.

    python -m tests.reference.against_oracle DIRECTORY      compute them, by transformers and peft

Not collected by itself: the mutation campaign runs it, with ``MUTATION_FILES`` naming the directory, because computing
the oracle anew takes longer than all the configurations together. The fast suite has test_differential.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.reference.cases import SHAPES, make_mixture, make_tokens
from tests.reference.differential import (
    MIXTURE_RUNS,
    compare,
    engine_logits,
    mixture_by_engine,
    write_case,
    write_mixture,
)

MIXTURE = "mixture"
CONFIGURATIONS = (
    "tiny none", "gqa-2x none", "gqa-4x none", "mqa none", "untied-cls none", "full-context none", "tiny r8",
    "gqa-4x alpha", "mqa rslora", "full-context patterns", "untied-cls head", "qwen2 none", "qwen3 none",
    "llama-biases none", "bf16 none", "fp16-shards none", "rope-linear none", "rope-llama3 none", "rope-yarn none",
    MIXTURE,
)  # fmt: skip


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_every_logit_is_the_oracles(configuration: str) -> None:
    directory = Path(os.environ["MUTATION_FILES"])
    oracle = np.load(directory / f"{configuration}.npy")
    with np.errstate(all="ignore"):  # a wrong engine may overflow on its way to a wrong logit
        if configuration == MIXTURE:
            model, adapters, tokens = write_mixture(directory)
            for rows, first in MIXTURE_RUNS:
                assert compare(mixture_by_engine(model, adapters, tokens, rows, first), oracle[first:]).agrees
        else:
            shape, axis = configuration.split()
            model, adapter = write_case(directory, shape, axis)
            for _, logits in engine_logits(model, adapter, make_tokens(SHAPES[shape])):
                assert compare(logits, oracle).agrees


def write_oracles(directory: Path, configurations: Iterable[str]) -> None:
    """Write the files and the oracle's logits of each configuration."""
    from tests.reference.oracle import mixture_logits, oracle_logits

    for configuration in configurations:
        if configuration == MIXTURE:
            model, adapters, tokens = write_mixture(directory)
            logits = mixture_logits(model, adapters, tokens, *make_mixture(len(tokens)))
        else:
            shape, axis = configuration.split()
            model, adapter = write_case(directory, shape, axis)
            logits = oracle_logits(model, adapter, make_tokens(SHAPES[shape]))
        np.save(directory / f"{configuration}.npy", logits)


if __name__ == "__main__":
    write_oracles(Path(sys.argv[1]), CONFIGURATIONS)
