"""Work beside a thread: in order, once, and without waiting for a thread that has no core."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

import pytest

from epochless_vllm.store import beside
from epochless_vllm.store.beside import Helper


def tell(done: list[tuple[int, int]], number: int) -> None:
    done.append((number, threading.get_ident()))


def stop_thread(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no helper begin before the event is set: a thread that gets no core."""
    may_begin = threading.Event()
    monkeypatch.setattr(beside.os, "setpriority", lambda *_: may_begin.wait(10))
    return may_begin


def wait_for_no_helper() -> None:
    for thread in threading.enumerate():
        if thread.name == "epochless-helper":
            thread.join(10)
            assert not thread.is_alive()


def work(actions: list[Callable[[], None]], *, wait: bool = True, error: Exception | None = None) -> None:
    with Helper() as helper:
        for action in actions:
            helper.give(action)
        if error is not None:
            raise error
        if wait:
            helper.wait()


def test_actions_are_done_once_and_in_order_whoever_does_them() -> None:
    done: list[tuple[int, int]] = []
    with Helper() as helper:
        for number in range(2000):
            helper.give(partial(tell, done, number))
            helper.wait(3)
            assert len(done) >= number - 2
    assert [number for number, _ in done] == list(range(2000))


def test_a_thread_that_has_no_core_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    may_begin = stop_thread(monkeypatch)
    done: list[tuple[int, int]] = []
    helper = Helper()
    with helper:
        for number in range(5):
            helper.give(partial(tell, done, number))
            helper.wait(1)
        helper.wait()
    assert done == [(number, threading.get_ident()) for number in range(5)]
    assert "epochless-helper" in {thread.name for thread in threading.enumerate()}  # the block has ended without it
    may_begin.set()
    wait_for_no_helper()
    assert len(done) == 5


def test_what_is_left_of_a_thread_that_stops_in_an_action_is_done_by_who_waits() -> None:
    done: list[tuple[int, int]] = []
    began, may_end = threading.Event(), threading.Event()

    def stop() -> None:
        began.set()
        may_end.wait(10)

    with Helper() as helper:
        helper.give(stop)
        began.wait(10)
        for number in range(3):
            helper.give(partial(tell, done, number))
        threading.Timer(20 * beside.PATIENCE_S, may_end.set).start()
        helper.wait(3)  # also what might have been left: nobody else is there for it now
        assert done == [(number, threading.get_ident()) for number in range(3)]
        helper.give(partial(tell, done, 3))
        helper.wait(1)
        assert len(done) == 4


def test_a_failure_is_raised_to_who_waits_and_ends_the_work() -> None:
    done: list[tuple[int, int]] = []

    def fail() -> None:
        raise KeyError("number 1")

    with pytest.raises(KeyError, match="number 1"):
        work([partial(tell, done, 0), fail, partial(tell, done, 2)])
    assert [number for number, _ in done] == [0]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_thread_is_raised_to_who_waits(error: type[BaseException]) -> None:
    began = threading.Event()

    def end() -> None:
        began.set()
        raise error

    with pytest.raises(error):
        give_and_wait_for(began, end)


def give_and_wait_for(began: threading.Event, action: Callable[[], None]) -> None:
    with Helper() as helper:
        helper.give(action)
        assert began.wait(10)


def test_the_block_ends_only_after_the_action_in_progress() -> None:
    done: list[tuple[int, int]] = []
    began, may_end = threading.Event(), threading.Event()

    def take_long() -> None:
        began.set()
        may_end.wait(10)
        tell(done, 0)

    with pytest.raises(ZeroDivisionError):
        work_until(take_long, began, may_end)
    assert len(done) == 1


def work_until(action: Callable[[], None], began: threading.Event, may_end: threading.Event) -> None:
    with Helper() as helper:
        helper.give(action)
        began.wait(10)
        threading.Timer(0.02, may_end.set).start()
        raise ZeroDivisionError


def test_the_end_of_the_block_waits_for_what_was_given_and_raises_its_failure() -> None:
    def fail() -> None:
        raise KeyError("late")

    with pytest.raises(KeyError, match="late"):
        work([fail], wait=False)


def test_nothing_runs_after_a_block_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    may_begin = stop_thread(monkeypatch)
    done: list[tuple[int, int]] = []
    with pytest.raises(ZeroDivisionError):
        work([partial(tell, done, 0)], error=ZeroDivisionError())
    may_begin.set()
    wait_for_no_helper()
    assert done == []


def test_the_thread_stays_behind_the_one_that_it_helps() -> None:
    def place() -> tuple[int, int, set[int]]:
        own = threading.get_native_id()
        return own, os.getpriority(os.PRIO_PROCESS, own), os.sched_getaffinity(0)

    found: list[tuple[int, int, set[int]]] = []
    seen = threading.Event()

    def note() -> None:
        found.append(place())
        seen.set()

    with Helper() as helper:
        helper.give(note)
        seen.wait(10)
    (helping, niceness, cores), (asking, own_niceness, own_cores) = found[0], place()
    assert helping != asking
    assert niceness == min(19, own_niceness + beside.NICENESS)
    assert cores >= own_cores


def test_a_helper_leaves_no_thread_behind() -> None:
    for _ in range(20):
        with Helper() as helper:
            helper.give(lambda: None)
    wait_for_no_helper()
