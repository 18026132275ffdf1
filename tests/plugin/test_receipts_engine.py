"""Receipts on a real server of two API server processes, verified with `epochless verify` from files."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from epochless_vllm.plugin.sink import ReceiptSink
from epochless_vllm.verify import verify_receipt
from tests.plugin.servers import ROOT, Server, running
from tests.plugin.test_front_end_engine import admitted, overtake, wait_until_admitted
from tests.tiny_model import make_adapter, make_model

pytestmark = pytest.mark.engine

PROMPT = "What this stream says is one policy's and no other's. "
NONCE = "a-nonce-of-this-test"
ASK = {"attest": "receipt", "nonce": NONCE}
COMPLETIONS, CHAT, TOKENS = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [PROMPT, "Another. "], "n": 2, "max_tokens": 70, "return_token_ids": True},
    CHAT: {"messages": [{"role": "user", "content": PROMPT}], "n": 2, "max_tokens": 70, "return_token_ids": True},
    TOKENS: {"token_ids": [5, 6, 7], "sampling_params": {"n": 2, "max_tokens": 70}},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"top_p": 0.9, "top_k": 50, "min_p": 0.001, "temperature": 0.8},
    "seeded": {"seed": 7, "repetition_penalty": 1.1, "min_tokens": 3},
    "greedy": {"temperature": 0, "n": 1},
    "stop string": {"stop": ["e", "?"], "logit_bias": {"40": 2.0}},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("server")
    make_model(root / "model")
    for number in (1, 2, 3):
        make_adapter(root / f"r{number}", seed=number)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with running(root, "--api-server-count", "2") as server:
        server.publish(root / "r1", "policy", step=1)
        (root / "key.pem").write_text(httpx.get(f"{server.url}/v1/receipts/key", headers=_key(server)).text)
        yield server


def _key(server: Server) -> dict[str, str]:
    return {"Authorization": f"Bearer {server.key}"}


def verify(root: Path, payload: bytes, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``epochless verify`` on these bytes, under the server's key."""
    file = root / "payload"
    file.write_bytes(payload)
    command = [sys.executable, "-m", "epochless_vllm.cli.main", "verify", str(file), "--json"]
    command += ["--key", str(root / "key.pem"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def verified(root: Path, payload: bytes, *options: str) -> Any:
    result = verify(root, payload, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def body_of(path: str, sampler: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "policy", "epochless": ASK, **BODIES[path], **fields}
    if path == TOKENS:
        body["sampling_params"] = {**body["sampling_params"], **SAMPLERS[sampler]}
    else:
        body |= SAMPLERS[sampler]
    return body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_choice_carries_a_receipt_that_verifies(
    server: Server, root: Path, path: str, sampler: str, stream: bool
) -> None:
    response = server.post(path, **body_of(path, sampler, stream=stream))
    assert response.status_code == 200, response.text
    checked = verified(root, response.content, "--nonce", NONCE)["choices"]
    assert len(checked) == (2 if path == COMPLETIONS else 1) * (1 if sampler == "greedy" else 2)
    places = [(item["prompt_index"], item["choice_index"]) for item in checked]
    assert len(set(places)) == len(places)
    for item in checked:
        assert (item["verdict"], item["anchor"]) == ("SAMPLING-CONSISTENT", "signature")
        assert [span["step"] for span in item["weight_versions"]] == [1]
        kept = server.get(f"/v1/receipts/{item['receipt_id']}")
        assert kept["final"]["root"] == _root_of(response.content, item["receipt_id"])
    assert len({item["request_id"] for item in checked}) == 1
    assert checked[0]["request_id"] == _id_of(response.content)


def _events(payload: bytes) -> list[Any]:
    if not payload.startswith(b"data:"):
        return [json.loads(payload)]
    return [json.loads(line[6:]) for line in payload.splitlines() if line.startswith(b"data: {")]


def _root_of(payload: bytes, receipt_id: str) -> str:
    bodies = [choice.get("epochless", {}) for event in _events(payload) for choice in event["choices"]]
    (root,) = [body["root"] for body in bodies if body.get("id") == receipt_id]
    return str(root)


def _id_of(payload: bytes) -> str:
    first = _events(payload)[0]
    return str(first.get("id") or first.get("request_id"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tampered_answer_is_refused(server: Server, root: Path, stream: bool) -> None:
    body = {**body_of(CHAT, "plain"), "n": 1}
    payload = server.post(CHAT, **body, stream=stream).content
    assert verify(root, payload, "--nonce", NONCE).returncode == 0
    assert "nonce_mismatch" in verify(root, payload, "--nonce", "another-nonce-0001").stdout
    events = _events(payload)
    choice = next(event["choices"][0] for event in events if event["choices"] and event["choices"][0].get("token_ids"))
    choice["token_ids"][0] ^= 1
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] if stream else [json.dumps(events[0])]
    refused = verify(root, "".join(lines).encode(), "--nonce", NONCE)
    assert (refused.returncode, json.loads(refused.stdout)["error"]["threat"]) == (1, "token_swapped")
    kept = httpx.get(
        f"{server.url}/v1/receipts/{events[-1]['choices'][0]['epochless']['id']}?format=compact", headers=_key(server)
    ).content
    for place in (len(kept) // 2, len(kept) - 1):
        broken = kept[:place] + bytes([kept[place] ^ 1]) + kept[place + 1 :]
        assert verify(root, broken).returncode == 1


def test_a_truncated_stream_is_incomplete(server: Server, root: Path) -> None:
    payload = server.post(CHAT, **body_of(CHAT, "plain", stream=True), **{}).content
    lines = payload.split(b"\n\n")
    start = b"\n\n".join(line for line in lines if b'"finish_reason":null' in line or b'"role"' in line)
    assert '"incomplete"' in verify(root, start, "--nonce", NONCE).stdout
    assert verified(root, start, "--allow-incomplete")["choices"][0]["verdict"] == "INCOMPLETE"


def test_base_answers_name_the_base_model(server: Server, root: Path) -> None:
    payload = server.post(CHAT, **body_of(CHAT, "plain", model="base", n=1)).content
    (item,) = verified(root, payload)["choices"]
    assert item["weight_versions"][0]["version"] == "base:" + item["base"]


def test_logprobs_of_the_response_are_those_of_the_receipt(server: Server, root: Path) -> None:
    """Without temperature, penalties and filters vLLM's raw logprobs are the behaviour's, to float32."""
    from math import log

    body = {**body_of(COMPLETIONS, "plain"), "prompt": PROMPT, "n": 1, "logprobs": 0, "temperature": 1.0}
    choice = server.post(COMPLETIONS, **body).json()["choices"][0]
    receipt = verify_receipt(base64.b64decode(choice["epochless"]["receipt"]), keep_blocks=True)
    exact = [log((most + 1) / 2**32) for block in receipt.blocks for most in block.width_less_one]
    assert exact == pytest.approx(choice["logprobs"]["token_logprobs"], abs=4e-4)


def test_a_seed_gives_the_same_tokens_whatever_the_request_id(server: Server, root: Path) -> None:
    body = {**body_of(CHAT, "seeded"), "epochless": {"attest": "summary"}}
    one, two = (server.post(CHAT, **body).json()["choices"] for _ in range(2))
    assert [choice["token_ids"] for choice in one] == [choice["token_ids"] for choice in two]
    assert one[0]["token_ids"] != one[1]["token_ids"]


def test_an_aborted_stream_is_kept_as_aborted(server: Server, root: Path) -> None:
    body = body_of(COMPLETIONS, "plain", stream=True, prompt=PROMPT, n=1, max_tokens=900, ignore_eos=True)
    seen: list[int] = []
    with server.braked(), server.client() as client, client.stream("POST", COMPLETIONS, json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                seen += event["choices"][0]["token_ids"]
                if len(seen) >= 3:
                    break
    (kept,) = wait_for_receipts(server, event["id"])
    assert kept["finish_reason"] == "abort"
    receipt = server.get(f"/v1/receipts/{kept['id']}")
    tokens = [token for block in receipt["blocks"] for token in block["tokens"]]
    assert tokens[: len(seen)] == seen
    assert verified(root, json.dumps(receipt, separators=(",", ":"), sort_keys=True).encode())["tokens"] == len(tokens)


def test_a_whole_answer_that_nobody_waits_for_is_kept_as_aborted(server: Server) -> None:
    name = "left-alone-1"
    body = body_of(COMPLETIONS, "plain", prompt=PROMPT, n=2, max_tokens=900, ignore_eos=True)
    with server.braked(), server.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post(COMPLETIONS, json=body, headers={"X-Request-Id": name}, timeout=2)
    kept = wait_for_receipts(server, f"cmpl-{name}")
    assert [(item["finish_reason"], item["choice_index"]) for item in kept] == [("abort", 0), ("abort", 1)]
    assert all(item["tokens"] > 0 for item in kept)


def wait_for_receipts(server: Server, request_id: str) -> list[dict[str, Any]]:
    """The abort reaches the engine, and the receipt the disk, after the client has left."""
    deadline = time.monotonic() + 60
    with server.client() as client:
        while True:
            reply = client.get("/v1/receipts", params={"request_id": request_id})
            if reply.status_code == 200:
                found: list[dict[str, Any]] = reply.json()["receipts"]
                return found
            assert time.monotonic() < deadline, reply.text
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (CHAT, {"epochless": {"attest": "all"}}, "epochless.attest"),
        (CHAT, {"epochless": {"attest": "receipt", "nonce": "short"}}, "epochless.nonce"),
        (CHAT, {"use_beam_search": True, "epochless": ASK}, "epochless.attest"),
        (COMPLETIONS, {"echo": True, "max_tokens": 0, "epochless": ASK}, "epochless.attest"),
        ("/v1/responses", {"input": "x", "epochless": ASK}, "epochless.attest"),
    ],
)
def test_what_cannot_be_attested_answers_400_by_name(
    server: Server, path: str, fields: dict[str, Any], field: str
) -> None:
    body = {"model": "policy", **({} if path == "/v1/responses" else BODIES[path]), **fields}
    response = server.post(path, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert field in response.json()["error"]["message"]


def test_responses_are_found_in_the_sink_by_their_id(server: Server) -> None:
    body = {"model": "policy", "input": "x", "max_output_tokens": 5, "epochless": {"attest": "summary", "nonce": NONCE}}
    response = server.post("/v1/responses", **body)
    assert response.status_code == 200, response.text
    (kept,) = wait_for_receipts(server, response.json()["id"])
    assert kept["tokens"] == 5


def test_batched_chats_are_told_apart_by_their_prompt(server: Server, root: Path) -> None:
    chats = [BODIES[CHAT]["messages"], [{"role": "user", "content": "Another. "}]]
    body = {**body_of(CHAT, "plain", messages=chats, max_tokens=9), "n": 1}
    checked = verified(root, server.post(f"{CHAT}/batch", **body).content, "--nonce", NONCE)["choices"]
    assert [(item["prompt_index"], item["verdict"]) for item in checked] == [
        (0, "SAMPLING-CONSISTENT"),
        (1, "SAMPLING-CONSISTENT"),
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_arrived_late_has_the_receipt_of_the_revision_that_served(
    server: Server, root: Path, stream: bool
) -> None:
    policy = f"late-{stream}"
    server.publish(root / "r3", policy, step=1)  # held under no other name, so that retiring it removes it
    before = admitted(server)
    server.gate.touch()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, CHAT, **body_of(CHAT, "plain", model=policy, stream=stream))
        wait_until_admitted(server, before + 1)
        overtake(server, policy, root)
        payload = waiting.result(120).content
    checked = verified(root, payload, "--nonce", NONCE)["choices"]
    assert [span["step"] for item in checked for span in item["weight_versions"]] == [2, 2]
    assert len(wait_for_receipts(server, checked[0]["request_id"])) == 2  # nothing is kept of what never ran


def test_an_anthropic_message_is_found_in_the_sink(server: Server) -> None:
    name = "anthropic-1"
    body = {
        "model": "policy",
        "messages": BODIES[CHAT]["messages"],
        "max_tokens": 4,
        "epochless": {"attest": "summary", "nonce": NONCE},
    }
    with server.client() as client:
        response = client.post("/v1/messages", json=body, headers={"X-Request-Id": name})
    assert response.status_code == 200, response.text
    (kept,) = wait_for_receipts(server, f"chatcmpl-{name}")
    assert kept["tokens"] == 4


def test_metrics_count_receipts(server: Server) -> None:
    server.post(CHAT, **body_of(CHAT, "plain"))
    text = server.client().get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith('epochless:receipts_total{outcome="kept"')]
    assert float(line.split()[-1]) >= 2


def test_a_killed_server_leaves_a_readable_sink_and_its_key(root: Path) -> None:
    copy = root / "killed"
    copy.mkdir()
    (copy / "model").symlink_to(root / "model")
    with running(copy, "--epochless-attest", "receipt") as server:
        server.publish(root / "r2", "policy", step=1)
        first = server.post(CHAT, **{**body_of(CHAT, "plain"), "epochless": {"nonce": NONCE}}).json()
        key = server.client().get("/v1/receipts/key").text
        group = os.getpgid(int((copy / "store" / "lock").read_text().split()[-1]))
        busy = threading.Thread(target=_until_refused, args=(server,))
        busy.start()
        os.killpg(group, signal.SIGKILL)
        busy.join()
    receipt_id = first["choices"][0]["epochless"]["id"]
    body = ReceiptSink(copy / "store", max_bytes=1 << 30, max_age_s=3600).read(receipt_id)
    assert body == base64.b64decode(first["choices"][0]["epochless"]["receipt"])
    with running(copy) as server:
        assert server.get(f"/v1/receipts/{receipt_id}")["header"]["nonce"] == NONCE
        assert server.client().get("/v1/receipts/key").text == key


def _until_refused(server: Server) -> None:
    try:
        while True:
            server.post(CHAT, **body_of(CHAT, "plain"))
    except httpx.TransportError:  # the server is gone
        return
