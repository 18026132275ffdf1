"""The choice-labels and token-choices seams, on the response builders of every endpoint with choices."""

from __future__ import annotations

import asyncio
import json

import pytest
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.engine.protocol import DeltaMessage, RequestResponseMetadata
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from tests.patch.patched.rows import check_alignment, two_choices


class Labels:
    """A plugin's annotation: counts the rows seen of each choice and writes the count on every choice object."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[tuple[str, int], list[int]] = {}
        monkeypatch.setattr(GenerateBaseServing, "annotate_choice", self.annotate)

    def annotate(self, choice, output, request_output, request) -> None:
        assert request.model == "m"
        positions = []
        if output is not None:
            positions = self.seen.setdefault((request_output.request_id, output.index), [])
            positions += check_alignment(output)
        if choice is not None:
            choice.weight_version = "v"
            choice.rows_so_far = len(positions)


def serving(cls: type, **attributes: object):
    """Return a serving object with just what its response builders read."""
    instance = cls.__new__(cls)
    defaults = {
        "parser_cls": None,
        "enable_force_include_usage": False,
        "enable_log_outputs": False,
        "request_logger": None,
        "system_fingerprint": None,
        "enable_prompt_tokens_details": False,
        "enable_per_request_metrics": False,
        "enable_auto_tools": False,
        "response_role": "assistant",
        "return_tokens_as_token_ids": False,
    }
    for name, value in {**defaults, **attributes}.items():
        setattr(instance, name, value)
    return instance


async def stream(outputs: list):
    for output in outputs:
        yield output


def read_events(generator) -> list[dict]:
    async def collect() -> list[str]:
        return [event async for event in generator]

    events = [event.removeprefix("data: ").strip() for event in asyncio.run(collect())]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def check_events(events: list[dict], *, opening: int = 0) -> None:
    assert all("error" not in event for event in events), events
    choices = [choice for event in events for choice in event["choices"]]
    assert all(choice["weight_version"] == "v" for choice in choices)
    for index in (0, 1):
        counts = [choice["rows_so_far"] for choice in choices if choice["index"] == index]
        assert counts == [0] * opening + [1, 2, 3]


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2}
METADATA = RequestResponseMetadata(request_id="r")


def chat_stream(instance, request):
    return instance.chat_completion_stream_generator(request, stream(two_choices()), "r", "m", [], None, METADATA)


def test_every_chunk_of_a_chat_stream_is_annotated(monkeypatch: pytest.MonkeyPatch):
    Labels(monkeypatch)
    check_events(read_events(chat_stream(serving(OpenAIServingChat), ChatCompletionRequest(**CHAT))), opening=1)


def test_the_echo_chunk_of_a_chat_stream_is_annotated(monkeypatch: pytest.MonkeyPatch):
    Labels(monkeypatch)
    request = ChatCompletionRequest(**CHAT, echo=True)
    conversation = [{"role": "assistant", "content": "hi"}]
    generator = serving(OpenAIServingChat).chat_completion_stream_generator(
        request, stream(two_choices()), "r", "m", conversation, None, METADATA
    )
    check_events(read_events(generator), opening=2)


def test_a_held_back_chat_delta_is_not_lost(monkeypatch: pytest.MonkeyPatch):
    class Parser:
        """Holds every second delta back, as a tool parser does inside a call."""

        def __init__(self, *arguments: object, **keywords: object) -> None:
            self.calls = 0

        def parse_delta(self, delta_text: str, **keywords: object) -> DeltaMessage | None:
            self.calls += 1
            return None if self.calls == 2 else DeltaMessage(content=delta_text)

    labels = Labels(monkeypatch)
    instance = serving(OpenAIServingChat, parser_cls=Parser, model_config=None)
    request = ChatCompletionRequest(**CHAT)
    generator = instance.chat_completion_stream_generator(
        request, stream(two_choices()), "r", "m", [], object(), METADATA
    )
    choices = [choice for event in read_events(generator) for choice in event["choices"]]
    assert [c["rows_so_far"] for c in choices if c["index"] == 0] == [0, 1, 3]
    assert labels.seen == {("e", 0): [0, 1, 2], ("e", 1): [0, 1, 2]}


def merged_choices() -> RequestOutput:
    first, *others = two_choices()
    for output in others:
        first.add(output, aggregate=True)
    return first


def test_every_choice_of_a_chat_response_is_annotated(monkeypatch: pytest.MonkeyPatch):
    Labels(monkeypatch)
    response = asyncio.run(
        serving(OpenAIServingChat).chat_completion_full_generator(
            ChatCompletionRequest(**CHAT), stream([merged_choices()]), "r", "m", [], None, METADATA
        )
    )
    choices = json.loads(response.model_dump_json())["choices"]
    assert [(c["index"], c["weight_version"], c["rows_so_far"]) for c in choices] == [(0, "v", 3), (1, "v", 3)]


def test_every_choice_of_a_batch_of_chats_is_annotated(monkeypatch: pytest.MonkeyPatch):
    Labels(monkeypatch)
    conversations = [[{"role": "user", "content": "hi"}]] * 2
    outputs = [merged_choices(), merged_choices()]
    for number, output in enumerate(outputs):
        output.request_id = f"conversation {number}"
        del output.outputs[1]
    response = asyncio.run(
        serving(OpenAIServingChatBatch).chat_completion_full_generator_batch(
            BatchChatCompletionRequest(model="m", messages=conversations),
            [stream([output]) for output in outputs],
            "r",
            "m",
            [[], []],
            None,
            METADATA,
        )
    )
    choices = json.loads(response.model_dump_json())["choices"]
    assert [(c["index"], c["weight_version"], c["rows_so_far"]) for c in choices] == [(0, "v", 3), (1, "v", 3)]


def test_every_chunk_of_a_completion_stream_is_annotated(monkeypatch: pytest.MonkeyPatch):
    Labels(monkeypatch)
    request = CompletionRequest(model="m", prompt=[1], n=2, max_tokens=3)
    outputs = [(0, output) for output in two_choices()]
    for _, output in outputs:
        output.prompt = "p"
    generator = serving(OpenAIServingCompletion).completion_stream_generator(
        request, [], stream(outputs), "r", 0, "m", 1, None, METADATA
    )
    check_events(read_events(generator))


def test_every_choice_of_a_completion_is_annotated(monkeypatch: pytest.MonkeyPatch):
    Labels(monkeypatch)
    request = CompletionRequest(model="m", prompt=[[1], [1]], n=2, max_tokens=3)
    batch = [merged_choices(), merged_choices()]
    batch[1].request_id = "second prompt"
    response = serving(OpenAIServingCompletion).request_output_to_completion_response(
        batch, request, "r", 0, "m", None, METADATA
    )
    choices = json.loads(response.model_dump_json())["choices"]
    assert [(c["index"], c["rows_so_far"]) for c in choices] == [(n, 3) for n in range(4)]


def tokens_request(*, streamed: bool) -> GenerateRequest:
    return GenerateRequest(model="m", token_ids=[1], sampling_params=SamplingParams(n=2), stream=streamed)


def test_every_chunk_of_a_token_stream_is_annotated_for_every_choice(monkeypatch: pytest.MonkeyPatch):
    Labels(monkeypatch)
    generator = serving(ServingTokens).serve_tokens_stream_generator(
        tokens_request(streamed=True), stream(two_choices()), "r", "m", METADATA
    )
    check_events(read_events(generator))


def test_every_choice_of_a_token_response_is_annotated(monkeypatch: pytest.MonkeyPatch):
    Labels(monkeypatch)
    response = asyncio.run(
        serving(ServingTokens).serve_tokens_full_generator(
            tokens_request(streamed=False), stream([merged_choices()]), "r", "m", METADATA
        )
    )
    choices = json.loads(response.model_dump_json())["choices"]
    assert [(c["index"], c["weight_version"], c["rows_so_far"]) for c in choices] == [(0, "v", 3), (1, "v", 3)]


def test_without_a_plugin_responses_have_no_extra_field():
    events = read_events(
        serving(ServingTokens).serve_tokens_stream_generator(
            tokens_request(streamed=True), stream(two_choices()), "r", "m", METADATA
        )
    )
    keys = {key for event in events for choice in event["choices"] for key in choice}
    assert keys == {"index", "logprobs", "finish_reason", "token_ids", "routed_experts"}
