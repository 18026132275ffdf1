"""Runs tests in a fresh copy of itself for each request. Started by path with what all runs share; see runner.py.

Reads one JSON object a line, forks, and answers with a line when the child has ended. The child finds the package and
the tests in the tree it is told, writes what failed to a file, and ends without a word. Nothing of ours is imported
before the fork: every child imports the tree's.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

# Of one test; beyond them a mutant has made it hang. Of its own time, because the machine may have little of it.
BUSY_S, WAITING_S = 60, 900


class Reporter:
    """Collects what pytest says of each test."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.broken: list[str] = []
        self.passed = 0

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken.append(f"{report.nodeid}: {str(report.longrepr)[-300:]}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
        for number in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number, _hang)
        self._limit(BUSY_S, WAITING_S)
        try:
            return (yield)
        finally:
            self._limit(0, 0)

    def _limit(self, busy_s: float, waiting_s: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, busy_s)
        signal.setitimer(signal.ITIMER_REAL, waiting_s)


def _hang(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"{BUSY_S} s busy, or {WAITING_S} s in all")


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run the tests of a request in this process."""
    tree = request["tree"]
    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree
    sys.path.insert(0, tree)
    sys.dont_write_bytecode = request["keep_nothing"]
    if request["keep_nothing"]:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        if request["module"]:
            importlib.import_module(request["module"])
    except Exception as error:  # noqa: BLE001  # any way of not importing is the same finding
        return {"failed": [], "broken": [f"does not import: {type(error).__name__}: {error}"], "passed": 0}
    reporter = Reporter()
    options = ["-q", "-p", "no:cacheprovider", "-m", "not engine and not gpu", f"--rootdir={tree}"]
    options += ["-x"] * request["first"]
    options += [f"--deselect={test}" for test in request["without"]]
    status = pytest.main([*options, *request["tests"]], plugins=[reporter])
    package = sys.modules.get("epochless_vllm")
    if package is not None and not str(package.__file__).startswith(tree + os.sep):
        reporter.broken.append(f"the package came from {package.__file__}")
    if status not in (0, 1) and not reporter.broken:
        reporter.broken.append(f"pytest ended with {int(status)}")
    return {"failed": reporter.failed, "broken": reporter.broken, "passed": reporter.passed}


def main(preload: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for name in preload:
        importlib.import_module(name)
    if "hypothesis" in sys.modules:
        settings = sys.modules["hypothesis"].settings
        settings.register_profile("campaign", derandomize=True, database=None)
        settings.load_profile("campaign")
    assert "epochless_vllm" not in sys.modules, "something loaded our package before the fork"
    assert "tests" not in sys.modules
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                Path(request["result"]).write_text(json.dumps(run(request)))
                os._exit(0)
            except BaseException:  # noqa: BLE001  # the child must end here, whatever it met
                traceback.print_exc()
                os._exit(70)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder
    main(sys.argv[1:])
