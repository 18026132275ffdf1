"""A reader of vLLM's message queue waits on its socket, and never long, where its spinning takes from others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin import spinning
from epochless_vllm.plugin.background import SWITCH_INTERVAL_S, is_working, short_turns

shm_broadcast = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")


class Poller:
    """Stands in for the sockets: nothing ever arrives."""

    def __init__(self) -> None:
        self.timeouts: list[int | None] = []

    def poll(self, timeout: int | None = None) -> list[Any]:
        self.timeouts.append(timeout)
        return []


class Host:
    """Stands in for the clock and for the scheduler: a yield takes as long as somebody else's turn, on the core or, if
    ``core`` is False, with the interpreter."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.turn_s = 0.0
        self.core = True
        self.turns = self.yields = 0

    def monotonic(self) -> float:
        return self.now

    def sched_yield(self) -> None:
        self.yields += 1
        self.now += self.turn_s
        self.turns += self.core


@pytest.fixture
def reader() -> Any:
    """A reader that has just read: vLLM's own would spin for a second."""
    spinning.install()
    reader = object.__new__(shm_broadcast.SpinCondition)
    reader.is_reader, reader.busy_loop_s, reader.last_read = True, 1e9, time.monotonic()
    reader.poller, reader.read_cancel_socket, reader.local_notify_socket = Poller(), object(), object()
    return reader


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    for module in (spinning, shm_broadcast):
        monkeypatch.setattr(module, "time", host)
    monkeypatch.setattr(shm_broadcast, "sched_yield", host.sched_yield)
    monkeypatch.setattr(spinning, "_turns", lambda: host.turns)
    return host


@pytest.mark.parametrize(("asked", "waited"), [(None, 1), (5000, 1), (0, 0)])
def test_a_reader_looks_every_millisecond_while_a_thread_publishes(reader: Any, asked: int | None, waited: int) -> None:
    with short_turns():
        reader.wait(asked)
    assert reader.poller.timeouts == [waited]
    assert reader.busy_loop_s == 1e9


def test_a_reader_spins_as_ever_while_nobody_publishes(reader: Any) -> None:
    reader.wait(None)
    assert reader.poller.timeouts == []


def test_a_reader_that_had_to_share_its_core_leaves_it_for_a_moment(reader: Any, host: Host) -> None:
    host.turn_s = 0.003
    reader.wait(None)
    assert (host.yields, reader.poller.timeouts) == (1, [])
    reader.wait(None)
    host.now += spinning.APART_S - 0.001
    reader.wait(5000)
    assert (host.yields, reader.poller.timeouts) == (1, [1, 1])
    host.now += 0.002
    host.turn_s = 0.0  # the others are done
    reader.wait(None)
    reader.wait(None)
    assert (host.yields, reader.poller.timeouts) == (3, [1, 1])
    assert reader.busy_loop_s == 1e9


def test_a_reader_with_a_core_of_its_own_spins_on(reader: Any, host: Host) -> None:
    host.turn_s = spinning.SHARED_S * 0.99
    for _ in range(3):
        reader.wait(None)
    assert (host.yields, reader.poller.timeouts) == (3, [])


def test_a_reader_that_waits_for_the_interpreter_spins_on(reader: Any, host: Host) -> None:
    host.turn_s, host.core = 0.005, False
    for _ in range(3):
        reader.wait(None)
    assert (host.yields, reader.poller.timeouts) == (3, [])


def test_a_core_shared_with_a_process_is_lost_to_it_in_turns() -> None:
    def yield_until_it_is_lost() -> bool:
        os.sched_setaffinity(0, {core})  # of this thread
        turns, deadline = spinning._turns(), time.monotonic() + 30
        while spinning._turns() < turns + 5 and time.monotonic() < deadline:
            os.sched_yield()
        return spinning._turns() >= turns + 5

    core = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as other, ThreadPoolExecutor(1) as pool:
        try:
            assert pool.submit(yield_until_it_is_lost).result()
        finally:
            other.kill()


def test_a_long_wait_on_the_socket_says_nothing_of_the_core(reader: Any, host: Host) -> None:
    def poll(timeout: int | None) -> list[Any]:
        host.now += 3.0
        host.turns += 1
        return []

    reader.busy_loop_s, reader.poller.poll = 1.0, poll
    host.now = reader.last_read + 2.0
    reader.wait(None)
    assert host.yields == 0
    reader.last_read = host.now  # a message came
    reader.wait(None)
    assert host.yields == 1


def test_installing_twice_wraps_once(reader: Any) -> None:
    spinning.install()
    assert spinning._original is not spinning.wait


def test_a_missing_target_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(shm_broadcast, "SpinCondition")
    with pytest.raises(SeamError, match="SpinCondition"):
        spinning.install()


def test_threads_that_overlap_leave_the_interpreter_as_it_was() -> None:
    usual = sys.getswitchinterval()
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def first() -> None:
        with short_turns():
            first_is_in.set()
            second_is_in.wait()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait()
    with short_turns():
        second_is_in.set()
        thread.join()
        assert is_working()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    assert not is_working()
    assert sys.getswitchinterval() == usual
