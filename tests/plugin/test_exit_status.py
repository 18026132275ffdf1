"""A server whose engine died ends with status 1 and the reason; one that was asked to end keeps its own."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin import exit_status

MODULE = "vllm.entrypoints.openai.api_server"


class FakeEngine:
    """A front end's client of an engine, as far as the seam looks at one."""

    def __init__(self) -> None:
        self.errored = False
        manager = SimpleNamespace(failed_proc_name=None)
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))

    def shutdown(self, timeout: float | None = None) -> None:
        self.errored = True  # vLLM's client calls itself dead after an orderly end, too

    def die(self) -> None:
        self.errored = True
        self.engine_core.resources.engine_manager.failed_proc_name = "EngineCore_0"


def serve(monkeypatch: pytest.MonkeyPatch, happens: Callable[[FakeEngine], None]) -> list[str]:
    """Run a server to which something happens, as vLLM's worker runs one; return what was awaited, in order."""
    awaited: list[str] = []

    async def end() -> None:
        awaited.append("end")

    async def build_and_serve(engine: FakeEngine, address: str, *, port: int) -> Any:
        assert (address, port) == ("here", 8000)
        happens(engine)
        awaited.append("served")
        return end()

    module = SimpleNamespace(build_and_serve=build_and_serve)
    monkeypatch.setitem(sys.modules, MODULE, module)  # type: ignore[arg-type]
    exit_status.install()
    installed = module.build_and_serve
    exit_status.install()
    assert module.build_and_serve is installed

    async def worker() -> None:
        ending = await module.build_and_serve(FakeEngine(), "here", port=8000)  # type: ignore[arg-type]
        await ending

    try:
        asyncio.run(worker())
    except SystemExit as ended:
        awaited.append(f"status {ended.code}")
    return awaited


def test_a_dead_engine_makes_the_status_one_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger=exit_status.logger.name):
        monkeypatch.setattr(exit_status.logger, "propagate", True)
        assert serve(monkeypatch, FakeEngine.die) == ["served", "end", "status 1"]
    assert "EngineCore_0 died" in caplog.text
    assert "restart" in caplog.text


@pytest.mark.parametrize("happens", [lambda engine: None, lambda engine: engine.shutdown(timeout=1)])
def test_an_end_that_was_asked_for_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, happens: Callable[[FakeEngine], None]
) -> None:
    assert serve(monkeypatch, happens) == ["served", "end"]


def test_an_engine_that_dies_while_it_is_asked_to_end_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def happens(engine: FakeEngine) -> None:
        engine.shutdown()
        engine.die()

    assert serve(monkeypatch, happens) == ["served", "end"]


def test_without_an_api_server_there_is_nothing_to_wrap_and_without_the_target_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    exit_status.install()
    assert MODULE not in sys.modules
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(SeamError, match="build_and_serve"):
        exit_status.install()
