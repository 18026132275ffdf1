"""Runs every test module that starts a real engine, each in a process of its own, and sums them up.

An engine leaves its mark on a process: loaded plugins, wrapped classes, environment. Usage:
``python -m tests.engine_modules [PATH ...]``; exits 1 if a module failed or ran nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
NO_TESTS = 5  # pytest's exit status when nothing was selected


def engine_modules() -> list[Path]:
    """Return the test modules that mark a test, or all of theirs, with ``engine``."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if "pytest.mark.engine" in path.read_text()]


def main(arguments: Sequence[str]) -> int:
    """Run the given modules, or all; return the exit status."""
    modules = [Path(argument).resolve() for argument in arguments] or engine_modules()
    failed = []
    for number, path in enumerate(modules, start=1):
        name = path.relative_to(ROOT)
        began = time.monotonic()
        print(f"[{number}/{len(modules)}] {name}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "engine and not gpu", str(path)]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status:
            failed.append(name)
        word = {0: "ok", NO_TESTS: "RAN NOTHING"}.get(status, "FAILED")
        print(f"[{number}/{len(modules)}] {name}: {word}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(modules) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed or not modules else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
