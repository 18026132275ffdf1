"""The token-attest seam from the wire to the outputs of a request."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from tests.patch.patched.rows import check_alignment, make_output, make_request, rows

# Of each step, how many tokens each choice gets
steps = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    steps=steps,
    kind=st.sampled_from(list(RequestOutputKind)),
    interval=st.integers(1, 4),
    choices=st.integers(1, 2),
    lag=st.integers(1, 5),
    abort=st.booleans(),
)
def test_every_row_arrives_once_with_its_token(steps, kind, interval, choices, lag, abort):
    """Random step sizes, stream intervals, choices, merges by a slow consumer, and an abort or a finish at the end."""
    processor = OutputProcessor(None, log_stats=False, stream_interval=interval)
    params = SamplingParams(n=choices, output_kind=kind, detokenize=False)
    queue = RequestOutputCollector(kind, "e")
    parent = ParentRequest(make_request("e", params)) if choices > 1 else None
    names = []
    for index in range(choices):
        name, child = (parent.get_child_info(index)) if parent else ("e", params)
        core_request = make_request(name, child)
        core_request.external_req_id = "e"
        processor.add_request(core_request, None, parent, index, queue)
        names.append(name)
    received: dict[int, list[int]] = {index: [] for index in range(choices)}
    sent = dict.fromkeys(names, 0)

    def consume() -> None:
        output = queue.get_nowait()
        if output is None:
            return
        for completion in output.outputs:
            if kind == RequestOutputKind.CUMULATIVE and len(completion.token_ids) > len(completion.token_attest):
                # The token list of an unread cumulative output grows in place; its rows are a snapshot.
                completion.token_ids = completion.token_ids[: len(completion.token_attest)]
            positions = check_alignment(completion)
            whole = kind != RequestOutputKind.DELTA
            received[completion.index] = positions if whole else received[completion.index] + positions

    for number, sizes in enumerate(steps):
        last = number == len(steps) - 1
        outputs = []
        for index, name in enumerate(names):
            size = sizes[index % len(sizes)]
            tokens = [10 * sent[name] + n + 100 * index for n in range(size)]
            table = np.stack([rows(tokens, sent[name])])
            finish = FinishReason.LENGTH if last and not abort else None
            outputs.append(
                EngineCoreOutput(request_id=name, new_token_ids=tokens, token_attest=table[0], finish_reason=finish)
            )
            sent[name] += size
            table_used = outputs[-1].token_attest
            assert table_used.base is not None  # a view, as in the engine
        processor.process_outputs(outputs)
        for output in outputs:
            output.token_attest[:] = 0  # the engine may reuse its buffer from here on
        if number % lag == 0:
            consume()
    if abort:
        processor.abort_requests(names, internal=True)
    consume()
    for index, name in enumerate(names):
        assert received[index] == list(range(sent[name]))


def test_a_stop_string_trims_text_and_keeps_one_row_for_each_token():
    processor = OutputProcessor(make_tokenizer(), log_stats=False)
    params = SamplingParams(stop=["c"], output_kind=RequestOutputKind.DELTA)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "e")
    processor.add_request(make_request("e", params), None, None, 0, queue)
    for position, token in enumerate([3, 4, 5]):
        processor.process_outputs(
            [EngineCoreOutput(request_id="e", new_token_ids=[token], token_attest=rows([token], position))]
        )
    output = queue.get_nowait().outputs[0]
    assert (output.finish_reason, output.stop_reason, "c" in output.text) == ("stop", "c", False)
    assert list(output.token_ids) == [3, 4, 5]
    assert check_alignment(output) == [0, 1, 2]


def make_tokenizer():
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")))


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=10))
def test_merged_outputs_keep_every_row_of_every_choice(parts: list[tuple[int, int]]):
    total = {0: 0, 1: 0}
    merged: RequestOutput | None = None
    for index, size in parts:
        tokens = [50 + total[index] + n for n in range(size)]
        following = make_output(index, tokens, total[index], attested=size > 0)
        total[index] += size
        if merged is None:
            merged = following
        else:
            merged.add(following, aggregate=True)
    for completion in merged.outputs:
        assert check_alignment(completion) == list(range(total[completion.index]))


def test_merging_outputs_without_rows_leaves_none():
    merged = make_output(0, [1], 0, attested=False)
    merged.add(make_output(0, [2], 1, attested=False), aggregate=True)
    assert merged.outputs[0].token_attest is None
    assert merged.outputs[0].token_ids == [1, 2]
