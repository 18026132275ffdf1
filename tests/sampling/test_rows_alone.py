"""A row's draw depends on its logits, sampler, key and position, and on nothing around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from epochless_vllm.protocol.draws import Purpose, draw_at, seeded_key
from epochless_vllm.protocol.sampler_config import sampler_from_parameters
from epochless_vllm.sampling import ALL_MASKED, NON_FINITE, OK, cpu_path, parameter_row, sample_rows, team, warm_up
from epochless_vllm.sampling.sample import Sampled

ROWS, VOCABULARY = 64, 5003
SAMPLERS = [
    sampler_from_parameters(temperature=temperature, **filters)
    for temperature in (0.0, 0.7, 1.0)
    for filters in ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 40, "top_p": 0.8})
]
PARAMETERS_BP = np.stack([parameter_row(SAMPLERS[row % len(SAMPLERS)]) for row in range(ROWS)])
KEYS_B2 = np.array([seeded_key(seed=row, prompt_index=0, choice_index=0) for row in range(ROWS)], dtype=np.uint32)
POSITIONS_B = np.arange(ROWS, dtype=np.int64) * 3


@pytest.fixture(scope="module")
def logits_BV() -> Tensor:
    return torch.randn((ROWS, VOCABULARY), generator=torch.Generator().manual_seed(8)) * 3


@pytest.fixture(scope="module")
def together(logits_BV: Tensor) -> Sampled:
    return sample_rows(logits_BV, PARAMETERS_BP, KEYS_B2, POSITIONS_B)


def sample_picked(logits_BV: Tensor, rows: list[int]) -> Sampled:
    return sample_rows(logits_BV[rows], PARAMETERS_BP[rows], KEYS_B2[rows], POSITIONS_B[rows])


def assert_equal_rows(found: Sampled, together: Sampled, rows: list[int]) -> None:
    assert torch.equal(found.tokens, together.tokens[rows])
    assert torch.equal(found.records, together.records[rows])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 31, 64])
def test_a_row_is_drawn_alike_in_batches_of_any_size(logits_BV: Tensor, together: Sampled, size: int) -> None:
    for first in range(0, ROWS, size):
        rows = list(range(first, min(first + size, ROWS)))
        assert_equal_rows(sample_picked(logits_BV, rows), together, rows)


def test_a_row_is_drawn_alike_in_any_order(logits_BV: Tensor, together: Sampled) -> None:
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).tolist()
    assert_equal_rows(sample_picked(logits_BV, rows), together, rows)


def test_a_row_is_drawn_alike_beside_other_neighbours(logits_BV: Tensor, together: Sampled) -> None:
    mixed_BV, keys_B2, positions_B = logits_BV.clone(), KEYS_B2.copy(), POSITIONS_B.copy()
    mixed_BV[1::2] = float("nan")
    mixed_BV[1::4] = 0.0
    keys_B2[1::2] += 1
    positions_B[1::2] = 1 << 40
    found = sample_rows(mixed_BV, PARAMETERS_BP, keys_B2, positions_B)
    assert torch.equal(found.records[::2], together.records[::2])


def test_a_row_is_drawn_alike_by_one_thread_and_without_an_openmp_runtime(
    logits_BV: Tensor, together: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(range(ROWS))
    monkeypatch.setattr(team, "_parallel_entry", lambda: None)
    assert team.team_size() == 1
    assert_equal_rows(sample_picked(logits_BV, rows), together, rows)
    assert_equal_rows(sample_picked(logits_BV, rows[:1]), together, rows[:1])


def test_a_row_is_drawn_alike_when_a_team_shares_it(
    logits_BV: Tensor, together: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pretends a team larger than the batch, so that chunks of rows are tickets whatever this machine has.
    monkeypatch.setattr(cpu_path, "team_size", lambda: 1000)
    monkeypatch.setattr(cpu_path, "_WORTH_SHARING", 0)
    rows = list(range(ROWS))
    assert_equal_rows(sample_picked(logits_BV, rows), together, rows)


def test_sampling_leaves_torchs_threads_and_the_logits_as_they_were(logits_BV: Tensor) -> None:
    threads, before_BV = torch.get_num_threads(), logits_BV.clone()
    sample_rows(logits_BV, PARAMETERS_BP, KEYS_B2, POSITIONS_B)
    assert torch.get_num_threads() == threads
    assert torch.equal(logits_BV, before_BV)


def test_logits_are_read_where_they_lie_and_converted_otherwise(logits_BV: Tensor, together: Sampled) -> None:
    rows = list(range(ROWS))
    padded = torch.full((ROWS, VOCABULARY + 61), 99.0)
    padded[:, :VOCABULARY] = logits_BV
    every_other = torch.stack([logits_BV, torch.full_like(logits_BV, 99.0)], dim=1)[:, 0]
    transposed = logits_BV.t().contiguous().t()
    for view in (padded[:, :VOCABULARY], every_other, transposed):
        assert_equal_rows(sample_picked(view, rows), together, rows)
    halves = logits_BV.to(torch.bfloat16)
    by_halves = sample_rows(halves, PARAMETERS_BP, KEYS_B2, POSITIONS_B)
    by_floats = sample_rows(halves.float(), PARAMETERS_BP, KEYS_B2, POSITIONS_B)
    assert torch.equal(by_halves.records, by_floats.records)


def test_the_recorded_draw_is_the_keys_word_at_the_position(together: Sampled) -> None:
    for row in range(ROWS):
        key = seeded_key(seed=row, prompt_index=0, choice_index=0)
        if SAMPLERS[row % len(SAMPLERS)].greedy:
            assert together.draw[row] == 0
        else:
            assert together.draw[row] == draw_at(key, int(POSITIONS_B[row]))
            assert together.lo[row] <= together.draw[row] < together.lo[row] + together.w[row]
    assert (together.lo + together.w <= 1 << 32).all()


def test_each_purpose_and_each_position_has_its_own_draw(logits_BV: Tensor) -> None:
    parameters = np.tile(parameter_row(sampler_from_parameters(temperature=1.0)), (ROWS, 1))
    rows = [sample_rows(logits_BV, parameters, KEYS_B2, POSITIONS_B, purpose).draw for purpose in Purpose]
    rows.append(sample_rows(logits_BV, parameters, KEYS_B2, POSITIONS_B + 1).draw)
    for one in range(4):
        for other in range(one):
            assert (rows[one] != rows[other]).all()


def test_a_refused_row_fails_alone(logits_BV: Tensor) -> None:
    rows = 12
    parameters = np.tile(parameter_row(sampler_from_parameters(temperature=1.0)), (rows, 1))
    parameters[1::2] = parameter_row(sampler_from_parameters(temperature=0.0))
    broken_BV = logits_BV[:rows].clone()
    for row, value in enumerate((float("nan"), -float("nan"), float("inf"))):
        for greedy in (0, 1):
            broken_BV[2 * row + greedy, VOCABULARY - 1 - row] = value
    broken_BV[6:8] = float("-inf")
    found = sample_rows(broken_BV, parameters, KEYS_B2[:rows], POSITIONS_B[:rows])
    assert found.status.tolist() == [NON_FINITE] * 6 + [ALL_MASKED] * 2 + [OK] * 4
    assert (found.tokens[:8] == 0).all()
    assert (found.records[:8, :4] == 0).all()
    whole = sample_rows(logits_BV[:rows], parameters, KEYS_B2[:rows], POSITIONS_B[:rows])
    assert torch.equal(found.records[8:], whole.records[8:])


def test_greedy_takes_the_first_of_equals_with_certainty() -> None:
    logits_BV = torch.full((3, 3000), -1.0)
    logits_BV[0, [2900, 1700, 2000]] = 5.0
    logits_BV[1, 1500], logits_BV[1, 40] = 0.0, -0.0
    parameters = np.tile(parameter_row(sampler_from_parameters(temperature=0.0)), (3, 1))
    found = sample_rows(logits_BV, parameters, KEYS_B2[:3], POSITIONS_B[:3])
    assert found.tokens.tolist() == [1700, 40, 0]
    assert found.records.tolist() == [[0, 1 << 32, 0, 1 << 32, OK]] * 3


def test_exactly_k_of_many_ties_are_kept_and_they_are_the_first() -> None:
    # Five tied at the edge of top-k: a mask by value would keep them all.
    logits_BV = torch.full((4000, 8), 0.0)
    logits_BV[:, 6] = 1.0
    parameters = np.tile(parameter_row(sampler_from_parameters(temperature=1.0, top_k=3)), (4000, 1))
    found = sample_rows(logits_BV, parameters, np.tile(KEYS_B2[:1], (4000, 1)), np.arange(4000))
    assert set(found.tokens.tolist()) == {0, 1, 6}


def test_an_empty_batch_is_an_empty_sample() -> None:
    found = sample_rows(torch.empty((0, 100)), PARAMETERS_BP[:0], KEYS_B2[:0], POSITIONS_B[:0])
    assert found.tokens.shape == (0,)
    assert found.records.shape == (0, 5)


def test_warm_up_accepts_this_machine_and_refuses_a_wrong_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    from epochless_vllm.errors import ConfigurationError
    from epochless_vllm.sampling import self_test

    warm_up()

    def off_by_one(*call: object) -> Sampled:
        tokens, records = sample_rows(*call)  # type: ignore[arg-type]
        return Sampled(tokens, records + (torch.arange(5) == 1))

    monkeypatch.setattr(self_test, "sample_rows", off_by_one)
    with pytest.raises(ConfigurationError):
        warm_up()
