"""Two tensor-parallel ranks: each packs its own shard, and together they say what one rank says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from epochless_vllm.plugin import punica
from epochless_vllm.plugin.options import Options
from tests.adapters import MLP
from tests.execution.live import MergedModel, Row, prompt_of, running, write_adapter, write_model

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4


class InstallSeam:
    """What a worker process imports before it builds its model; a deployment's plugin does this by itself."""

    punica.install(Options(store="unused"))


def test_mixed_rows_on_two_ranks_equal_the_merged_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    model = write_model(tmp_path)
    paths = [
        write_adapter(tmp_path, "all-modules-rank-8", seed=1, rank=8),
        write_adapter(tmp_path, "head-and-mlp-rank-4", seed=2, rank=4, targets=(*MLP, "lm_head"), scale=0.1),
    ]
    extension = f"{InstallSeam.__module__}.{InstallSeam.__qualname__}"
    with running(model, paths, tensor_parallel_size=2, worker_extension_cls=extension) as engine:
        kinds = [None, engine.adapters[0], engine.adapters[1], engine.adapters[0], None]
        rows: list[Row] = [(kind, prompt_of(20 + place, place)) for place, kind in enumerate(kinds)]
        answers = engine.answer(rows, prompt=True)
    merged = {
        kind: MergedModel(model, path) for kind, path in zip([None, *engine.adapters], [None, *paths], strict=True)
    }
    for (kind, prompt), answer in zip(rows, answers, strict=True):
        expected = merged[kind].logprobs([*prompt, *answer.tokens])
        got = np.concatenate([answer.prompt_logprobs, answer.logprobs])
        assert np.abs(got - expected).max() <= TOLERANCE
