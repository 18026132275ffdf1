"""Several API servers, several engines, and both: what one publishes, all serve from the moment it answers."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.servers import Server, running
from tests.tiny_model import make_adapter, make_model

pytestmark = pytest.mark.engine

POLICY = "p"
PUBLICATIONS, REQUESTS = 10, 100  # of each publication: 1,000 requests in all
CLIENTS = 8
FRONT_END = r"\((?:ApiServer_\d+|APIServer) pid=(\d+)\)"  # as vLLM begins a line of its log
SHAPES = {
    "two of both": (("--data-parallel-size", "2", "--api-server-count", "2"), 2, 2),
    "two API servers": (("--api-server-count", "2"), 1, 2),
    "two engines": (("--data-parallel-size", "2", "--api-server-count", "1"), 2, 1),
}
# The largest has every process of the others, save a front end that is also the owner.
TESTED = list(SHAPES) if os.environ.get("EPOCHLESS_TEST_EVERY_SHAPE") else ["two of both"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("front-ends")
    make_model(root / "model")
    for number in range(PUBLICATIONS):
        make_adapter(root / f"r{number}", seed=number)
    return root


@pytest.fixture(scope="module", params=TESTED)
def shape(request: pytest.FixtureRequest, root: Path) -> Iterator[tuple[Server, int, int]]:
    flags, engines, front_ends = SHAPES[request.param]
    place = root / request.param.replace(" ", "-")
    place.mkdir()
    (place / "model").symlink_to(root / "model")
    with running(place, "--max-loras", "4", "--max-cpu-loras", "8", *flags) as server:
        yield server, engines, front_ends


def test_what_any_front_end_publishes_every_one_serves_at_once(shape: tuple[Server, int, int], root: Path) -> None:
    server, engines, front_ends = shape
    seen: Counter[str] = Counter()

    def ask(expected: str, step: int) -> str:
        # A connection of its own, so that the kernel picks the front end anew.
        model = POLICY if step % 2 else f"{POLICY}-v{step}"
        answer = server.post("/v1/completions", model=model, prompt="x", max_tokens=1)
        if answer.status_code != 200:
            return str(answer.status_code)
        return "fresh" if answer.json()["choices"][0]["weight_version"] == expected else "stale"

    with ThreadPoolExecutor(CLIENTS) as pool:
        for step in range(PUBLICATIONS):
            reply = server.publish(root / f"r{step}", POLICY, step=step)
            assert set(reply["receipts"]) == {f"engine{engine}/rank0" for engine in range(engines)}
            answers = [pool.submit(ask, reply["weight_version"], step) for _ in range(REQUESTS)]
            seen.update(answer.result() for answer in answers)
    assert seen == {"fresh": PUBLICATIONS * REQUESTS}
    pids = set(re.findall(rf"{FRONT_END}[^\n]*POST /v1/completions", server.log.read_text()))
    assert len(pids) == front_ends, "every front end must have served"


def test_what_is_retired_through_any_front_end_is_gone_from_all(shape: tuple[Server, int, int]) -> None:
    server, _, _ = shape
    live = sorted(step for step, status in server.statuses(POLICY).items() if status == "live")
    assert server.post("/v1/unload_lora_adapter", lora_name=f"{POLICY}-v{live[0]}").status_code == 200
    server.wait_for(POLICY, live[0], "retired")
    answers = {server.post("/v1/completions", model=f"{POLICY}-v{live[0]}", prompt="x").status_code for _ in range(20)}
    assert answers == {410}


def test_a_front_end_that_dies_ends_the_deployment(shape: tuple[Server, int, int]) -> None:
    """Last of the module: afterwards there is no server."""
    server, _, _ = shape
    (pid, *_) = re.findall(rf"{FRONT_END}", server.log.read_text())
    os.kill(int(pid), signal.SIGKILL)
    server.wait_until_gone()


def test_restarting_brings_back_what_was_committed(shape: tuple[Server, int, int], root: Path) -> None:
    server, _, _ = shape
    place = server.log.parent
    with running(place, "--max-loras", "4", "--max-cpu-loras", "8") as again:
        statuses: Any = again.statuses(POLICY)
        assert max(statuses) == PUBLICATIONS - 1
        assert statuses[PUBLICATIONS - 1] == "live"
