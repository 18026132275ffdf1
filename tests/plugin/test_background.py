"""Which cores publishing and waiting may use: never those that ranks compute on, where it is known."""

from __future__ import annotations

import os

import pytest

from epochless_vllm.plugin import background


@pytest.mark.parametrize(
    ("spec", "cores"),
    [
        ("0", {0}),
        ("0-3", {0, 1, 2, 3}),
        ("0,2|5-6", {0, 2, 5, 6}),
        ("auto", set()),
        ("nobind", set()),
        ("", set()),
        ("0-", {0}),
        ("1-x", set()),
    ],
)
def test_the_ranks_cores_are_read_as_vllm_writes_them(
    monkeypatch: pytest.MonkeyPatch, spec: str, cores: set[int]
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", spec)
    assert background.bound_cores() == cores


@pytest.mark.parametrize(("spec", "moved"), [("0", {1, 2, 3}), ("0-1|2-3", None), ("auto", None)])
def test_an_engine_core_leaves_named_cores_if_others_are_left(
    monkeypatch: pytest.MonkeyPatch, spec: str, moved: set[int] | None
) -> None:
    chosen: list[set[int]] = []
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", spec)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: chosen.append(set(cores)))
    background.leave_ranks_their_cores()
    assert chosen == ([] if moved is None else [moved])


@pytest.mark.parametrize(("idle", "moved"), [(True, {0, 1, 2, 3}), (False, {1, 2, 3})])
def test_a_publishing_thread_leaves_named_cores_unless_nobody_computes_there(
    monkeypatch: pytest.MonkeyPatch, idle: bool, moved: set[int]
) -> None:
    chosen: list[set[int]] = []
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: chosen.append(set(cores)))
    background.step_aside(idle=idle)
    assert chosen == [moved]
