"""Early loads: found by the bytes they have read, never in the way of a publication."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.errors import RefusedAdapterError
from epochless_vllm.plugin import early_loads
from epochless_vllm.plugin.early_loads import EarlyLoads


class Writer:
    """A store in which revisions are being written until they are finished here."""

    def __init__(self) -> None:
        self.finished: dict[str, threading.Event] = {}
        self.begun: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.hidden: set[str] = set()  # finished, and the directory is still there for a moment

    def write(self, name: str) -> str:
        self.finished[name] = threading.Event()
        return name

    def assemble(self, name: str) -> Any:
        self.begun.append(name)
        assert self.finished[name].wait(10)
        if name in self.failures:
            raise self.failures[name]
        return SimpleNamespace(stored=SimpleNamespace(manifest=SimpleNamespace(revision_id=f"revision {name}")))

    def is_staged(self, name: str) -> bool:
        return name in self.hidden or not self.finished[name].is_set()


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    for event in writer.finished.values():
        event.set()


@pytest.fixture
def loads(writer: Writer) -> EarlyLoads:
    return EarlyLoads(writer.assemble, writer.is_staged, lambda: False)


def wait_until(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(2000):
        if condition():
            return
        event.wait(0.005)
    raise AssertionError("it never came true")


def test_a_revision_that_is_written_is_taken_once(writer: Writer, loads: EarlyLoads) -> None:
    loads.begin(writer.write("a"))
    writer.finished["a"].set()
    taken = loads.take("revision a")
    assert taken is not None
    assert taken.stored.manifest.revision_id == "revision a"
    assert loads.take("revision a") is None


def test_the_revision_that_is_asked_for_is_found_among_others(writer: Writer, loads: EarlyLoads) -> None:
    for name in "ab":
        loads.begin(writer.write(name))
        writer.finished[name].set()
    assert loads.take("revision b") is not None
    assert loads.take("revision c") is None
    assert loads.take("revision a") is not None


def ask(loads: EarlyLoads, revision_id: str) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    asker = threading.Thread(target=lambda: answers.append(loads.take(revision_id)), daemon=True)
    asker.start()
    return asker, answers


def test_one_that_is_still_being_written_is_not_waited_for(writer: Writer, loads: EarlyLoads) -> None:
    loads.begin(writer.write("a"))
    asker, answers = ask(loads, "revision of somebody else")
    asker.join(3)
    assert answers == [None]
    writer.finished["a"].set()
    assert loads.take("revision a") is not None


def test_one_that_is_written_and_does_not_end_is_waited_for_only_so_long(
    writer: Writer, loads: EarlyLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_loads, "WAIT_S", 0.01)
    monkeypatch.setattr(loads, "_is_staged", lambda name: False)
    loads.begin(writer.write("a"))
    asker, answers = ask(loads, "revision a")
    asker.join(3)
    assert answers == [None]


def test_who_waits_for_one_that_fails_goes_on_at_once(
    writer: Writer, loads: EarlyLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_loads, "WAIT_S", 60.0)
    monkeypatch.setattr(loads, "_is_staged", lambda name: False)
    loads.begin(writer.write("a"))
    writer.failures["a"] = RefusedAdapterError("no module takes it", reason="unconsumed_tensor")
    waiting = threading.Event()
    monkeypatch.setattr(loads._loads[0].ended, "wait", signalling(loads._loads[0].ended.wait, waiting))
    asker, answers = ask(loads, "revision a")
    assert waiting.wait(10)
    writer.finished["a"].set()
    asker.join(3)
    assert answers == [None]


def signalling(wait: Callable[[float], bool], waiting: threading.Event) -> Callable[[float], bool]:
    def wait_and_tell(timeout: float) -> bool:
        waiting.set()
        return wait(timeout)

    return wait_and_tell


def test_a_load_that_fails_is_none_and_leaves_room(writer: Writer, loads: EarlyLoads) -> None:
    for number in range(2 * early_loads.MAX_LOADS):
        name = writer.write(f"n{number}")
        writer.failures[name] = RefusedAdapterError("no module takes it", reason="unconsumed_tensor")
        loads.begin(name)
        writer.finished[name].set()
        wait_until(lambda: not loads._loads)
        assert loads.take(f"revision {name}") is None
    assert len(writer.begun) == 2 * early_loads.MAX_LOADS


def test_what_is_no_error_of_ours_is_shown_and_leaves_room(
    writer: Writer, loads: EarlyLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: shown.append(arguments.exc_value))
    name = writer.write("a")
    writer.failures[name] = ZeroDivisionError("a fault")
    loads.begin(name)
    writer.finished[name].set()
    wait_until(lambda: bool(shown))
    assert isinstance(shown[0], ZeroDivisionError)
    assert loads.take("revision a") is None
    wait_until(lambda: not loads._loads)


def test_a_load_that_gets_no_thread_is_told_and_leaves_room(
    writer: Writer, loads: EarlyLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2 * early_loads.MAX_LOADS):
            with pytest.raises(RuntimeError, match="new thread"):
                loads.begin(writer.write("a"))
    assert not loads._loads
    loads.begin(writer.write("b"))
    writer.finished["b"].set()
    assert loads.take("revision b") is not None


def test_one_that_has_ended_is_taken_whatever_else_still_loads(
    writer: Writer, loads: EarlyLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "_is_staged", lambda name: False)  # both are written
    for name in "ab":
        loads.begin(writer.write(name))
    writer.finished["b"].set()
    assert loads._loads[1].ended.wait(10)
    asker, answers = ask(loads, "revision b")
    asker.join(3)
    assert answers[0] is not None


def test_no_more_are_loaded_than_there_is_room_for(writer: Writer, loads: EarlyLoads) -> None:
    names = [writer.write(f"n{number}") for number in range(early_loads.MAX_LOADS + 1)]
    for name in names:
        loads.begin(name)
    wait_until(lambda: len(writer.begun) == early_loads.MAX_LOADS)
    for name in names:
        writer.finished[name].set()
    assert loads.take(f"revision {names[-1]}") is None
    assert loads.take(f"revision {names[0]}") is not None


def test_the_oldest_that_nobody_asked_for_makes_room(writer: Writer, loads: EarlyLoads) -> None:
    names = [writer.write(f"n{number}") for number in range(early_loads.MAX_LOADS + 1)]
    for name in names:
        loads.begin(name)
        writer.finished[name].set()
        wait_until(lambda: all(load.ended.is_set() for load in loads._loads))
    assert [load.staged for load in loads._loads] == names[1:]
    assert loads.take(f"revision {names[0]}") is None
    assert loads.take(f"revision {names[-1]}") is not None


def test_what_nobody_asks_for_is_given_up(writer: Writer, loads: EarlyLoads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_loads, "KEEP_S", 0.01)
    loads.begin(writer.write("a"))
    writer.finished["a"].set()
    wait_until(lambda: not loads._loads)
    assert loads.take("revision a") is None


def test_what_is_kept_keeps_no_worker_alive(writer: Writer) -> None:
    loads = EarlyLoads(writer.assemble, writer.is_staged, lambda: False)
    gone = weakref.ref(loads)
    loads.begin(writer.write("a"))
    load = loads._loads[0]
    writer.finished["a"].set()
    assert load.ended.wait(10)
    assert not load.taken.is_set()
    del loads
    wait_until(lambda: gone() is None)


def test_two_that_ask_for_one_revision_do_not_both_get_it(writer: Writer, loads: EarlyLoads) -> None:
    loads.begin(writer.write("a"))
    got: list[Any] = []
    askers = [threading.Thread(target=lambda: got.append(loads.take("revision a"))) for _ in range(8)]
    writer.finished["a"].set()
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(10)
    assert sum(each is not None for each in got) == 1


@pytest.mark.parametrize("idle", [True, False])
def test_cores_that_serve_are_left_alone_unless_the_engine_is_idle(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(early_loads, "step_aside", lambda *, idle: asked.append(idle))
    loads = EarlyLoads(writer.assemble, writer.is_staged, lambda: idle)
    loads.begin(writer.write("a"))
    writer.finished["a"].set()
    assert loads.take("revision a") is not None
    assert asked == [idle]
