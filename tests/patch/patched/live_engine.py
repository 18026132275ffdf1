"""The seams in a running engine, in process; run by test_live_engine in a process whose vllm is a patched copy.

The sampler is given rows ``[token id, row of the batch]``, as a plugin would; the plugin itself is not loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.sampler import Sampler

from tests.tiny_model import make_adapter, make_model

OPTIONS = {
    "enforce_eager": True,
    "max_model_len": 128,
    "dtype": "float32",
    "seed": 0,
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 4,
    "max_num_batched_tokens": 32,  # prompts are prefilled in chunks
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> LLM:
    return LLM(str(model), **OPTIONS)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: LoRARequest(name, number, str(make_adapter(root / name, seed=number)))
        for number, name in enumerate("ABC", 1)
    }


@pytest.fixture
def attested(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Sampler.forward

    def with_rows(self: Sampler, *arguments: object, **keywords: object) -> SamplerOutput:
        output = forward(self, *arguments, **keywords)
        tokens = output.sampled_token_ids.to(torch.int64)
        batch_rows = torch.arange(len(tokens)).reshape(-1, 1)
        output.token_attest = torch.stack([tokens, batch_rows], dim=-1)
        return output

    monkeypatch.setattr(Sampler, "forward", with_rows)


def run(engine: LLM, requests: list[tuple[str, SamplingParams, LoRARequest | None]]) -> Iterator[list[RequestOutput]]:
    """Yield the outputs of each step until all requests are finished."""
    core = engine.llm_engine
    for number, (prompt, params, adapter) in enumerate(requests):
        core.add_request(f"{number}", {"prompt": prompt}, params, lora_request=adapter)
    while core.has_unfinished_requests():
        yield core.step()


def drain(steps: Iterator[list[RequestOutput]]) -> list[RequestOutput]:
    return [output for outputs in steps for output in outputs]


@pytest.mark.usefixtures("attested")
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_each_token_of_a_live_engine_has_its_row(
    engine: LLM, adapters: dict[str, LoRARequest], kind: RequestOutputKind
):
    params = [
        SamplingParams(max_tokens=8, output_kind=kind, ignore_eos=True),
        SamplingParams(max_tokens=7, n=2, output_kind=kind, ignore_eos=True),
        SamplingParams(max_tokens=12, stop=list("etaoin"), output_kind=kind, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0.0, output_kind=kind, ignore_eos=True),
    ]
    prompts = ["short", "p" * 50, "middle", "q" * 70]
    seen: dict[tuple[str, int], list[int]] = {}
    wanted = zip(prompts, params, [None, adapters["A"], adapters["B"], None], strict=True)
    for outputs in run(engine, list(wanted)):  # looked at in each step: cumulative token lists grow in place
        for completion, request in [(c, output.request_id) for output in outputs for c in output.outputs]:
            assert completion.token_attest.shape == (len(completion.token_ids), 2)
            assert completion.token_attest[:, 0].tolist() == list(completion.token_ids)
            tokens = seen.get((request, completion.index), []) if kind == RequestOutputKind.DELTA else []
            seen[request, completion.index] = tokens + list(completion.token_ids)
    assert {key: len(tokens) for key, tokens in seen.items() if key[0] != "2"} == {
        ("0", 0): 8,
        ("1", 0): 7,
        ("1", 1): 7,
        ("3", 0): 5,
    }


def test_an_engine_whose_sampler_records_nothing_sends_no_rows(engine: LLM):
    outputs = drain(run(engine, [("x", SamplingParams(max_tokens=3), None)]))
    assert all(completion.token_attest is None for output in outputs for completion in output.outputs)


def test_loading_an_adapter_leaves_running_requests_alone(engine: LLM, adapters: dict[str, LoRARequest]):
    """Two adapters fill both slots; a third is loaded in the middle and takes one of them."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    requests = [("hello", params, adapters["A"]), ("world", params, adapters["C"])]

    def tokens(outputs: list[RequestOutput]) -> dict[str, list[int]]:
        return {output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished}

    engine.llm_engine.remove_lora(2)
    undisturbed = tokens(drain(run(engine, requests)))
    steps = run(engine, requests)
    outputs = list(itertools.chain.from_iterable(itertools.islice(steps, 5)))
    assert engine.llm_engine.add_lora(adapters["B"])
    assert tokens(outputs + drain(steps)) == undisturbed


def test_an_engine_that_asks_for_epochless_does_not_start_without_the_plugin(model: Path):
    with pytest.raises(RuntimeError, match="plugin is not active in this process"):
        LLM(str(model), additional_config={"epochless": {"store": "s"}}, **OPTIONS)


def test_the_worker_and_the_core_refuse_a_configuration_made_where_the_plugin_was_active(
    engine: LLM, monkeypatch: pytest.MonkeyPatch
):
    config = engine.llm_engine.vllm_config
    monkeypatch.setitem(config.additional_config, "epochless", {})
    with pytest.raises(RuntimeError, match="plugin is not active in this process"):
        VllmConfig.activate_epochless(config)
