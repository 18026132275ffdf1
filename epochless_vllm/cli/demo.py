"""``epochless demo``: the product's claims on a real server and a tiny model, as a readable transcript.

Starts ``vllm serve`` on 127.0.0.1, streams on one revision while others are published and a broken one is refused,
verifies a receipt and has a changed answer refused, kills the server and starts it again. Exits 0 only if every claim
held. Needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from epochless_vllm.cli.output import Output
from epochless_vllm.cli.tiny_model import make_adapter, make_model
from epochless_vllm.cli.verify import read_public_key
from epochless_vllm.errors import ReceiptError
from epochless_vllm.verify import Verdict, attested_choices, verify_receipt

PROMPT = "A rollout keeps the policy it was admitted with. " * 6
TOKENS = 240
START_TIMEOUT_S = 300
POLICY = "walker"


class ClaimError(Exception):
    """A claim of the demonstration did not hold."""


class Server:
    """One ``vllm serve`` process group of ours."""

    def __init__(self, work: Path, ranks: int) -> None:
        self.work = work
        self.ranks = ranks
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """Return the command line, as a reader would type it."""
        vllm = Path(sys.executable).with_name("vllm")
        return [
            *(str(vllm), "serve", str(self.work / "model"), "--served-model-name", "base"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--max-model-len", "1024"),
            *("--enforce-eager", "--tensor-parallel-size", str(self.ranks), "--enable-prompt-tokens-details"),
            *("--enable-lora", "--enable-epochless", "--epochless-store", str(self.work / "store")),
        ]

    def start(self) -> float:
        """Start and wait until it answers; return the seconds it took."""
        began = time.monotonic()
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if self.ranks > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(self.ranks))
        with (self.work / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, env=environment, start_new_session=True
            )
        while time.monotonic() - began < START_TIMEOUT_S:
            if self._process.poll() is not None:
                raise ClaimError(f"the server ended with {self._process.returncode}; see {self.work / 'server.log'}")
            try:
                if self.client.get("/health").status_code == 200:
                    return time.monotonic() - began
            except httpx.TransportError:  # not listening yet
                pass
            time.sleep(0.25)
        raise ClaimError(f"the server did not answer in {START_TIMEOUT_S} s; see {self.work / 'server.log'}")

    def stop(self, sign: int) -> None:
        """Signal the whole process group and wait for the front end."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, sign)
                self._process.wait(60)
            self._process = None

    def publish(self, step: int, path: Path) -> httpx.Response:
        return self.client.post(
            "/v1/load_lora_adapter", json={"lora_name": POLICY, "lora_path": str(path), "step": step}
        )

    def generate(self, model: str, *, tokens: int = 16, prompt: str = PROMPT) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return dict(answer.json())

    def stream(self, model: str) -> Iterator[dict[str, Any]]:
        """Yield the choices of a greedy stream of TOKENS tokens."""
        body = {
            **{"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
            **{"stream": True, "return_token_ids": True},
        }
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])["choices"][0]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks (default 1)")
    parser.add_argument("--keep-files", action="store_true", help="leave the model, store and log in place")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Run the demonstration; return 0 if every claim held, else 1. The transcript is text also with ``--json``."""
    work = Path(tempfile.mkdtemp(prefix="epochless-demo-"))
    server = Server(work, arguments.tensor_parallel_size)
    try:
        _demonstrate(server, work)
    except (ClaimError, httpx.HTTPError) as error:
        print(f"\nFAILED: {error}\nserver log: {work / 'server.log'}")
        arguments.keep_files = True
        return 1
    finally:
        server.stop(signal.SIGTERM)
        if not arguments.keep_files:
            shutil.rmtree(work, ignore_errors=True)
    print("\nEvery claim held.")
    return 0


def _demonstrate(server: Server, work: Path) -> None:
    _say("A tiny random Llama, three revisions of one policy, and one broken adapter")
    make_model(work / "model")
    paths = [make_adapter(work / f"r{step}", seed=step) for step in (1, 2, 3)]
    broken = make_adapter(work / "broken", seed=9, hidden_size=128)
    _say("$ " + " ".join(server.command()).replace(str(work), "$WORK"))
    print(f"   ready in {server.start():.0f} s on {server.ranks} rank(s)")

    r1 = _publish(server, 1, paths[0])
    undisturbed = _tokens(server.stream(f"{POLICY}@{r1}"))
    print(f"   an undisturbed stream on r1: {len(undisturbed)} tokens")

    _say("The same stream again, while r2 and r3 are published and the broken adapter is refused")
    versions = _stream_while_publishing(server, r1, undisturbed, paths, broken)

    _say("A new request by policy name runs on the head, r3")
    choice = server.generate(POLICY)["choices"][0]
    _claim(choice["weight_version"] == versions[3], f"weight_version is r3, {versions[3][:19]}")
    _claim(
        choice["weight_versions"] == [{"version": versions[3], "step": 3, "start": 0, "end": 16}],
        "weight_versions label tokens [0, 16) with r3, step 3",
    )

    _say("Prefix KV is keyed by content")
    _check_prefix_isolation(server, versions)

    _say("A receipt beside an answer, checked offline; then one token of the answer is changed")
    receipt_id = _check_receipt(server, work, versions[3])

    _say("$ kill -9 the server, start it again on the same store")
    server.stop(signal.SIGKILL)
    print(f"   ready in {server.start():.0f} s")
    listed = server.client.get(f"/v1/policies/{POLICY}").json()["revisions"]
    live = {item["step"]: item["revision_id"] for item in listed if item["status"] == "live"}
    _claim(live == versions, "all three revisions are back, and nothing else")
    kept = server.client.get(f"/v1/receipts/{receipt_id}")
    _claim(kept.status_code == 200, "the receipt is still kept")
    again = _tokens(server.stream(f"{POLICY}@{r1}"))
    _claim(again == undisturbed, "a stream on r1 equals the first one token for token")


def _stream_while_publishing(
    server: Server, r1: str, undisturbed: list[int], paths: list[Path], broken: Path
) -> dict[int, str]:
    versions = {1: r1}
    tokens: list[int] = []
    refused: list[httpx.Response] = []

    def at(count: int, action: Callable[[], None]) -> tuple[int, threading.Thread]:
        return count, threading.Thread(target=action)

    def publish(step: int) -> None:
        versions[step] = _publish(server, step, paths[step - 1], note=f"after {len(tokens)} tokens of the stream")

    events = [
        at(40, lambda: publish(2)),
        at(100, lambda: refused.append(server.publish(9, broken))),
        at(140, lambda: publish(3)),
    ]
    pending = list(events)
    labels = set()
    for choice in server.stream(f"{POLICY}@{r1}"):
        tokens += choice.get("token_ids") or []
        labels.add(choice["weight_version"])
        if pending and len(tokens) >= pending[0][0]:
            pending.pop(0)[1].start()
    for _, thread in events:
        thread.join()
    _claim(tokens == undisturbed, f"all {len(tokens)} tokens equal the undisturbed stream")
    _claim(labels == {r1}, "every chunk says it was written by r1")
    _claim(len(refused) == 1 and refused[0].status_code == 422, "the broken adapter was refused with 422:")
    print("      " + str(refused[0].json().get("error", {}).get("message", ""))[:160])
    return versions


def _check_prefix_isolation(server: Server, versions: dict[int, str]) -> None:
    prompt = "Prefix blocks carry the digest of the revision that computed them. " * 5

    def cached(step: int) -> int:
        usage = server.generate(f"{POLICY}@{versions[step]}", prompt=prompt)["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    first, other, again = cached(1), cached(2), cached(1)
    _claim(first == 0 and other == 0, "the same prompt on r1, then on r2: 0 and 0 cached tokens")
    _claim(again > 0, f"on r1 again: {again} cached tokens")


def _check_receipt(server: Server, work: Path, head: str) -> str:
    """Return the id of a receipt that held."""
    nonce = secrets.token_hex(16)
    body = {"model": POLICY, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    answer = server.client.post("/v1/completions", json={**body, "epochless": {"attest": "receipt", "nonce": nonce}})
    answer.raise_for_status()
    (work / "key.pem").write_bytes(server.client.get("/v1/receipts/key").content)
    key = read_public_key(str(work / "key.pem"))
    (choice,) = attested_choices(answer.content)
    verified = verify_receipt(choice.receipt, public_key=key, nonce=nonce, response=answer.content, revisions=[head])
    _claim(
        (verified.verdict, verified.anchor) == (Verdict.SAMPLING_CONSISTENT, "signature"),
        f"{verified.tokens} tokens are {verified.verdict.value} with their draws and signed, all by r3",
    )
    tampered = answer.json()
    tampered["choices"][0]["token_ids"][3] ^= 1
    try:
        verify_receipt(choice.receipt, public_key=key, nonce=nonce, response=json.dumps(tampered).encode())
    except ReceiptError as error:
        _claim(error.fields["threat"] == "token_swapped", f"the changed answer is refused: {error}")
    else:
        _claim(False, "the changed answer is refused")
    return str(verified.receipt_id)


def _publish(server: Server, step: int, path: Path, note: str = "") -> str:
    began = time.monotonic()
    answer = server.publish(step, path)
    if answer.status_code != 200:
        raise ClaimError(f"publish of step {step} answered {answer.status_code}: {answer.text}")
    version = str(answer.json()["weight_version"])
    print(f"   published r{step} in {1000 * (time.monotonic() - began):.0f} ms: {version[:19]}... {note}")
    return version


def _tokens(choices: Iterator[dict[str, Any]]) -> list[int]:
    return [token for choice in choices for token in choice.get("token_ids") or []]


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _claim(held: bool, text: str) -> None:
    print(f"   {'ok' if held else 'NO'}  {text}", flush=True)
    if not held:
        raise ClaimError(text)
