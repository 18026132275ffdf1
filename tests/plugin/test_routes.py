"""The routes of publication over a front end without an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import make_adapter
from tests.plugin.front_end import BASE, BASE_DIGEST, FrontEnd, run_front_end

PUBLISH = ("/v1/load_lora_adapter", "/load_lora_adapter")
RETIRE = ("/v1/unload_lora_adapter", "/unload_lora_adapter")


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == response.status_code
    return error


async def publish(front: FrontEnd, path: Path, name: str = "policy", **fields: Any) -> httpx.Response:
    return await front.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


async def drained(front: FrontEnd) -> None:
    while front.served.publisher._draining is not None and not front.served.publisher._draining.done():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("route", PUBLISH)
def test_loading_an_adapter_publishes_it_and_answers_with_identity_and_a_receipt_per_rank(
    tmp_path: Path, route: str
) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(front: FrontEnd) -> None:
        response = await front.http.post(route, json={"lora_name": "team/policy", "lora_path": str(adapter)})
        assert response.status_code == 200, response.text
        reply = response.json()
        head = front.service.resolve("team/policy")
        assert head is not None
        assert reply["status"] == "ok"
        assert reply["policy"] == "team/policy"
        assert reply["weight_version"] == head.revision_id
        assert reply["lora_name"] == f"team/policy@{head.revision_id}"
        assert (reply["lora_int_id"], reply["step"], reply["sequence"]) == (1, 1, 1)
        assert set(reply["receipts"]) == {"engine0/rank0", "engine0/rank1"}
        assert all(r["source_digest"] == head.revision_id for r in reply["receipts"].values())

    run_front_end(tmp_path / "store", scenario)


def test_a_versioned_name_publishes_a_step_of_its_policy(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(front: FrontEnd) -> None:
        reply = (await publish(front, adapter, "policy-v7")).json()
        assert (reply["policy"], reply["step"]) == ("policy", 7)

    run_front_end(tmp_path / "store", scenario)


def test_publishing_the_same_step_again_repeats_the_answer_and_other_content_conflicts(tmp_path: Path) -> None:
    first, second = make_adapter(tmp_path / "a", seed=1), make_adapter(tmp_path / "b", seed=2)

    async def scenario(front: FrontEnd) -> None:
        reply = (await publish(front, first, step=3)).json()
        again = (await publish(front, first, step=3, load_inplace=True)).json()
        assert again == {**reply, "repeated": True}
        conflict = await publish(front, second, step=3)
        assert conflict.status_code == 409
        assert error_of(conflict)["error_code"] == "step_conflict"
        assert (await front.http.get("/weight_info")).json()["weight_version"] == reply["weight_version"]

    run_front_end(tmp_path / "store", scenario)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b'{"lora_path": "/x"}', "lora_name"),
        (b'{"lora_name": "policy"}', "lora_path"),
        (b'{"lora_name": 5, "lora_path": "/x"}', "lora_name"),
        (b'{"lora_name": "policy", "lora_path": ""}', "lora_path"),
        (b'{"lora_name": "policy", "lora_path": "/x", "step": "3"}', "step"),
        (b'{"lora_name": "policy", "lora_path": "/x", "step": true}', "step"),
        (b'{"lora_name": "policy", "lora_path": "/x", "step": -1}', "step"),
        (b'{"lora_name": "policy", "lora_path": "/x", "load_inplace": "yes"}', "load_inplace"),
        (b'{"lora_name": "policy", "lora_path": "/x", "is_3d_lora_weight": true}', "is_3d_lora_weight"),
        (b'{"lora_name": "../x", "lora_path": "/x"}', "lora_name"),
        (b'{"lora_name": "po\\u0000licy", "lora_path": "/x"}', "lora_name"),
        (f'{{"lora_name": "{BASE}", "lora_path": "/x"}}'.encode(), "lora_name"),
        (b"[" * 100_000, "body"),
    ],
)
def test_a_malformed_body_is_refused_with_the_field_at_fault(tmp_path: Path, body: bytes, field: str) -> None:
    async def scenario(front: FrontEnd) -> None:
        headers = {"content-type": "application/json"}
        response = await front.http.post("/v1/load_lora_adapter", content=body, headers=headers)
        assert response.status_code in (400, 413), response.text
        if response.status_code == 400:
            assert error_of(response)["param"] == field
        assert error_of(response)["message"].startswith(field)
        assert front.service.state().sequence == 0

    run_front_end(tmp_path / "store", scenario)


def test_a_body_of_another_content_type_is_refused(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        headers = {"content-type": "text/plain"}
        response = await front.http.post("/load_lora_adapter", content=b"{}", headers=headers)
        assert response.status_code == 400
        assert error_of(response)["param"] == "content-type"

    run_front_end(tmp_path / "store", scenario)


@pytest.mark.parametrize(
    ("case", "status"),
    [("missing", 404), ("hub", 404), ("pickle", 422), ("dora", 422), ("rank", 422), ("outside", 403)],
)
def test_a_refused_adapter_answers_with_its_reason_and_publishes_nothing(
    tmp_path: Path, case: str, status: int
) -> None:
    root = tmp_path / "root"
    adapter = make_adapter(root / "a", seed=1, config={"use_dora": True} if case == "dora" else {})
    paths = {"missing": root / "none", "hub": Path("org/model"), "outside": tmp_path}
    if case == "pickle":
        (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")

    async def scenario(front: FrontEnd) -> None:
        if case == "rank":
            front.transport.registries[1].refuse = "layer 2: too wide"
        response = await publish(front, paths.get(case, adapter))
        assert response.status_code == status, response.text
        error = error_of(response)
        if case in paths:
            assert error["param"] == "lora_path"
            reply = await front.http.post("/v1/policies/policy/revisions", json={"path": str(paths[case])})
            assert (reply.status_code, error_of(reply)["param"]) == (status, "path")
        if case == "rank":
            assert error["rank"] == "engine0/rank1"
            assert "layer 2: too wide" in error["message"]
        assert front.service.state().sequence == 0
        assert (await front.http.get("/v1/policies")).json()["policies"] == []
        # Nothing is left behind on either rank, and publishing goes on.
        front.transport.registries[1].refuse = None
        assert all(not registry.adapters for registry in front.transport.registries)
        good = make_adapter(root / "good", seed=2)
        assert (await publish(front, good)).status_code == 200

    run_front_end(tmp_path / "store", scenario, import_root=str(root))


def test_publishing_beyond_keep_retires_the_oldest_once_its_requests_are_done(tmp_path: Path) -> None:
    adapters = [make_adapter(tmp_path / str(seed), seed=seed) for seed in range(4)]

    async def scenario(front: FrontEnd) -> None:
        replies = [(await publish(front, adapter)).json() for adapter in adapters]
        await drained(front)
        assert [reply["step"] for reply in replies] == [1, 2, 3, 4]
        assert set(front.transport.registries[0].adapters) == {replies[2]["lora_int_id"], replies[3]["lora_int_id"]}
        gone = await front.http.get("/v1/policies/policy")
        assert [item["status"] for item in gone.json()["revisions"]] == ["live", "live", "retired", "retired"]

    run_front_end(tmp_path / "store", scenario, keep=2)


def test_a_hundred_bad_publishes_leave_the_head_alone(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)
    bad = make_adapter(tmp_path / "bad", seed=2)
    (bad / "adapter_model.safetensors").write_bytes(b"\xff" * 64)

    async def scenario(front: FrontEnd) -> None:
        head = (await publish(front, adapter)).json()["weight_version"]
        statuses = {(await publish(front, bad)).status_code for _ in range(100)}
        assert statuses == {422}
        assert (await front.http.get("/weight_info")).json()["weight_version"] == head

    run_front_end(tmp_path / "store", scenario)


@pytest.mark.parametrize("route", RETIRE)
def test_unloading_reports_what_is_in_flight_and_lets_go_when_it_is_done(tmp_path: Path, route: str) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(front: FrontEnd) -> None:
        reply = (await publish(front, adapter)).json()
        front.transport.holding[reply["lora_int_id"]] = 3
        response = await front.http.post(route, json={"lora_name": "policy"})
        assert response.status_code == 200, response.text
        assert (response.json()["status"], response.json()["in_flight"]) == ("draining", 3)
        described = (await front.http.get("/v1/policies/policy")).json()
        assert described["revisions"][0]["status"] == "draining"
        assert reply["lora_int_id"] in front.transport.registries[0].adapters
        front.transport.holding.clear()
        await drained(front)
        assert front.transport.registries[0].adapters == {}
        described = (await front.http.get("/v1/policies/policy")).json()
        assert described["revisions"][0]["status"] == "retired"

    run_front_end(tmp_path / "store", scenario)


def test_unloading_what_was_never_loaded_is_not_found(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        response = await front.http.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"})
        assert response.status_code == 404
        assert error_of(response)["type"] == "NotFoundError"

    run_front_end(tmp_path / "store", scenario)


def test_the_head_cannot_be_retired_while_older_revisions_live(tmp_path: Path) -> None:
    adapters = [make_adapter(tmp_path / str(seed), seed=seed) for seed in range(2)]

    async def scenario(front: FrontEnd) -> None:
        for adapter in adapters:
            await publish(front, adapter)
        response = await front.http.delete("/v1/policies/policy/revisions/2")
        assert response.status_code == 409
        assert error_of(response)["error_code"] == "head_retirement"
        assert (await front.http.delete("/v1/policies/policy/revisions/1")).status_code == 200

    run_front_end(tmp_path / "store", scenario)


def upload_of(adapter: Path, **fields: Any) -> dict[str, Any]:
    names = ("adapter_config.json", "adapter_model.safetensors")
    return {"files": {name: (name, (adapter / name).read_bytes()) for name in names}, **fields}


def test_an_upload_publishes_the_same_revision_as_the_directory(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(front: FrontEnd) -> None:
        url = "/v1/policies/team/policy/revisions"
        response = await front.http.post(url, **upload_of(adapter, data={"step": "5"}))
        assert response.status_code == 200, response.text
        uploaded = response.json()
        by_path = await front.http.post(url, json={"path": str(adapter), "step": 5})
        assert by_path.json() == {**uploaded, "repeated": True}
        assert uploaded["step"] == 5
        assert list((tmp_path / "store" / "incoming").iterdir()) == []

    run_front_end(tmp_path / "store", scenario)


def test_a_versioned_name_in_the_path_is_a_step_too(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(front: FrontEnd) -> None:
        response = await front.http.post("/v1/policies/policy-v4/revisions", json={"path": str(adapter)})
        assert (response.json()["policy"], response.json()["step"]) == ("policy", 4)

    run_front_end(tmp_path / "store", scenario)


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ("no tensors", 422, None),
        ("unknown part", 400, "weights.bin"),
        ("twice", 400, "adapter_config.json"),
        ("step", 400, "step"),
        ("long step", 413, "step"),
        ("large config", 413, "adapter_config.json"),
        ("cut", 400, "body"),
        ("not multipart", 400, "content-type"),
        ("garbage", 400, "body"),
        ("long boundary", 400, "body"),
        ("header bomb", 400, "body"),
    ],
)
def test_a_malformed_upload_is_refused_and_leaves_no_file(
    tmp_path: Path, change: str, status: int, field: str | None
) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)
    config = (adapter / "adapter_config.json").read_bytes()
    tensors = (adapter / "adapter_model.safetensors").read_bytes()
    parts: list[tuple[str, Any]] = [
        ("adapter_config.json", ("adapter_config.json", config)),
        ("adapter_model.safetensors", ("adapter_model.safetensors", tensors)),
    ]
    fields: dict[str, str] = {}
    if change == "no tensors":
        del parts[1]
    if change == "unknown part":
        parts.append(("weights.bin", ("weights.bin", b"x")))
    if change == "twice":
        parts.append(parts[0])
    if change == "step":
        fields["step"] = "seven"
    if change == "long step":
        fields["step"] = "7" * 1000
    if change == "large config":
        parts[0] = ("adapter_config.json", ("adapter_config.json", b" " * (2 << 20)))
    request = httpx.Request("POST", "http://server/v1/policies/policy/revisions", files=parts, data=fields)
    body, content_type = request.read(), request.headers["content-type"]
    if change == "cut":
        body = body[:-200]
    if change == "not multipart":
        content_type = "multipart/form-data"
    if change == "long boundary":
        content_type = f"multipart/form-data; boundary={'b' * 5000}"
    if change == "garbage":
        body = b"\xff" * 4096
    if change == "header bomb":
        body = body.split(b"\r\n")[0] + b"\r\nX: " + b"a" * 100_000

    async def scenario(front: FrontEnd) -> None:
        headers = {"content-type": content_type}
        response = await front.http.post("/v1/policies/policy/revisions", content=body, headers=headers)
        assert response.status_code == status, response.text
        if field is not None:
            assert error_of(response)["param"] == field
        assert front.service.state().sequence == 0
        assert list((tmp_path / "store" / "incoming").iterdir()) == []

    run_front_end(tmp_path / "store", scenario)


def test_policies_are_described_whole_one_by_one_and_by_revision(tmp_path: Path) -> None:
    adapters = [make_adapter(tmp_path / str(seed), seed=seed) for seed in range(2)]

    async def scenario(front: FrontEnd) -> None:
        first = (await publish(front, adapters[0], "team/a")).json()
        await publish(front, adapters[1], "b")
        everything = (await front.http.get("/v1/policies")).json()
        assert [policy["policy"] for policy in everything["policies"]] == ["b", "team/a"]
        assert everything["base_digest"] == BASE_DIGEST
        one = (await front.http.get("/v1/policies/team/a")).json()
        assert one == everything["policies"][1]
        digest = first["weight_version"]
        for revision in (digest, digest[:20], "1"):
            item = (await front.http.get(f"/v1/policies/team/a/revisions/{revision}")).json()
            assert (item["policy"], item["revision_id"], item["status"]) == ("team/a", digest, "live")
        for path in ("/v1/policies/none", "/v1/policies/b/revisions/7", "/weight_info?policy=x"):
            assert (await front.http.get(path)).status_code == 404

    run_front_end(tmp_path / "store", scenario)


@pytest.mark.parametrize("revision", ["03", "x", "sha256:abc", "sha256:" + "A" * 64, "3/"])
def test_a_revision_that_no_pin_spells_is_refused_with_the_spelling(tmp_path: Path, revision: str) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(front: FrontEnd) -> None:
        await publish(front, adapter, "a", step=3)
        await publish(front, adapter, f"b/revisions/{revision}".rstrip("/"), step=3)
        response = await front.http.get(f"/v1/policies/a/revisions/{revision}")
        assert response.status_code == 400, response.text
        assert error_of(response)["param"] == "revision"
        assert "sha256: and 12 or more" in error_of(response)["message"]
        assert (await front.http.delete(f"/v1/policies/a/revisions/{revision}")).status_code == 400
        assert (await front.http.get("/v1/policies/a/revisions/3")).json()["step"] == 3

    run_front_end(tmp_path / "store", scenario)


@pytest.mark.parametrize("route", ["/weight_info", "/get_weight_version"])
def test_weight_info_names_the_base_then_the_only_head_and_asks_when_there_are_several(
    tmp_path: Path, route: str
) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(front: FrontEnd) -> None:
        assert (await front.http.get(route)).json()["weight_version"] == f"base:{BASE_DIGEST}"
        reply = (await publish(front, adapter, "a", step=9)).json()
        info = (await front.http.get(route)).json()
        assert info == {"weight_version": reply["weight_version"], "policy": "a", "step": 9, "sequence": 1}
        await publish(front, adapter, "b")
        refused = await front.http.get(route)
        assert refused.status_code == 400
        assert error_of(refused)["candidates"] == ["a", "b"]
        assert (await front.http.get(f"{route}?policy=")).json() == refused.json()  # as if it were left out
        assert (await front.http.get(route, params={"policy": "b"})).json()["sequence"] == 2

    run_front_end(tmp_path / "store", scenario)


def test_every_route_checks_every_key_itself(tmp_path: Path) -> None:
    requests = [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/unload_lora_adapter"),
        ("POST", "/v1/policies/p/revisions"),
        ("DELETE", "/v1/policies/p/revisions/1"),
        ("GET", "/v1/policies"),
        ("GET", "/v1/policies/p"),
        ("GET", "/weight_info"),
        ("GET", "/get_weight_version"),
        ("GET", "/v1/receipts/r"),
    ]
    wrong = [None, "Bearer ", "Bearer third", "first", "Basic first", "Bearer firstx", "Bearer first\xff"]

    async def scenario(front: FrontEnd) -> None:
        for method, path in requests:
            for header in wrong:
                headers = {} if header is None else {b"authorization": header.encode("latin-1")}
                response = await front.http.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path, header)
            for key in ("first", "second"):
                response = await front.http.request(method, path, headers={"authorization": f"bearer {key}"})
                assert response.status_code != 401, (method, path, key)

    run_front_end(tmp_path / "store", scenario, keys=("first", "second"))


def test_concurrent_publishes_of_one_content_are_one_revision(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(front: FrontEnd) -> None:
        responses = await asyncio.gather(*(publish(front, adapter) for _ in range(8)))
        assert {response.status_code for response in responses} == {200}
        assert {response.json()["lora_int_id"] for response in responses} == {1}
        assert sum(not response.json()["repeated"] for response in responses) == 1

    run_front_end(tmp_path / "store", scenario)


def test_the_event_loop_runs_on_while_a_publish_blocks(tmp_path: Path) -> None:
    import threading

    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(front: FrontEnd) -> None:
        gate, original = threading.Event(), front.service.publish_directory

        def blocked(*arguments: Any) -> Any:
            assert gate.wait(10)
            return original(*arguments)

        front.service.publish_directory = blocked  # type: ignore[method-assign]
        publishing = asyncio.create_task(publish(front, adapter))
        for _ in range(3):
            assert (await front.http.get("/weight_info")).status_code == 200
        assert not publishing.done()
        gate.set()
        assert (await publishing).status_code == 200

    run_front_end(tmp_path / "store", scenario)


def test_our_routes_take_the_place_of_vllms_and_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from argparse import Namespace

    from fastapi import FastAPI
    from vllm.entrypoints.serve.lora import api_router

    from epochless_vllm.plugin import routes

    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setattr(api_router, "attach_router", api_router.attach_router)
    routes.install()
    routes.install()
    found: dict[bool, list[Any]] = {}
    for enabled in (True, False):
        app = FastAPI()
        config = {"epochless": {"store": "/tmp/store"}} if enabled else {}
        app.state.args = Namespace(additional_config=config, api_key=["k"])
        api_router.attach_router(app)
        found[enabled] = [
            (route.endpoint.__module__, route.path)
            for route in app.routes
            if "lora_adapter" in getattr(route, "path", "")
        ]
    assert sorted(path for _, path in found[True]) == sorted([*PUBLISH, *RETIRE])
    assert {module for module, _ in found[True]} == {"epochless_vllm.plugin.routes"}
    assert {module for module, _ in found[False]} == {"vllm.entrypoints.serve.lora.api_router"}
