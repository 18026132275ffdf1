"""Draws, rows and labels on the real engine: what users reported of seeds, logprobs and neighbours, made right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epochless_vllm.plugin.token_rows import FILTERED, FLAGS, GREEDY, KEPT, LO, LORA, RESTRICTED, W
from epochless_vllm.protocol.sampler_config import sampler_from_parameters
from tests.engines import finish, make_engine
from tests.plugin.draws import Logits, expected_rows, penalised, seeded, unseeded
from tests.tiny_model import make_adapter, make_model

pytestmark = pytest.mark.engine

SHORT = "A draw is a token's position."
LONG = "This prompt is longer than what one step takes in, so that it is computed in several parts. " * 3
VOCABULARY = 258
SETTINGS: dict[str, Any] = {
    "max_loras": 4,
    "max_cpu_loras": 8,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 96,
    "max_logprobs": VOCABULARY,
    "logprobs_mode": "raw_logits",
}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attestation")


@pytest.fixture(scope="module")
def engines(root: Path) -> Iterator[Callable[..., Any]]:
    """Start an engine, ending the one before it."""
    make_model(root / "model")
    running: list[Any] = []

    def start_engine(**settings: Any) -> Any:
        if running:
            running.pop().llm_engine.engine_core.shutdown()
        engine = make_engine(root / "model", root / "store", epochless={"keep": None}, **{**SETTINGS, **settings})
        running.append(engine)
        return engine

    yield start_engine
    running.pop().llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def llm(engines: Callable[..., Any]) -> Any:
    return engines()


@pytest.fixture(scope="module")
def loras(llm: Any, root: Path) -> list[Any]:
    """Three revisions, under three policies."""
    from epochless_vllm.plugin.engine import publish, resolve

    for seed in (1, 2, 3):
        publish(llm, make_adapter(root / f"a{seed}", seed=seed), policy=f"policy-{seed}")
    return [resolve(llm, f"policy-{seed}") for seed in (1, 2, 3)]


def add(llm: Any, prompt: str, *, lora: Any = None, tokens: int = 24, salt: str | None = None, **fields: Any) -> str:
    from vllm import SamplingParams

    request_id = f"attest-{next(_numbers)}"
    params = SamplingParams(max_tokens=tokens, **{"ignore_eos": True, **fields})
    # A salt of its own keeps a request away from what an earlier one cached, and so from another split of its prompt.
    text: Any = {"prompt": prompt, "cache_salt": salt or request_id}
    llm.llm_engine.add_request(request_id, text, params, lora_request=lora)
    return request_id


def run(llm: Any, prompt: str = SHORT, **fields: Any) -> Any:
    request_id = add(llm, prompt, **fields)
    return finish(llm)[request_id].outputs[0]


def rows_of(completion: Any) -> np.ndarray[Any, Any]:
    """Return the rows, which are as many as the tokens."""
    rows: np.ndarray[Any, Any] = completion.token_attest
    assert rows.shape == (len(completion.token_ids), 5)
    assert rows.dtype == np.int64
    return rows


def raw_logits(completion: Any) -> Logits:
    """Return what each token was drawn from before any processor, as the engine's own logprobs report it."""
    table = np.empty((len(completion.token_ids), VOCABULARY), dtype=np.float32)
    for row, values in zip(table, completion.logprobs, strict=True):
        for token, value in values.items():
            row[token] = value.logprob
    return table


def check(completion: Any, logits: Logits, key: tuple[int, int], flags: int = 0, **sampler: Any) -> None:
    """Compare tokens and rows with an independent sampler's from the same logits."""
    config = sampler_from_parameters(**{"temperature": 1.0, **sampler})
    tokens, expected = expected_rows(logits, config, key)
    rows = rows_of(completion)
    assert list(completion.token_ids) == tokens
    assert rows[:, [LO, W, KEPT]].tolist() == expected
    assert set(rows[:, FLAGS].tolist()) == {flags | (FILTERED if config.filtered else 0)}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9}])
def test_recorded_probability_is_recomputed_from_the_logits(
    llm: Any, loras: list[Any], filters: dict[str, Any], temperature: float
) -> None:
    out = run(llm, lora=loras[0], seed=11, temperature=temperature, logprobs=VOCABULARY, **filters)
    check(out, raw_logits(out), seeded(11), temperature=temperature, **filters)
    assert set(rows_of(out)[:, LORA].tolist()) == {loras[0].lora_int_id}


def test_recorded_probability_is_that_of_the_penalised_logits(llm: Any) -> None:
    fields = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.7}
    out = run(llm, seed=12, temperature=0.7, top_p=0.8, logprobs=VOCABULARY, tokens=40, **fields)
    prompt = llm.get_tokenizer().encode(SHORT)
    logits = penalised(raw_logits(out), prompt, list(out.token_ids), *fields.values())
    check(out, logits, seeded(12), temperature=0.7, top_p=0.8)


def test_bias_allowed_tokens_bad_words_and_min_tokens_are_inside_the_recorded_probability(llm: Any) -> None:
    allowed = [*range(97, 123), 257]
    fields: dict[str, Any] = {
        "logit_bias": {100: 3.0, 101: -2.0}, "allowed_token_ids": allowed, "min_tokens": 12, "bad_words": ["f"],
    }  # fmt: skip
    out = run(llm, seed=13, logprobs=VOCABULARY, tokens=12, ignore_eos=False, **fields)
    logits = raw_logits(out)
    logits[:, 100] += np.float32(3)
    logits[:, 101] -= np.float32(2)
    banned = np.full(VOCABULARY, True)
    banned[allowed] = False
    banned[[257, 102]] = True  # the end of the sequence before min_tokens, and the bad word
    logits[:, banned] = -np.inf
    check(out, logits, seeded(13), RESTRICTED)


def test_greedy_tokens_have_probability_one(llm: Any, loras: list[Any]) -> None:
    out = run(llm, lora=loras[1], temperature=0, seed=5, logprobs=VOCABULARY)
    assert list(out.token_ids) == raw_logits(out).argmax(axis=1).tolist()
    assert rows_of(out).tolist() == [[loras[1].lora_int_id, 0, 1 << 32, GREEDY, 0]] * 24


def test_unseeded_requests_draw_from_the_material_that_travels_with_them(llm: Any) -> None:
    material = {"seed": "5a" * 32, "nonce": "client", "request": "external", "prompt": 3, "choice": 2}
    out = run(llm, logprobs=VOCABULARY, extra_args={"epochless": material})
    check(out, raw_logits(out), unseeded(material))
    assert list(run(llm).token_ids) != list(run(llm).token_ids)


def test_choices_draw_apart_from_one_seed(llm: Any) -> None:
    from vllm import SamplingParams

    for n in (1, 3):
        params = SamplingParams(seed=21, n=n, max_tokens=16, ignore_eos=True, logprobs=VOCABULARY)
        for result in llm.generate([SHORT, SHORT], params, use_tqdm=False):
            assert len(result.outputs) == n
            for choice in result.outputs:
                check(choice, raw_logits(choice), seeded(21, choice=choice.index))


@pytest.mark.parametrize("size", [2, 7, 64])
def test_a_seeded_stream_is_the_same_alone_among_unseeded_neighbours_and_in_any_order(
    llm: Any, loras: list[Any], size: int
) -> None:
    fields: dict[str, Any] = {"seed": 42, "tokens": 20, "lora": loras[0], "salt": "stream"}
    run(llm, **fields)  # fills the prefix cache
    alone = list(run(llm, **fields).token_ids)
    for place in sorted({0, size // 2, size - 1}):
        ids = []
        for row in range(size):
            if row == place:
                ids.append(add(llm, SHORT, **fields))
            else:
                kind: dict[str, Any] = [{}, {"seed": row}, {"temperature": 0}, {"top_p": 0.5}][row % 4]
                add(llm, f"{row}: {SHORT}", tokens=4 + row % 13, lora=[*loras, None][row % 4], **kind)
        assert list(finish(llm)[ids[0]].outputs[0].token_ids) == alone


def test_a_seeded_chunked_prefill_keeps_its_stream_and_the_engine(llm: Any) -> None:
    out = run(llm, LONG, seed=8, logprobs=VOCABULARY)
    check(out, raw_logits(out), seeded(8))
    ids = [add(llm, LONG, seed=8), *(add(llm, f"{n}{LONG}", seed=n) for n in range(3))]
    assert list(finish(llm)[ids[0]].outputs[0].token_ids) == list(out.token_ids)


def test_preemption_does_not_move_a_draw(llm: Any, loras: list[Any]) -> None:
    quiet = run(llm, LONG, seed=9, lora=loras[2], tokens=40)
    request_id = add(llm, LONG, seed=9, lora=loras[2], tokens=40)
    other = add(llm, LONG[5:], tokens=30)
    preempted = []

    def preempt() -> None:
        preempted.append(llm.reset_prefix_cache(reset_running_requests=True))

    outputs = finish(llm, {12: preempt, 13: preempt, 25: preempt})
    assert preempted == [True] * 3
    assert list(outputs[request_id].outputs[0].token_ids) == list(quiet.token_ids)
    assert len(rows_of(outputs[request_id].outputs[0])) == 40
    assert len(rows_of(outputs[other].outputs[0])) == 30


def test_a_grammar_holds_and_its_rows_say_so(llm: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(choice=["publish", "retire"])
    ids = [add(llm, SHORT, structured_outputs=grammar, seed=s, ignore_eos=False, tokens=12) for s in range(4)]
    free = add(llm, SHORT, seed=1)
    outputs = finish(llm)
    for request_id in ids:
        out = outputs[request_id].outputs[0]
        assert out.text in ("publish", "retire")
        assert set(rows_of(out)[:, FLAGS].tolist()) == {RESTRICTED}
        assert (rows_of(out)[1:-1, W] == 1 << 32).all()  # after the first letter one token is left
    assert set(rows_of(outputs[free].outputs[0])[:, FLAGS].tolist()) == {0}


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def test_logits_that_are_not_finite_end_their_request_with_the_reason_and_no_other(
    llm: Any, loras: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from epochless_vllm.plugin.failed_rows import REASON

    quiet = run(llm, seed=3, lora=loras[0])
    runner, sick = runner_of(llm), []
    original = runner._sample

    def _sample(logits: Any, metadata: Any) -> Any:
        batch = runner.input_batch
        for index, request_id in enumerate(batch.req_ids):
            emitted = batch.num_tokens_no_spec[index] - batch.num_prompt_tokens[index]
            if any(request_id.startswith(name) for name in sick) and emitted == 6:
                logits[index, 17] = float("nan")
        return original(logits, metadata)

    monkeypatch.setattr(runner, "_sample", _sample)
    healthy = add(llm, SHORT, seed=3, lora=loras[0])
    sick.append(add(llm, LONG, seed=4, salt="sick"))
    after = add(llm, SHORT)
    outputs = finish(llm)
    failed = outputs[sick[0]].outputs[0]
    assert (failed.finish_reason, failed.stop_reason) == ("error", REASON)
    assert len(failed.token_ids) == len(rows_of(failed)) == 6
    assert list(outputs[healthy].outputs[0].token_ids) == list(quiet.token_ids)
    assert outputs[after].outputs[0].finish_reason == "length"
    sick.clear()
    again = add(llm, LONG, seed=4, salt="sick")
    assert finish(llm)[again].num_cached_tokens == 0


def test_rows_name_the_revision_of_their_step_while_others_are_published(
    llm: Any, loras: list[Any], root: Path
) -> None:
    from epochless_vllm.plugin.engine import publish, resolve, retire, service_of

    expected = {}
    for lora in (*loras, None, *loras, None):
        expected[add(llm, SHORT, lora=lora, tokens=32)] = 0 if lora is None else lora.lora_int_id
    fresh = [make_adapter(root / f"fresh{seed}", seed=seed) for seed in (21, 22)]

    def publish_and_use(step: int) -> None:
        publish(llm, fresh[step], policy="policy-1", step=100 + step)
        lora = resolve(llm, "policy-1")
        expected[add(llm, SHORT, lora=lora, tokens=8)] = lora.lora_int_id

    outputs = finish(llm, {5: lambda: publish_and_use(0), 15: lambda: publish_and_use(1)})
    service = service_of(llm)
    for request_id, lora_int_id in expected.items():
        assert set(rows_of(outputs[request_id].outputs[0])[:, LORA].tolist()) == {lora_int_id}
        if lora_int_id:
            assert service.publication_of(lora_int_id, None).lora_int_id == lora_int_id
    assert len(set(expected.values())) == 6
    last = service.publication_of(max(expected.values()), "policy-1")
    assert (last.policy, last.step) == ("policy-1", 101)
    retire(llm, "policy-1-v100")
    assert service.publication_of(last.lora_int_id - 1, "policy-1").step == 100
    assert service.publication_of(10_000, None) is None


def stream(llm: Any, request_id: str) -> list[Any]:
    chunks = []
    while llm.llm_engine.has_unfinished_requests():
        chunks += [output for output in llm.llm_engine.step() if output.request_id == request_id]
    return chunks


def test_every_chunk_has_as_many_rows_as_tokens_with_stop_strings_and_merged_deltas(llm: Any) -> None:
    from vllm.sampling_params import RequestOutputKind

    whole = run(llm, seed=31, tokens=30)
    stop = whole.text[9:12]
    assert stop not in whole.text[:9]
    for merge in (1, 3, 100):
        request_id = add(llm, SHORT, seed=31, tokens=30, stop=[stop], output_kind=RequestOutputKind.DELTA)
        chunks = stream(llm, request_id)
        merged: list[Any] = []
        for number, chunk in enumerate(chunks):
            if number % merge == 0:
                merged.append(chunk)
            else:
                merged[-1].add(chunk, aggregate=True)
        rows = [rows_of(chunk.outputs[0]) for chunk in merged if chunk.outputs[0].token_ids]
        tokens = [token for chunk in merged for token in chunk.outputs[0].token_ids]
        assert merged[-1].outputs[0].finish_reason == "stop"
        assert tokens == list(whole.token_ids)[: len(tokens)]
        assert len(tokens) < 30
        assert np.concatenate(rows).tolist() == rows_of(whole)[: len(tokens)].tolist()


def test_an_abort_and_a_beam_search_leave_the_streams_beside_them(llm: Any, loras: list[Any]) -> None:
    from vllm.sampling_params import BeamSearchParams

    quiet = run(llm, seed=51, lora=loras[0])
    kept, dropped = add(llm, SHORT, seed=51, lora=loras[0]), add(llm, SHORT, lora=loras[1], tokens=200)
    outputs = finish(llm, {4: lambda: llm.llm_engine.abort_request([dropped])})
    assert list(outputs[kept].outputs[0].token_ids) == list(quiet.token_ids)
    (beams,) = llm.beam_search([{"prompt": SHORT}], BeamSearchParams(beam_width=2, max_tokens=4))
    assert len(beams.sequences) == 2


def test_a_malformed_contract_is_refused_before_the_engine_holds_the_request(llm: Any) -> None:
    with pytest.raises(ValueError, match=r"extra_args\.epochless\.seed"):
        add(llm, SHORT, extra_args={"epochless": {"seed": "short"}})
    assert not llm.llm_engine.has_unfinished_requests()


SEEDED_AFTER_RESTART: Sequence[tuple[str, dict[str, Any]]] = (
    (SHORT, {"seed": 61}),
    (LONG, {"seed": 62, "top_p": 0.9}),
    (LONG, {"seed": 63, "temperature": 0.5, "min_p": 0.02}),
)


def test_a_restarted_engine_with_other_batch_sizes_draws_the_same(
    llm: Any, loras: list[Any], engines: Callable[..., Any]
) -> None:
    """The last test: it ends the module's engine. The second one also returns logprobs of what was drawn from."""
    from epochless_vllm.plugin.engine import resolve

    material = {"seed": "c3" * 32, "nonce": "n", "request": "same", "prompt": 0, "choice": 0}
    requests = [*SEEDED_AFTER_RESTART, (SHORT, {"extra_args": {"epochless": material}})]
    before = [run(llm, prompt, lora=loras[1], **fields) for prompt, fields in requests]
    restarted = engines(max_num_batched_tokens=1024, max_num_seqs=8, logprobs_mode="processed_logprobs")
    lora = resolve(restarted, "policy-2")
    assert lora.lora_int_id == loras[1].lora_int_id
    for (prompt, fields), earlier in zip(requests, before, strict=True):
        out = run(restarted, prompt, lora=lora, logprobs=0, **fields)
        assert list(out.token_ids) == list(earlier.token_ids)
        for token, row, values in zip(out.token_ids, rows_of(out), out.logprobs, strict=True):
            assert values[token].logprob == pytest.approx(math.log(row[W] / 2**32), abs=4e-4)
