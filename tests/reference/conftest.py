"""One directory of models and adapters for all tests of the reference engine, and quiet BLAS threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before NumPy or torch starts its pool: the models are too small to share between threads.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")


@pytest.fixture(scope="session")
def case_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")
