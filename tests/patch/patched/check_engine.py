"""The token-attest seam from the model runner to the wire."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import async_utils

from tests.patch.patched.rows import make_request, rows


def test_the_wire_structure_only_gained_a_last_field():
    names = EngineCoreOutput.__struct_fields__
    assert names[-1] == "token_attest"
    assert names[:2] == ("request_id", "new_token_ids")
    assert names[-2] == "num_nans_in_logits"


def test_an_output_without_rows_costs_one_byte_and_a_former_one_is_understood():
    fields = [(f.name, f.type, f.default) for f in msgspec.structs.fields(EngineCoreOutput)[2:-1]]
    former = msgspec.defstruct(
        "Former", [("request_id", str), ("new_token_ids", list), *fields], array_like=True, omit_defaults=True
    )
    values = {"request_id": "r", "new_token_ids": [1, 2], "stop_reason": "x", "num_nans_in_logits": 3}
    (sent,) = MsgpackEncoder().encode(EngineCoreOutput(**values))
    (sent_before,) = MsgpackEncoder().encode(former(**values))
    assert sent[1:] == sent_before[1:] + b"\xc0"  # nil; the first byte counts the fields
    assert MsgpackDecoder(EngineCoreOutput).decode(sent_before) == EngineCoreOutput(**values)


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint8])
@pytest.mark.parametrize("count", [1, 400])  # inline in the message, and in a buffer of its own
def test_rows_survive_the_wire(dtype: type, count: int):
    table = np.arange(3 * count * 5, dtype=dtype).reshape(3, count, 5)
    sent = EngineCoreOutput(request_id="r", new_token_ids=list(range(count)), token_attest=table[1, :count])
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[sent]))
    received = MsgpackDecoder(EngineCoreOutputs).decode(frames).outputs[0]
    assert received.token_attest.dtype == dtype
    np.testing.assert_array_equal(received.token_attest, table[1, :count])


def update_scheduler(sampled: list[list[int]], table: np.ndarray | None, *, stop_after: int | None = None):
    """Run the scheduler's update over one step of len(sampled) requests; return the outputs by request id."""
    names = [f"r{n}" for n in range(len(sampled))]

    def update_request(request, token_ids):
        stopped = stop_after is not None and len(token_ids) > stop_after
        if stopped:
            del token_ids[stop_after:]
            request.status = RequestStatus.FINISHED_STOPPED
        return token_ids, stopped

    requests = {}
    for name in names:
        core_request = make_request(name, SamplingParams(max_tokens=100))
        requests[name] = Request.from_engine_core_request(core_request, None)
        requests[name].status = RequestStatus.RUNNING
    scheduler = SimpleNamespace(
        requests=requests,
        running=list(requests.values()),
        perf_metrics=None,
        defer_block_free=False,
        structured_output_manager=SimpleNamespace(should_advance=lambda request: False),
        enable_return_routed_experts=False,
        num_sampled_tokens_per_step=1,
        connector=None,
        ec_connector=None,
        kv_cache_manager=SimpleNamespace(take_events=list, take_new_block_ids=list),
        kv_event_publisher=None,
        finished_req_ids_dict=None,
        log_stats=False,
        make_stats=lambda *a, **k: None,
        _update_request_with_output=update_request,
        _handle_stopped_request=lambda request: True,
        _free_request=lambda request: None,
    )
    runner_output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: n for n, name in enumerate(names)},
        sampled_token_ids=sampled,
        token_attest=table,
    )
    step = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, 1), scheduled_spec_decode_tokens={}, total_num_scheduled_tokens=1
    )
    outputs = Scheduler.update_from_output(scheduler, step, runner_output)
    return {output.request_id: output for output in outputs[0].outputs}


def test_each_request_gets_its_own_rows_and_a_partial_prefill_gets_none():
    table = np.stack([rows([5, 0, 0]), rows([9, 9, 9]), rows([6, 7, 8])])
    outputs = update_scheduler([[5], [], [6, 7, 8]], table)
    np.testing.assert_array_equal(outputs["r0"].token_attest, rows([5]))
    np.testing.assert_array_equal(outputs["r2"].token_attest, rows([6, 7, 8]))
    assert "r1" not in outputs


def test_rows_past_a_stop_are_cut_with_their_tokens():
    output = update_scheduler([[6, 7, 8]], np.stack([rows([6, 7, 8])]), stop_after=2)["r0"]
    assert output.new_token_ids == [6, 7]
    np.testing.assert_array_equal(output.token_attest, rows([6, 7]))


def test_a_step_without_rows_sends_none():
    assert update_scheduler([[5]], None)["r0"].token_attest is None


class FakeStream:
    def wait_stream(self, other: object) -> None: ...


class FakeEvent:
    def __init__(self, blocking: bool = False) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)


@pytest.mark.parametrize("table", [None, torch.arange(8).reshape(2, 1, 4)])
@pytest.mark.usefixtures("no_cuda")
def test_the_asynchronous_first_runner_returns_the_rows(table: torch.Tensor | None):
    pending = gpu_model_runner.AsyncGPUModelRunnerOutput(
        model_runner_output=ModelRunnerOutput(req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1}),
        sampled_token_ids=torch.tensor([[3], [4]]),
        logprobs_tensors=None,
        invalid_req_indices=[1],
        async_output_copy_stream=FakeStream(),
        vocab_size=10,
        token_attest=table,
    )
    output = pending.get_output()
    assert output.sampled_token_ids == [[3], []]
    if table is None:
        assert output.token_attest is None
    else:
        np.testing.assert_array_equal(output.token_attest, table.numpy())


@pytest.mark.parametrize("table", [None, torch.arange(12).reshape(2, 2, 3)])
@pytest.mark.usefixtures("no_cuda")
def test_the_second_runner_returns_the_rows(table: torch.Tensor | None):
    sampler_output = async_utils.SamplerOutput(torch.tensor([[3, 5], [4, -1]]), None, None, None)
    if table is not None:
        sampler_output.token_attest = table
    pending = async_utils.AsyncOutput(
        model_runner_output=ModelRunnerOutput(req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1}),
        sampler_output=sampler_output,
        num_sampled_tokens=torch.tensor([2, 1]),
        main_stream=FakeStream(),
        copy_stream=FakeStream(),
    )
    output = pending.get_output()
    assert output.sampled_token_ids == [[3, 5], [4]]
    if table is None:
        assert output.token_attest is None
    else:
        np.testing.assert_array_equal(output.token_attest, table.numpy())


def test_a_sampler_that_knows_of_no_rows_still_builds_its_output():
    assert SamplerOutput(torch.zeros(1, 1), None).token_attest is None
