"""What the engine promises beyond its numbers: causality, order of rows, no allocation, refusals."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from epochless_vllm.errors import ReplayError
from epochless_vllm.reference.arithmetic import Arithmetic, WideArithmetic
from epochless_vllm.reference.buffers import LOGIT_ELEMENTS, Limits, allocate
from epochless_vllm.reference.config import config_from_document
from epochless_vllm.reference.forward import Engine
from epochless_vllm.reference.lora import Adapter, adapter_from_directory
from epochless_vllm.reference.model import Model, load_model
from epochless_vllm.reference.rounding import Rounding
from tests.reference.cases import SHAPES, Shape, make_tokens, write_adapter, write_model
from tests.reference.differential import collect, write_case

CASE = "gqa-4x"


@pytest.fixture(scope="module")
def model(case_directory: Path) -> Model:
    return load_model(write_case(case_directory, CASE, "none")[0])


@pytest.fixture(scope="module")
def adapter(case_directory: Path, model: Model) -> Adapter:
    directory = write_case(case_directory, CASE, "alpha")[1]
    assert directory is not None
    return adapter_from_directory(directory, model.config)


@pytest.fixture
def tokens() -> list[int]:
    return make_tokens(SHAPES[CASE])


def prefill(model: Model, tokens: list[int], adapter: Adapter | None = None, rows: int = 16) -> np.ndarray:
    return collect(Engine(model, Limits(len(tokens), rows=rows)).prefill(tokens, adapter))


def test_logits_do_not_depend_on_later_tokens(model: Model, tokens: list[int]) -> None:
    changed = [*tokens[:40], *(tokens[40:][::-1])]
    assert np.array_equal(prefill(model, tokens)[:40], prefill(model, changed)[:40])


def test_logits_depend_on_every_earlier_token(model: Model, tokens: list[int]) -> None:
    last = prefill(model, tokens)[-1]
    for position in range(len(tokens)):
        changed = list(tokens)
        changed[position] = (tokens[position] + 1) % SHAPES[CASE].vocab
        assert np.abs(prefill(model, changed)[-1] - last).max() > 1e-4


def test_rows_at_a_time_change_nothing_but_rounding(model: Model, tokens: list[int]) -> None:
    whole = prefill(model, tokens, rows=64)
    for rows in (1, 5, 63, 1000):
        np.testing.assert_allclose(prefill(model, tokens, rows=rows), whole, atol=5e-5)


def test_prefill_goes_on_from_steps_and_steps_from_a_prefill(model: Model, tokens: list[int], adapter: Adapter) -> None:
    whole = prefill(model, tokens, adapter)
    engine = Engine(model, Limits(len(tokens)))
    rows = [engine.step(token, adapter).copy() for token in tokens[:10]]
    rows += list(collect(engine.prefill(tokens[10:30], adapter), first=10))
    rows += [engine.step(token, adapter).copy() for token in tokens[30:]]
    np.testing.assert_allclose(np.stack(rows), whole, atol=5e-5)


def test_logits_are_computed_from_the_position_asked_for(model: Model, tokens: list[int]) -> None:
    whole = prefill(model, tokens, rows=7)
    for wanted in (0, 6, 7, 20, len(tokens) - 1):
        engine = Engine(model, Limits(len(tokens), rows=7))
        found = collect(engine.prefill(tokens, logits_from=wanted), first=wanted)
        np.testing.assert_allclose(found, whole[wanted:], atol=1e-5)
    engine = Engine(model, Limits(len(tokens)))
    engine.extend(tokens)
    assert engine.length == len(tokens)


def test_cache_keeps_the_adapter_it_was_computed_under(model: Model, tokens: list[int], adapter: Adapter) -> None:
    switched = prefill_under(model, tokens, [adapter] * 30 + [None] * (len(tokens) - 30))
    assert np.allclose(switched[:30], prefill(model, tokens, adapter)[:30], atol=5e-5)
    assert np.abs(switched[30:] - prefill(model, tokens)[30:]).max() > 1e-2


def prefill_under(model: Model, tokens: list[int], adapters: list[Adapter | None]) -> np.ndarray:
    return collect(Engine(model, Limits(len(tokens), rows=16)).prefill(tokens, adapters))


def test_rewound_positions_are_computed_again_under_another_adapter(
    model: Model, tokens: list[int], adapter: Adapter
) -> None:
    engine = Engine(model, Limits(len(tokens), rows=16))
    engine.extend(tokens, adapter)
    engine.rewind(0)
    assert np.array_equal(collect(engine.prefill(tokens)), prefill(model, tokens))


@pytest.mark.parametrize(
    ("accumulation", "rounding"),
    [("float32", "float32"), ("float64", "float32"), ("float32", "bfloat16"), ("float32", "float16")],
)
def test_computing_allocates_no_array(
    tmp_path: Path, accumulation: Literal["float32", "float64"], rounding: Rounding
) -> None:
    shape = Shape(640, 8, 2, 1, 2000, 128)
    loaded, tokens = load_model(write_model(tmp_path / "model", shape), rounding), make_tokens(shape)
    directory = write_adapter(tmp_path / "adapter", shape, "head")
    assert directory is not None
    adapter = adapter_from_directory(directory, loaded.config)
    engine = Engine(loaded, Limits(len(tokens), rows=64, accumulation=accumulation))
    engine.extend(tokens, adapter)  # first use fills NumPy's own caches
    for count in (1, 64):
        engine.rewind(64)
        tracemalloc.start()
        if count == 1:
            engine.step(tokens[64], adapter)
        else:
            assert len(collect_lengths(engine, tokens[64:], adapter)) == 1
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # A ufunc over rows that are not contiguous takes at most three buffers of 8,192 elements; the rest is views.
        # Any array of 64 rows of hidden states would be 160 KiB, one of logits 500 KiB.
        assert peak < (3 * 8192 * 4 + 16384), (count, peak)


def collect_lengths(engine: Engine, tokens: list[int], adapter: Adapter) -> list[int]:
    return [len(logits) for _, logits in engine.prefill(tokens, adapter)]


def test_buffers_take_the_bytes_their_sum_says() -> None:
    for shape, limits in (
        (SHAPES["gqa-4x"], Limits(64, rows=16, rank=8)),
        (SHAPES["qwen3"], Limits(40, rows=128, rank=0)),
        (Shape(64, 8, 2, 3, 1_000_000, 64, tied=False), Limits(48, rows=32, rank=4, accumulation="float64")),
    ):
        buffers = allocate(config_from_document(shape.config()), limits)
        layers, heads, kv, size, hidden = shape.layers, shape.heads, shape.kv_heads, shape.size_of_head, shape.hidden
        positions, rows, rank, vocab = limits.positions, min(limits.rows, limits.positions), limits.rank, shape.vocab
        block = min(rows, max(1, LOGIT_ELEMENTS // vocab))
        widest = max(hidden, 2 * hidden, heads * size)
        elements = 2 * layers * kv * positions * size + positions * size
        elements += rows * (2 * hidden + 2 * heads * size + 2 * kv * size + 3 * 2 * hidden)
        elements += rows * heads * size + rows * positions + rows * rows
        elements += rows * rank + (max(rows * widest, block * vocab) if rank else 0) + block * vocab + rows * heads
        wide = max(widest, positions, rank)
        scratch = rows * wide + 64 * wide + rows * max(64, heads) if limits.accumulation == "float64" else 0
        assert buffers.byte_size == 4 * elements + 8 * scratch
        for rounding, added in (("bfloat16", 40 << 10), ("float16", 16 << 10)):
            rounded = allocate(config_from_document(shape.config()), limits, rounding)  # type: ignore[arg-type]
            assert rounded.byte_size == buffers.byte_size + added


def test_wide_sums_are_right_where_narrow_ones_cancel() -> None:
    random = np.random.default_rng(0)
    x, weight = (random.standard_normal((5, 4096)).astype(np.float32) * 1e3 for _ in range(2))
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    narrow, wide = np.empty((5, 5), np.float32), np.empty((5, 5), np.float32)
    Arithmetic().product(x, weight, narrow)
    WideArithmetic(5, 4096, 5).product(x, weight, wide)
    assert np.array_equal(wide, exact.astype(np.float32))
    assert not np.array_equal(narrow, wide)
    sums, plain = np.empty(5, np.float32), np.empty(5, np.float32)
    WideArithmetic(5, 4096, 5).sum_rows(x, sums)
    assert np.array_equal(sums, x.astype(np.float64).sum(axis=1).astype(np.float32))
    Arithmetic().sum_rows(x, plain)
    np.testing.assert_allclose(plain, sums, rtol=1e-3)


@pytest.mark.parametrize("token", [-1, 200, 1 << 70, 1.5, "1"])
def test_token_outside_the_vocabulary_is_refused(model: Model, token: object) -> None:
    engine = Engine(model, Limits(8))
    with pytest.raises(ReplayError):
        engine.step(token)  # type: ignore[arg-type]
    with pytest.raises(ReplayError):
        engine.prefill([3, token])  # type: ignore[list-item]
    assert engine.length == 0


def test_more_positions_than_provided_for_are_refused(model: Model) -> None:
    engine = Engine(model, Limits(4))
    with pytest.raises(ReplayError):
        engine.prefill([1, 2, 3, 4, 5])
    engine.extend([1, 2, 3, 4])
    with pytest.raises(ReplayError):
        engine.step(5)
    for positions in (0, model.config.rope.limit + 1):
        with pytest.raises(ReplayError):
            Engine(model, Limits(positions))


def test_rank_beyond_the_one_provided_for_is_refused(model: Model, adapter: Adapter) -> None:
    with pytest.raises(ReplayError):
        Engine(model, Limits(8, rank=4)).step(1, adapter)
    assert Engine(model, Limits(8, rank=8)).step(1, adapter).shape == (200,)


def test_adapters_must_be_one_or_one_for_each_token(model: Model, adapter: Adapter) -> None:
    with pytest.raises(ReplayError):
        Engine(model, Limits(8)).prefill([1, 2, 3], [adapter, None])


def test_rewinding_forward_is_refused(model: Model) -> None:
    engine = Engine(model, Limits(8))
    engine.extend([1, 2])
    for length in (3, -1):
        with pytest.raises(ReplayError):
            engine.rewind(length)


def test_engine_used_in_the_middle_of_a_prefill_is_noticed(model: Model, tokens: list[int]) -> None:
    engine = Engine(model, Limits(len(tokens), rows=8))
    items = engine.prefill(tokens[:20])
    next(items)
    engine.step(tokens[20])
    with pytest.raises(ReplayError):
        list(items)


def test_very_negative_gates_are_zero_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    loaded = load_model(write_model(tmp_path, SHAPES["tiny"]))
    for layer in loaded.layers:
        layer.gate.weight[...] *= 1e4
    assert np.isfinite(prefill(loaded, make_tokens(SHAPES["tiny"]))).all()
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]
