"""Labels of choices: one label per output token, whatever shape the response takes."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from epochless_vllm.errors import TokenRowsError
from epochless_vllm.plugin import labels
from epochless_vllm.plugin.admission import admission_of, admit
from epochless_vllm.plugin.labels import Label, annotate_choice, extend_spans, label_response
from tests.adapters import make_adapter
from tests.plugin.front_end import BASE, BASE_DIGEST, FrontEnd, run_front_end


class Request:
    """A request body as far as admission reads it."""

    def __init__(self, model: str, **fields: Any) -> None:
        self.model = model
        self.__dict__.update(fields)


def stream_choice() -> Any:
    from vllm.entrypoints.openai.completion.protocol import CompletionResponseStreamChoice

    return CompletionResponseStreamChoice(index=0, text="")


def full_choice() -> Any:
    from vllm.entrypoints.openai.completion.protocol import CompletionResponseChoice

    return CompletionResponseChoice(index=0, text="")


def rows_of(adapters: list[int]) -> Any:
    """Rows as the engine sends them: the adapter's id first."""
    return np.array([[adapter, 0, 1 << 32, 1, 0] for adapter in adapters], dtype=np.int64)


def completion(count: int, *, index: int = 0, finish: str | None = None, adapters: list[int] | None = None) -> Any:
    """An output of the engine; without ``adapters`` its tokens are of what its request is bound to."""
    rows = None if adapters is None else rows_of(adapters)
    return SimpleNamespace(index=index, token_ids=list(range(count)), finish_reason=finish, token_attest=rows)


def annotate(choice: Any, output: Any, request: Any, prompt: str = "cmpl-0") -> Any:
    admission = admission_of(request)
    if output is not None and output.token_attest is None and output.token_ids and admission is not None:
        bound = admission.lora_request.lora_int_id if admission.lora_request else 0
        output.token_attest = rows_of([bound] * len(output.token_ids))
    annotate_choice(None, choice, output, SimpleNamespace(request_id=prompt), request)
    return choice


def on_policy(tmp_path: Path, scenario: Any, model: str = "policy-v4") -> None:
    """Run a scenario with a request admitted to step 4 of a policy whose head is step 5."""

    async def body(front: FrontEnd) -> None:
        for step in (4, 5):
            adapter = make_adapter(tmp_path / str(step), seed=step)
            await front.served.publisher.publish_directory(str(adapter), "policy", step)
        request = Request(model)
        admit(front.served, SimpleNamespace(), request)
        publication = front.service.resolve(model)
        version = f"base:{BASE_DIGEST}" if publication is None else publication.revision_id
        scenario(request, version)

    run_front_end(tmp_path / "store", body)


def span(version: str, end: int, step: int | None = 4) -> list[dict[str, Any]]:
    return [{"version": version, "step": step, "start": 0, "end": end}] if end else []


def test_a_full_choice_carries_one_span_over_all_its_tokens(tmp_path: Path) -> None:
    def scenario(request: Request, version: str) -> None:
        for count in (1, 17):
            choice = annotate(full_choice(), completion(count, finish="length"), request)
            assert choice.weight_version == version
            assert choice.weight_versions == span(version, count)
            assert '"weight_versions"' in choice.model_dump_json(exclude_unset=True)

    on_policy(tmp_path, scenario)


def test_base_rows_have_their_own_marker_and_no_step(tmp_path: Path) -> None:
    def scenario(request: Request, version: str) -> None:
        choice = annotate(full_choice(), completion(3, finish="stop"), request)
        assert version == f"base:{BASE_DIGEST}"
        assert choice.weight_version == version
        assert choice.weight_versions == span(version, 3, None)

    on_policy(tmp_path, scenario, BASE)


def test_a_choice_without_a_token_has_no_span_and_names_its_revision(tmp_path: Path) -> None:
    def scenario(request: Request, version: str) -> None:
        choice = annotate(full_choice(), completion(0, finish="abort"), request)
        assert (choice.weight_version, choice.weight_versions) == (version, [])
        final = annotate(stream_choice(), completion(0, finish="abort"), request)
        assert (final.weight_version, final.weight_versions) == (version, [])

    on_policy(tmp_path, scenario)


def test_chunks_carry_the_scalar_and_the_last_one_the_spans(tmp_path: Path) -> None:
    def scenario(request: Request, version: str) -> None:
        opening = annotate(stream_choice(), None, request)
        assert opening.weight_version == version
        middle = annotate(stream_choice(), completion(2), request)
        assert middle.weight_version == version
        assert "weight_versions" not in middle.model_dump()
        last = annotate(stream_choice(), completion(1, finish="stop"), request)
        assert last.weight_versions == span(version, 3)

    on_policy(tmp_path, scenario)


def test_tokens_of_a_chunk_that_is_not_sent_are_counted(tmp_path: Path) -> None:
    def scenario(request: Request, version: str) -> None:
        annotate(None, completion(5), request)
        last = annotate(stream_choice(), completion(2, finish="stop"), request)
        assert last.weight_versions == span(version, 7)

    on_policy(tmp_path, scenario)


def test_an_echo_without_generation_labels_no_token(tmp_path: Path) -> None:
    def scenario(request: Request, version: str) -> None:
        request.echo, request.max_tokens = True, 0  # type: ignore[attr-defined]
        choice = annotate(full_choice(), completion(1, finish="length"), request)
        assert (choice.weight_version, choice.weight_versions) == (version, [])

    on_policy(tmp_path, scenario)


@pytest.mark.parametrize("seed", range(5))
def test_interleaved_choices_of_several_prompts_are_counted_apart(tmp_path: Path, seed: int) -> None:
    """Any split of any choice's tokens over chunks, merged, skipped or empty ones included, sums to its tokens."""

    def scenario(request: Request, version: str) -> None:
        rng = random.Random(seed)
        totals = {(f"cmpl-{prompt}", index): rng.randrange(30) for prompt in range(3) for index in range(4)}
        left = dict(totals)
        finished: dict[tuple[str, int], Any] = {}
        while len(finished) < len(totals):
            prompt, index = key = rng.choice([k for k in totals if k not in finished])
            count = rng.randint(0, left[key])
            left[key] -= count
            final = left[key] == 0 and rng.random() < 0.5
            output = completion(count, index=index, finish="stop" if final else None)
            choice = stream_choice() if final or rng.random() < 0.7 else None
            annotate(choice, output, request, prompt)
            if final:
                finished[key] = choice.weight_versions
        assert finished == {key: span(version, total) for key, total in totals.items()}

    on_policy(tmp_path, scenario)


def test_a_request_without_an_admission_is_left_alone() -> None:
    choice = annotate(full_choice(), completion(3, finish="stop"), Request("policy"))
    assert "weight_version" not in choice.model_dump()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4))))
def test_spans_are_exactly_the_runs_of_equal_labels(runs: list[tuple[str, int]]) -> None:
    spans: list[dict[str, Any]] = []
    for name, count in runs:
        extend_spans(spans, [(Label(name, ord(name)), count)])
    tokens = [name for name, count in runs for _ in range(count)]
    expanded = [s["version"] for s in spans for _ in range(s["start"], s["end"])]
    assert expanded == tokens
    assert all(left["end"] == right["start"] for left, right in itertools.pairwise(spans))
    assert all(left["version"] != right["version"] for left, right in itertools.pairwise(spans))
    assert all(s["start"] < s["end"] and s["step"] == ord(s["version"]) for s in spans)


def test_equal_content_of_two_steps_is_two_spans() -> None:
    spans: list[dict[str, Any]] = []
    extend_spans(spans, [(Label("a", 1), 2), (Label("a", 2), 3)])
    assert [(each["step"], each["start"], each["end"]) for each in spans] == [(1, 0, 2), (2, 2, 5)]


def test_content_that_two_policies_published_has_the_step_of_the_requests_own(tmp_path: Path) -> None:
    shared, head = (make_adapter(tmp_path / str(seed), seed=seed) for seed in (1, 2))

    async def body(front: FrontEnd) -> None:
        publish = front.served.publisher.publish_directory
        first = (await publish(str(shared), "policy", 1)).publication
        await publish(str(head), "policy", 2)
        other = (await publish(str(shared), "other", 7)).publication
        assert other.lora_int_id == first.lora_int_id
        for model, step in (("policy", 1), (BASE, 7)):
            request = Request(model)
            admit(front.served, SimpleNamespace(), request)
            output = completion(1, finish="stop", adapters=[first.lora_int_id])
            (found,) = annotate(full_choice(), output, request).weight_versions
            assert (found["version"], found["step"]) == (first.revision_id, step)

    run_front_end(tmp_path / "store", body)


@pytest.mark.parametrize(("model", "kind"), [("policy-v4", "revision"), (BASE, "base")])
def test_labelled_tokens_are_counted_when_their_choice_ends(tmp_path: Path, model: str, kind: str) -> None:
    def counted() -> float:
        return REGISTRY.get_sample_value("epochless:labelled_tokens_total", {"kind": kind}) or 0.0

    def scenario(request: Request, version: str) -> None:
        before = counted()
        annotate(stream_choice(), completion(4), request)
        assert counted() == before
        annotate(stream_choice(), completion(3, finish="stop"), request)
        assert counted() == before + 7

    on_policy(tmp_path, scenario, model)


def test_a_responses_body_names_the_revision_it_was_admitted_to(tmp_path: Path) -> None:
    def scenario(request: Request, version: str) -> None:
        body = SimpleNamespace()
        assert label_response(body, request) is body
        assert body.weight_version == version
        assert vars(label_response(SimpleNamespace(), Request("policy-v4"))) == {}

    on_policy(tmp_path, scenario)


def test_the_same_content_under_another_step_is_labelled_with_the_step_of_admission(tmp_path: Path) -> None:
    adapters = [make_adapter(tmp_path / str(seed), seed=seed) for seed in (1, 2)]

    async def body(front: FrontEnd) -> None:
        for step, which in ((1, 0), (2, 1), (3, 0)):
            await front.served.publisher.publish_directory(str(adapters[which]), "policy", step)
        steps = {}
        for model in ("policy", "policy-v1"):
            request = Request(model)
            admit(front.served, SimpleNamespace(), request)
            steps[model] = annotate(full_choice(), completion(1, finish="stop"), request).weight_versions[0]["step"]
        assert steps == {"policy": 3, "policy-v1": 1}

    run_front_end(tmp_path / "store", body)


def test_labels_are_what_the_rows_say_not_what_the_request_was_bound_to(tmp_path: Path) -> None:
    """Tokens of three revisions and the base in one output; the step is the request's policy's own."""

    async def body(front: FrontEnd) -> None:
        published = {}
        for step, policy in enumerate(("policy", "policy", "other"), start=1):
            adapter = make_adapter(tmp_path / str(step), seed=step)
            published[step] = (await front.served.publisher.publish_directory(str(adapter), policy, step)).publication
        request = Request("policy")
        admit(front.served, SimpleNamespace(), request)
        adapters = [published[step].lora_int_id for step in (1, 1, 2, 3)] + [0, 0]
        choice = annotate(full_choice(), completion(6, finish="stop", adapters=adapters), request)
        steps = [(s["version"], s["step"], s["start"], s["end"]) for s in choice.weight_versions]
        assert steps == [
            (published[1].revision_id, 1, 0, 2),
            (published[2].revision_id, 2, 2, 3),
            (published[3].revision_id, 3, 3, 4),
            (f"base:{BASE_DIGEST}", None, 4, 6),
        ]
        assert choice.weight_version == f"base:{BASE_DIGEST}"

    run_front_end(tmp_path / "store", body)


@pytest.mark.parametrize("adapters", [[4242], [], [1, 1]])
def test_a_row_of_an_unknown_adapter_or_a_missing_row_is_an_error_of_that_response(
    tmp_path: Path, adapters: list[int]
) -> None:
    def scenario(request: Request, version: str) -> None:
        with pytest.raises(TokenRowsError, match="report this"):
            annotate(full_choice(), completion(1, finish="stop", adapters=adapters), request)

    on_policy(tmp_path, scenario)


def test_a_beam_is_labelled_by_what_its_request_was_bound_to(tmp_path: Path) -> None:
    def scenario(request: Request, version: str) -> None:
        request.use_beam_search = True  # type: ignore[attr-defined]
        choice = full_choice()
        annotate_choice(None, choice, completion(4, finish="stop"), SimpleNamespace(request_id="cmpl-0"), request)
        assert choice.weight_versions == span(version, 4)

    on_policy(tmp_path, scenario)


def test_installing_twice_keeps_one_wrapper() -> None:
    pytest.importorskip("vllm.entrypoints.generate.base.serving")
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.responses.protocol import ResponsesResponse

    if not hasattr(GenerateBaseServing, "annotate_choice"):
        pytest.skip("this vLLM is not patched")
    labels.install()
    first = ResponsesResponse.from_request.__func__  # type: ignore[attr-defined]
    labels.install()
    assert GenerateBaseServing.annotate_choice is annotate_choice
    assert ResponsesResponse.from_request.__func__ is first  # type: ignore[attr-defined]


@pytest.mark.parametrize("lora_name", [None, "policy@sha256:" + "a" * 64])
def test_pooling_answers_name_the_revision_that_computed_them(lora_name: str | None) -> None:
    import asyncio
    import json

    from fastapi.responses import JSONResponse

    lora_request = None if lora_name is None else SimpleNamespace(lora_name=lora_name)

    async def init_context(self: Any) -> Any:
        return SimpleNamespace(lora_request=lora_request, model_name=BASE)

    context = asyncio.run(labels.name_in_context(init_context)(None))
    assert context.model_name == (lora_name or BASE)

    def build(self: Any, ctx: Any) -> JSONResponse:
        return JSONResponse({"model": BASE, "data": [0.5]})

    body = json.loads(labels.name_in_scores(build)(None, context).body)
    assert body == {"model": lora_name or BASE, "data": [0.5]}
