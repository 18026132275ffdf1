"""The patched modules of vLLM at work, in a process that imports a patched copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from epochless_vllm.patch.installation import apply_patch
from epochless_vllm.patch.pin import load_series
from tests.patch.conftest import REPOSITORY
from tests.patch.trees import mirror_package

PATCHED = Path(__file__).parent / "patched"


@pytest.fixture(scope="module")
def mirror(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An importable copy of the installed vLLM, patched."""
    target = mirror_package(installed, tmp_path_factory.mktemp("mirror") / "packages", load_series().pin.files)
    assert apply_patch(target).state == "patched"
    return target


def run_checks(mirror: Path, *names: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(mirror), str(REPOSITORY)]),
        "PYTHONDONTWRITEBYTECODE": "1",  # the copy shares its compiled files with the installed package
        "VLLM_PLUGINS": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the models are tiny; threads that wait for each other cost more than they give
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    checks = [str(PATCHED / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *checks]
    finished = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]


def test_the_patched_modules_behave(mirror: Path):
    run_checks(mirror, "check_config.py", "check_engine.py", "check_front_end.py", "check_responses.py")


@pytest.mark.engine
def test_a_running_engine_behaves(mirror: Path):
    run_checks(mirror, "live_engine.py")
