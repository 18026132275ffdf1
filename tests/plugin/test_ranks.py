"""The port to the ranks: every engine's answer is looked at, whatever became of the others."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
