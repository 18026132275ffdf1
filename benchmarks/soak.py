"""A real server under everything at once: streams, publications good and bad, retirements, clients that go away.

    python benchmarks/soak.py --seconds 60      ends with "N passed, N failed"; exit status 1 if anything failed

Sixty-four clients ask for policies by name, by digest and by step, and for the base model; a trainer publishes every
second, one time in five something that must be refused, and retires. Every stream that ends is compared, token by
token, with what a stock engine without Epochless says to the same prompt, alone, with the adapter the stream's label
names (greedy, float32). Throughput and memory are judged from ten minutes on, and such a run writes
benchmarks/results/soak.json; a shorter one only prints them.

Memory is what the server's processes have for themselves, without pages of files: those come and go with whoever else
maps them. It is compared from a warm point on, when the live revisions are as many as they stay and the engine has met
its batch shapes, by medians of a window there and of the last. The server runs with the allocator settings the README
recommends for CPU: under glibc's own the heap of a rank grows in holes between buffers, with or without Epochless.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from engines import ROOT
from processes import use_of
from soak_judge import JUDGED_S, Observed, judge, measure

from epochless_vllm.cli.tiny_model import make_adapter, make_model
from epochless_vllm.store.revisions import RevisionStore
from tests.plugin.servers import Server, running

CONTENTS = 12
PROMPTS = [f"Soak {n}: what this stream says is one policy's and no other's. " * (1 + n % 3) for n in range(6)]
TOKENS = (8, 24, 64)
POLICY = "team/soak"
FLAGS = ("--max-loras", "3", "--max-cpu-loras", "32", "--epochless-keep", "4", "--max-num-seqs", "64")
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "67108864"}
PUBLISH_S = 1.0
END_S = 180.0  # a request that takes longer is counted as hung
IDLE_PUBLICATIONS = 20  # before the first stream, to compare with

ORACLE = """
import json, sys
from pathlib import Path
from vllm.lora.request import LoRARequest
from tests.engines import generate, make_engine, tokens_of
root, prompts, tokens = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
llm = make_engine(root / "model", None, max_loras=1)
said = {}
for number in range(int(sys.argv[4]) + 1):
    lora = LoRARequest(f"r{number}", number, str(root / f"r{number}")) if number else None
    said[number] = [tokens_of(generate(llm, prompt, lora, tokens)) for prompt in prompts]
print("SAID " + json.dumps(said), flush=True)
"""


class Soak:
    """One run against one server."""

    def __init__(self, server: Server, root: Path, said: dict[str, list[list[int]]], seconds: float) -> None:
        self.server = server
        self.root = root
        self.said = said  # by revision_id; "base" for the base model
        self.seconds = seconds
        self.observed = Observed()
        self.live: dict[int, str] = {}  # revision_id by step, as far as the trainer knows
        self.retired: set[str] = set()
        self.began = time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    async def run(self, streams: int) -> None:
        """Run trainer and clients until the time is up and everything they began has ended."""
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=0
        )  # a server may close an idle one as it is used
        headers = {"Authorization": f"Bearer {self.server.key}"}
        async with httpx.AsyncClient(
            base_url=self.server.url, headers=headers, timeout=END_S, limits=limits
        ) as self.client:
            for step in range(1, 1 + IDLE_PUBLICATIONS):
                await self._publish(step, "idle")
            self.began = time.monotonic()
            tasks = [asyncio.create_task(self._ask_repeatedly(number)) for number in range(streams)]
            tasks += [asyncio.create_task(self._train()), asyncio.create_task(self._watch_server())]
            _, pending = await asyncio.wait(tasks, timeout=self.seconds + 2 * END_S)
            for task in pending:
                self.observed.problem(f"hung: {task.get_name()}")
                task.cancel()
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    self.observed.problem(f"{task.get_name()}: {task.exception()!r}")
            await self._settle()

    # The trainer

    async def _train(self) -> None:
        number = IDLE_PUBLICATIONS
        while self.elapsed() < self.seconds:
            number += 1
            tick = time.monotonic()
            if number % 5 == 0:
                await self._publish_bad(number // 5)
            else:
                await self._publish(number)
            if number % 7 == 0:
                await self._retire()
            await asyncio.sleep(max(0.0, PUBLISH_S - (time.monotonic() - tick)))

    async def _publish(self, step: int, beside: str = "streams") -> None:
        path = self.root / f"r{1 + step * 5 % CONTENTS}"
        began = time.monotonic()
        answer = await self.client.post(
            "/v1/load_lora_adapter", json={"lora_name": POLICY, "lora_path": str(path), "step": step}
        )
        code = "" if answer.status_code == 200 else answer.json().get("error", {}).get("error_code", "")
        self.observed.publications[f"{answer.status_code} {code}".strip()] += 1
        if answer.status_code == 200:
            self.observed.publish_s[beside].append(time.monotonic() - began)
            self.live[step] = answer.json()["weight_version"]
            while len(self.live) > 4:
                self.live.pop(min(self.live))
        elif code not in (
            "registry_full",
            "conflict",
        ):  # full of draining revisions, or this one drains: both say retry
            self.observed.problem(f"publish of step {step}: {answer.status_code} {answer.text[:300]}")

    async def _publish_bad(self, number: int) -> None:
        path = self.root / f"bad{number % len(BAD)}"
        answer = await self.client.post("/v1/load_lora_adapter", json={"lora_name": POLICY, "lora_path": str(path)})
        self.observed.publications[f"bad: {answer.status_code}"] += 1
        if answer.status_code not in (404, 422):
            self.observed.problem(f"bad publish {BAD[number % len(BAD)]}: {answer.status_code} {answer.text[:300]}")

    async def _retire(self) -> None:
        if len(self.live) < 2:
            return
        step = min(self.live)
        self.live.pop(step)
        answer = await self.client.post("/v1/unload_lora_adapter", json={"lora_name": f"{POLICY}-v{step}"})
        self.observed.publications[f"retire: {answer.status_code}"] += 1
        if answer.status_code not in (200, 409, 410):  # beyond what is kept already, or the head again
            self.observed.problem(f"retire of step {step}: {answer.status_code} {answer.text[:300]}")

    # The clients

    async def _ask_repeatedly(self, number: int) -> None:
        chance = random.Random(number)
        while self.elapsed() < self.seconds:
            try:
                await self._ask(chance)
            except httpx.HTTPError as error:
                self.observed.outcomes["error"] += 1
                self.observed.problem(f"client {number}: {error!r}")
                if not isinstance(error, httpx.TimeoutException):
                    await asyncio.sleep(1.0)

    async def _ask(self, chance: random.Random) -> None:
        model, expected = self._choose_model(chance)
        prompt = chance.randrange(len(PROMPTS))
        tokens = chance.choice(TOKENS)
        leave_after = chance.randrange(1, tokens) if chance.random() < 0.1 else None
        body = {
            **{"model": model, "prompt": PROMPTS[prompt], "max_tokens": tokens, "temperature": 0, "stream": True},
            **{"ignore_eos": True, "return_token_ids": True},
        }
        heard: list[int] = []
        labels: set[str] = set()
        spans: Any = None
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self._count_refusal(model, answer)
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self._count_stream_error(model, event["error"])
                    return
                for choice in event["choices"]:
                    heard += choice["token_ids"]
                    labels.add(choice["weight_version"])
                    spans = choice.get("weight_versions", spans)
                    self.observed.tokens.append((self.elapsed(), len(choice["token_ids"])))
                if leave_after is not None and len(heard) >= leave_after:
                    self.observed.outcomes["left"] += 1
                    self._compare(labels, prompt, heard, expected)
                    return
        self.observed.outcomes["finished"] += 1
        if len(heard) != tokens:
            self.observed.problem(f"{model}: {len(heard)} of {tokens} tokens")
        if spans is None or [(s["version"], s["start"], s["end"]) for s in spans] != [(*labels, 0, tokens)]:
            self.observed.problem(f"{model}: labels {labels}, spans {spans}")
        self._compare(labels, prompt, heard, expected)

    def _choose_model(self, chance: random.Random) -> tuple[str, str | None]:
        """Return a model string, and the revision it pins."""
        kind = chance.random()
        if kind < 0.1:
            return "base", "base"
        if kind < 0.6 or not self.live:
            return POLICY, None
        step = chance.choice(list(self.live))
        name = f"{POLICY}-v{step}" if kind < 0.8 else f"{POLICY}@{self.live[step]}"
        return name, self.live[step]

    def _count_refusal(self, model: str, answer: httpx.Response) -> None:
        self.observed.outcomes[f"refused {answer.status_code}"] += 1
        if answer.status_code != 410 or model in ("base", POLICY):  # a pinned revision may have been retired
            self.observed.problem(f"{model}: {answer.status_code} {answer.text[:300]}")

    def _count_stream_error(self, model: str, error: dict[str, Any]) -> None:
        self.observed.outcomes[f"refused late {error.get('code')}"] += 1
        if error.get("code") != 410 or model in ("base", POLICY):
            self.observed.problem(f"{model}: {error}")

    def _compare(self, labels: set[str], prompt: int, heard: list[int], expected: str | None) -> None:
        if len(labels) != 1:
            self.observed.problem(f"labels of one stream: {labels}")
            return
        (label,) = labels
        name = "base" if label.startswith("base:") else label
        if expected is not None and name != expected:
            self.observed.problem(f"asked for {expected}, labelled {label}")
        if name not in self.said:
            self.observed.problem(f"labelled {label}, which was never published")
            return
        wanted = self.said[name][prompt][: len(heard)]
        wrong = sum(a != b for a, b in zip(heard, wanted, strict=True))
        self.observed.compared_tokens += len(heard)
        if wrong:
            self.observed.wrong_tokens += wrong
            self.observed.problem(f"{label}, prompt {prompt}: {heard} instead of {wanted}")

    # The server

    async def _watch_server(self) -> None:
        while self.elapsed() < self.seconds:
            self.observed.uses.append((self.elapsed(), use_of(self.server.process.pid)))
            await asyncio.sleep(1.0)

    async def _settle(self) -> None:
        """Everything that drains must be gone soon after its last request."""
        deadline = time.monotonic() + 60
        while True:
            described = (await self.client.get(f"/v1/policies/{POLICY}")).json()
            draining = [item["step"] for item in described["revisions"] if item["status"] == "draining"]
            if not draining:
                break
            if time.monotonic() > deadline:
                self.observed.problem(f"steps {draining} still drain a minute after the last request")
                break
            await asyncio.sleep(0.2)
        quarantined = [item["step"] for item in described["revisions"] if item["status"] == "quarantined"]
        if quarantined:
            self.observed.problem(f"quarantined: {quarantined}")


def _spoil_weights(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"\xff" * 4096)


def _cut_weights(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


def _poison_weights(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"  # not a number, in float32
    path.write_bytes(content)


def _rename_rank(directory: Path) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "r": 5}))


BAD = (_spoil_weights, _cut_weights, _poison_weights, _rename_rank, shutil.rmtree)


def prepare(root: Path) -> dict[str, list[list[int]]]:
    """Make the model and the adapters, good and bad; return what a stock engine says, by revision_id and prompt."""
    make_model(root / "model")
    for number in range(1, CONTENTS + 1):
        make_adapter(root / f"r{number}", seed=number)
    for number, spoil in enumerate(BAD):
        make_adapter(root / f"bad{number}", seed=1000 + number)
        spoil(root / f"bad{number}")
    arguments = [str(root), json.dumps(PROMPTS), str(max(TOKENS)), str(CONTENTS)]
    result = subprocess.run(
        [sys.executable, "-c", ORACLE, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("SAID ")]
    if not lines:
        raise SystemExit(f"the stock engine did not answer: {result.stderr[-3000:]}")
    said = json.loads(lines[0][5:])
    names = RevisionStore(root / "names")  # only to learn each adapter's revision_id
    return {
        "base" if number == "0" else names.ingest_directory(root / f"r{number}").revision_id: tokens
        for number, tokens in said.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        said = prepare(root)
        with running(root, *FLAGS, **ALLOCATOR) as server:
            soak = Soak(server, root, said, arguments.seconds)
            asyncio.run(soak.run(arguments.streams))
            observed = soak.observed
            if server.process.poll() is not None:
                observed.problem(f"the server ended with {server.process.returncode}")
            if observed.problems:
                print(server.log.read_text()[-3000:])
    figures = measure(observed, arguments.seconds)
    verdicts = judge(observed, figures)
    for promise, kept in verdicts:
        print(f"{'passed' if kept else 'FAILED'}: {promise}")
    failed = sum(not kept for _, kept in verdicts)
    if arguments.seconds >= JUDGED_S:
        report = {**figures, "verdicts": dict(verdicts)}
        (ROOT / "benchmarks" / "results" / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(verdicts) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
