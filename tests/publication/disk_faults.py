"""Runs Python in a process whose disk can be made to fail, by disk_faults.c."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")
ROOT = Path(__file__).parents[2]
EIO, ENOSPC, EDQUOT = errno.EIO, errno.ENOSPC, errno.EDQUOT


def build(directory: Path) -> Path:
    """Compile the shim; skip the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = directory / "disk_faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def run(library: Path, control: Path, script: str, *arguments: object) -> str:
    """Run a script under the shim and return what it printed.

    The script finds ``fail(call, pattern, code, count=0)`` and ``heal()`` defined, and its arguments in ``sys.argv``.
    """
    prelude = f"""
import os, sys
CONTROL = {str(control)!r}
def fail(call, pattern, code, count=0):
    with open(CONTROL + ".new", "w") as file:
        file.write(f"{{call}} {{pattern}} {{code}} {{count}}")
    os.rename(CONTROL + ".new", CONTROL)
def heal():
    os.unlink(CONTROL)
"""
    finished = subprocess.run(
        [sys.executable, "-c", prelude + script, *map(str, arguments)],
        env={**os.environ, "LD_PRELOAD": str(library), "FAULT_CONTROL": str(control), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()
