"""Rotary tables equal to the serving engine's own, kind by kind. Imports the engine, starts none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from epochless_vllm.reference.rope import rope_from_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("parameters", "positions"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, 4096),
        ({"rope_type": "default", "rope_theta": 1000000.0}, 131072),
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 4096),
        ({"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}, 131072),
        ({"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 8192}, 8192),
        (
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 4096,
             "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
            4096,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128])
def test_table_is_the_serving_engines(parameters: dict[str, Any], positions: int, head_dim: int) -> None:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        served = get_rope(head_dim, positions, True, dict(parameters), torch.float32).cos_sin_cache.numpy()
    rope = rope_from_config({"max_position_embeddings": positions, "rope_parameters": parameters}, default_theta=None)
    limit = min(rope.limit, len(served))
    cosines, sines = rope.table(head_dim, limit)
    # Angles grow with the position, and with them one unit in the last place of a frequency.
    allowed = 4e-7 + np.arange(limit)[:, None] * 3e-7
    assert (np.abs(cosines - served[:limit, : head_dim // 2]) <= allowed).all()
    assert (np.abs(sines - served[:limit, head_dim // 2 :]) <= allowed).all()
    assert np.abs(cosines[-1] - 1).max() > 0.3
