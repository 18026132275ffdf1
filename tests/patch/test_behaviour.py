"""The patched modules of vLLM at work, in a process that imports a patched copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from epochless_vllm.patch.installation import apply_patch
from epochless_vllm.patch.pin import load_series
from tests.patch.conftest import REPOSITORY
from tests.patch.trees import mirror_package

CHECKS = sorted(str(place) for place in (Path(__file__).parent / "patched").glob("check_*.py"))


def test_the_patched_modules_behave(installed: Path, tmp_path: Path):
    mirror = mirror_package(installed, tmp_path / "mirror", load_series().pin.files)
    assert apply_patch(mirror).state == "patched"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(mirror), str(REPOSITORY)]),
        "PYTHONDONTWRITEBYTECODE": "1",  # the copy shares its compiled files with the installed package
        "VLLM_PLUGINS": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *CHECKS]
    finished = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
