"""The front end on a real server of two API server processes, so that everything here holds across them.

Every route, its labels, retirement beside streams, requests that arrive late.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from epochless_vllm.client import EpochlessClient, request_fields, spans_of, steps_of_tokens
from tests.plugin.servers import Server, running
from tests.tiny_model import make_adapter, make_model

pytestmark = pytest.mark.engine

PROMPT = "What this stream says is one policy's and no other's. "
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "ignore_eos": True}
_names = itertools.count(1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("server")
    make_model(root / "model")
    for number in range(1, 6):
        make_adapter(root / f"r{number}", seed=number)
    (make_adapter(root / "bad", seed=9) / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    flags = ("--max-loras", "4", "--max-cpu-loras", "12", "--lora-modules", f"static={root / 'r5'}")
    with running(root, "--api-server-count", "2", *flags) as server:
        yield server


@pytest.fixture
def policy(server: Server) -> Iterator[str]:
    """A name no other test uses; its revisions are gone afterwards."""
    name = f"team/policy-{next(_names)}x"
    yield name
    server.post("/v1/unload_lora_adapter", lora_name=name)


def version_of(reply: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
    return [{"version": reply["weight_version"], "step": reply["step"], "start": 0, "end": tokens}]


BODIES = {
    "/v1/completions": {"prompt": [PROMPT, "Another. "], "n": 2, "max_tokens": 7, "return_token_ids": True},
    "/v1/chat/completions": {"messages": MESSAGES, "n": 2, "max_tokens": 7, "return_token_ids": True},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"n": 2, "max_tokens": 7, "seed": 3}},
}
STOPS: list[dict[str, Any]] = [{}, {"stop": ["e", "\u001b", "?"]}]


@pytest.mark.parametrize("extra", STOPS, ids=["length", "stop strings"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_choice_has_one_label_per_token(
    server: Server, policy: str, root: Path, path: str, stream: bool, extra: dict[str, Any]
) -> None:
    body: dict[str, Any] = dict(BODIES[path])
    if path.startswith("/inference"):
        body["sampling_params"] = {**body["sampling_params"], **extra}
    else:
        body.update(extra)
    first = server.publish(root / "r1", policy, step=4)
    server.publish(root / "r2", policy, step=9)
    tokens: dict[int, int] = defaultdict(int)
    final: dict[int, Any] = {}
    answers = server.events(f"{policy}-v4", path, **body) if stream else [server.complete(f"{policy}-v4", path, **body)]
    for answer in answers:
        assert answer.get("model", first["lora_name"]) == first["lora_name"]
        for choice in answer["choices"]:
            assert choice["weight_version"] == first["weight_version"]
            tokens[choice["index"]] += len(choice.get("token_ids") or ())
            if "weight_versions" in choice:
                assert choice["index"] not in final
                final[choice["index"]] = choice["weight_versions"]
    assert len(final) == (4 if path == "/v1/completions" else 2)
    assert final == {index: version_of(first, count) for index, count in tokens.items()}


def test_the_base_model_has_its_own_marker_on_every_route(server: Server) -> None:
    for path, body in BODIES.items():
        for choice in server.complete("base", path, **body)["choices"]:
            assert choice["weight_version"].startswith("base:sha256:")
            assert {span["step"] for span in choice["weight_versions"]} == {None}


def test_routes_without_choices_carry_the_revision(server: Server, policy: str, root: Path) -> None:
    reply = server.publish(root / "r1", policy)
    response = server.complete(policy, "/v1/responses", input=PROMPT, max_output_tokens=4)
    assert (response["model"], response["weight_version"]) == (reply["lora_name"], reply["weight_version"])
    batch = server.complete(policy, "/v1/chat/completions/batch", messages=[MESSAGES, MESSAGES], max_tokens=3)
    assert [choice["weight_version"] for choice in batch["choices"]] == [reply["weight_version"]] * 2
    message = server.complete(policy, "/v1/messages", messages=MESSAGES, max_tokens=3)
    assert message["model"] == reply["lora_name"]
    invoked = server.complete(policy, "/invocations", prompt=PROMPT, max_tokens=3)
    assert invoked["model"] == reply["lora_name"]
    assert server.complete(policy, "/tokenize", prompt="ab")["count"] == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
        ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1]}),
        ("/v1/completions/render", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/invocations", {"prompt": "x"}),
    ],
)
def test_an_unknown_model_an_unmet_constraint_and_a_malformed_one_are_refused_on_every_route(
    server: Server, policy: str, root: Path, path: str, body: dict[str, Any]
) -> None:
    server.publish(root / "r1", policy, step=3)
    assert server.post(path, **body, model="nobody").status_code == 404
    assert server.post(path, **body, model=f"{policy}-v8").status_code == 404
    assert server.post(path, **body, model=policy, weight_version={"min_version": 4}).status_code == 409
    assert server.post(path, **body, model=policy, weight_version={"min": 4}).status_code == 400
    assert server.post(path, **body, model=policy, epochless={"attests": True}).status_code == 400
    assert server.post(path, **body, model=policy, weight_version={"min_version": 3}).status_code == 200


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_choice_without_a_token_that_could_be_drawn_is_an_error_that_says_why(
    server: Server, policy: str, root: Path, path: str
) -> None:
    server.publish(root / "r1", policy)
    with server.poisoned():
        for model in (policy, "base"):
            answer = server.post(path, model=model, **BODIES[path])
            assert answer.status_code == 500, answer.text
            assert answer.json()["error"]["error_code"] == "sampling_failed"
            assert "not finite" in answer.json()["error"]["message"]
        *_, last = server.events(policy, path, **BODIES[path])
        assert last["error"]["error_code"] == "sampling_failed"
    assert server.complete(policy, path, **BODIES[path])["choices"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_beams_are_labelled_with_the_revision_of_their_request(
    server: Server, policy: str, root: Path, path: str
) -> None:
    reply = server.publish(root / "r1", policy)
    for choice in server.complete(policy, path, **{**BODIES[path], "use_beam_search": True})["choices"]:
        (span,) = choice["weight_versions"]
        assert (span["version"], span["start"]) == (reply["weight_version"], 0)
        assert span["end"] > 0


def test_key_material_that_is_none_is_refused_with_its_name(server: Server) -> None:
    answer = server.post("/v1/completions", model="base", prompt="x", max_tokens=2, vllm_xargs={"epochless": "mine"})
    assert answer.status_code == 400, answer.text
    assert "extra_args.epochless" in answer.json()["error"]["message"]


def test_a_seed_gives_the_same_stream_through_every_route_alone_and_among_neighbours(
    server: Server, policy: str, root: Path
) -> None:
    server.publish(root / "r1", policy)
    body: dict[str, Any] = {"prompt": PROMPT, "seed": 12, "max_tokens": 12, "return_token_ids": True, "n": 2}

    def tokens(_: int = 0) -> list[list[int]]:
        answer = server.complete(policy, **body)
        return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

    alone = tokens()
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(server.complete, "base", prompt=f"{n}", max_tokens=20, temperature=1) for n in range(4)]
        assert list(pool.map(tokens, range(4))) == [alone] * 4
        assert all(other.result()["choices"] for other in others)


def test_the_openai_package_reads_labels_and_meets_our_errors(server: Server, policy: str, root: Path) -> None:
    import openai

    reply = server.publish(root / "r1", policy, step=11)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k1", max_retries=0)
    fields = request_fields(min_version=11, nonce="n")
    chat = client.chat.completions.create(model=policy, messages=MESSAGES, max_tokens=5, **fields)  # type: ignore[call-overload]
    assert chat.model == reply["lora_name"]
    assert spans_of(chat.choices[0])[0].version == reply["weight_version"]
    assert set(steps_of_tokens(chat.choices[0])) == {11}
    with pytest.raises(openai.ConflictError) as raised:
        client.completions.create(model=policy, prompt="x", **request_fields(min_version=12))
    assert raised.value.body["type"] == "WeightVersionNotReady"  # type: ignore[index,call-overload]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
    assert {policy, reply["lora_name"], "base", "static"} <= {model.id for model in client.models.list()}


def test_the_client_publishes_by_path_and_by_upload(server: Server, policy: str, root: Path) -> None:
    with EpochlessClient(server.url, api_key="k1") as client:
        first = client.publish(policy, root / "r1", step=1)
        assert client.upload(policy, root / "r1", step=1).repeated
        second = client.upload(policy, root / "r2")
        assert (first.step, second.step) == (1, 2)
        assert client.wait_for_step(policy, 2, timeout_s=5).weight_version == second.weight_version
        assert [item.step for item in client.retire(f"{policy}-v1").revisions] == [1]
        server.wait_for(policy, 1, "retired")


def test_static_modules_are_published_at_start(server: Server) -> None:
    assert server.statuses("static") == {0: "live"}
    assert server.complete("static", prompt="x", max_tokens=1)["choices"][0]["weight_versions"][0]["step"] == 0


def test_every_route_of_ours_needs_a_key(server: Server) -> None:
    for method, path in (
        ("POST", "/load_lora_adapter"),
        ("POST", "/unload_lora_adapter"),
        ("POST", "/v1/load_lora_adapter"),
        ("DELETE", "/v1/policies/static/revisions/0"),
        ("GET", "/weight_info"),
        ("GET", "/v1/receipts/x"),
    ):
        assert httpx.request(method, server.url + path, json={}).status_code == 401, path
    assert server.statuses("static") == {0: "live"}


def test_bad_publishes_beside_traffic_disturb_nobody(server: Server, policy: str, root: Path) -> None:
    server.publish(root / "r1", policy)
    expected = server.complete(policy, prompt=PROMPT, max_tokens=24, **GREEDY)["choices"][0]["text"]

    def ask(_: int) -> str:
        return str(server.complete(policy, prompt=PROMPT, max_tokens=24, **GREEDY)["choices"][0]["text"])

    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(ask, range(24))
        body = {"lora_name": policy, "lora_path": str(root / "bad")}
        statuses = {server.post("/v1/load_lora_adapter", **body).status_code for _ in range(100)}
        assert set(answers) == {expected}
    assert statuses == {422}
    assert server.statuses(policy) == {1: "live"}


def test_a_revision_retired_under_a_stream_finishes_it_and_admits_nobody(
    server: Server, policy: str, root: Path
) -> None:
    reply = server.publish(root / "r1", policy, step=1)
    body = {"prompt": PROMPT, "max_tokens": 600, "return_token_ids": True, **GREEDY}
    alone = server.complete(f"{policy}-v1", **body)["choices"][0]["token_ids"]
    with server.braked():
        stream = server.events(policy, **body)
        tokens = list(next(stream)["choices"][0]["token_ids"])
        server.publish(root / "r2", policy, step=2)
        retired = server.post("/v1/unload_lora_adapter", lora_name=f"{policy}-v1").json()
    assert (retired["status"], retired["in_flight"]) == ("draining", 1)
    refused = server.post("/v1/completions", model=f"{policy}@{reply['weight_version'][:30]}", prompt="x")
    assert (refused.status_code, refused.json()["error"]["error_code"]) == (410, "retired_revision")
    assert server.complete(policy, prompt="x", max_tokens=1)["choices"][0]["weight_versions"][0]["step"] == 2
    last: Any = None
    for event in stream:
        last = event["choices"][0]
        tokens += last["token_ids"]
        assert last["weight_version"] == reply["weight_version"]
    assert tokens == alone
    assert last["weight_versions"] == version_of(reply, 600)
    server.wait_for(policy, 1, "retired")


def test_a_client_that_goes_away_lets_its_revision_drain(server: Server, policy: str, root: Path) -> None:
    server.publish(root / "r1", policy, step=1)
    with server.braked():
        stream = server.events(policy, prompt=PROMPT, max_tokens=900, **GREEDY)
        next(stream)
        assert server.post("/v1/unload_lora_adapter", lora_name=policy).json()["in_flight"] == 1
        stream.close()  # type: ignore[attr-defined]  # a generator
    server.wait_for(policy, 1, "retired")


def overtake(server: Server, policy: str, root: Path) -> dict[str, Any]:
    """With requests held before the engine, publish step 2 and let step 1 leave; return the reply of step 2."""
    reply = server.publish(root / "r2", policy, step=2)
    server.post("/v1/unload_lora_adapter", lora_name=f"{policy}-v1")
    server.wait_for(policy, 1, "retired")
    server.gate.unlink()
    return reply


def admitted(server: Server) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("epochless:admissions_total"))


def wait_until_admitted(server: Server, count: float) -> None:
    for _ in range(600):
        if admitted(server) >= count:
            return
        threading.Event().wait(0.05)
    raise AssertionError("the requests were not admitted")


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_request_that_arrives_late_by_name_runs_on_the_head_of_now(
    server: Server, policy: str, root: Path, path: str
) -> None:
    server.publish(root / "r1", policy, step=1)
    before = admitted(server)
    server.gate.touch()
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(server.complete, policy, path, **BODIES[path])
        streamed = pool.submit(lambda: list(server.events(policy, path, **BODIES[path])))
        wait_until_admitted(server, before + 2)
        reply = overtake(server, policy, root)
        answers = [plain.result(120), *streamed.result(120)]
    for answer in answers:
        assert answer.get("model", reply["lora_name"]) == reply["lora_name"]
        for choice in answer["choices"]:
            assert choice["weight_version"] == reply["weight_version"]
            assert all(span["step"] == 2 for span in choice.get("weight_versions", []))


def test_routes_without_choices_run_late_requests_on_the_head_of_now(server: Server, policy: str, root: Path) -> None:
    server.publish(root / "r1", policy, step=1)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 4}),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES], "max_tokens": 3}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
        ("/generative_scoring", {"query": "a", "items": ["b", "c"], "label_token_ids": [1]}),
        ("/invocations", {"prompt": PROMPT, "max_tokens": 3}),
    ]
    before = admitted(server)
    server.gate.touch()
    with ThreadPoolExecutor(len(bodies) + 1) as pool:
        plain = [pool.submit(server.complete, policy, path, **body) for path, body in bodies]
        streamed = pool.submit(lambda: list(server.events(policy, bodies[0][0], **bodies[0][1])))
        wait_until_admitted(server, before + len(bodies) + 1)
        reply = overtake(server, policy, root)
        assert [answer.result(120)["model"] for answer in plain] == [reply["lora_name"]] * len(bodies)
        events = streamed.result(120)
    assert events[0]["type"] == "response.created"
    assert {event["response"]["model"] for event in events if "response" in event} == {reply["lora_name"]}
    assert events[-1]["type"] == "response.completed"


def test_a_request_that_arrives_late_by_exact_pin_is_gone(server: Server, policy: str, root: Path) -> None:
    server.publish(root / "r1", policy, step=1)
    before = admitted(server)
    server.gate.touch()
    model = f"{policy}-v1"
    with ThreadPoolExecutor(3) as pool:
        plain = pool.submit(server.post, "/v1/completions", model=model, prompt=PROMPT)
        streamed = pool.submit(lambda: list(server.events(model, prompt=PROMPT)))
        announced = pool.submit(lambda: list(server.events(model, "/v1/responses", input=PROMPT)))
        wait_until_admitted(server, before + 3)
        overtake(server, policy, root)
        assert plain.result(120).status_code == 410
        (event,), (last,) = streamed.result(120), announced.result(120)
    assert event["error"]["code"] == 410
    assert (last["type"], last["code"]) == ("error", "retired_revision")
    assert server.complete(policy, prompt="x", max_tokens=1)["choices"]


def test_metrics_have_our_series_and_no_name_of_a_policy_or_revision(server: Server, policy: str, root: Path) -> None:
    server.publish(root / "r1", policy)
    server.complete(policy, prompt="x", max_tokens=1)
    with server.client() as client:
        ours = [line for line in client.get("/metrics").text.splitlines() if line.startswith("epochless:")]
    assert any(line.startswith('epochless:publications_total{outcome="committed"}') for line in ours)
    assert any(line.startswith('epochless:revisions{status="live"}') for line in ours)
    assert not any(policy in line or "sha256" in line for line in ours)


def test_what_one_api_server_publishes_every_api_server_serves_at_once(server: Server, policy: str, root: Path) -> None:
    for step in range(1, 5):
        reply = server.publish(root / f"r{step}", policy, step=step)
        for _ in range(12):
            answer = server.complete(policy, prompt="x", max_tokens=1)
            assert answer["model"] == reply["lora_name"]
            assert server.get(f"/weight_info?policy={policy}")["step"] == step
    lines = [line for line in server.log.read_text().splitlines() if "ApiServer_" in line and '"POST /v1' in line]
    assert len({line.split("pid=")[1].split(")")[0] for line in lines}) == 2, "both processes must have served"
    server.post("/v1/unload_lora_adapter", lora_name=f"{policy}-v1")
    server.wait_for(policy, 1, "retired")
    for _ in range(12):
        assert server.post("/v1/completions", model=f"{policy}-v1", prompt="x").status_code == 410
