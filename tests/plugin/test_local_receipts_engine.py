"""Receipts of an engine in this process: every parameter that moves a probability, verified and held to logprobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from epochless_vllm.errors import InvalidRequestError, TokenRowsError
from epochless_vllm.protocol.compact import encode_compact
from epochless_vllm.verify import Verdict, verify_receipt
from tests.engines import finish, make_engine
from tests.tiny_model import make_adapter, make_model

pytestmark = pytest.mark.engine

PROMPTS = ["The first prompt. ", "Another one, longer than the first was. "]
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0, "n": 1},
    "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "seeded": {"seed": 5},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    "allowed": {"allowed_token_ids": list(range(40, 80)), "ignore_eos": True},
    "stop token": {"stop_token_ids": list(range(60, 120))},
    "stop string": {"stop": ["a", "e", "o"]},
    "bias and minimum": {"logit_bias": {50: 5.0}, "min_tokens": 4},
    "bad words": {"bad_words": ["a", "b"]},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from epochless_vllm.plugin.engine import publish

    root = tmp_path_factory.mktemp("local")
    make_model(root / "model")
    llm = make_engine(root / "model", root / "store")
    publish(llm, make_adapter(root / "a", seed=1), policy="policy", step=3)
    yield llm
    del llm


def generate(llm: Any, model: str | None, **parameters: Any) -> list[Any]:
    from vllm import SamplingParams

    from epochless_vllm.plugin.engine import resolve

    params = SamplingParams(**{"temperature": 0.9, "max_tokens": 80, "n": 2, "logprobs": 0, **parameters})
    lora = None if model is None else resolve(llm, model)
    return list(llm.generate(PROMPTS, params, lora_request=lora, use_tqdm=False))


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_every_completion_has_a_receipt_that_verifies(llm: Any, name: str) -> None:
    from epochless_vllm.plugin.engine import receipts

    seen = set()
    for output in generate(llm, "policy", **PARAMETERS[name]):
        sealed = receipts(output)
        assert len(sealed) == len(output.outputs)
        for receipt, completion in zip(sealed, output.outputs, strict=True):
            verified = verify_receipt(
                encode_compact(receipt),
                token_ids=list(completion.token_ids),
                prompt_token_ids=output.prompt_token_ids,
                finish_reason=completion.finish_reason,
                seed=PARAMETERS[name].get("seed"),
            )
            assert verified.verdict is Verdict.SAMPLING_CONSISTENT
            assert verified.header.revisions[0].step == 3
            assert verified.final is not None
            seen.add((verified.header.choice_index, completion.finish_reason, verified.final.seed))
    assert len(seen) > 1 or name == "greedy"


def test_base_rows_name_the_base_model_and_raw_logprobs_agree(llm: Any) -> None:
    from math import log

    from epochless_vllm.plugin.engine import receipts

    for output in generate(llm, None, temperature=1.0):
        for receipt, completion in zip(receipts(output), output.outputs, strict=True):
            assert receipt.header.revisions[0].revision == f"base:{receipt.header.base}"
            exact = [log((most + 1) / 2**32) for block in receipt.blocks for most in block.width_less_one]
            vllms = [
                entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
            ]
            assert exact == pytest.approx(vllms, abs=4e-4)


def test_an_output_without_a_receipt_says_why(llm: Any) -> None:
    from vllm.sampling_params import RequestOutputKind

    from epochless_vllm.plugin.engine import receipts

    with pytest.raises(InvalidRequestError, match="DELTA"):
        receipts(object())
    for output in generate(llm, None, output_kind=RequestOutputKind.FINAL_ONLY):
        assert len(receipts(output)) == 2


def test_nothing_is_remembered_of_requests_that_ended_or_were_aborted(llm: Any) -> None:
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request("aborted-1", {"prompt": "x"}, SamplingParams(max_tokens=50))
    engine.step()
    engine.abort_request(["aborted-1"])
    assert engine.__dict__.get("_epochless_pending") == {}


def test_a_preempted_request_says_so_and_its_draws_stand(llm: Any) -> None:
    from vllm import SamplingParams

    from epochless_vllm.plugin.engine import receipts, resolve

    engine, tokens = llm.llm_engine, []
    for preempted in (False, True):
        params = SamplingParams(temperature=0.9, max_tokens=30, seed=11, ignore_eos=True)
        name = f"preempted-{preempted}"
        engine.add_request(name, {"prompt": PROMPTS[0]}, params, lora_request=resolve(llm, "policy"))
        for _ in range(10):
            engine.step()
        if preempted:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        (output,) = finish(llm).values()
        (receipt,) = receipts(output)
        assert receipt.final.kv_rebuilds == int(preempted)
        tokens.append(list(output.outputs[0].token_ids))
        verified = verify_receipt(encode_compact(receipt), token_ids=tokens[-1], seed=11)
        assert verified.verdict is Verdict.SAMPLING_CONSISTENT
    assert tokens[0] == tokens[1]


def test_receipts_made_beside_the_step_loop_are_those_made_in_it(llm: Any) -> None:
    from epochless_vllm.plugin.engine import receipts, seal

    outputs = generate(llm, "policy", n=3, max_tokens=150) + generate(llm, None, seed=3)
    futures = [seal(output) for output in outputs]
    for output, future in zip(outputs, futures, strict=True):
        assert [encode_compact(each) for each in future.result(60)] == [
            encode_compact(each) for each in receipts(output)
        ]
    outputs[0].outputs[0].token_attest = None
    with pytest.raises(TokenRowsError, match="0 rows"):
        seal(outputs[0]).result(60)
    with pytest.raises(InvalidRequestError, match="DELTA"):
        seal(object())


def test_a_receipt_states_the_parameters_that_were_sampled_with_whatever_became_of_the_callers(llm: Any) -> None:
    from vllm import SamplingParams

    from epochless_vllm.plugin.engine import receipts

    params = SamplingParams(temperature=0.5, top_k=30, max_tokens=8, ignore_eos=True)
    llm.llm_engine.add_request("changed", {"prompt": PROMPTS[0]}, params)
    params.temperature, params.top_k, params.max_tokens, params.n = 1.0, 0, 100, 2
    (receipt,) = receipts(finish(llm)["changed"])
    (sampler,) = receipt.header.samplers
    assert (float(sampler.temperature), sampler.top_k, receipt.header.max_tokens) == (0.5, 30, 8)
    assert receipt.final.tokens == 8
