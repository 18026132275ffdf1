"""The soak's judge notices what it is there to notice."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
SAID = {A: [[1, 2, 3]], B: [[1, 2, 4]], "base": [[5, 5, 5]]}


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    module = importlib.import_module("soak")
    run = module.Soak(SimpleNamespace(), tmp_path, SAID, 60.0)
    run.judge = lambda observed, seconds: module.judge(observed, module.measure(observed, seconds))
    processes = importlib.import_module("processes")
    run.Use, run.use_of = processes.Use, processes.use_of
    return run


def failed(run: Any, seconds: float = 60.0) -> set[str]:
    run.observed.publications["200"] += 1
    return {promise for promise, kept in run.judge(run.observed, seconds) if not kept}


def test_right_tokens_under_their_label_pass(soak: Any) -> None:
    soak._compare({A}, 0, [1, 2], None)
    soak._compare({B}, 0, [1, 2, 4], B)
    soak._compare({"base:sha256:0"}, 0, [5], "base")
    assert failed(soak) == set()


@pytest.mark.parametrize(
    ("labels", "heard", "expected"),
    [
        ({A}, [1, 2, 4], None),  # another revision's tokens
        ({A}, [1, 2, 3], B),  # another revision than was pinned
        ({A, B}, [1, 2], None),  # a revision that changed in mid-sentence
        ({"sha256:" + "c" * 64}, [1], None),  # a revision nobody published
        ({"base:sha256:0"}, [1], A),  # the base model in place of a revision
    ],
)
def test_wrong_tokens_and_labels_fail(soak: Any, labels: set[str], heard: list[int], expected: str | None) -> None:
    soak._compare(labels, 0, heard, expected)
    soak._compare({A}, 0, [1], None)
    assert "nothing went wrong but the planned refusals" in failed(soak)


@pytest.mark.parametrize(
    ("model", "status", "planned"), [("p-v1", 410, True), ("p-v1", 404, False), ("team/soak", 410, False)]
)
def test_only_a_retired_pin_may_be_refused(soak: Any, model: str, status: int, planned: bool) -> None:
    soak._compare({A}, 0, [1], None)
    soak._count_refusal(model, SimpleNamespace(status_code=status, text=""))
    assert (failed(soak) == set()) is planned


def test_a_long_run_is_judged_by_throughput_and_memory_too(soak: Any) -> None:
    soak._compare({A}, 0, [1], None)
    tokens = [(float(second), 10) for second in range(600)]
    soak.observed.tokens = tokens
    # What is taken before the warm point is not growth, nor is a moment of more.
    sizes = [100 if second < 120 else 5000 if second == 570 else 1000 for second in range(600)]
    soak.observed.uses = [(float(n), soak.Use({"a 1": size, "b 2": 10}, n / 10)) for n, size in enumerate(sizes)]
    assert failed(soak, 600.0) == set()
    for spoiled in ("tokens", "uses"):
        right = getattr(soak.observed, spoiled)
        if spoiled == "tokens":
            soak.observed.tokens = [(when, count) for when, count in tokens if when < 598]
        else:
            soak.observed.uses = [
                (when, soak.Use({**use.bytes, "b 2": 22 if when > 300 else 10}, use.cpu_s)) for when, use in right
            ]
        assert len(failed(soak, 600.0)) == 1
        setattr(soak.observed, spoiled, right)


def test_a_short_run_only_reports_them(soak: Any) -> None:
    soak._compare({A}, 0, [1], None)
    soak.observed.uses = [(float(second), soak.Use({"a 1": 1000 + second}, second / 10)) for second in range(60)]
    assert failed(soak, 60.0) == set()


def test_memory_and_time_of_a_process_group_are_read(soak: Any) -> None:
    """The oracle: a process that takes so much memory, and says so, in a group of its own."""
    program = "held = bytearray(b'x') * (64 << 20); print('ready', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    use = soak.use_of(child.pid)
    child.communicate(b"\n")
    (held,) = use.bytes.values()
    assert 64 << 20 <= held <= 96 << 20
    assert use.cpu_s >= 0
    assert soak.use_of(child.pid).bytes == {}
