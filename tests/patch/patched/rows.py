"""Requests, outputs and rows for the checks. A row is ``[token id, position]``: one in the wrong place shows."""

from __future__ import annotations

import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest


def rows(token_ids: list[int], start: int = 0) -> np.ndarray:
    return np.array([[token, start + n] for n, token in enumerate(token_ids)], np.uint32).reshape(-1, 2)


def make_request(name: str, params: SamplingParams, **fields: object) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=name.split("-")[0],
        **fields,
    )


def check_alignment(output: CompletionOutput) -> list[int]:
    """Check that each token of an output has its row; return the positions."""
    if not output.token_ids:
        assert output.token_attest is None or len(output.token_attest) == 0
        return []
    assert output.token_attest.shape == (len(output.token_ids), 2)
    assert output.token_attest[:, 0].tolist() == list(output.token_ids)
    return output.token_attest[:, 1].tolist()


def make_output(index: int, token_ids: list[int], start: int, *, attested: bool = True) -> RequestOutput:
    table = rows(token_ids, start) if attested else None
    completion = CompletionOutput(index, "", list(token_ids), None, None, token_attest=table)
    return RequestOutput("e", None, [1], None, [completion], False)


def two_choices() -> list[RequestOutput]:
    """Return the deltas of a request with n = 2, one choice in each message, as the engine sends them."""
    deltas = []
    for position in range(3):
        for index in (0, 1):
            output = make_output(index, [10 * index + position], position)
            output.outputs[0].text = "x"
            output.outputs[0].finish_reason = "length" if position == 2 else None
            deltas.append(output)
    return deltas
