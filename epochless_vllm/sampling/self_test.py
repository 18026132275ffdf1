"""Compiles the sampler before the first request and proves that what was compiled is the recipe.

A cached kernel may be stale and a compiler may err, and either would be a silent forgery by ourselves. So a start-up
draws a batch of awkward rows twice, by the path that will serve and by plain torch operations, and compares bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from epochless_vllm.errors import ConfigurationError
from epochless_vllm.protocol.draws import seeded_key
from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters
from epochless_vllm.sampling.rows import parameter_row
from epochless_vllm.sampling.sample import sample_rows
from epochless_vllm.sampling.torch_path import sample_rows_torch

_VOCABULARY = 3001  # more than one block, and not a multiple of one


def warm_up(device: torch.device | str = "cpu") -> None:
    """Compile the sampler for a device, some ten seconds without a cache, and check it.

    Raises:
        ConfigurationError: the compiled sampler does not draw what the recipe says.
    """
    logits_BV, samplers = _awkward_rows(), _samplers()
    parameters_BP = np.stack([parameter_row(sampler) for sampler in samplers])
    rows = len(samplers)
    keys_B2 = np.array([seeded_key(seed=row, prompt_index=0, choice_index=0) for row in range(rows)], dtype=np.uint32)
    positions_B = np.arange(rows, dtype=np.int64) * 0x40000003
    expected, records = sample_rows_torch(logits_BV, parameters_BP, keys_B2, positions_B, 0)
    for count in (1, rows):  # the split of work differs with the number of rows
        cut = slice(0, count)
        sampled = sample_rows(logits_BV[cut].to(device), parameters_BP[cut], keys_B2[cut], positions_B[cut])
        if not (torch.equal(sampled.tokens.cpu(), expected[cut]) and torch.equal(sampled.records.cpu(), records[cut])):
            raise ConfigurationError(
                "the compiled sampler differs from its recipe; remove the __pycache__ of epochless_vllm/sampling, and "
                "report this if it stays",
                flag="sampler",
            )


def _samplers() -> list[SamplerConfig]:
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.95, "min_p": 0.01}]
    samplers = [
        sampler_from_parameters(temperature=temperature, top_k=top_k, **values)
        for temperature in (0.6, 1.0)
        for top_k in (0, 20)
        for values in filters
    ]
    return [*samplers, sampler_from_parameters(temperature=0)]


def _awkward_rows() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    logits_BV = torch.randn((len(_samplers()), _VOCABULARY), generator=generator) * 4
    logits_BV[1::4] = logits_BV[1::4].round()  # ties
    logits_BV[2::4, ::3] = float("-inf")
    logits_BV[3::4, ::2] = -3.4e38
    return logits_BV
