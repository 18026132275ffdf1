"""A real ``vllm serve`` in a process group of its own, for tests that speak HTTP to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 600
END_S = 120
ROOT = Path(__file__).parents[2]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass
class Server:
    """A running server. While ``gate`` exists, requests wait between admission and engine; while ``brake`` does, a
    step of the engine takes at least gated_server.BRAKED_STEP_S, and the longer the older the brake; while ``poison``
    does, none has finite logits. Written into ``cut``, a crash point stops the process that next passes it."""

    url: str
    key: str
    gate: Path
    brake: Path
    poison: Path
    cut: Path
    log: Path
    process: subprocess.Popen[bytes]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=120)

    def post(self, path: str, **body: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    def get(self, path: str) -> Any:
        with self.client() as client:
            return client.get(path).raise_for_status().json()

    def publish(self, path: Path, name: str, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **fields)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    def complete(self, model: str | None, path: str = "/v1/completions", **fields: Any) -> Any:
        response = self.post(path, model=model, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, model: str, path: str = "/v1/completions", **fields: Any) -> Iterator[Any]:
        """Yield the JSON of each event of a streamed request."""
        with (
            self.client() as client,
            client.stream("POST", path, json={"model": model, "stream": True, **fields}) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    @contextmanager
    def braked(self) -> Iterator[None]:
        """Keep requests running for as long as a test needs them to, even on a machine that stalls; waiting for their
        end inside takes hours."""
        self.brake.touch()
        try:
            yield
        finally:
            self.brake.unlink()

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        """Let every sampling step fail."""
        self.poison.touch()
        try:
            yield
        finally:
            self.poison.unlink()

    def statuses(self, policy: str) -> dict[int, str]:
        """Return the status of each step of a policy."""
        return {item["step"]: item["status"] for item in self.get(f"/v1/policies/{policy}")["revisions"]}

    def wait_for(self, policy: str, step: int, status: str) -> None:
        deadline = time.monotonic() + 60
        while self.statuses(policy).get(step) != status:
            assert time.monotonic() < deadline, f"{policy} step {step} is {self.statuses(policy)}"
            time.sleep(0.05)

    def wait_until_gone(self) -> None:
        """Wait for the server's end and that of every process it started."""
        self.process.wait(END_S)
        deadline = time.monotonic() + END_S
        while left := members(self.process.pid):
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.05)


@contextmanager
def running(root: Path, *flags: str, key: str = "k2", **environment: str) -> Iterator[Server]:
    """Start a server on ``root``'s model and store; stop it, whatever happened, at the end."""
    server = launch(root, *flags, key=key, **environment)
    try:
        wait_until_healthy(server)
        yield server
    finally:
        stop(server)


def launch(root: Path, *flags: str, key: str = "k2", **environment: str) -> Server:
    """Start a server and return without waiting for it; ``stop`` must follow."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (root / "chat.jinja").write_text(CHAT_TEMPLATE)
    log, gate, brake, poison, cut = (root / name for name in ("server.log", "gate", "brake", "poison", "cut"))
    command = [
        *(sys.executable, str(ROOT / "tests" / "plugin" / "gated_server.py"), "serve", str(root / "model")),
        *("--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", "1024", "--enforce-eager", "--chat-template", str(root / "chat.jinja")),
        *("--api-key", "k1", "k2", "--enable-lora", "--enable-epochless", "--epochless-store", str(root / "store")),
        *flags,
    ]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "EPOCHLESS_TEST_GATE": str(gate),
        "EPOCHLESS_TEST_BRAKE": str(brake),
        "EPOCHLESS_TEST_POISON": str(poison),
        "EPOCHLESS_TEST_CUT": str(cut),
        "PYTHONPATH": str(ROOT),
    }
    with log.open("ab") as target:
        process = subprocess.Popen(
            command, stdout=target, stderr=target, env={**os.environ, **settings, **environment}, start_new_session=True
        )
    return Server(f"http://127.0.0.1:{port}", key, gate, brake, poison, cut, log, process)


def stop(server: Server) -> None:
    """End a server as an operator does, and whatever of it is still there afterwards."""
    for file in (server.gate, server.brake, server.poison, server.cut):
        file.unlink(missing_ok=True)
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(30)


def wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()[-4000:]
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:  # not listening yet
            pass
        time.sleep(0.25)
    raise AssertionError(f"no answer in {START_TIMEOUT_S} s: {server.log.read_text()[-4000:]}")


def members(group: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, _, process_group = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
                if int(process_group) == group and state != "Z":
                    found.append(int(entry.name))
    return found
