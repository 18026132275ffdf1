"""The sampling seam without an engine: vLLM's own batch metadata in, tokens, rows and logprobs out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from epochless_vllm.errors import SamplingFailedError
from epochless_vllm.protocol import records
from epochless_vllm.protocol.sampler_config import sampler_from_parameters
from tests.plugin.draws import expected_rows, seeded

pytest.importorskip("vllm.v1.sample.sampler")

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors, MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from epochless_vllm.plugin import draw_batch, failed_rows
from epochless_vllm.plugin.draw_batch import DrawBatch, pack_request
from epochless_vllm.plugin.draw_keys import prepare_request
from epochless_vllm.plugin.exact_sampler import ExactSampler, has_custom_processors
from epochless_vllm.plugin.token_rows import (
    FAILED,
    FILTERED,
    FLAGS,
    GREEDY,
    KEPT,
    LO,
    LORA,
    RESTRICTED,
    W,
    record_flags,
)
from epochless_vllm.sampling import Sampled, sample_rows

VOCABULARY = 300
FILTERS: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}]


def request(lora: int = 0, **fields: Any) -> Any:
    """A request as the runner keeps it, past the gate."""
    params = SamplingParams(**fields)
    prepare_request(SimpleNamespace(sampling_params=params, request_id="r", external_req_id="r", resumable=False))
    return SimpleNamespace(sampling_params=params, lora=lora)


def batch_of(requests: list[Any], emitted: list[int]) -> Any:
    """An input batch of the requests, each with a prompt of three tokens and ``emitted`` tokens after it."""
    from vllm.v1.sample.metadata import SamplingMetadata

    rows, greedy = len(requests), [r.sampling_params.temperature == 0 for r in requests]
    metadata = SamplingMetadata(
        temperature=torch.tensor([r.sampling_params.temperature for r in requests]),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return SimpleNamespace(
        num_reqs=rows,
        req_ids=[str(row) for row in range(rows)],
        sampling_metadata=metadata,
        num_tokens_no_spec=np.array([3 + count for count in emitted], dtype=np.int32),
        num_prompt_tokens=np.full(rows, 3, dtype=np.int32),
        request_lora_mapping=np.array([r.lora for r in requests], dtype=np.int64),
    )


def sample(
    requests: list[Any], emitted: list[int], logits: torch.Tensor, mode: Any = "raw_logprobs"
) -> tuple[Any, np.ndarray[Any, Any]]:
    draws = DrawBatch("cpu", restricted=False)
    sampler = ExactSampler(Sampler(mode), draws)
    batch = batch_of(requests, emitted)
    draws.refresh(batch, {str(row): item for row, item in enumerate(requests)})
    sampler.stepping = True
    output = sampler(logits=logits.clone(), sampling_metadata=batch.sampling_metadata)
    assert output.token_attest.shape == (len(requests), 1, 5)
    assert output.token_attest.dtype == torch.int64
    return output, output.token_attest[:, 0].numpy()


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_tokens_and_rows_are_those_of_an_independent_sampler(filters: dict[str, Any], temperature: float) -> None:
    logits = random_logits(16)
    config = sampler_from_parameters(temperature=temperature, **filters)
    requests = [request(lora=2, seed=9, temperature=temperature, **filters) for _ in range(16)]
    output, rows = sample(requests, list(range(16)), logits)
    tokens, expected = expected_rows(logits.numpy(), config, seeded(9))
    assert output.sampled_token_ids[:, 0].tolist() == tokens
    assert rows[:, [LO, W, KEPT]].tolist() == expected
    assert set(rows[:, FLAGS].tolist()) == {FILTERED if filters else 0}
    assert set(rows[:, LORA].tolist()) == {2}


def test_greedy_rows_take_the_likeliest_token_and_no_draw() -> None:
    logits = random_logits(4)
    output, rows = sample([request(temperature=0) for _ in range(4)], [0] * 4, logits)
    assert output.sampled_token_ids[:, 0].tolist() == logits.argmax(dim=1).tolist()
    assert rows.tolist() == [[0, 0, 1 << 32, GREEDY, 0]] * 4


def test_a_row_is_the_same_alone_among_neighbours_in_any_order_and_in_any_batch() -> None:
    logits = random_logits(64, seed=1)
    kinds: list[dict[str, Any]] = [{"seed": 5}, {}, {"temperature": 0}, {"seed": 6, "top_p": 0.8}, {"top_k": 3}]
    requests = [request(lora=row % 3, **kinds[row % len(kinds)]) for row in range(64)]
    emitted = [row * 7 for row in range(64)]
    alone = [sample([requests[row]], [emitted[row]], logits[row : row + 1]) for row in range(64)]
    rng = random.Random(0)
    for size in (1, 2, 3, 8, 17, 64):
        chosen = rng.sample(range(64), size)
        output, rows = sample([requests[i] for i in chosen], [emitted[i] for i in chosen], logits[chosen])
        assert output.sampled_token_ids[:, 0].tolist() == [int(alone[i][0].sampled_token_ids) for i in chosen]
        assert rows.tolist() == [alone[i][1][0].tolist() for i in chosen]


def test_the_position_alone_moves_a_draw() -> None:
    logits = (random_logits(1) / 10).expand(8, -1)  # nearly flat: a draw in every place
    output, _ = sample([request(seed=1)] * 8, [0, 1, 2, 3, 4, 5, 1, 0], logits)
    tokens, _ = expected_rows(logits[:6].numpy(), sampler_from_parameters(temperature=1.0), seeded(1))
    drawn = output.sampled_token_ids[:, 0].tolist()
    assert drawn == [*tokens, tokens[1], tokens[0]]
    assert len(set(tokens)) == 6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_fail_their_row_alone(value: float) -> None:
    logits = random_logits(3)
    whole, _ = sample([request(seed=2)] * 3, [0, 1, 2], logits)
    logits[1, 7] = value
    output, rows = sample([request(seed=2)] * 3, [0, 1, 2], logits)
    assert (rows[:, FLAGS] & FAILED).tolist() == [0, FAILED, 0]
    assert output.sampled_token_ids[[0, 2]].tolist() == whole.sampled_token_ids[[0, 2]].tolist()
    logits[1] = float("-inf")
    assert (sample([request(seed=2)] * 3, [0, 1, 2], logits)[1][:, FLAGS] & FAILED).tolist() == [0, FAILED, 0]


def test_members_are_stacked_when_they_change_and_positions_and_adapters_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = []
    original = pack_request
    monkeypatch.setattr(draw_batch, "pack_request", lambda *a, **k: packed.append(1) or original(*a, **k))
    draws = DrawBatch("cpu", restricted=False)
    requests = {str(row): request(seed=row) for row in range(3)}
    batch = batch_of(list(requests.values()), [0, 4, 5])
    draws.refresh(batch, requests)
    first = draws.parameters
    batch.num_tokens_no_spec += 1
    batch.request_lora_mapping[:] = 7
    draws.refresh(batch, requests)
    assert draws.parameters is first
    assert draws.positions.tolist() == [1, 5, 6]
    assert draws.rows_of(_sampled(3))[:, 0, LORA].tolist() == [7, 7, 7]
    batch.request_lora_mapping[:] = 8
    assert draws.rows_of(_sampled(3))[:, 0, LORA].tolist() == [7, 7, 7]
    batch.sampling_metadata = object()  # what the batch does when a row changes its place
    draws.refresh(batch, requests)
    assert draws.parameters is not first
    assert len(packed) == 3


def test_rows_are_the_same_on_the_host_and_on_a_device() -> None:
    kinds: list[dict[str, Any]] = [{"seed": 1}, {"top_k": 4}, {"temperature": 0}, {"top_p": 0.4, "seed": 3}]
    requests = [request(lora=row, **kinds[row % 4]) for row in range(16)]
    logits = random_logits(16)
    logits[[2, 5], 3] = float("nan")
    draws = DrawBatch("cpu", restricted=True)
    draws.refresh(batch_of(requests, [0] * 16), {str(row): item for row, item in enumerate(requests)})
    sampled = sample_rows(logits, draws.parameters, draws.keys, draws.positions)
    assert torch.equal(draws.rows_of(sampled), draws._rows_on_device(sampled))


def _sampled(rows: int) -> Any:
    return Sampled(torch.zeros(rows, dtype=torch.int64), torch.zeros((rows, 5), dtype=torch.int64))


def test_flags_are_those_of_the_request() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    def flags(restricted: bool = False, **fields: Any) -> int:
        return pack_request(request(**fields).sampling_params, restricted=restricted).flags

    assert flags() == flags(min_tokens=3, logit_bias={1: 2.0}, repetition_penalty=1.2) == 0
    assert flags(temperature=0, top_k=5, top_p=0.5) == GREEDY  # vLLM drops the filters of a greedy request
    assert flags(top_k=1_000_000) == flags(top_p=0.5) == flags(min_p=0.5) == FILTERED
    assert flags(allowed_token_ids=[1, 2]) == flags(restricted=True) == RESTRICTED
    assert flags(structured_outputs=StructuredOutputsParams(choice=["a", "b"])) == RESTRICTED
    assert flags(thinking_token_budget=3, top_k=2) == RESTRICTED | FILTERED


def test_row_flags_mean_the_record_flags_of_a_receipt() -> None:
    assert record_flags(GREEDY) == record_flags(0) == 0
    assert record_flags(FILTERED) == records.FILTERED
    assert record_flags(RESTRICTED | FILTERED) == records.MASKED | records.FILTERED
    with pytest.raises(ValueError, match="failed"):
        record_flags(FAILED)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_processed_logprobs_are_of_the_distribution_that_was_drawn_from(filters: dict[str, Any]) -> None:
    """ln(w / 2**32) of every drawn token, up to the integer weights' rounding; -inf for what could not be drawn."""
    logits = random_logits(8)
    requests = [request(seed=3, temperature=0.8, **filters) for _ in range(8)]
    output, rows = sample(requests, list(range(8)), logits, "processed_logprobs")
    logprobs = output.logprobs_tensors.logprobs[:, 0].numpy()
    assert logprobs == pytest.approx(np.log(rows[:, W] / 2**32), abs=4e-4)
    _, plain = sample(requests, list(range(8)), logits, "raw_logprobs")
    assert plain.tolist() == rows.tolist()


def test_raw_modes_return_what_stock_vllm_returns_and_processed_logits_are_scaled_and_masked() -> None:
    logits = random_logits(4)
    requests = [request(temperature=0.5, top_k=3, seed=row) for row in range(3)] + [request(temperature=0)]
    output, _ = sample(requests, [0] * 4, logits, "raw_logprobs")
    tokens = output.sampled_token_ids.long()
    expected = logits.log_softmax(dim=1).gather(1, tokens)[:, 0]
    assert torch.equal(output.logprobs_tensors.logprobs[:, 0], expected)
    raw, _ = sample(requests, [0] * 4, logits, "raw_logits")
    assert torch.equal(raw.logprobs_tensors.logprobs[:, 0], logits.gather(1, tokens)[:, 0])
    processed, _ = sample(requests, [0] * 4, logits, "processed_logits")
    scale = torch.tensor([0.5, 0.5, 0.5, 1.0])
    assert torch.equal(processed.logprobs_tensors.logprobs[:, 0], logits.gather(1, tokens)[:, 0] / scale)


class Processor:
    """A custom processor that says it keeps the argmax, as vLLM calls it."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.apply = change

    def is_argmax_invariant(self) -> bool:
        return True


def processed(requests: list[Any], logits: torch.Tensor, *changes: Any) -> tuple[Any, list[list[int]]]:
    """Return (tokens, rows) of a step under custom processors."""
    draws = DrawBatch("cpu", restricted=True)
    sampler = ExactSampler(Sampler(), draws)
    batch = batch_of(requests, [0] * len(requests))
    batch.sampling_metadata.logitsprocs = LogitsProcessors([Processor(change) for change in changes])  # type: ignore[misc]
    draws.refresh(batch, {str(row): item for row, item in enumerate(requests)})
    sampler.stepping = True
    output = sampler(logits=logits.clone(), sampling_metadata=batch.sampling_metadata)
    return output.sampled_token_ids[:, 0].tolist(), output.token_attest[:, 0].tolist()


def test_a_custom_processor_runs_before_the_draw_and_is_known_as_custom() -> None:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
    built_in = MinPLogitsProcessor(config, torch.device("cpu"), False)  # type: ignore[arg-type]
    assert not has_custom_processors(LogitsProcessors([built_in]))
    assert has_custom_processors(LogitsProcessors([built_in, Processor(torch.clone)]))  # type: ignore[list-item]
    logits = random_logits(1)
    drawn, rows = processed([request(seed=1)], logits, lambda seen: seen * 2)
    tokens, expected = expected_rows(logits.numpy() * 2, sampler_from_parameters(temperature=1.0), seeded(1))
    assert rows == [[0, *expected[0][:2], RESTRICTED, 0]]
    assert drawn == tokens


def test_a_custom_processor_sees_logits_after_temperature_as_in_stock_vllm() -> None:
    """Sampling at temperature one what stock shows the processor is the same distribution, up to float32."""
    logits, temperature = random_logits(8), 0.5
    seen: list[torch.Tensor] = []

    def cap(shown: torch.Tensor) -> torch.Tensor:
        seen.append(shown.clone())
        return shown.clamp_(max=3.0)  # in place, as processors may

    drawn, rows = processed([request(seed=1, temperature=temperature)] * 8, logits, cap)
    assert torch.equal(seen[0], Sampler.apply_temperature(logits.clone(), torch.full((8,), temperature), True))
    capped = (logits / temperature).clamp(max=3.0)
    for row in range(8):
        tokens, expected = expected_rows(
            capped[row : row + 1].numpy(), sampler_from_parameters(temperature=1.0), seeded(1)
        )
        assert drawn[row] == tokens[0]
        assert rows[row][W] == pytest.approx(expected[0][1], rel=1e-4)
    assert seen[0].max() > 3.0  # else nothing was capped


def test_logits_that_processors_leave_alone_are_drawn_from_bit_for_bit_and_greedy_rows_are_not_theirs() -> None:
    logits = random_logits(6)
    requests = [request(seed=2, temperature=value) for value in (0.3, 0.7, 1.3, 0, 1.9, 0)]
    plain = processed(requests, logits)
    assert processed(requests, logits, torch.clone) == plain
    fewer = processed(requests, logits, lambda seen: seen.fill_(float("-inf")).index_fill_(1, torch.tensor([7]), 0.0))
    assert [fewer[0][row] for row in (0, 1, 2, 4)] == [7] * 4
    for row in (3, 5):
        assert (fewer[0][row], fewer[1][row]) == (plain[0][row], plain[1][row])
    assert (
        processed([requests[3]] * 2, logits[:2], lambda seen: seen * float("nan"))[0] == logits[:2].argmax(1).tolist()
    )


def test_a_call_that_is_no_step_of_requests_is_sampled_all_the_same() -> None:
    sampler = ExactSampler(Sampler(), DrawBatch("cpu", restricted=False))
    metadata = batch_of([request()] * 5, [0] * 5).sampling_metadata
    assert isinstance(metadata, SamplingMetadata)
    assert sampler(logits=random_logits(5), sampling_metadata=metadata).sampled_token_ids.shape == (5, 1)


class FakeScheduler:
    def __init__(self, requests: list[str]) -> None:
        self.requests = {i: SimpleNamespace(request_id=i, client_index=0) for i in requests}
        self.finished: list[str] = []
        self.evicted: set[int] = set()
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda request_id: ([ord(request_id)],), evict_blocks=self.evicted.update
        )

    def finish_requests(self, request_ids: list[str], status: Any) -> None:
        assert status.name == "FINISHED_ERROR"
        self.finished += request_ids


def test_a_failed_row_finishes_its_request_unless_its_sample_is_discarded_or_it_is_gone() -> None:
    rows = np.zeros((4, 1, 5), dtype=np.int64)
    rows[[1, 2, 3], 0, FLAGS] = FAILED | GREEDY
    output = SimpleNamespace(token_attest=rows, req_ids=list("abcd"), sampled_token_ids=[[1], [0], [], [0]])
    scheduler = FakeScheduler(["a", "b", "c"])
    core = SimpleNamespace(
        scheduler=scheduler,
        model_executor=SimpleNamespace(sample_tokens=lambda grammar: output),
        **{failed_rows.FAILED_REQUESTS: []},
    )
    failed_rows.guard_sampling(core)
    assert core.model_executor.sample_tokens(None) is output
    assert scheduler.finished == ["b"]
    assert scheduler.evicted == {ord("b")}
    assert getattr(core, failed_rows.FAILED_REQUESTS) == [("b", 0, failed_rows.REASON)]
    output.token_attest = None
    core.model_executor.sample_tokens(None)
    assert scheduler.finished == ["b"]


def test_a_stream_says_why_a_choice_has_no_token_and_passes_other_errors_on() -> None:
    async def read(reason: str | None) -> list[int]:
        async def stream() -> Any:
            for number in range(2):
                finish = "error" if number else None
                yield SimpleNamespace(outputs=[SimpleNamespace(index=0, finish_reason=finish, stop_reason=reason)])

        return [1 async for _ in failed_rows.raise_failures(stream())]

    assert asyncio.run(read(None)) == [1, 1]
    with pytest.raises(SamplingFailedError, match="not finite"):
        asyncio.run(read(failed_rows.REASON))
