"""How the compiled task is made: never from a stale cache, and without a cache where none can be written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from epochless_vllm.sampling import arithmetic, filters, kernels, rows, tables, tasks, team, warm_up


def test_the_cache_key_covers_every_source_that_is_compiled() -> None:
    # numba looks at one file's age; what a function closes over is in its key, and this one closes over all sources.
    sources = b"".join(Path(m.__file__).read_bytes() for m in (arithmetic, filters, kernels, rows, tables))
    fingerprint = int.from_bytes(hashlib.sha256(sources).digest()[:7], "big")
    assert fingerprint in [cell.cell_contents for cell in tasks.TASK.owner._pyfunc.__closure__]


def test_without_a_writable_cache_the_task_is_compiled_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    class Compiled:
        address = 0x1000

    def compile_stub(signature: Any, *, cache: bool = False, error_model: str) -> Any:
        attempts.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda body: Compiled()

    monkeypatch.setattr(tasks, "cfunc", compile_stub)
    assert tasks._compile_task().address == 0x1000
    assert attempts == [True, False]


def test_sampling_starts_no_second_pool_of_threads() -> None:
    from numba.np.ufunc import parallel

    before, threads = parallel._is_initialized, torch.get_num_threads()
    warm_up()
    assert parallel._is_initialized == before, "numba's pool would be pinned to one core, or fight torch's"
    assert torch.get_num_threads() == threads


def test_the_team_is_torchs() -> None:
    assert team.team_size() in (1, torch.get_num_threads())
    if torch.backends.openmp.is_available():
        assert team._parallel_entry() is not None
