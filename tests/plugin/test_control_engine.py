"""Pausing, sleeping and resetting a real server keep every request on its revision; other weights are refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.servers import Server, members, running
from tests.tiny_model import make_adapter, make_model

pytestmark = pytest.mark.engine

PROMPT = "A pause is no reason to change one's mind. "
TOKENS = 100
BODY = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("control")
    make_model(root / "model")
    for number in (1, 2):
        make_adapter(root / f"r{number}", seed=number)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with running(root, "--max-loras", "2", "--max-cpu-loras", "6", VLLM_SERVER_DEV_MODE="1") as server:
        for step in (1, 2):
            server.publish(root / f"r{step}", "p", step=step)
        yield server


@pytest.fixture(scope="module")
def alone(server: Server) -> dict[int, list[int]]:
    return {step: server.complete(f"p-v{step}", **BODY)["choices"][0]["token_ids"] for step in (1, 2)}


@pytest.fixture(autouse=True)
def awake(server: Server) -> Iterator[None]:
    """Leave nothing paused or asleep behind a test that failed: the next one is not to fail for it."""
    yield
    if server.process.poll() is None and server.get("/is_paused")["is_paused"]:
        control(server, "/wake_up")
        control(server, "/resume")


def control(server: Server, path: str) -> None:
    response = server.post(path)
    assert response.status_code == 200, response.text


def heard(events: list[Any]) -> tuple[list[int], set[str], str | None]:
    """Return the tokens of a stream, its labels and why it ended."""
    choices = [choice for event in events for choice in event["choices"]]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    return tokens, {choice["weight_version"] for choice in choices}, choices[-1]["finish_reason"]


@pytest.mark.parametrize(
    ("stop", "go"),
    [
        ("/pause?mode=keep", "/resume"),
        ("/sleep?level=0&mode=keep", "/wake_up"),
        ("/sleep?level=1&mode=keep", "/wake_up"),
    ],
)
def test_a_stream_kept_through_a_pause_goes_on_with_its_revision(
    server: Server, root: Path, alone: dict[int, list[int]], stop: str, go: str
) -> None:
    policy = f"kept-by{stop.translate(str.maketrans('?&=', '---'))}"
    first = server.publish(root / "r1", policy, step=1)
    with server.braked():
        stream = server.events(policy, **BODY)
        events = [next(stream)]
        control(server, stop)
        second = server.publish(root / "r2", policy, step=2)  # publishing needs no step of the engine
        assert server.post("/v1/unload_lora_adapter", lora_name=f"{policy}-v1").json()["in_flight"] == 1
    with ThreadPoolExecutor(1) as pool:
        queued = pool.submit(server.complete, policy, **BODY)
        control(server, go)
        events += stream
        assert heard(events) == (alone[1], {first["weight_version"]}, "length")
        choice = queued.result(120)["choices"][0]
    assert (choice["token_ids"], choice["weight_version"]) == (alone[2], second["weight_version"])
    server.wait_for(policy, 1, "retired")


def test_a_stream_a_pause_aborts_says_what_it_said_it_was(server: Server, alone: dict[int, list[int]]) -> None:
    with server.braked():
        stream = server.events("p-v1", **BODY)
        events = [next(stream)]
        control(server, "/pause?mode=abort")
        events += stream
    tokens, labels, reason = heard(events)
    assert tokens == alone[1][: len(tokens)]
    assert len(tokens) < TOKENS
    assert (len(labels), reason) == (1, "abort")
    control(server, "/resume")
    assert server.complete("p-v1", **BODY)["choices"][0]["token_ids"] == alone[1]


def test_a_pause_that_waits_lets_streams_end(server: Server, alone: dict[int, list[int]]) -> None:
    stream = server.events("p-v2", **BODY)
    events = [next(stream)]
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(control, server, "/pause?mode=wait")
        events += stream
        paused.result(120)
    assert heard(events)[0] == alone[2]
    assert server.get("/is_paused") == {"is_paused": True}
    control(server, "/resume")


def test_emptying_the_prefix_cache_under_running_requests_changes_nothing(
    server: Server, alone: dict[int, list[int]]
) -> None:
    with server.braked():
        streams = {step: server.events(f"p-v{step}", **BODY) for step in (1, 2)}
        events = {step: [next(stream)] for step, stream in streams.items()}
        control(server, "/reset_prefix_cache?reset_running_requests=true")
    for step, stream in streams.items():
        events[step] += stream
        assert heard(events[step])[0] == alone[step]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/collective_rpc", {"method": "reload_weights"}),
        ("/collective_rpc", {"method": "epochless_call", "args": ["retire"]}),
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {}}),
        ("/finish_weight_update", {}),
        ("/sleep?level=2", {}),
    ],
)
def test_whatever_could_change_weights_is_refused_with_the_reason(
    server: Server, alone: dict[int, list[int]], path: str, body: dict[str, Any]
) -> None:
    response = server.post(path, **body)
    assert response.status_code == 400, response.text
    assert "weights" in response.json()["error"]["message"]
    assert server.get("/is_paused") == {"is_paused": False}
    short = {**BODY, "max_tokens": 8}
    assert server.complete("p-v1", **short)["choices"][0]["token_ids"] == alone[1][:8]


def test_calls_that_read_are_answered(server: Server) -> None:
    answer = server.post("/collective_rpc", method="list_loras")
    assert answer.status_code == 200, answer.text


def test_a_server_whose_engine_dies_ends_with_status_one_and_says_why(server: Server) -> None:
    """Last of the module: afterwards there is no server."""
    comm = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in members(server.process.pid)}
    (engine,) = [pid for pid, name in comm.items() if name.startswith("VLLM::EngineCor")]
    os.kill(engine, signal.SIGKILL)
    server.wait_until_gone()
    assert server.process.returncode == 1
    assert "EngineCore died" in server.log.read_text()
    assert "restart it, and it comes back with every committed revision" in server.log.read_text()
