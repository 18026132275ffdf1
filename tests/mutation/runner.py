"""Runs mutants: a copy of the sources per job, one edit at a time, the room's tests in a process of their own.

Promises that a mutant passes only when a named test failed and the edit itself imports, and that the tests pass
without it. Knows no particular mutant: see rooms/.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.mutation.mutants import ROOT, Mutant, Room

COPIED = (
    "epochless_vllm", "tests", "patches", "spec", "benchmarks", "docker", "verify_patch.py", "pyproject.toml",
    "README.md", "CHANGELOG.md", "LICENSE", "Makefile",
)  # fmt: skip
STEM = Path(__file__).parent / "stem.py"
ALWAYS = ("pytest", "hypothesis")  # loaded before the runs part
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: ``caught`` names the tests that failed, ``error`` a fault of the campaign itself."""

    room: Room
    mutant: Mutant
    caught: tuple[str, ...]
    error: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self.room.label, self.caught)))

    @property
    def passed(self) -> bool:
        return not self.problem

    @property
    def problem(self) -> str:
        """Why the mutant fails, or nothing."""
        mutant, labels = self.mutant, self.labels
        if self.error:
            return f"campaign error: {self.error}"
        if mutant.equivalent:
            return f"not equivalent: {', '.join(labels)}" if labels else ""
        if not labels:
            return "caught by nothing"
        if mutant.only and set(labels) != mutant.only:
            return f"caught by {', '.join(labels)}; expected {', '.join(sorted(mutant.only))}"
        return ""


class Job:
    """One copy of the sources, and the process from which the runs of one room part."""

    def __init__(self, directory: Path, *, first: bool = False, root: Path = ROOT) -> None:
        """Copy the sources below ``root``.

        Args:
            first: stop at a mutant's first failing test.
        """
        self._first = first
        self.tree = directory / "tree"
        self.tree.mkdir()
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, self.tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).exists():
                shutil.copy2(root / name, self.tree)
        self._result = directory / "result"
        self._log = (directory / "log").open("ab")
        self._stem: subprocess.Popen[str] | None = None
        self._key: object = None

    def run(self, room: Room, mutant: Mutant | None, files: Path) -> Outcome:
        """Return the outcome of a mutant; the tree is as before afterwards. None: of the sources as they are."""
        if mutant is None:
            found = self._ask(room, None, files)
            broken = found["broken"] + [f"{test} fails without a mutant" for test in found["failed"]]
            return self._outcome(room, Mutant("", "no mutant", "", ""), {**found, "failed": [], "broken": broken})
        path = self.tree / mutant.path
        original, times = path.read_bytes(), path.stat()
        try:
            path.write_text(mutant.edit(original.decode("utf-8")), encoding="utf-8")
            # Compiled files know their source by its time: another second, and none stands for the edit.
            os.utime(path, (times.st_atime, times.st_mtime - 86_400))
            return self._outcome(room, mutant, self._ask(room, mutant, files))
        except ValueError as error:
            return Outcome(room, mutant, (), str(error))
        finally:
            path.write_bytes(original)
            os.utime(path, (times.st_atime, times.st_mtime))

    def _outcome(self, room: Room, mutant: Mutant, found: dict[str, Any]) -> Outcome:
        error = "; ".join(found["broken"])
        if not error and not found["passed"] and not found["failed"]:
            error = "no test ran"
        return Outcome(room, mutant, tuple(found["failed"]), error)

    def _ask(self, room: Room, mutant: Mutant | None, files: Path) -> dict[str, Any]:
        self._result.unlink(missing_ok=True)
        module = "" if mutant is None or mutant.module.startswith("tests/") else mutant.path
        request = {
            "tree": str(self.tree),
            "module": module.removesuffix(".py").replace("/", "."),
            "tests": room.tests,
            "without": room.without,
            "result": str(self._result),
            "keep_nothing": mutant is not None,
            "first": self._first,
        }
        stem = self._stem_of(room, files)
        assert stem.stdin is not None
        assert stem.stdout is not None
        stem.stdin.write(json.dumps(request) + "\n")
        stem.stdin.flush()
        status = stem.stdout.readline().strip()
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        if status != "0":
            return {"failed": [], "broken": [f"the run ended with {status or 'its stem'}"], "passed": 0}
        found: dict[str, Any] = json.loads(self._result.read_text())
        return found

    def _stem_of(self, room: Room, files: Path) -> subprocess.Popen[str]:
        key = (room.preload, room.environment, room.prepare)
        if self._stem is None or self._key != key:
            self.close()
            environment = {**os.environ, **dict.fromkeys(THREADS, "1"), **dict(room.environment)}
            environment |= {"MUTATION_FILES": str(files), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            environment.pop("PYTHONPATH", None)
            self._key = key
            self._stem = subprocess.Popen(
                [sys.executable, str(STEM), *ALWAYS, *room.preload],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
                cwd=self.tree,
            )  # fmt: skip
        return self._stem

    def close(self) -> None:
        """End the process."""
        if self._stem is not None and self._stem.stdin is not None:
            self._stem.stdin.close()
            self._stem.wait()
        self._stem = None


def run_rooms(
    rooms: Sequence[Room],
    *,
    jobs: int,
    names: Sequence[str] = (),
    first: bool = False,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Run the mutants of rooms, or those named, and return the outcomes in order; each room's tests must pass first.

    A room whose tests fail as they are has one outcome, which says so. ``first``: stop at a mutant's first failing
    test, and ask no more than that there is one.
    """
    if not rooms:
        return []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(jobs) as pool:
        idle: SimpleQueue[Job] = SimpleQueue()
        made = []
        for number in range(jobs):
            place = Path(directory) / str(number)
            place.mkdir()
            made.append(Job(place, first=first))
            idle.put(made[-1])

        def run_one(room: Room, mutant: Mutant | None, files: Path) -> Outcome:
            job = idle.get()
            try:
                outcome = job.run(room, mutant, files)
            finally:
                idle.put(job)
            if mutant is not None:
                tell(outcome)
            return outcome

        outcomes: list[Outcome] = []
        try:
            for room in rooms:
                mutants = [mutant for mutant in room.mutants if not names or mutant.name in names]
                if first:
                    mutants = [replace(mutant, only=frozenset()) for mutant in mutants]
                if not mutants:
                    continue
                files = Path(directory) / f"files of {room.name}"
                files.mkdir()
                prepare(room, made[0].tree, files)
                honest = list(pool.map(lambda _, r=room, f=files: run_one(r, None, f), range(jobs)))
                if unwell := [outcome for outcome in honest if outcome.error]:
                    outcomes.append(unwell[0])
                    tell(unwell[0])
                    continue
                outcomes += pool.map(lambda mutant, r=room, f=files: run_one(r, mutant, f), mutants)
        finally:
            for job in made:
                job.close()
        return outcomes


def prepare(room: Room, tree: Path, files: Path) -> None:
    """Have a room's files written."""
    if room.prepare:
        command = [sys.executable, "-m", room.prepare, str(files)]
        environment = {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": str(tree)}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
