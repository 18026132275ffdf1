"""Cuts of a real ``vllm serve``: one for each class of durable step, with requests running beside it.

The lives follow one another on one store: each checks what the cut before it left, repeats what was cut, runs a stream
on the head, and is cut itself. What a revision says is known beforehand from a stock engine without Epochless, alone
with one adapter at a time. Knows how the server is started from tests/plugin/servers.py, and nothing of its insides.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import httpx

from epochless_vllm.durable import CRASH_EXIT_CODE, CRASH_VARIABLE
from tests import campaigns
from tests.plugin.servers import ROOT, Server, launch, stop, wait_until_healthy
from tests.tiny_model import make_adapter, make_model

HEADINGS = ("during", "process", "cut at", "manner", "after the restart", "result")
POLICY = "p"
PROMPT = "What was committed before the power went is served after it. "
TOKENS = 240  # of the stream beside a cut, which must not end before it
CHECKED = 32  # of each revision in each life
FLAGS = ("--max-loras", "4", "--max-cpu-loras", "20", "--epochless-keep", "18", "--max-lora-rank", "8")
END_S = 120  # until the processes of a server are gone after one of them was cut

ORACLE = """
import json, sys
from pathlib import Path
from vllm.lora.request import LoRARequest
from tests.engines import generate, make_engine, tokens_of
root, prompt, tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
llm = make_engine(root / "model", None, max_loras=1)
said = {}
for number, path in enumerate(sorted(root.glob("r*")), start=1):
    said[path.name[1:]] = tokens_of(generate(llm, prompt, LoRARequest(path.name, number, str(path)), tokens))
print("SAID " + json.dumps(said), flush=True)
"""


@dataclass(frozen=True)
class ServerCut:
    """One cut and what must come of it.

    Attributes:
        during: ``publish``, ``retire`` or ``start``.
        process: ``API server``, ``engine core`` or ``rank``: who passes the point.
        counts: whether the operation must be found done after the restart.
    """

    during: str
    process: str
    point: str
    manner: str
    counts: bool
    outcome: str


CUTS = (
    ServerCut("publish", "API server", "ingest.rename", "kill", False, "not published"),
    ServerCut("publish", "API server", "intend", "exit", False, "aborted"),
    ServerCut("publish", "API server", "prepare.sent", "kill", False, "aborted"),
    ServerCut("publish", "rank", "rank.register", "exit", False, "aborted"),
    ServerCut("publish", "API server", "decide", "kill", True, "committed"),
    ServerCut("publish", "API server", "commit.reply", "exit", True, "committed"),
    ServerCut("start", "engine core", "prepare.sent", "exit", True, "as committed"),
    ServerCut("retire", "API server", "retire.begin", "kill", True, "retired"),
    ServerCut("retire", "API server", "retire.fence", "exit", True, "retired"),
    ServerCut("retire", "rank", "rank.remove", "kill", True, "retired"),
    ServerCut("retire", "API server", "retire.remove", "kill", True, "retired"),
)


@dataclass
class Outcome:
    """What was wrong after a cut; nothing if it passed."""

    cut: ServerCut
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems


class Chain:
    """The lives of one store, and what a client was told in them.

    Attributes:
        expected: status by step of every publication that was answered, or must count.
    """

    def __init__(self, directory: Path, cuts: Iterable[ServerCut]) -> None:
        self.root = directory
        self.cuts = tuple(cuts)
        make_model(directory / "model")
        self.adapters = 2 + sum(cut.during != "start" for cut in self.cuts)
        for number in range(1, self.adapters + 1):
            make_adapter(directory / f"r{number}", seed=number)
        self.said = self._ask_stock_engine()
        self.expected: dict[int, str] = {}
        self.next = 1

    def _ask_stock_engine(self) -> dict[int, list[int]]:
        command = [sys.executable, "-c", ORACLE, str(self.root), PROMPT, str(TOKENS)]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        lines = [line for line in result.stdout.splitlines() if line.startswith("SAID ")]
        assert lines, result.stderr[-3000:]
        return {int(number): tokens for number, tokens in json.loads(lines[0][5:]).items()}

    def run(self) -> list[Outcome]:
        """Live every life; return one outcome a cut."""
        outcomes = []
        server = self._start()
        for _ in range(2):
            self._publish(server)
        for cut in self.cuts:
            outcome = Outcome(cut)
            outcomes.append(outcome)
            try:
                repeat = self._cut(server, cut)
                server = self._start()
                self._check(server)
                repeat(server)
                self._check(server)
            except (AssertionError, httpx.HTTPError) as error:
                outcome.problems.append(f"{type(error).__name__}: {str(error)[:2000]}")
                stop(server)
                break  # the lives after it would start from nothing known
        stop(server)
        unrun = self.cuts[len(outcomes) :]
        return outcomes + [Outcome(cut, ["not run: the life before it failed"]) for cut in unrun]

    # One life

    def _start(self) -> Server:
        (self.root / "server.log").unlink(missing_ok=True)  # each life writes its own
        server = launch(self.root, *FLAGS)
        try:
            wait_until_healthy(server)
        except BaseException:
            stop(server)
            raise
        return server

    def _publish(self, server: Server) -> dict[str, Any]:
        reply = server.publish(self.root / f"r{self.next}", POLICY, step=self.next)
        self.expected[self.next] = "live"
        self.next += 1
        return reply

    def _cut(self, server: Server, cut: ServerCut) -> Callable[[Server], None]:
        """End the life by its cut; return how the next one repeats the operation."""
        if cut.during == "start":
            stop(server)
            dying = launch(self.root, *FLAGS, **{CRASH_VARIABLE: spec(cut)})
            self._await_end(dying, cut)
            return lambda server: None
        head = max(step for step, status in self.expected.items() if status == "live")
        server.brake.touch()  # the stream beside the cut must not end before it
        with ThreadPoolExecutor(1) as pool:
            heard: list[int] = []
            started = Event()
            stream = pool.submit(self._listen, server, f"{POLICY}@{head}", heard, started)
            assert started.wait(60), "the stream beside the cut did not begin"
            server.cut.write_text(spec(cut))
            repeat = self._begin_publish(server, cut) if cut.during == "publish" else self._begin_retire(server)
            self._await_end(server, cut)
            stream.result(60)
        assert 0 < len(heard) < TOKENS, f"the stream beside the cut heard {len(heard)} tokens"
        assert heard == self.said[head][: len(heard)], "the stream beside the cut heard other tokens"
        return repeat

    def _begin_publish(self, server: Server, cut: ServerCut) -> Callable[[Server], None]:
        step = self.next
        body = {"lora_name": POLICY, "lora_path": str(self.root / f"r{step}"), "step": step}
        with suppress(httpx.TransportError):
            answer = server.post("/v1/load_lora_adapter", **body)
            assert answer.status_code >= 500, answer.text
        if cut.counts:
            self.expected[step] = "live"

        def repeat(server: Server) -> None:
            assert self._publish(server)["repeated"] is cut.counts

        return repeat

    def _begin_retire(self, server: Server) -> Callable[[Server], None]:
        step = min(step for step, status in self.expected.items() if status == "live")
        name = f"{POLICY}@{step}"
        with suppress(httpx.TransportError):  # a cut behind the answer lets it out
            server.post("/v1/unload_lora_adapter", lora_name=name)
        self.expected[step] = "retired"

        def repeat(server: Server) -> None:
            assert server.post("/v1/unload_lora_adapter", lora_name=name).status_code == 410

        return repeat

    def _listen(self, server: Server, model: str, heard: list[int], started: Event) -> None:
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        with suppress(httpx.TransportError):  # its server is about to be cut
            for event in server.events(model, **body):
                if "error" in event:
                    return
                heard += event["choices"][0]["token_ids"]
                started.set()

    def _await_end(self, server: Server, cut: ServerCut) -> None:
        """Wait for the server and every process of it; the one that was cut ends as the cut says."""
        status = server.process.wait(END_S)
        if cut.process == "API server":
            wanted = -signal.SIGKILL if cut.manner == "kill" else CRASH_EXIT_CODE
            assert status == wanted, f"the server ended with {status}: {server.log.read_text()[-2000:]}"
        elif cut.process == "rank":
            assert "died unexpectedly" in server.log.read_text(), "no rank was cut"
            assert status == 1, f"the server ended with {status}, and a supervisor would leave it down"
        else:
            assert status != 0, "the server started"
        server.wait_until_gone()
        stop(server)

    def _check(self, server: Server) -> None:
        """The server shows and serves exactly what is expected, and the store holds nothing half-done."""
        described = server.get(f"/v1/policies/{POLICY}")
        statuses = {item["step"]: item["status"] for item in described["revisions"]}
        assert statuses == self.expected, f"it shows {statuses}, expected {self.expected}"
        live = {step for step, status in self.expected.items() if status == "live"}
        assert server.get(f"/weight_info?policy={POLICY}")["step"] == max(live)
        ids = {item["step"]: item["revision_id"] for item in described["revisions"]}
        listed = {card["id"] for card in server.get("/v1/models")["data"]}
        assert listed == {"base", POLICY, *(f"{POLICY}@{ids[step]}" for step in live)}, f"listed: {sorted(listed)}"
        body = {"prompt": PROMPT, "max_tokens": CHECKED, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for step in range(1, self.next + 1):
            answer = server.post("/v1/completions", model=f"{POLICY}@{step}", **body)
            wanted = {"live": 200, "retired": 410}.get(self.expected.get(step, ""), 404)
            assert answer.status_code == wanted, f"step {step}: {answer.status_code}, expected {wanted}: {answer.text}"
            if wanted == 200:
                heard = answer.json()["choices"][0]["token_ids"]
                assert heard == self.said[step][:CHECKED], f"step {step} says other tokens"
        store = self.root / "store"
        leftovers = os.listdir(store / "incoming")
        assert not leftovers, f"leftovers: {leftovers}"
        strange = [name for name in os.listdir(store / "revisions") if len(name) != 64]
        assert not strange, f"strays: {strange}"


def spec(cut: ServerCut) -> str:
    """Return the cut as EPOCHLESS_CRASH_AT takes it."""
    return f"{cut.point}:1:kill" if cut.manner == "kill" else cut.point


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the rows of the lives of a real server."""
    return campaigns.table(HEADINGS, (_row(outcome) for outcome in outcomes))


def _row(outcome: Outcome) -> tuple[str, ...]:
    cut = outcome.cut
    verdict = "passed" if outcome.passed else f"FAILED: {outcome.problems[0]}"
    return cut.during, cut.process, f"`{cut.point}`", cut.manner, cut.outcome, verdict
