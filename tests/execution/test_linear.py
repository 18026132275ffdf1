"""The linear layer over rows of different slots, against the plain reference."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit  # type: ignore[import-untyped]
from torch.utils._python_dispatch import TorchDispatchMode

from epochless_vllm.execution import kernel, linear
from epochless_vllm.execution.linear import add_adapters
from epochless_vllm.execution.rows import RowPlan, plan_rows
from epochless_vllm.execution.slots import SlotWeights, array_of
from tests.execution.oracle import Layer, expected_rows, make_layer

Apply = Callable[[torch.Tensor, torch.Tensor, SlotWeights, RowPlan], None]

# Half a unit in the last place of the result, from the one rounding to the model's dtype.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def plan_of(slots: list[int]) -> RowPlan:
    return plan_rows(np.array(slots, dtype=np.int64))


def check_rows(layer: Layer, slots: list[int], dtype: torch.dtype, seed: int, apply: Apply = add_adapters) -> None:
    """Compare every row with the reference: adapter rows within rounding, the others bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(slots) + 2, layer.inputs, generator=generator).to(dtype)
    y = torch.randn(len(slots) + 2, sum(layer.outputs), generator=generator).to(dtype)
    y[:, ::3] = -0.0
    before = y.clone()
    apply(y, x, layer.pack(), plan_of(slots))
    expected = expected_rows(before, x, layer, slots)
    touched = [row for row, slot in enumerate(slots) if slot >= 0]
    untouched = sorted(set(range(len(y))) - set(touched))
    assert torch.equal(y[untouched].view(torch.uint8), before[untouched].view(torch.uint8))
    error = np.abs(y.double().numpy() - expected)
    assert (error <= 1e-5 + ROUNDING[dtype] * np.abs(expected)).all()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layer, list[int]]:
    outputs = draw(st.lists(st.sampled_from([1, 5, 64, 300]), min_size=1, max_size=3))
    slots = draw(st.integers(1, 5))
    rank = st.sampled_from([0, 1, 3, 4, 8, 13, 16])
    ranks = [[draw(rank) for _ in outputs] for _ in range(slots)]
    inputs = draw(st.sampled_from([1, 7, 16, 100]))
    rows = draw(st.lists(st.integers(-1, slots - 1), max_size=40))
    dtype = draw(st.sampled_from(list(ROUNDING)))
    return make_layer(draw(st.integers(0, 99)), inputs=inputs, outputs=outputs, ranks=ranks, dtype=dtype), rows


@settings(max_examples=150, deadline=None)
@given(layouts(), st.sampled_from(list(ROUNDING)), st.integers(0, 99))
def test_every_row_gets_its_own_adapter_and_no_other(
    layout: tuple[Layer, list[int]], dtype: torch.dtype, seed: int
) -> None:
    layer, slots = layout
    check_rows(layer, slots, dtype, seed)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.randoms(use_true_random=False))
def test_a_row_has_the_same_bits_whatever_shares_the_batch(layout: tuple[Layer, list[int]], random: Any) -> None:
    layer, slots = layout
    weights = layer.pack()
    x = torch.randn(len(slots), layer.inputs).to(weights.dtype)
    y = torch.randn(len(slots), sum(layer.outputs)).to(weights.dtype)
    together = y.clone()
    add_adapters(together, x, weights, plan_of(slots))
    order = random.sample(range(len(slots)), len(slots))
    shuffled = y[order].clone()
    add_adapters(shuffled, x[order].clone(), weights, plan_of([slots[row] for row in order]))
    assert torch.equal(shuffled, together[order])
    for row, slot in enumerate(slots[:6]):
        alone = y[row : row + 1].clone()
        add_adapters(alone, x[row : row + 1], weights, plan_of([slot]))
        assert torch.equal(alone, together[row : row + 1])


def test_the_kernel_rounds_to_bfloat16_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    special = np.array(
        [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x80000000, 1], np.uint32
    )
    values = np.concatenate([bits, ties, special]).view(np.float32)

    @njit  # type: ignore[untyped-decorator]
    def round_all(values: Any, results: Any) -> None:
        for place in range(len(values)):
            results[place] = kernel._rounded(values[place], results[place])

    results = torch.zeros(len(values), dtype=torch.bfloat16)
    round_all(values, array_of(results))
    expected = torch.from_numpy(values).bfloat16()
    assert torch.equal(results.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(results[numbers].view(torch.int16), expected[numbers].view(torch.int16))


@settings(max_examples=40, deadline=None)
@given(layouts(), st.integers(0, 99))
def test_threads_do_not_change_a_bit(layout: tuple[Layer, list[int]], seed: int) -> None:
    layer, slots = layout
    weights, plan = layer.pack(), plan_of(slots)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(slots), layer.inputs, generator=generator).to(weights.dtype)
    results = []
    for on_one_thread in (True, False):
        y = torch.ones(len(slots), sum(layer.outputs), dtype=weights.dtype)
        linear.add_rows(
            array_of(y),
            array_of(x),
            weights.a_SKI,
            weights.b_SRO,
            weights.offsets_SP,
            weights.blocks_B3,
            plan.rows,
            plan.tiles,
            on_one_thread,
        )
        results.append(y)
    assert torch.equal(*results)


def test_threads_are_woken_for_much_work_only() -> None:
    small = make_layer(1, inputs=64, outputs=[64], ranks=[[8]]).pack()
    large = make_layer(1, inputs=2048, outputs=[2048], ranks=[[16]] * 4).pack()
    assert linear._is_little_work(small, plan_of([0]))
    assert not linear._is_little_work(large, plan_of([row % 4 for row in range(64)]))


@pytest.mark.parametrize(
    ("threads", "variables"), [(2, {"GOMP_CPU_AFFINITY": "0 1"}), (2, {"NUMBA_NUM_THREADS": "1"}), (1, {})]
)
def test_numba_takes_as_many_threads_as_torch_and_leaves_torch_its_own(variables: dict[str, str], threads: int) -> None:
    """The first case is a worker that vLLM binds to its cores: numba alone would count one, and leave torch one."""
    program = """if True:
        import torch
        from epochless_vllm.execution.kernel import compile_kernel
        import numba
        threads = torch.get_num_threads()
        compile_kernel("float32", threads)
        numba.njit(lambda: 0)()  # numba reads its configuration again
        print(threads, torch.get_num_threads(), numba.get_num_threads())
    """
    environment = os.environ | variables | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    assert run.stdout.split() == [str(threads)] * 3


def test_nan_and_infinity_in_one_adapter_reach_no_row_of_another() -> None:
    layer = make_layer(2, inputs=32, outputs=[40, 40], ranks=[[8, 8], [8, 8], [8, 8]])
    weights, slots = layer.pack(), [0, 1, 2, -1, 1, 0]
    x, y = torch.randn(6, 32), torch.randn(6, 80)
    clean = y.clone()
    add_adapters(clean, x, weights, plan_of(slots))
    poisoned = layer.pack()
    factor_a, factor_b = layer.slots[1][0]  # type: ignore[misc]
    poisoned.write(1, [(torch.full_like(factor_a, torch.inf), torch.full_like(factor_b, torch.nan)), None])
    result = y.clone()
    add_adapters(result, x, poisoned, plan_of(slots))
    others = [0, 2, 3, 5]
    assert torch.equal(result[others], clean[others])
    assert result[1].isnan().any()


def test_a_reused_slot_holds_nothing_of_its_former_adapter() -> None:
    former = make_layer(3, inputs=24, outputs=[30, 30], ranks=[[16, 16]])
    later = make_layer(4, inputs=24, outputs=[30, 30], ranks=[[0, 3]])
    weights = former.pack()
    weights.write(0, later.slots[0])
    x, y = torch.randn(4, 24), torch.randn(4, 60)
    result = y.clone()
    add_adapters(result, x, weights, plan_of([0] * 4))
    np.testing.assert_allclose(result.double(), expected_rows(y, x, later, [0] * 4), atol=1e-5)
    assert torch.equal(result[:, :30], y[:, :30])


def test_a_check_of_a_slot_finds_one_changed_weight_and_weights_where_none_belong() -> None:
    layer = make_layer(5, inputs=8, outputs=[6, 6], ranks=[[3, 0]])
    weights = layer.pack()
    weights.check(0, layer.slots[0])
    for array, place in ((weights.a_SKI, (0, 2, 7)), (weights.b_SRO, (0, 1, 4)), (weights.a_SKI, (0, 3, 0))):
        kept = array[place]
        array[place] = 0.5
        with pytest.raises(ValueError, match="slice 0"):
            weights.check(0, layer.slots[0])
        array[place] = kept
    with pytest.raises(ValueError, match="holds rank 4, not 0"):
        weights.check(0, [None, None])


def test_a_cleared_slot_keeps_no_copy_of_the_weights() -> None:
    weights = make_layer(5, inputs=8, outputs=[6, 6], ranks=[[3, 16]]).pack()
    assert weights.row_products
    weights.clear(0)
    assert not weights.row_products
    assert not weights.a_SKI[0, : 4 + 16].any()
    assert not weights.b_SRO[0, :4, :6].any()
    assert not weights.b_SRO[0, :16, 6:].any()


@pytest.mark.parametrize("width", [50, 64, 80])
def test_a_vocabulary_padded_differently_is_cut_to_the_common_columns(width: int) -> None:
    layer = make_layer(6, inputs=16, outputs=[64], ranks=[[8]])
    x, y = torch.randn(3, 16), torch.randn(3, width)
    result = y.clone()
    add_adapters(result, x, layer.pack(), plan_of([0, -1, 0]))
    np.testing.assert_allclose(result.double(), expected_rows(y, x, layer, [0, -1, 0]), atol=1e-5)


def test_strided_tensors_are_served_like_contiguous_ones() -> None:
    layer = make_layer(7, inputs=16, outputs=[64], ranks=[[8]])
    x, y = torch.randn(16, 5).T, torch.randn(5, 128)[:, ::2]
    before = y.clone()
    add_adapters(y, x, layer.pack(), plan_of([0, -1, 0, 0, -1]))
    np.testing.assert_allclose(y.double(), expected_rows(before, x, layer, [0, -1, 0, 0, -1]), atol=1e-5)


def test_shards_of_two_ranks_add_up_to_the_whole_layer() -> None:
    whole = make_layer(8, inputs=64, outputs=[48, 16], ranks=[[8, 4], [16, 0]])
    slots = [0, 1, -1, 1, 0]
    x, y = torch.randn(5, 64), torch.zeros(5, 64)
    expected = expected_rows(y, x, whole, slots)

    def shard(cut_a: slice, cut_b: Callable[[int], slice]) -> Layer:
        cut = tuple(
            tuple(None if pair is None else (pair[0][:, cut_a], pair[1][cut_b(len(pair[1]))]) for pair in slices)
            for slices in whole.slots
        )
        outputs = tuple(len(range(*cut_b(size).indices(size))) for size in whole.outputs)
        return Layer(len(range(*cut_a.indices(64))), outputs, 16, cut)

    summed = y.clone()
    for half in (slice(0, 32), slice(32, 64)):  # row-parallel: A is cut along the input, results are added
        add_adapters(summed, x[:, half], shard(half, lambda size: slice(0, size)).pack(), plan_of(slots))
    np.testing.assert_allclose(summed.double(), expected, atol=1e-5)
    columns = []
    for rank in (0, 1):  # column-parallel: B is cut along each slice's output
        part = shard(slice(0, 64), lambda size, rank=rank: slice(rank * size // 2, (rank + 1) * size // 2))  # type: ignore[misc]
        y_part = torch.zeros(5, 32)
        add_adapters(y_part, x, part.pack(), plan_of(slots))
        columns.append(y_part)
    left, right = columns
    joined = torch.cat([left[:, :24], right[:, :24], left[:, 24:], right[:, 24:]], dim=1)
    np.testing.assert_allclose(joined.double(), expected, atol=1e-5)


class CountOperations(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("weights_dtype", list(ROUNDING))
def test_operations_do_not_grow_with_slots_rows_or_slices(
    dtype: torch.dtype, weights_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_calls = 0
    add_rows = linear.add_rows

    def counting(*args: Any) -> None:
        nonlocal kernel_calls
        kernel_calls += 1
        add_rows(*args)

    monkeypatch.setattr(linear, "add_rows", counting)
    counts = []
    for live, rows, slices in [(1, 1, 1), (2, 8, 2), (16, 200, 3)]:
        ranks = [[4] * slices] * live
        layer = make_layer(9, inputs=16, outputs=[20] * slices, ranks=ranks, dtype=weights_dtype)
        weights, plan = layer.pack(), plan_of([row % live for row in range(rows)])
        x, y = torch.randn(rows, 16).to(dtype), torch.randn(rows, 20 * slices).to(dtype)
        with CountOperations() as mode:
            add_adapters(y, x, weights, plan)
        counts.append(mode.count)
    assert counts[0] == counts[1] == counts[2]
    moving = {
        name: count for name, count in counts[0].items() if name not in ("aten.detach.default", "aten.view.dtype")
    }
    assert sum(moving.values()) <= 3  # at most: widen x, widen y, narrow y
    assert kernel_calls == 3


def test_base_rows_alone_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "add_rows", lambda *args: pytest.fail("the kernel ran"))
    live = make_layer(10, inputs=16, outputs=[20], ranks=[[4]]).pack()
    empty = make_layer(10, inputs=16, outputs=[20], ranks=[[0]]).pack()
    x, y = torch.zeros(3, 16), torch.zeros(3, 20)
    with CountOperations() as mode:
        add_adapters(y, x, live, plan_of([-1, -1, -1]))
        add_adapters(y, x, empty, plan_of([0, 0, 0]))
    assert not mode.count


def test_tensors_that_do_not_fit_the_plan_or_the_layer_are_refused() -> None:
    weights = make_layer(11, inputs=16, outputs=[20], ranks=[[4]]).pack()
    with pytest.raises(ValueError, match="the plan covers 3 rows"):
        add_adapters(torch.zeros(2, 20), torch.zeros(2, 16), weights, plan_of([0, 0, 0]))
    with pytest.raises(ValueError, match="16 inputs"):
        add_adapters(torch.zeros(3, 20), torch.zeros(3, 17), weights, plan_of([0, 0, 0]))


@pytest.mark.parametrize("shapes", [((17, 16), (20, 17)), ((4, 15), (20, 4)), ((4, 16), (21, 4)), ((4, 16), (20, 5))])
def test_factors_that_do_not_fit_leave_the_slot_empty(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    weights = make_layer(12, inputs=16, outputs=[20], ranks=[[4]]).pack()
    with pytest.raises(ValueError, match="slice 0"):
        weights.write(0, [(torch.zeros(shapes[0]), torch.zeros(shapes[1]))])
    assert not weights.row_products


# Mutants: each is a way this layer has been, or could be, got wrong; the check above must see every one.


def serve_base_rows_by_the_last_slot(y: torch.Tensor, x: torch.Tensor, weights: SlotWeights, plan: RowPlan) -> None:
    slots = np.full(plan.num_rows, len(weights.offsets_SP) - 1)
    for first, end, slot in plan.tiles:
        slots[plan.rows[first:end]] = slot
    add_adapters(y, x, weights, plan_rows(slots))


def serve_the_first_slot_to_all(y: torch.Tensor, x: torch.Tensor, weights: SlotWeights, plan: RowPlan) -> None:
    tiles = plan.tiles.copy()
    tiles[:, 2] = 0
    add_adapters(y, x, weights, replace(plan, tiles=tiles))


def lose_the_last_row_of_a_tile(y: torch.Tensor, x: torch.Tensor, weights: SlotWeights, plan: RowPlan) -> None:
    tiles = plan.tiles.copy()
    tiles[:, 1] -= 1
    add_adapters(y, x, weights, replace(plan, tiles=tiles))


def shift_the_slices(y: torch.Tensor, x: torch.Tensor, weights: SlotWeights, plan: RowPlan) -> None:
    weights.offsets_SP[:, 1] = 0
    add_adapters(y, x, weights, plan)


def add_zero_to_base_rows(y: torch.Tensor, x: torch.Tensor, weights: SlotWeights, plan: RowPlan) -> None:
    add_adapters(y, x, weights, plan)
    y += 0.0


def round_the_shrink(y: torch.Tensor, x: torch.Tensor, weights: SlotWeights, plan: RowPlan) -> None:
    weights.a_SKI[:] = torch.from_numpy(weights.a_SKI).bfloat16().float().numpy()
    add_adapters(y, x, weights, plan)


@pytest.mark.parametrize(
    "mutant",
    [
        serve_base_rows_by_the_last_slot,
        serve_the_first_slot_to_all,
        lose_the_last_row_of_a_tile,
        shift_the_slices,
        add_zero_to_base_rows,
        round_the_shrink,
    ],
)
def test_the_check_sees_every_mutant(mutant: Apply) -> None:
    layer = make_layer(13, inputs=32, outputs=[40, 40], ranks=[[8, 8], [8, 4], [3, 8]])
    slots = [0, -1, 1, 2, -1, 2, 0]
    check_rows(layer, slots, torch.float32, 0)
    with pytest.raises(AssertionError):
        check_rows(layer, slots, torch.float32, 0, apply=mutant)
