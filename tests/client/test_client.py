"""The trainer-side clients against our own routes, and against servers that are something else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from epochless_vllm import client as package
from epochless_vllm.client import AsyncEpochlessClient, EpochlessClient, request_fields, spans_of, steps_of_tokens
from epochless_vllm.client.client import client_options
from epochless_vllm.client.replies import error_from_body
from epochless_vllm.errors import (
    AdapterNotFoundError,
    EpochlessError,
    HeadRetirementError,
    InvalidRequestError,
    RefusedAdapterError,
    ServerUnreachableError,
    StepConflictError,
    UnauthorizedError,
    UnexpectedReplyError,
    UnknownRevisionError,
    WeightVersionNotReadyError,
)
from tests.adapters import make_adapter
from tests.plugin.front_end import BASE_DIGEST, FrontEnd, run_front_end


def with_client(
    store: Path, scenario: Callable[[AsyncEpochlessClient, FrontEnd], Awaitable[None]], **options: Any
) -> None:
    async def body(front: FrontEnd) -> None:
        transport = front.http._transport
        async with AsyncEpochlessClient("http://server/v1", transport=transport, api_key="key") as client:
            await scenario(client, front)

    run_front_end(store, body, keys=("key",), **options)


def test_publish_upload_retire_and_describe_over_our_routes(tmp_path: Path) -> None:
    first, second = make_adapter(tmp_path / "a", seed=1), make_adapter(tmp_path / "b", seed=2)

    async def scenario(client: AsyncEpochlessClient, front: FrontEnd) -> None:
        assert (await client.weight_info()).weight_version == f"base:{BASE_DIGEST}"
        published = await client.publish("team/policy", first, step=3)
        assert (published.policy, published.step, published.repeated) == ("team/policy", 3, False)
        assert (await client.upload("team/policy", first, step=3)).repeated
        uploaded = await client.upload("team/policy", second)
        assert uploaded.step == 4
        info = await client.weight_info("team/policy")
        assert (info.step, info.weight_version) == (4, uploaded.weight_version)
        assert (await client.wait_for_step("team/policy", 4, timeout_s=5)).sequence == 2
        everything = await client.policies()
        assert everything["policies"] == [await client.policies("team/policy")]
        reply = await client.retire("team/policy-v3")
        assert (reply.status, [item.step for item in reply.revisions]) == ("draining", [3])

    with_client(tmp_path / "store", scenario)


def test_a_refusal_is_raised_as_the_class_the_server_raised(tmp_path: Path) -> None:
    first, second = make_adapter(tmp_path / "a", seed=1), make_adapter(tmp_path / "b", seed=2)
    bad = make_adapter(tmp_path / "bad", seed=3, config={"use_dora": True})

    async def scenario(client: AsyncEpochlessClient, front: FrontEnd) -> None:
        await client.publish("policy", first, step=1)
        cases: list[tuple[type[EpochlessError], Any]] = [
            (StepConflictError, client.publish("policy", second, step=1)),
            (AdapterNotFoundError, client.publish("policy", tmp_path / "none")),
            (AdapterNotFoundError, client.upload("policy", tmp_path / "none")),
            (RefusedAdapterError, client.publish("policy", bad)),
            (InvalidRequestError, client.publish("policy", second, step=-1)),
            (UnknownRevisionError, client.policies("nobody")),
            (UnknownRevisionError, client.retire("nobody")),
        ]
        for kind, call in cases:
            with pytest.raises(kind) as raised:
                await call
            assert raised.value.message
        await client.publish("policy", second, step=2)
        with pytest.raises(HeadRetirementError):
            await client.retire("policy-v2")

    with_client(tmp_path / "store", scenario)


def test_waiting_for_a_step_that_does_not_come_says_where_the_policy_is(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(client: AsyncEpochlessClient, front: FrontEnd) -> None:
        with pytest.raises(WeightVersionNotReadyError, match="is at step None"):
            await client.wait_for_step("policy", 1, timeout_s=0)
        await client.publish("policy", adapter, step=1)
        with pytest.raises(WeightVersionNotReadyError, match="is at step 1"):
            await client.wait_for_step("policy", 2, timeout_s=0)

    with_client(tmp_path / "store", scenario)


def test_a_wrong_key_is_unauthorized(tmp_path: Path) -> None:
    async def scenario(client: AsyncEpochlessClient, front: FrontEnd) -> None:
        async with AsyncEpochlessClient("http://server", transport=front.http._transport, api_key="no") as other:
            with pytest.raises(UnauthorizedError):
                await other.weight_info()

    with_client(tmp_path / "store", scenario)


def answering(status: int, body: bytes) -> EpochlessClient:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=body)

    return EpochlessClient("http://server", transport=httpx.MockTransport(handle))


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>"), (200, b"{}"), (404, b'{"detail":"Not Found"}'), (502, b""), (200, b'{"weight_version": 5}')],
)
def test_an_answer_in_other_words_is_unexpected_and_says_so(status: int, body: bytes) -> None:
    with answering(status, body) as client, pytest.raises(UnexpectedReplyError, match="--enable-epochless"):
        client.weight_info()


def test_vllms_own_refusal_of_a_key_is_unauthorized() -> None:
    with answering(401, b'{"error": "Unauthorized"}') as client, pytest.raises(UnauthorizedError):
        client.policies()


def test_a_server_that_does_not_answer_is_unreachable() -> None:
    with (
        EpochlessClient("http://127.0.0.1:9") as client,
        pytest.raises(ServerUnreachableError, match="is the server up"),
    ):
        client.weight_info()

    async def asynchronous() -> None:
        async with AsyncEpochlessClient("http://127.0.0.1:9") as client:
            await client.weight_info()

    with pytest.raises(ServerUnreachableError):
        asyncio.run(asynchronous())


def test_the_blocking_client_sends_what_the_asynchronous_one_sends(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)
    sent: list[tuple[str, str, bytes]] = []

    def record(request: httpx.Request) -> httpx.Response:
        body = request.read()
        boundary = request.headers.get("content-type", "").partition("boundary=")[2].encode()
        sent.append((request.method, str(request.url), body.replace(boundary, b"B") if boundary else body))
        return httpx.Response(418, content=b"")

    names = ("publish", "upload", "retire", "policies", "weight_info")
    arguments: dict[str, tuple[Any, ...]] = {
        "publish": ("p/q", adapter),
        "upload": ("p/q", adapter),
        "retire": ("p/q-v1",),
        "policies": ("p/q",),
        "weight_info": ("p/q",),
    }
    with EpochlessClient("http://server", transport=httpx.MockTransport(record)) as blocking:
        for name in names:
            with pytest.raises(UnexpectedReplyError):
                getattr(blocking, name)(*arguments[name])
    halves, sent = sent, []

    async def asynchronous() -> None:
        async def record_async(request: httpx.Request) -> httpx.Response:
            await request.aread()
            return record(request)

        async with AsyncEpochlessClient("http://server", transport=httpx.MockTransport(record_async)) as client:
            for name in names:
                with pytest.raises(UnexpectedReplyError):
                    await getattr(client, name)(*arguments[name])

    asyncio.run(asynchronous())
    assert halves == sent
    assert len(sent) == len(names)


def test_the_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    assert client_options("http://s/v1/", None, 1.0)["headers"] == {"Authorization": "Bearer from-environment"}
    assert client_options("http://s", "given", 1.0)["headers"] == {"Authorization": "Bearer given"}
    assert client_options("http://s/v1/", None, 1.0)["base_url"] == "http://s"


@pytest.mark.parametrize("value", [None, [], "x", {"error": None}, {"error": {}}, {"error": {"message": 5}}])
def test_a_body_that_spells_no_error_is_none(value: object) -> None:
    assert error_from_body(500, value) is None


def test_an_error_of_a_newer_server_keeps_its_status_and_fields() -> None:
    error = error_from_body(418, {"error": {"message": "m", "error_code": "brand_new", "code": 418, "retryable": True}})
    assert error is not None
    assert (type(error), error.status, error.fields) == (EpochlessError, 418, {"retryable": True})
    assert EpochlessError.status == 500


# Our fields, with the openai package


def test_request_fields_are_the_extra_body_the_openai_package_sends() -> None:
    assert request_fields(min_version=3, nonce="n") == {
        "extra_body": {"weight_version": {"min_version": 3}, "epochless": {"nonce": "n"}}
    }
    assert request_fields() == {"extra_body": {}}
    with pytest.raises(InvalidRequestError):
        request_fields(min_version=1, exact_version=1)


def test_spans_read_from_a_dictionary_and_from_an_openai_object() -> None:
    openai = pytest.importorskip("openai.types.chat.chat_completion")
    spans = [
        {"version": "sha256:a", "step": 4, "start": 0, "end": 2},
        {"version": "base:sha256:b", "step": None, "start": 2, "end": 3},
    ]
    message = {"role": "assistant", "content": "x"}
    plain = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": None, "weight_versions": spans}
    for choice in (plain, openai.Choice.model_validate(plain)):
        assert [span.version for span in spans_of(choice)] == ["sha256:a", "base:sha256:b"]
        assert steps_of_tokens(choice) == [4, 4, None]
    del plain["weight_versions"]
    for choice in (plain, openai.Choice.model_validate(plain)):
        with pytest.raises(UnexpectedReplyError):
            spans_of(choice)


# PEFT


class Model:
    """A PeftModel as far as publishing sees one."""

    def __init__(self, *names: str) -> None:
        self.peft_config = dict.fromkeys(names)

    def save_pretrained(self, directory: str, *, safe_serialization: bool, selected_adapters: list[str]) -> None:
        assert safe_serialization
        for seed, name in enumerate(selected_adapters):
            if name in self.peft_config:
                target = Path(directory) if name == "default" else Path(directory) / name
                make_adapter(target, seed=seed)


@pytest.mark.parametrize("name", ["default", "actor"])
def test_a_peft_model_is_saved_and_uploaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[tuple[Any, ...]] = []

    def upload(self: Any, policy: str, directory: Path, *, step: int | None) -> str:
        uploads.append((policy, step, sorted(path.name for path in directory.iterdir() if path.is_file())))
        return "reply"

    monkeypatch.setattr(EpochlessClient, "upload", upload)
    with EpochlessClient("http://server") as client:
        reply: Any = package.publish_model(client, Model("default", "actor"), policy="p", step=7, adapter_name=name)
        assert reply == "reply"
        with pytest.raises(AdapterNotFoundError, match="it has"):
            package.publish_model(client, Model("default"), policy="p", adapter_name="missing")
    assert uploads == [("p", 7, ["adapter_config.json", "adapter_model.safetensors"])]


def test_a_real_peft_model_uploads_what_the_server_takes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")

    class Tiny(torch.nn.Module):  # type: ignore[misc,name-defined]  # torch is looked up at run time
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = torch.nn.Linear(8, 8)

    model = peft.get_peft_model(Tiny(), peft.LoraConfig(r=2, target_modules=["q_proj"]))

    async def scenario(client: AsyncEpochlessClient, front: FrontEnd) -> None:
        class Uploader:
            def upload(self, policy: str, directory: Path, *, step: int | None) -> Path:
                make = tmp_path / "saved"
                make.mkdir()
                for path in directory.iterdir():
                    if path.is_file():
                        (make / path.name).write_bytes(path.read_bytes())
                return make

        uploader: Any = Uploader()
        saved: Any = package.publish_model(uploader, model, policy="policy", step=1)
        assert (await client.upload("policy", saved, step=1)).step == 1

    with_client(tmp_path / "store", scenario)


def test_receipts_and_the_key_are_fetched(tmp_path: Path) -> None:
    from epochless_vllm.errors import UnknownReceiptError
    from epochless_vllm.plugin.response_receipts import entry_of
    from epochless_vllm.verify import verify_receipt
    from tests.plugin.attested import make_attestor
    from tests.protocol.receipt_factory import make_receipt

    async def scenario(client: AsyncEpochlessClient, front: FrontEnd) -> None:
        front.served.attestor = attestor = make_attestor(tmp_path / "store")
        receipt = make_receipt(70)
        attestor.sink.submit(lambda: entry_of(receipt)).result(60)
        for form in ("compact", "verbose", "stream"):
            fetched = await client.receipt(receipt.receipt_id, form=form)
            assert verify_receipt(fetched).receipt_id == receipt.receipt_id
        (listed,) = await client.receipts(receipt.header.request_id)
        assert (listed["id"], listed["tokens"]) == (receipt.receipt_id, 70)
        assert await client.receipt_key() == attestor.signer.public_pem
        for call in (client.receipt("sha256:" + "0" * 64), client.receipts("cmpl-none")):
            with pytest.raises(UnknownReceiptError):
                await call
        with pytest.raises(InvalidRequestError):
            await client.receipt(receipt.receipt_id, form="xml")
        attestor.sink.close()

    with_client(tmp_path / "store", scenario)


def test_a_dotted_policy_reaches_the_server_as_it_was_given(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(client: AsyncEpochlessClient, front: FrontEnd) -> None:
        assert (await client.publish("team/v1.5", adapter)).policy == "team/v1.5"
        assert (await client.policies("team/v1.5"))["policy"] == "team/v1.5"
        for policy in ("team/./x", "a/../b", "../receipts"):
            with pytest.raises(InvalidRequestError, match=r"dotted path part|is not a policy name"):
                await client.publish(policy, adapter)
            with pytest.raises(InvalidRequestError):
                await client.upload(policy, adapter)
        with pytest.raises(UnknownRevisionError, match=r"policy \.\./receipts/key"):
            await client.policies("../receipts/key")
        assert [item["policy"] for item in (await client.policies())["policies"]] == ["team/v1.5"]

    with_client(tmp_path / "store", scenario)


@pytest.mark.parametrize(
    "url",
    ["", "host:8000", "http://", "ftp://host/", "http://[::1", "http://a\nb", "http://:::1/", "http://host/?x=1"],
)
def test_what_is_no_url_of_a_server_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^url: .* give one such as http://127.0.0.1:8000$") as caught:
        EpochlessClient(url)
    assert caught.value.fields["field"] == "url"


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-secret ", "sk-secret\r\nX: y", "sk-secr\u00e9t", "sk-secret\x00"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match=r"^api_key: ") as caught:
        EpochlessClient("http://host", api_key=key)
    assert "sk-" not in str(caught.value)
    monkeypatch.setattr("os.environ", {"VLLM_API_KEY": key})
    with pytest.raises(InvalidRequestError, match=r"^api_key: "):
        EpochlessClient("http://host")
