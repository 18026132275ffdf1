"""The soak's judge notices what it is there to notice."""

from __future__ import annotations

import importlib
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
    run.judge = module.judge
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
    soak.observed.tokens = [(float(second), 10) for second in range(600)]
    soak.observed.memory = [(float(second), 1000) for second in range(600)]
    assert failed(soak, 600.0) == set()
    soak.observed.tokens = [(when, count) for when, count in soak.observed.tokens if when < 550]
    soak.observed.memory.append((600.0, 1011))
    assert len(failed(soak, 600.0)) == 2
