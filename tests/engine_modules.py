"""Runs every test module that starts a real engine, each in a process of its own, and sums them up.

An engine leaves its mark on a process: loaded plugins, wrapped classes, environment. A tiny engine keeps one core busy:
modules run in pairs where there are two, but for those that start several ranks or servers, or watch memory and clocks.
Usage: ``python -m tests.engine_modules [PATH ...]``; exits 1 if a module failed or ran nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
NO_TESTS = 5  # pytest's exit status when nothing was selected
ALONE = frozenset(
    {
        "test_server_cuts",
        "test_two_rank_server_engine",
        "test_front_end_engine",
        "test_long_life_engine",
        "test_many_front_ends_engine",
        "test_ranks_engine",
    }
)
LONG = ("test_receipts_engine", "test_vllm_engine", "test_restart_engine")  # begun first, so that pairs end together

_printing = threading.Lock()


def engine_modules() -> list[Path]:
    """Return the test modules that mark a test, or all of theirs, with ``engine``."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if "pytest.mark.engine" in path.read_text()]


def run_module(path: Path) -> bool:
    """Run a module, print what it said and how long it took; return whether it passed."""
    name = path.relative_to(ROOT)
    _print(f"{name} ...")
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "engine and not gpu", str(path)]
    run = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    word = {0: "ok", NO_TESTS: "RAN NOTHING"}.get(run.returncode, "FAILED")
    _print(f"{run.stdout.decode(errors='replace')}{name}: {word}, {time.monotonic() - began:.0f} s")
    return run.returncode == 0


def _print(text: str) -> None:
    with _printing:
        print(text, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the given modules, or all; return the exit status."""
    modules = [Path(argument).resolve() for argument in arguments] or engine_modules()
    alone = [path for path in modules if path.stem in ALONE]
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pair:
        paired = sorted((path for path in modules if path not in alone), key=lambda path: path.stem not in LONG)
        passed = list(pair.map(run_module, paired))
    passed += map(run_module, alone)
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if modules and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
