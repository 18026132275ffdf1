"""Admission on vLLM's own serving classes, over a front end without an engine."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.errors import (
    AmbiguousRevisionError,
    ConfigurationError,
    EpochlessError,
    QuarantinedRevisionError,
    RetiredRevisionError,
    UnknownRevisionError,
)
from epochless_vllm.plugin import admission, late_arrivals, readmission
from epochless_vllm.plugin.admission import admission_of
from epochless_vllm.plugin.served_models import list_model_cards, publish_static_modules
from tests.adapters import make_adapter
from tests.plugin.front_end import BASE, FrontEnd, run_front_end


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    admission.install()


def serving(front: FrontEnd, kind: type | None = None) -> Any:
    from vllm.entrypoints.serve.engine.serving import BaseServing

    made = object.__new__(kind or BaseServing)
    made.models = front.models
    return made


def chat(model: str | None, **fields: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(model=model, messages=[{"role": "user", "content": "x"}], **fields)


async def publish(front: FrontEnd, directory: Path, seed: int, name: str = "policy", step: int | None = None) -> Any:
    adapter = make_adapter(directory / f"adapter-{seed}", seed=seed)
    return (await front.served.publisher.publish_directory(str(adapter), name, step)).publication


async def drained(front: FrontEnd) -> None:
    task = front.served.publisher._draining
    if task is not None:
        await task


async def check(front: FrontEnd, request: Any) -> Any:
    """Return the error of the first check, or None."""
    answer = await serving(front)._check_model(request)
    return None if answer is None else answer.error


def bind(front: FrontEnd, request: Any) -> Any:
    return serving(front)._maybe_get_adapters(request, supports_default_mm_loras=True)


def test_every_form_of_model_string_binds_to_its_revision(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        first = await publish(front, tmp_path, 1, "team/policy", 3)
        second = await publish(front, tmp_path, 2, "team/policy", 8)
        forms = {
            "team/policy": second,
            "team/policy-v3": first,
            "team/policy@3": first,
            "team/policy-v8": second,
            f"team/policy@{first.revision_id}": first,
            f"team/policy@{second.revision_id[:19]}": second,
        }
        for model, expected in forms.items():
            request = chat(model)
            assert await check(front, request) is None
            bound = bind(front, request)
            assert (bound.lora_name, bound.lora_int_id) == (expected.lora_name, expected.lora_int_id), model
        for model in (BASE, None, ""):
            request = chat(model)
            assert await check(front, request) is None
            assert bind(front, request) is None

    run_front_end(tmp_path / "store", scenario)


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("nobody", 404, "unknown_revision"),
        ("policy-v99", 404, "unknown_revision"),
        ("policy@99", 404, "unknown_revision"),
        ("policy@sha256:" + "0" * 64, 404, "unknown_revision"),
        ("policy@sha256:0123", 400, "invalid_request"),
        ("policy-v1", 410, "retired_revision"),
        ("gone", 410, "retired_revision"),
        ("ill", 503, "quarantined_revision"),
    ],
)
def test_a_model_that_cannot_serve_is_refused_alike_by_the_check_and_by_the_binding(
    tmp_path: Path, model: str, status: int, code: str
) -> None:
    async def scenario(front: FrontEnd) -> None:
        await publish(front, tmp_path, 1, "policy", 1)
        await publish(front, tmp_path, 2, "policy", 2)
        await publish(front, tmp_path, 3, "gone")
        sick = await publish(front, tmp_path, 4, "ill")
        await front.served.publisher.retire("policy-v1")
        await front.served.publisher.retire("gone")
        front.service.coordinator.quarantine(sick.revision_id, "engine0/rank1", "slot differs")
        error = await check(front, chat(model))
        assert (error.code, error.error_code) == (status, code)
        if status == 503:
            assert error.rank == "engine0/rank1"
        with pytest.raises(EpochlessError) as raised:
            bind(front, chat(model))
        assert (raised.value.status, raised.value.code) == (status, code)
        await drained(front)

    run_front_end(tmp_path / "store", scenario)


def test_an_ambiguous_prefix_is_refused_with_the_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = ["sha256:" + "a" * 64, "sha256:" + "a" * 63 + "b"]

    async def scenario(front: FrontEnd) -> None:
        def resolve(model: str, weight_version: object) -> None:
            raise AmbiguousRevisionError("model: names 2 revisions", model=model, candidates=candidates)

        monkeypatch.setattr(front.service, "resolve", resolve)
        error = await check(front, chat("policy@sha256:" + "a" * 12))
        assert (error.code, error.type, error.candidates) == (409, "ConflictError", candidates)

    run_front_end(tmp_path / "store", scenario)


def test_version_constraints_hold_back_what_is_not_published_yet(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        first = await publish(front, tmp_path, 1, "policy", 4)
        await publish(front, tmp_path, 2, "policy", 6)
        for constraint in ({"min_version": 5}, {"min_version": 6}, {"exact_version": 6}):
            assert await check(front, chat("policy", weight_version=constraint)) is None
        exact = chat("policy", weight_version={"exact_version": 4})
        assert bind(front, exact).lora_name == first.lora_name
        error = await check(front, chat("policy", weight_version={"min_version": 7}))
        assert error.code == 409
        assert error.type == "WeightVersionNotReady"
        assert (error.retryable, error.applied, error.target_version) == (True, 6, 7)
        error = await check(front, chat("policy", weight_version={"exact_version": 5}))
        assert (error.type, error.retryable) == ("WeightVersionNotReady", False)
        assert error.param == "weight_version"

    run_front_end(tmp_path / "store", scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"weight_version": 5}, "weight_version"),
        ({"weight_version": {"min_version": 1, "exact_version": 1}}, "weight_version"),
        ({"weight_version": {"min_version": "1"}}, "weight_version.min_version"),
        ({"weight_version": {"newest": 1}}, "weight_version"),
        ({"epochless": "receipt"}, "epochless"),
        ({"epochless": {"attests": "none"}}, "epochless.attests"),
        ({"epochless": {"attest": "all"}}, "epochless.attest"),
        ({"epochless": {"nonce": 7}}, "epochless.nonce"),
        ({"epochless": {"nonce": ""}}, "epochless.nonce"),
        ({"epochless": {"nonce": "n" * 300}}, "epochless.nonce"),
        ({"epochless": {"on_publish": "recompute"}}, "epochless.on_publish"),
        ({"epochless": {"on_publish": 3}}, "epochless.on_publish"),
    ],
)
def test_a_malformed_field_of_ours_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async def scenario(front: FrontEnd) -> None:
        await publish(front, tmp_path, 1)
        error = await check(front, chat("policy", **fields))
        assert (error.code, error.param) == (400, param)
        with pytest.raises(EpochlessError) as raised:
            bind(front, chat("policy", **fields))
        assert raised.value.status == 400

    run_front_end(tmp_path / "store", scenario)


def test_well_formed_fields_of_ours_are_kept_with_the_admission(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        await publish(front, tmp_path, 1)
        request = chat("policy", epochless={"attest": "none", "nonce": "0123456789abcdef", "on_publish": "pin"})
        assert await check(front, request) is None
        bind(front, request)
        admitted = admission_of(request)
        assert admitted is not None
        assert admitted.options is not None
        assert admitted.options.nonce == "0123456789abcdef"

    run_front_end(tmp_path / "store", scenario)


def test_requiring_a_revision_refuses_the_base_model_but_not_the_tokenizer(tmp_path: Path) -> None:
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeCompletionRequest
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

    async def scenario(front: FrontEnd) -> None:
        await publish(front, tmp_path, 1)
        for model in (BASE, None, ""):
            error = await check(front, chat(model))
            assert (error.code, error.error_code, error.param) == (400, "revision_required", "model")
        assert await check(front, chat("policy")) is None
        tokenizer = serving(front, ServingTokenization)
        request = TokenizeCompletionRequest(model=BASE, prompt="x")
        assert await tokenizer._check_model(request) is None
        assert tokenizer._maybe_get_adapters(request) is None

    run_front_end(tmp_path / "store", scenario, require_revision=True)


def test_an_unknown_name_never_falls_back_to_the_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SKIP_MODEL_NAME_VALIDATION", "1")

    async def scenario(front: FrontEnd) -> None:
        error = await check(front, chat("typo"))
        assert (error.code, error.type) == (404, "NotFoundError")

    run_front_end(tmp_path / "store", scenario)


def test_pooling_raises_what_its_serving_class_would_drop(tmp_path: Path) -> None:
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing

    class Pooling(PoolingBaseServing):
        get_io_processor = _build_response = None  # type: ignore[assignment]

    async def scenario(front: FrontEnd) -> None:
        with pytest.raises(UnknownRevisionError):
            await serving(front, Pooling)._check_model(SimpleNamespace(model="nobody"))

    run_front_end(tmp_path / "store", scenario)


def test_a_class_that_drops_unknown_fields_is_constrained_by_the_body_itself(tmp_path: Path) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    async def scenario(front: FrontEnd) -> None:
        await publish(front, tmp_path, 1, "policy", 1)
        body = {"model": "policy", "token_ids": [1], "sampling_params": {}, "weight_version": {"min_version": 2}}
        request = GenerateRequest.model_validate(body)

        async def parsed() -> dict[str, Any]:
            return body

        async def handler(self: Any, request: Any, raw_request: Any) -> Any:
            return await check(front, request)

        handle = readmission.readmitting(handler)
        assert (await handle(None, request, SimpleNamespace(json=parsed))).type == "WeightVersionNotReady"
        del body["weight_version"]
        assert await handle(None, GenerateRequest.model_validate(body), SimpleNamespace(json=parsed)) is None

    run_front_end(tmp_path / "store", scenario)


def test_multimodal_chats_of_the_base_model_get_the_default_policy_of_their_modality(tmp_path: Path) -> None:
    audio = [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "data:,"}}]}]

    async def scenario(front: FrontEnd) -> None:
        heard = await publish(front, tmp_path, 1, "audio")
        request = chat(BASE)
        request.messages = audio
        assert bind(front, request).lora_name == heard.lora_name
        assert bind(front, chat(BASE)) is None
        other = await publish(front, tmp_path, 2, "policy")
        request.model = "policy"
        assert bind(front, request).lora_name == other.lora_name

    run_front_end(tmp_path / "store", scenario, modalities=frozenset({"audio", "image"}))


def test_the_view_lists_live_revisions_and_looks_up_any_model_string(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        first = await publish(front, tmp_path, 1)
        second = await publish(front, tmp_path, 2)
        assert {request.lora_name for request in front.served.values()} == {first.lora_name, second.lora_name}
        assert "policy-v1" in front.served
        assert "nobody" not in front.served
        assert BASE not in front.served
        assert front.served["policy"].lora_int_id == second.lora_int_id
        cards = {card.id: card for card in list_model_cards(front.served, BASE)}
        assert set(cards) == {"policy", first.lora_name, second.lora_name}
        assert (cards["policy"].root, cards["policy"].parent) == (second.lora_name, BASE)
        assert cards[first.lora_name].step == 1

    run_front_end(tmp_path / "store", scenario)


def test_admissions_are_forgotten_with_their_requests(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        await publish(front, tmp_path, 1)
        before = len(admission._admissions)
        requests = [chat("policy") for _ in range(50)]
        for request in requests:
            bind(front, request)
        assert len(admission._admissions) == before + 50
        del requests, request
        gc.collect()
        assert len(admission._admissions) <= before

    run_front_end(tmp_path / "store", scenario)


# Static modules


def module(name: str, path: Path) -> Any:
    return SimpleNamespace(name=name, path=str(path))


def test_static_modules_are_published_once_and_a_restart_moves_no_head(tmp_path: Path) -> None:
    static = make_adapter(tmp_path / "static", seed=9)
    models = SimpleNamespace(static_lora_modules=[module("policy", static), module("other-v5", static)])

    async def start(front: FrontEnd) -> tuple[int, int]:
        await publish_static_modules(models, front.served)
        head, other = front.service.resolve("policy"), front.service.resolve("other")
        assert head is not None
        assert other is not None
        return head.step, other.step

    async def first(front: FrontEnd) -> None:
        assert await start(front) == (0, 5)
        assert await start(front) == (0, 5)
        await publish(front, tmp_path, 1, "policy")

    run_front_end(tmp_path / "store", first)

    async def later(front: FrontEnd) -> None:
        assert await start(front) == (1, 5)
        await front.served.publisher.retire("policy-v0")
        await drained(front)
        assert await start(front) == (1, 5)

    run_front_end(tmp_path / "store", later)


def test_a_static_module_over_another_policy_or_other_content_stops_the_start(tmp_path: Path) -> None:
    static, changed = make_adapter(tmp_path / "a", seed=8), make_adapter(tmp_path / "b", seed=9)

    async def scenario(front: FrontEnd) -> None:
        await publish(front, tmp_path, 1, "policy")
        with pytest.raises(ConfigurationError, match="--lora-modules policy"):
            await publish_static_modules(SimpleNamespace(static_lora_modules=[module("policy", static)]), front.served)
        for path in (static, changed):
            models = SimpleNamespace(static_lora_modules=[module("other", path)])
            if path is changed:
                with pytest.raises(EpochlessError, match="step 0"):
                    await publish_static_modules(models, front.served)
            else:
                await publish_static_modules(models, front.served)

    run_front_end(tmp_path / "store", scenario)


# Late arrivals


def output(*tokens: int, finish: str | None = None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(tokens), finish_reason=finish)])


REFUSAL = output(finish="error")


class Engine:
    """Streams that a gate in front of the engine would answer; ``refused`` names the revisions it has let go."""

    def __init__(self) -> None:
        self.refused: set[int] = set()
        self.served: list[int] = []

    async def generate(self, *, lora_request: Any) -> AsyncGenerator[Any, None]:
        if lora_request.lora_int_id in self.refused:
            yield REFUSAL
            return
        self.served.append(lora_request.lora_int_id)
        for token in range(3):
            yield output(token)


class Server:
    """A handler in the shape of vLLM's: check, await, bind, open the stream; then collect or stream it.

    One that announces itself opens the engine's stream after its announcement, as a Responses stream does.
    """

    def __init__(self, front: FrontEnd, engine: Engine, between: Any = None, announces: bool = False) -> None:
        self.front, self.engine, self.between, self.announces = front, engine, between, announces
        self.open = late_arrivals._watched(lambda engine, **keywords: engine.generate(**keywords))

    async def handle(self, request: Any, raw_request: Any = None) -> Any:
        if (error := await serving(self.front)._check_model(request)) is not None:
            return error
        lora_request = bind(self.front, request)
        if self.between is not None:
            await self.between()
        if request.stream and self.announces:
            return self.chunks(lambda: self.open(self.engine, lora_request=lora_request))
        stream = self.open(self.engine, lora_request=lora_request)
        if request.stream:
            return self.chunks(lambda: stream)
        return [item.outputs[0].token_ids async for item in stream]

    async def chunks(self, stream: Any) -> AsyncGenerator[str, None]:
        if self.announces:
            yield "created"
        try:
            async for item in stream():
                yield f"data: {item.outputs[0].token_ids}\n\n"
        except Exception as error:  # noqa: BLE001  # as vLLM's stream generators do
            yield f"error: {error}"


def late_scenario(
    tmp_path: Path, model: str, *, stream: bool, keep_live: bool = False, announces: bool = False
) -> tuple[Any, list[int]]:
    """Admit a request, retire its revision before it reaches the engine, and return its answer and who served it."""
    manner = readmission.Manner(refuse=readmission.event_refusal, announcements=1)
    handle = readmission.readmitting(Server.handle, manner if announces else readmission.ORDINARY)

    async def scenario(front: FrontEnd) -> tuple[Any, list[int]]:
        first = await publish(front, tmp_path, 1, "policy", 1)
        engine = Engine()

        async def overtake() -> None:
            if not engine.refused:
                await publish(front, tmp_path, 2, "policy", 2)
                engine.refused.add(first.lora_int_id)
                if not keep_live:
                    await front.served.publisher.retire("policy-v1")

        # As in vLLM, the handler runs in a task of its own; what it returns is iterated outside.
        answer = await asyncio.create_task(
            handle(Server(front, engine, overtake, announces), chat(model, stream=stream))
        )
        if stream and not hasattr(answer, "error"):
            answer = [chunk async for chunk in answer]
        await drained(front)
        return answer, engine.served

    return run_front_end(tmp_path / "store", scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_late_arrival_by_policy_name_runs_on_the_head_of_now(tmp_path: Path, stream: bool) -> None:
    answer, served = late_scenario(tmp_path, "policy", stream=stream)
    assert served == [2]
    expected = ["data: [0]\n\n", "data: [1]\n\n", "data: [2]\n\n"] if stream else [[0], [1], [2]]
    assert answer == expected


@pytest.mark.parametrize("model", ["policy-v1", "policy@1"])
def test_a_late_arrival_by_exact_pin_is_gone(tmp_path: Path, model: str) -> None:
    answer, served = late_scenario(tmp_path, model, stream=False)
    assert served == []
    assert (answer.error.code, answer.error.error_code) == (410, "retired_revision")


def test_a_late_streamed_arrival_by_exact_pin_gets_410_as_its_last_chunk(tmp_path: Path) -> None:
    answer, served = late_scenario(tmp_path, "policy-v1", stream=True)
    assert served == []
    assert '"code": 410' in answer[0]
    assert answer[1] == "data: [DONE]\n\n"


def test_a_stream_that_announces_itself_announces_the_revision_that_serves_it(tmp_path: Path) -> None:
    answer, served = late_scenario(tmp_path, "policy", stream=True, announces=True)
    assert served == [2]
    assert answer == ["created", "data: [0]\n\n", "data: [1]\n\n", "data: [2]\n\n"]


def test_a_stream_of_events_by_exact_pin_ends_in_one_error_event(tmp_path: Path) -> None:
    answer, served = late_scenario(tmp_path, "policy-v1", stream=True, announces=True)
    assert served == []
    (event,) = answer
    assert (event.type, event.code) == ("error", "retired_revision")


@pytest.mark.parametrize("model", [BASE, "policy"])
def test_no_chunk_waits_for_the_one_after_it(tmp_path: Path, model: str) -> None:
    """A client sees each chunk when it is made; what a stream announces waits for the engine's first output only."""

    async def scenario(front: FrontEnd) -> None:
        await publish(front, tmp_path, 1)
        made: list[str] = []

        class Counting(Server):
            async def handle(self, request: Any, raw_request: Any = None) -> Any:
                lora_request = bind(self.front, request)

                async def outputs(engine: Engine, **keywords: Any) -> AsyncGenerator[Any, None]:
                    for token in range(3):
                        yield output(token)

                stream = late_arrivals._watched(outputs)(self.engine, lora_request=lora_request)

                async def chunks() -> AsyncGenerator[str, None]:
                    made.append("created")
                    yield "created"
                    async for item in stream:
                        made.append(str(item.outputs[0].token_ids))
                        yield made[-1]

                return chunks()

        manner = readmission.Manner(announcements=1)
        answer = await readmission.readmitting(Counting.handle, manner)(Counting(front, Engine()), chat(model))
        lead = 0
        seen: list[str] = []
        async for chunk in answer:
            seen.append(chunk)
            lead = max(lead, len(made) - len(seen))
        assert seen == made == ["created", "[0]", "[1]", "[2]"]
        assert lead <= 1

    run_front_end(tmp_path / "store", scenario)


def test_an_engine_error_of_a_live_revision_is_passed_on_as_it_is(tmp_path: Path) -> None:
    answer, served = late_scenario(tmp_path, "policy", stream=False, keep_live=True)
    assert served == []
    assert answer == [[]]


def test_a_request_that_arrives_late_twice_is_not_admitted_a_third_time(tmp_path: Path) -> None:
    handle = readmission.readmitting(Server.handle)

    async def scenario(front: FrontEnd) -> None:
        engine, steps = Engine(), iter(range(2, 100))
        bound = await publish(front, tmp_path, 1, "policy", 1)

        async def overtake() -> None:
            nonlocal bound
            step = next(steps)
            engine.refused.add(bound.lora_int_id)
            retiring, bound = bound, await publish(front, tmp_path, step, "policy", step)
            await front.served.publisher.retire(f"policy-v{retiring.step}")

        with pytest.raises(RetiredRevisionError, match="send it again"):
            await handle(Server(front, engine, overtake), chat("policy"))
        assert len(engine.refused) == 2
        await drained(front)

    run_front_end(tmp_path / "store", scenario)


def test_a_stream_of_someone_else_is_not_watched(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        await publish(front, tmp_path, 1)
        bind(front, chat("policy"))
        engine = Engine()
        opened = late_arrivals._watched(lambda engine, **keywords: engine.generate(**keywords))
        theirs = SimpleNamespace(lora_int_id=1)
        assert opened(engine, lora_request=theirs).ag_code.co_name == "generate"
        assert opened(engine, lora_request=front.served["policy"]).ag_code.co_name == "watch"

    run_front_end(tmp_path / "store", scenario)


def test_closing_a_watched_stream_closes_the_engines(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        closed: list[str] = []

        async def stream() -> AsyncGenerator[Any, None]:
            try:
                while True:
                    yield output(1)
            finally:
                closed.append("engine")

        watched = late_arrivals.watch(stream(), SimpleNamespace(started=False))
        async for _ in watched:
            break
        await watched.aclose()
        return closed

    assert asyncio.run(scenario()) == ["engine"]


def test_a_refused_pooling_request_ends_alone(tmp_path: Path) -> None:
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor

    seen: list[Any] = []
    processor = object.__new__(OutputProcessor)
    processor.request_states = {
        "pooling": SimpleNamespace(detokenizer=None, make_request_output=lambda *a, **k: seen.append(a))
    }
    refusal = EngineCoreOutput("pooling", [], finish_reason=FinishReason.ERROR)
    with pytest.raises(AttributeError):  # this far without the assertion that would end every request's task
        processor.process_outputs([refusal])
    assert refusal.pooling_output is not None
    assert refusal.pooling_output.numel() == 0


def test_a_quarantine_between_check_and_binding_is_503_not_500(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        publication = await publish(front, tmp_path, 1)
        request = chat("policy")
        assert await check(front, request) is None
        front.service.coordinator.quarantine(publication.revision_id, "engine0/rank0", "read-back differs")
        with pytest.raises(QuarantinedRevisionError):
            bind(front, request)

    run_front_end(tmp_path / "store", scenario)


def test_an_invocation_without_the_adapter_header_keeps_the_model_of_its_body() -> None:
    from model_hosting_container_standards.sagemaker.lora.transforms.inject_to_body import InjectToBodyApiTransform
    from starlette.requests import Request

    transform = InjectToBodyApiTransform({"model": 'headers."X-Amzn-SageMaker-Adapter-Identifier"'})

    async def model_after(*headers: tuple[bytes, bytes]) -> Any:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b'{"model": "policy"}', "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": list(headers)}
        request = Request({**scope, "path_params": {}}, receive)
        await transform.transform_request(request)
        return (await request.json())["model"]

    assert asyncio.run(model_after()) == "policy"
    assert asyncio.run(model_after((b"x-amzn-sagemaker-adapter-identifier", b"other"))) == "other"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_asks_for_all_choices_in_one_output_unless_it_streams(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.sampling_params import RequestOutputKind

    class CheckReachedError(Exception):
        pass

    async def check_model(self: Any, request: Any) -> None:
        raise CheckReachedError

    monkeypatch.setattr(ServingTokens, "_check_model", check_model)
    body = {"token_ids": [1], "sampling_params": {"n": 2}, "stream": stream}
    request = GenerateRequest.model_validate(body)
    with pytest.raises(CheckReachedError):
        asyncio.run(object.__new__(ServingTokens).serve_tokens(request))
    kind = request.sampling_params.output_kind
    assert (kind is RequestOutputKind.FINAL_ONLY) is not stream
