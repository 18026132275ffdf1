"""The port to the ranks: every engine's answer is looked at, whatever became of the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.plugin.channel import Listener
from epochless_vllm.plugin.ranks import AsyncTransport, EngineRanks
from epochless_vllm.store.revisions import RevisionStore


class TwoEngines:
    """A client of two engines whose answers are scripted: rank replies, or an exception."""

    def __init__(self, answers: dict[int, Any]) -> None:
        self.core_engines = [i.to_bytes(2, "little") for i in range(2)]
        self.answers = answers
        self.calls: list[tuple[int, str]] = []

    async def _call_utility_async(self, method: str, *arguments: Any, engine: bytes) -> Any:
        index = int.from_bytes(engine, "little")
        self.calls.append((index, method))
        answer = self.answers[index]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def ranks(client: Any, tmp_path: Path, loop: asyncio.AbstractEventLoop, *, size: int = 2) -> EngineRanks:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=size, data_parallel_size=2, data_parallel_index=0),
        lora_config=SimpleNamespace(lora_dtype="torch.float32"),
    )
    return EngineRanks(AsyncTransport(client, loop), config, RevisionStore(tmp_path))


def on_loop(action: Any) -> Any:
    """Run ``action(loop)`` in this thread while a loop turns in another."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        return action(loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_every_rank_of_every_engine_is_named(tmp_path: Path) -> None:
    names = on_loop(lambda loop: ranks(TwoEngines({}), tmp_path, loop).names())
    assert names == ("engine0/rank0", "engine0/rank1", "engine1/rank0", "engine1/rank1")


def test_second_engines_refusal_is_seen(tmp_path: Path) -> None:
    refusal = [{"ok": True}, {"ok": False, "code": "refused", "reason": "no file"}]
    client = TwoEngines({0: [{"ok": True}, {"ok": True}], 1: refusal})
    replies = on_loop(lambda loop: ranks(client, tmp_path, loop).call({"kind": "status", "epoch": 1}))
    assert [replies[f"engine{e}/rank{r}"]["ok"] for e in (0, 1) for r in (0, 1)] == [True, True, True, False]
    assert replies["engine1/rank1"]["reason"] == "no file"


def test_a_dead_engine_is_a_failure_of_its_ranks_alone(tmp_path: Path) -> None:
    client = TwoEngines({0: [{"ok": True}, {"ok": True}], 1: RuntimeError("engine died")})
    replies = on_loop(lambda loop: ranks(client, tmp_path, loop).call({"kind": "status", "epoch": 1}))
    assert replies["engine0/rank0"]["ok"]
    assert not replies["engine1/rank0"]["ok"]
    assert "engine died" in replies["engine1/rank1"]["reason"]


def test_a_reply_standing_in_another_ranks_place_is_detected(tmp_path: Path) -> None:
    swapped = [{"ok": True, "rank": "engine0/rank1"}, {"ok": True, "rank": "engine0/rank0"}]
    client = TwoEngines({0: swapped, 1: [{"ok": True}, {"ok": True}]})
    replies = on_loop(lambda loop: ranks(client, tmp_path, loop).call({"kind": "status", "epoch": 1}))
    assert replies["engine0/rank0"]["code"] == "out_of_step"
    assert replies["engine1/rank0"]["ok"]


def test_an_engine_that_does_not_answer_counts_as_a_holder(tmp_path: Path) -> None:
    client = TwoEngines({0: [0], 1: RuntimeError("lost")})
    assert on_loop(lambda loop: ranks(client, tmp_path, loop).holders(5)) == 1
    client = TwoEngines({0: [2], 1: [3]})
    assert on_loop(lambda loop: ranks(client, tmp_path, loop).holders(5)) == 5
    client = TwoEngines({0: [2, 0], 1: [3, 0]})
    assert on_loop(lambda loop: ranks(client, tmp_path, loop).holders_of([5, 6])) == {5: 5, 6: 0}


class SilentEngines(TwoEngines):
    """Two engines that never answer; ``asked`` is set once they are asked."""

    def __init__(self) -> None:
        super().__init__({})
        self.resources = SimpleNamespace(engine_dead=False)
        self.asked = threading.Event()

    async def _call_utility_async(self, method: str, *arguments: Any, engine: bytes) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


def ask_in_a_thread(client: SilentEngines, tmp_path: Path, then: Any) -> dict[str, dict[str, Any]]:
    """Call, do something once the engines were asked, and return the replies."""
    loop = asyncio.new_event_loop()
    turning = threading.Thread(target=loop.run_forever)
    turning.start()
    with ThreadPoolExecutor(1) as pool:
        replies = pool.submit(ranks(client, tmp_path, loop).call, {"kind": "status", "epoch": 1})
        assert client.asked.wait(10)
        then(client, loop)
        answer = replies.result(10)
    if loop.is_running():
        loop.call_soon_threadsafe(loop.stop)
    turning.join()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    return answer


def test_an_engine_that_dies_under_a_call_is_a_failure_at_once(tmp_path: Path) -> None:
    replies = ask_in_a_thread(
        SilentEngines(), tmp_path, lambda client, loop: setattr(client.resources, "engine_dead", True)
    )
    assert {reply["code"] for reply in replies.values()} == {"engine_failed"}
    assert "died" in replies["engine1/rank1"]["reason"]


def test_a_call_does_not_outlive_its_server(tmp_path: Path) -> None:
    replies = ask_in_a_thread(SilentEngines(), tmp_path, lambda client, loop: loop.call_soon_threadsafe(loop.stop))
    assert "stopping" in replies["engine0/rank0"]["reason"]


def test_a_call_after_the_end_of_the_server_fails(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    replies = ranks(TwoEngines({}), tmp_path, loop).call({"kind": "status", "epoch": 1})
    assert len(replies) == 4
    assert "stopped" in replies["engine0/rank0"]["reason"]


class ListeningEngines(TwoEngines):
    """Two engines of two ranks, whose ranks listen; each rank repeats what it was asked."""

    def __init__(self) -> None:
        super().__init__({})
        self.heard: dict[str, list[str]] = {}
        self.listeners: dict[str, Listener] = {}
        for name in (f"engine{e}/rank{r}" for e in (0, 1) for r in (0, 1)):
            self.listen(name)

    def listen(self, name: str) -> None:
        def handle(message: dict[str, Any]) -> dict[str, Any]:
            self.heard.setdefault(name, []).append(message["kind"])
            return {"ok": True, "rank": name, "kind": message["kind"]}

        if name in self.listeners:
            self.listeners[name].close()
        self.listeners[name] = Listener(handle)

    async def _call_utility_async(self, method: str, *arguments: Any, engine: bytes) -> Any:
        index = int.from_bytes(engine, "little")
        self.calls.append((index, method))
        names = [f"engine{index}/rank{r}" for r in (0, 1)]
        if method == "epochless_address":
            return [{"ok": True, "rank": name, "address": self.listeners[name].address} for name in names]
        return [{"ok": True, "rank": name} for name in names]


@pytest.fixture
def listening() -> Iterator[ListeningEngines]:
    client = ListeningEngines()
    yield client
    for listener in client.listeners.values():
        listener.close()


ORDER = {"epoch": 1, "transaction_id": 1, "revision_id": "sha256:" + "a" * 64, "lora_int_id": 1}


def test_publishing_waits_for_no_step_of_an_engine(listening: ListeningEngines, tmp_path: Path) -> None:
    def publish(loop: asyncio.AbstractEventLoop) -> None:
        port = ranks(listening, tmp_path, loop)
        port.note_expected(ORDER["revision_id"], "digest")
        for kind in ("prepare_begin", "prepare_poll", "prepare_poll", "commit"):
            replies = port.call({**ORDER, "kind": kind})
            assert {name: reply["kind"] for name, reply in replies.items()} == dict.fromkeys(port.names(), kind)

    on_loop(publish)
    assert listening.calls == [(0, "epochless_address"), (1, "epochless_address")]
    assert set(listening.heard) == set(listening.listeners)


@pytest.mark.parametrize("message", [{"kind": "retire"}, {"kind": "abort"}, {"kind": "status"}])
def test_what_touches_slots_goes_between_steps(
    listening: ListeningEngines, tmp_path: Path, message: dict[str, Any]
) -> None:
    on_loop(lambda loop: ranks(listening, tmp_path, loop).call({**ORDER, **message}))
    assert listening.calls == [(0, "epochless_call"), (1, "epochless_call")]
    assert listening.heard == {}


@pytest.mark.parametrize("kind", ["prepare_begin", "prepare_poll"])
def test_a_quarantined_revision_is_prepared_again_between_steps(
    listening: ListeningEngines, tmp_path: Path, kind: str
) -> None:
    def call(loop: asyncio.AbstractEventLoop) -> None:
        port = ranks(listening, tmp_path, loop)
        port.note_expected(ORDER["revision_id"], "digest")
        port.call({**ORDER, "kind": kind, "reload": True})

    on_loop(call)
    assert [method for _, method in listening.calls] == ["epochless_call"] * 2


def test_a_channel_that_ended_is_opened_anew_and_the_message_repeated(
    listening: ListeningEngines, tmp_path: Path
) -> None:
    def call(loop: asyncio.AbstractEventLoop) -> None:
        port = ranks(listening, tmp_path, loop)
        port.call({**ORDER, "kind": "commit"})
        assert port._channel is not None
        port._channel.close()  # as a rank's end would be
        listening.listen("engine1/rank0")
        replies = port.call({**ORDER, "kind": "commit"})
        assert [reply["ok"] for reply in replies.values()] == [True] * 4

    on_loop(call)
    assert len(listening.calls) == 4


def test_every_rank_hears_of_what_is_being_written_once_its_channel_is_open(
    listening: ListeningEngines, tmp_path: Path
) -> None:
    def announce(loop: asyncio.AbstractEventLoop) -> None:
        port = ranks(listening, tmp_path, loop)
        port.announce("1-a")
        assert listening.calls == []  # publishing does not wait for a step to say so
        port.call({**ORDER, "kind": "commit"})
        port.announce("1-b")

    on_loop(announce)
    assert listening.heard == {name: ["commit", "load_early"] for name in listening.listeners}


def test_a_rank_that_cannot_hear_of_it_fails_nothing(listening: ListeningEngines, tmp_path: Path) -> None:
    def announce(loop: asyncio.AbstractEventLoop) -> None:
        port = ranks(listening, tmp_path, loop)
        port.call({**ORDER, "kind": "commit"})
        assert port._channel is not None
        port._channel.close()
        listening.listen("engine0/rank1")
        port.announce("1-a")
        replies = port.call({**ORDER, "kind": "commit"})
        assert [reply["ok"] for reply in replies.values()] == [True] * 4

    on_loop(announce)


def test_a_rank_that_is_gone_is_named(listening: ListeningEngines, tmp_path: Path) -> None:
    listening.listeners["engine1/rank1"].close()
    replies = on_loop(lambda loop: ranks(listening, tmp_path, loop).call({**ORDER, "kind": "commit"}))
    assert {reply["code"] for reply in replies.values()} == {"channel_ended"}
    assert "does not listen" in replies["engine1/rank1"]["reason"]


def test_an_engine_that_died_before_it_said_where_it_listens_fails_its_ranks(tmp_path: Path) -> None:
    addresses = [{"ok": True, "rank": f"engine0/rank{r}", "address": "epochless-none"} for r in (0, 1)]
    client = TwoEngines({0: addresses, 1: RuntimeError("engine died")})
    replies = on_loop(lambda loop: ranks(client, tmp_path, loop).call({**ORDER, "kind": "commit"}))
    assert {name: reply["code"] for name, reply in replies.items()} == {
        "engine1/rank0": "engine_failed",
        "engine1/rank1": "engine_failed",
    }
