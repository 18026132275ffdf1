"""Receipts beside answers, without an engine: every one made here is verified by the standard-library verifier."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.errors import InvalidRequestError, ReceiptError, TokenRowsError
from epochless_vllm.plugin import preemptions, response_receipts
from epochless_vllm.plugin.admission import Admission, admission_of, admit, check_options, validate_request
from epochless_vllm.plugin.labels import annotate_choice
from epochless_vllm.plugin.response_receipts import Attestor, conclude, observe, open_stream, settle
from epochless_vllm.verify import Expected, StreamVerifier, Verdict, verify_receipt
from tests.adapters import make_adapter
from tests.plugin.attested import (
    STOP_TOKEN,
    FakeEngine,
    honest_rows,
    make_attestor,
    output_of,
    stream_of,
    tokens_for,
)
from tests.plugin.front_end import BASE, FrontEnd, run_front_end

NONCE = "0123456789abcdef"
DONE = "data: [DONE]\n\n"


class OpenAIServingCompletion:
    """Named as the route whose prompts are numbered in the request id."""


class OpenAIServingResponses:
    """Named as a route without a place for receipts."""


class PoolingServing:
    """Named as no route that samples."""


class Request:
    """A request body as far as admission reads it."""

    def __init__(self, model: str = "policy", **fields: Any) -> None:
        self.model = model
        self.__pydantic_extra__ = {"epochless": fields.pop("epochless", {"attest": "receipt", "nonce": NONCE})}
        self.__dict__.update(fields)


def params(tokens: int = 100, *, deltas: bool = False, **changes: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if deltas else RequestOutputKind.FINAL_ONLY
    return SamplingParams(max_tokens=tokens, output_kind=kind, **{"temperature": 0.7, **changes})


def on_policy(tmp_path: Path, scenario: Callable[[FrontEnd], Awaitable[None]], **options: Any) -> None:
    """Run a scenario on a front end that attests, with step 4 of a policy published."""

    async def body(front: FrontEnd) -> None:
        front.served.attestor = make_attestor(tmp_path / "store")
        await front.served.publisher.publish_directory(str(make_adapter(tmp_path / "a", seed=4)), "policy", 4)
        try:
            await scenario(front)
        finally:
            attestor_of(front).sink.close()

    run_front_end(tmp_path / "store", body, **options)


def attestor_of(front: FrontEnd) -> Attestor:
    assert front.served.attestor is not None
    return front.served.attestor


def admitted(front: FrontEnd, request: Request, serving: Any = None) -> Admission:
    admit(front.served, serving or OpenAIServingCompletion(), request)
    admission = admission_of(request)
    assert admission is not None
    return admission


def lora_of(admission: Admission) -> int:
    return 0 if admission.publication is None else admission.publication.lora_int_id


def full_choice(index: int = 0) -> Any:
    from vllm.entrypoints.openai.completion.protocol import CompletionResponseChoice

    return CompletionResponseChoice(index=index, text="", finish_reason="length")


def stream_choice(index: int = 0) -> Any:
    from vllm.entrypoints.openai.completion.protocol import CompletionResponseStreamChoice

    return CompletionResponseStreamChoice(index=index, text="")


async def answer(front: FrontEnd, request: Request, asked: Any, tokens: list[int], finish: str = "length") -> Any:
    """Return the one choice of a whole answer with these tokens."""
    admission = admitted(front, request)
    owned, receipts = open_stream(FakeEngine(), admission, {"type": "token"}, asked, "cmpl-a-0")
    assert receipts is not None
    rows = honest_rows(owned, 0, len(tokens), lora=lora_of(admission))
    final = output_of("cmpl-a-0", 0, tokens, rows, finish)
    async for output in observe(stream_of([final]), receipts):
        choice = full_choice()
        annotate_choice(None, choice, output.outputs[0], output, request)
    assert admission.receipts is not None
    await settle(admission.receipts)
    return choice


def receipt_of(choice: Any) -> bytes:
    return base64.b64decode(choice.epochless["receipt"], validate=True)


def test_a_whole_answer_carries_a_receipt_that_verifies(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        tokens = tokens_for(1, 100)
        for changes in (
            {},
            {"temperature": 0},
            {"top_p": 0.9, "top_k": 40},
            {"seed": 11},
            {"temperature": 0, "seed": 3},
        ):
            request = Request()
            choice = await answer(front, request, params(100, **changes), tokens)
            verified = verify_receipt(
                receipt_of(choice),
                public_key=attestor_of(front).signer.public_key,
                nonce=NONCE,
                request_id="cmpl-a",
                token_ids=tokens,
                finish_reason="length",
                receipt_id=choice.epochless["id"],
                revisions=[choice.weight_version],
                response=json.dumps({"choices": [{**choice.model_dump(), "token_ids": tokens}]}).encode(),
            )
            assert verified.verdict is Verdict.SAMPLING_CONSISTENT
            assert verified.anchor == "signature"
            assert choice.epochless["kept"] is True
            assert choice.epochless["root"] == verified.final.root.hex()  # type: ignore[union-attr]
            kept = attestor_of(front).sink.read(choice.epochless["id"])
            assert kept == receipt_of(choice)

    on_policy(tmp_path, scenario)


def test_a_summary_names_a_receipt_that_the_sink_has(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        request = Request(epochless={"attest": "summary"})
        choice = await answer(front, request, params(10), tokens_for(2, 10))
        assert set(choice.epochless) == {"id", "root", "tokens", "prompt_index", "choice_index", "kept"}
        body = attestor_of(front).sink.read(choice.epochless["id"])
        assert body is not None
        assert verify_receipt(body).receipt_id == choice.epochless["id"]

    on_policy(tmp_path, scenario)


def test_an_unattested_answer_carries_nothing_and_draws_by_a_seed_of_its_own(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        seeds = set()
        asked = params(3)
        for _ in range(2):
            admission = admitted(front, Request(epochless={"attest": "none"}))
            owned, receipts = open_stream(FakeEngine(), admission, {"type": "token"}, asked, "cmpl-a-0")
            assert receipts is None
            material = owned.extra_args["epochless"]
            assert (material["request"], material["prompt"], material["choice"]) == ("cmpl-a", 0, 0)
            seeds.add(material["seed"])
        assert len(seeds) == 2
        assert asked.extra_args is None  # the caller's parameters stay as they are

    on_policy(tmp_path, scenario)


def test_a_base_answer_names_the_base_model(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        choice = await answer(front, Request(BASE), params(5), tokens_for(3, 5))
        verified = verify_receipt(receipt_of(choice))
        assert verified.table == (choice.weight_version,)

    on_policy(tmp_path, scenario)


@pytest.mark.parametrize(
    ("finish", "stop", "last", "reason"),
    [
        ("stop", None, STOP_TOKEN, "stop"),
        ("stop", 9, 9, "stop"),
        ("stop", "###", 40, "stop_string"),
        ("repetition", "repetition_detected", 40, "repetition"),
        ("abort", None, 40, "abort"),
    ],
)
def test_finish_reasons_of_the_engine_have_their_own_word(
    tmp_path: Path, finish: str, stop: Any, last: int, reason: str
) -> None:
    async def scenario(front: FrontEnd) -> None:
        request = Request()
        admission = admitted(front, request)
        asked = params(100, stop_token_ids=[9, 5000])
        owned, receipts = open_stream(FakeEngine(), admission, {"type": "token"}, asked, "cmpl-a-0")
        assert receipts is not None
        tokens = [*tokens_for(4, 70), last]
        tokens = [token if token != 9 or place == 70 else 10 for place, token in enumerate(tokens)]
        final = output_of("cmpl-a-0", 0, tokens, honest_rows(owned, 0, 71, lora=lora_of(admission)), finish, stop)
        choice = full_choice()
        async for output in observe(stream_of([final]), receipts):
            annotate_choice(None, choice, output.outputs[0], output, request)
        assert admission.receipts is not None
        await settle(admission.receipts)
        verified = verify_receipt(receipt_of(choice), token_ids=tokens)
        assert verified.final is not None
        assert verified.final.finish_reason == reason
        assert verified.header.stop_token_ids == (STOP_TOKEN, 9)

    on_policy(tmp_path, scenario)


@pytest.mark.parametrize("seed", range(4))
def test_frames_of_interleaved_choices_and_prompts_add_up_to_receipts(tmp_path: Path, seed: int) -> None:
    """Any split into deltas, merged and held-back ones included; the frames of each choice verify as a stream."""

    async def scenario(front: FrontEnd) -> None:
        rng = random.Random(seed)
        request = Request(stream=True, epochless={"attest": "receipt", "nonce": NONCE})
        admission = admitted(front, request)
        lora, frames, bodies = lora_of(admission), dict[Any, bytes](), dict[Any, dict[str, Any]]()
        lengths = {(prompt, index): rng.choice([1, 63, 64, 65, 200]) for prompt in range(2) for index in range(3)}

        async def one_prompt(prompt: int) -> None:
            name = f"cmpl-a-{prompt}"
            asked = params(200, deltas=True, n=3, top_k=rng.choice([0, 5]))
            owned, receipts = open_stream(FakeEngine(), admission, {"type": "token"}, asked, name)
            assert receipts is not None
            done = dict.fromkeys(range(3), 0)

            def outputs() -> Any:
                while open_choices := [i for i in done if done[i] < lengths[prompt, i]]:
                    index = rng.choice(open_choices)
                    start, left = done[index], lengths[prompt, index] - done[index]
                    count = min(left, rng.choice([1, 1, 2, 70]))
                    done[index] += count
                    tokens = tokens_for(prompt * 10 + index, 200)[start : start + count]
                    finish = None
                    if done[index] == lengths[prompt, index]:
                        finish = "length" if lengths[prompt, index] == 200 else "stop"
                    rows = honest_rows(owned, index, count, lora=lora, first=start)
                    yield output_of(name, index, tokens, rows, finish, "###" if finish == "stop" else None)

            async for output in observe(stream_of(outputs()), receipts):
                (completion,) = output.outputs
                held_back = completion.finish_reason is None and rng.random() < 0.3
                choice = None if held_back else stream_choice(completion.index)
                annotate_choice(None, choice, completion, output, request)
                body = getattr(choice, "epochless", {}) if choice is not None else {}
                key = (prompt, completion.index)
                frames[key] = frames.get(key, b"") + base64.b64decode(body.get("frames", ""))
                bodies[key] = body

        await one_prompt(0)
        await one_prompt(1)
        for (prompt, index), stream in frames.items():
            tokens = tokens_for(prompt * 10 + index, 200)[: lengths[prompt, index]]
            verified = verify_receipt(
                stream, token_ids=tokens, nonce=NONCE, public_key=attestor_of(front).signer.public_key
            )
            assert verified.verdict is Verdict.SAMPLING_CONSISTENT
            assert (verified.header.prompt_index, verified.header.choice_index) == (prompt, index)
            assert verified.header.request_id == "cmpl-a"
            assert bodies[prompt, index]["id"] == verified.receipt_id
            assert bodies[prompt, index]["kept"] is True
        attestor_of(front).sink.close()
        assert len(attestor_of(front).sink.find("cmpl-a")) == 6

    on_policy(tmp_path, scenario)


def test_a_client_sees_blocks_while_the_stream_runs(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        request = Request(stream=True)
        admission = admitted(front, request)
        owned, receipts = open_stream(FakeEngine(), admission, {"type": "token"}, params(130, deltas=True), "cmpl-a-0")
        assert receipts is not None
        tokens = tokens_for(5, 130)
        rows = honest_rows(owned, 0, 130, lora=lora_of(admission))
        outputs = [
            output_of("cmpl-a-0", 0, [token], rows[place : place + 1], "length" if place == 129 else None)
            for place, token in enumerate(tokens)
        ]
        verifier, seen = StreamVerifier(Expected(token_ids=tokens, nonce=NONCE)), []
        async for output in observe(stream_of(outputs), receipts):
            choice = stream_choice()
            annotate_choice(None, choice, output.outputs[0], output, request)
            body = getattr(choice, "epochless", None)
            if body:
                verifier.feed(base64.b64decode(body["frames"]))
                seen.append(verifier.tokens)
        assert seen == [0, 64, 128, 130]  # the header with the first token, then each block as it fills, then the seal
        assert verifier.close().verdict is Verdict.SAMPLING_CONSISTENT

    on_policy(tmp_path, scenario)


@pytest.mark.parametrize("deltas", [True, False])
def test_what_the_client_leaves_is_sealed_as_aborted_for_the_sink(tmp_path: Path, deltas: bool) -> None:
    async def scenario(front: FrontEnd) -> None:
        request = Request(stream=deltas)
        admission = admitted(front, request)
        owned, receipts = open_stream(
            FakeEngine(), admission, {"type": "token"}, params(500, deltas=deltas), "cmpl-a-0"
        )
        assert receipts is not None
        entered = asyncio.Event()
        tokens, rows = tokens_for(6, 90), honest_rows(owned, 0, 90, lora=lora_of(admission))

        async def engine() -> Any:
            sent = 70 if deltas else 0
            # As generate() does: the abort leaves what was not read yet in the queue, finished as aborted.
            last = output_of("cmpl-a-0", 0, tokens[sent:], rows[sent:], "abort")
            receipts.entered(SimpleNamespace(request_id="cmpl-a-0-x", get_nowait=lambda: last))
            entered.set()
            if deltas:
                yield output_of("cmpl-a-0", 0, tokens[:70], rows[:70])
            await asyncio.Event().wait()

        async def read() -> None:
            async with aclosing(observe(engine(), receipts)) as stream:
                async for output in stream:
                    annotate_choice(None, stream_choice(), output.outputs[0], output, request)

        reader = asyncio.create_task(read())
        await entered.wait()
        while deltas and not receipts.recorders:
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        sink = attestor_of(front).sink
        sink.close()
        (kept,) = sink.find("cmpl-a")
        assert (kept["finish_reason"], kept["tokens"]) == ("abort", 90)
        verified = verify_receipt(sink.read(kept["id"]) or b"", token_ids=tokens)
        assert verified.verdict is Verdict.SAMPLING_CONSISTENT

    on_policy(tmp_path, scenario)


def test_a_row_of_another_revision_fails_the_request(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        for spoil, error in (
            (lambda rows: rows.__setitem__((3, 0), 99), TokenRowsError),
            (lambda rows: rows.__setitem__((3, 3), 256), TokenRowsError),
            (lambda rows: rows.__setitem__((3, 2), 0), ReceiptError),
        ):
            admission = admitted(front, Request())
            owned, receipts = open_stream(FakeEngine(), admission, {"type": "token"}, params(5), "cmpl-a-0")
            assert receipts is not None
            rows = honest_rows(owned, 0, 5, lora=lora_of(admission))
            spoil(rows)
            receipts.take(output_of("cmpl-a-0", 0, tokens_for(7, 5), rows, "length"))
            assert receipts.sealed[0] is not None
            with pytest.raises(error):
                await asyncio.wrap_future(receipts.sealed[0].future)

    on_policy(tmp_path, scenario)


def test_tokens_without_rows_fail_the_request(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        admission = admitted(front, Request())
        _, receipts = open_stream(FakeEngine(), admission, {"type": "token"}, params(5), "cmpl-a-0")
        assert receipts is not None
        with pytest.raises(TokenRowsError, match="rows"):
            receipts.take(output_of("cmpl-a-0", 0, [4, 5], None, "length"))

    on_policy(tmp_path, scenario)


def test_a_full_disk_is_said_beside_the_choice_and_again_at_the_end_of_a_stream(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        sink = attestor_of(front).sink
        (sink.path).mkdir()  # SQLite cannot open a directory
        choice = await answer(front, Request(), params(5), tokens_for(8, 5))
        assert choice.epochless["kept"] is False
        assert "cannot be written" in choice.epochless["reason"]
        assert verify_receipt(receipt_of(choice)).verdict is Verdict.SAMPLING_CONSISTENT
        sink.path.rmdir()
        assert (await answer(front, Request(), params(5), tokens_for(8, 5))).epochless["kept"] is True

        sink._max_bytes = 10  # now it looks well, and then refuses
        request = Request(stream=True)
        admission = admitted(front, request)
        owned, receipts = open_stream(FakeEngine(), admission, {"type": "token"}, params(5, deltas=True), "cmpl-b-0")
        assert receipts is not None
        rows = honest_rows(owned, 0, 5, lora=lora_of(admission))

        async def route() -> Any:
            final = output_of("cmpl-b-0", 0, tokens_for(9, 5), rows, "length")
            async for output in observe(stream_of([final]), receipts):
                choice = stream_choice()
                annotate_choice(None, choice, output.outputs[0], output, request)
                chunk = {"model": "m", "usage": None, "choices": [choice.model_dump(mode="json")]}
                yield f"data: {json.dumps(chunk)}\n\n"
            yield DONE

        assert admission.receipts is not None
        first, last, done = [item async for item in conclude(route(), admission.receipts)]
        (announced,) = json.loads(first[6:])["choices"]
        assert announced["epochless"]["kept"] is True
        (refused,) = json.loads(last[6:])["epochless"]["receipts"]
        assert (refused["kept"], refused["id"]) == (False, announced["epochless"]["id"])
        assert json.loads(last[6:])["choices"] == []
        assert json.loads(last[6:])["model"] == "m"
        assert done == DONE

    on_policy(tmp_path, scenario)


@pytest.mark.parametrize(
    ("serving", "fields", "field"),
    [
        (OpenAIServingCompletion, {"epochless": {"attest": "all"}}, "epochless.attest"),
        (OpenAIServingCompletion, {"epochless": {"nonce": "short"}}, "epochless.nonce"),
        (OpenAIServingCompletion, {"epochless": {"nonce": "n" * 129}}, "epochless.nonce"),
        (OpenAIServingCompletion, {"epochless": {"nonce": "with a space in it"}}, "epochless.nonce"),
        (OpenAIServingCompletion, {"epochless": {"nonce": "é" * 20}}, "epochless.nonce"),
        (OpenAIServingCompletion, {"epochless": {"nonce": "0123456789abcdef\n"}}, "epochless.nonce"),
        (OpenAIServingCompletion, {"epochless": {"nonce": 5}}, "epochless.nonce"),
        (OpenAIServingCompletion, {"use_beam_search": True}, "epochless.attest"),
        (OpenAIServingCompletion, {"echo": True, "max_tokens": 0}, "epochless.attest"),
        (OpenAIServingResponses, {}, "epochless.attest"),
        (PoolingServing, {}, "epochless.attest"),
    ],
)
def test_what_cannot_be_attested_is_refused_by_name(
    tmp_path: Path, serving: Any, fields: dict[str, Any], field: str
) -> None:
    async def scenario(front: FrontEnd) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            validate_request(front.served, serving(), Request(**fields))
        assert caught.value.fields["field"] == field
        assert field in str(caught.value)

    on_policy(tmp_path, scenario)


def test_a_server_with_stocks_mixed_rows_attests_nothing(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        with pytest.raises(InvalidRequestError, match="--epochless-mixed-rows stock"):
            validate_request(front.served, OpenAIServingCompletion(), Request())
        validate_request(front.served, OpenAIServingCompletion(), Request(epochless={"attest": "none"}))

    on_policy(tmp_path, scenario, mixed_rows="stock")


def test_what_cannot_be_stated_in_a_header_is_refused_before_the_engine_hears_of_it(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        for prompt, asked, name, field in (
            ({"type": "embeds"}, params(5), "cmpl-a-0", "prompt_embeds"),
            ({"type": "token"}, params(5), "cmpl-with a space-0", "X-Request-Id"),
            ({"type": "token"}, params(5, extra_args={"epochless": {"seed": "mine"}}), "cmpl-a-0", None),
        ):
            admission = admitted(front, Request())
            with pytest.raises(InvalidRequestError) as caught:
                open_stream(FakeEngine(), admission, prompt, asked, name)
            assert field is None or caught.value.fields["field"] == field

    on_policy(tmp_path, scenario)


def test_the_deployments_default_holds_where_a_request_does_not_say(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        silent = Request(epochless=None)
        assert admitted(front, silent).receipts.level == "summary"  # type: ignore[union-attr]
        assert admitted(front, Request(epochless={"attest": "none"})).receipts is None
        assert admitted(front, Request(epochless=None), OpenAIServingResponses()).receipts is not None
        assert admitted(front, Request(epochless=None), PoolingServing()).receipts is None
        with pytest.raises(InvalidRequestError):
            admitted(front, Request(epochless=None, use_beam_search=True))
        assert check_options(silent) is None

    on_policy(tmp_path, scenario, attest="summary")


def test_receipts_and_the_key_are_read_over_http(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        from epochless_vllm.cli.verify import read_public_key

        choice = await answer(front, Request(), params(70), tokens_for(1, 70))
        key_file = tmp_path / "key.pem"
        key_file.write_bytes((await front.http.get("/v1/receipts/key")).content)
        key = read_public_key(str(key_file))
        assert key == attestor_of(front).signer.public_key
        receipt_id = choice.epochless["id"]
        for wanted in ("verbose", "compact", "stream"):
            reply = await front.http.get(f"/v1/receipts/{receipt_id}", params={"format": wanted})
            assert verify_receipt(reply.content, public_key=key).receipt_id == receipt_id
        listed = (await front.http.get("/v1/receipts", params={"request_id": "cmpl-a"})).json()["receipts"]
        assert [(item["id"], item["finish_reason"], item["tokens"]) for item in listed] == [(receipt_id, "length", 70)]
        for path, status, code in (
            ("/v1/receipts/sha256:" + "0" * 64, 404, "unknown_receipt"),
            ("/v1/receipts/nonsense", 404, "unknown_receipt"),
            (f"/v1/receipts/{receipt_id}?format=xml", 400, "invalid_request"),
            ("/v1/receipts", 400, "invalid_request"),
            ("/v1/receipts?request_id=cmpl-none", 404, "unknown_receipt"),
        ):
            reply = await front.http.get(path)
            assert (reply.status_code, reply.json()["error"]["error_code"]) == (status, code)

    on_policy(tmp_path, scenario)


def test_receipts_are_guarded_by_the_api_key(tmp_path: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        for path in ("/v1/receipts", "/v1/receipts/key", "/v1/receipts/sha256:" + "0" * 64):
            assert (await front.http.get(path)).status_code == 401

    run_front_end(tmp_path / "store", scenario, keys=("secret",))


def test_installing_twice_wraps_once() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    before = AsyncLLM.generate, AsyncLLM.add_request
    try:
        response_receipts.install()
        once = AsyncLLM.generate
        response_receipts.install()
        assert AsyncLLM.generate is once
    finally:
        AsyncLLM.generate, AsyncLLM.add_request = before  # type: ignore[method-assign]


@pytest.mark.parametrize("choices", [1, 2])
def test_preemptions_are_counted_for_the_receipt_and_then_forgotten(tmp_path: Path, choices: int) -> None:
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType

    process = preemptions._wrap_outputs(lambda self, outputs: outputs)
    preempted = [EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED)] * 2
    queued = [EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)]

    async def scenario(front: FrontEnd) -> None:
        request = Request()
        admission = admitted(front, request)
        asked = params(5, n=choices)
        owned, receipts = open_stream(FakeEngine(), admission, {"type": "token"}, asked, "cmpl-a-0")
        assert receipts is not None

        async def engine() -> Any:
            receipts.entered(SimpleNamespace(request_id="internal", get_nowait=lambda: None))
            name = "internal" if choices == 1 else "1_internal"
            for events in (queued, preempted, None):
                process(None, [SimpleNamespace(request_id=item, events=events) for item in (name, "another")])
            for index in range(choices):
                rows = honest_rows(owned, index, 5, lora=lora_of(admission))
                yield output_of("cmpl-a-0", index, tokens_for(index, 5), rows, "length")

        bodies = []
        async for output in observe(engine(), receipts):
            choice = full_choice(output.outputs[0].index)
            annotate_choice(None, choice, output.outputs[0], output, request)
            bodies.append(choice)
        assert admission.receipts is not None
        await settle(admission.receipts)
        counts = [verify_receipt(receipt_of(choice)).final.kv_rebuilds for choice in bodies]  # type: ignore[union-attr]
        assert counts == ([2] if choices == 1 else [0, 2])
        assert preemptions._watched == {}

    on_policy(tmp_path, scenario)


def test_nothing_is_kept_of_a_choice_that_never_ran(tmp_path: Path) -> None:
    """The first choice is refused by the engine, and leaving aborts the second before its first token."""

    async def scenario(front: FrontEnd) -> None:
        admission = admitted(front, Request(stream=True))
        asked = params(5, deltas=True, n=2)
        _, receipts = open_stream(FakeEngine(), admission, {"type": "token"}, asked, "cmpl-a-0")
        assert receipts is not None

        async def engine() -> Any:
            last = output_of("cmpl-a-0", 1, [], None, "abort")
            receipts.entered(SimpleNamespace(request_id="internal", get_nowait=lambda: last))
            yield output_of("cmpl-a-0", 0, [], None, "error")

        async with aclosing(observe(engine(), receipts)) as stream:
            async for _ in stream:
                break
        attestor_of(front).sink.close()
        assert attestor_of(front).sink.find("cmpl-a") == []

    on_policy(tmp_path, scenario)
