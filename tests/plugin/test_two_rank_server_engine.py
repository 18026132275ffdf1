"""A server of two tensor-parallel ranks: receipts over HTTP that an isolated interpreter verifies, mixed rows exact."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapters import MLP
from tests.execution.live import MergedModel, prompt_of, write_adapter, write_model
from tests.plugin.servers import ROOT, Server, running
from tests.plugin.test_front_end_engine import admitted, wait_until_admitted

pytestmark = pytest.mark.engine

NONCE = "a-nonce-of-two-ranks"
TOKENS = 70  # more than a block of a receipt
TOLERANCE = 1e-4  # of a logprob in float32 to one in float64
# Isolated: neither the environment nor the directory of this test can lend the verifier a module.
VERIFIER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from epochless_vllm.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two-ranks")
    write_model(root)
    write_adapter(root, "all-modules", seed=1, rank=8)
    write_adapter(root, "head-and-mlp", seed=2, rank=4, targets=(*MLP, "lm_head"), scale=0.1)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    binding = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with running(root, "--tensor-parallel-size", "2", **binding) as server:
        for policy in ("all-modules", "head-and-mlp"):
            reply = server.publish(root / policy, policy, step=1)
            assert sorted(reply["receipts"]) == ["engine0/rank0", "engine0/rank1"]
        with server.client() as client:
            (root / "key.pem").write_text(client.get("/v1/receipts/key").text)
        yield server


def verify(root: Path, payload: bytes) -> subprocess.CompletedProcess[str]:
    (root / "answer").write_bytes(payload)
    command = [sys.executable, "-I", "-c", VERIFIER, str(ROOT), "verify", str(root / "answer"), "--json"]
    command += ["--key", str(root / "key.pem"), "--nonce", NONCE]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_two_ranks_answer_over_http_verifies_and_a_changed_token_is_refused(
    server: Server, root: Path, stream: bool
) -> None:
    body: dict[str, Any] = {
        **{"model": "all-modules", "prompt": "Two ranks drew this. ", "n": 2, "top_p": 0.9, "stream": stream},
        **{"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True},
        "epochless": {"attest": "receipt", "nonce": NONCE},
    }
    response = server.post("/v1/completions", **body)
    assert response.status_code == 200, response.text
    checked = verify(root, response.content)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    choices = json.loads(checked.stdout)["choices"]
    assert [(item["choice_index"], item["verdict"], item["anchor"], item["tokens"]) for item in choices] == [
        (0, "SAMPLING-CONSISTENT", "signature", TOKENS),
        (1, "SAMPLING-CONSISTENT", "signature", TOKENS),
    ]
    spans = [(span["step"], span["start"], span["end"]) for item in choices for span in item["weight_versions"]]
    assert spans == [(1, 0, TOKENS)] * 2

    lines = response.text.splitlines()
    place = next(number for number, line in enumerate(lines) if '"token_ids":[' in line)
    event = json.loads(lines[place].removeprefix("data: "))
    event["choices"][0]["token_ids"][0] ^= 1
    lines[place] = ("data: " if stream else "") + json.dumps(event)
    refused = verify(root, "\n".join(lines).encode())
    assert (refused.returncode, json.loads(refused.stdout)["error"]["threat"]) == (1, "token_swapped")


def test_mixed_rows_on_two_ranks_equal_the_merged_models(server: Server, root: Path) -> None:
    """Each rank packs its own shard; together they say what one model with the weights merged says."""
    policies = [None, "all-modules", "head-and-mlp", "all-modules", None]
    prompts = [list(prompt_of(20 + place, place)) for place in range(len(policies))]
    fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
    before = admitted(server)
    server.gate.touch()
    with ThreadPoolExecutor(len(policies)) as pool, server.braked():
        waiting = [
            pool.submit(server.complete, policy or "base", prompt=prompt, return_token_ids=True, **fields)
            for policy, prompt in zip(policies, prompts, strict=True)
        ]
        wait_until_admitted(server, before + len(policies))
        server.gate.unlink()  # let in together, they share the steps of the engine
        answers = [each.result(120)["choices"][0] for each in waiting]
    merged = {each: MergedModel(root / "model", root / each if each else None) for each in set(policies)}
    for policy, prompt, answer in zip(policies, prompts, answers, strict=True):
        tokens = [*prompt, *answer["token_ids"]]
        known = zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True)
        got = [entry[str(token)]["logprob"] for token, entry in known] + answer["logprobs"]["token_logprobs"]
        assert np.abs(np.array(got) - merged[policy].logprobs(tokens)).max() <= TOLERANCE
