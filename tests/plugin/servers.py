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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 600
ROOT = Path(__file__).parents[2]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass
class Server:
    """A running server. While ``gate`` exists, requests wait between admission and engine; while ``brake`` does, a
    step of the engine takes at least gated_server.BRAKED_STEP_S; while ``poison`` does, none has finite logits."""

    url: str
    key: str
    gate: Path
    brake: Path
    poison: Path
    log: Path

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
        """Keep requests running for as long as a test needs them to."""
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


@contextmanager
def running(root: Path, *flags: str, key: str = "k2", **environment: str) -> Iterator[Server]:
    """Start a server on ``root``'s model and store; stop it, whatever happened, at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (root / "chat.jinja").write_text(CHAT_TEMPLATE)
    log, gate, brake, poison = (root / name for name in ("server.log", "gate", "brake", "poison"))
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
        "PYTHONPATH": str(ROOT),
    }
    with log.open("ab") as target:
        process = subprocess.Popen(
            command, stdout=target, stderr=target, env={**os.environ, **settings, **environment}, start_new_session=True
        )
    try:
        server = Server(f"http://127.0.0.1:{port}", key, gate, brake, poison, log)
        _wait_until_healthy(server, process)
        yield server
    finally:
        gate.unlink(missing_ok=True)
        brake.unlink(missing_ok=True)
        poison.unlink(missing_ok=True)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def _wait_until_healthy(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, server.log.read_text()[-4000:]
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:  # not listening yet
            pass
        time.sleep(0.25)
    raise AssertionError(f"no answer in {START_TIMEOUT_S} s: {server.log.read_text()[-4000:]}")
