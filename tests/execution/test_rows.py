"""Grouping rows by slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.execution.rows import TILE_ROWS, plan_rows, slots_of_ids


@given(st.lists(st.integers(-1, 5), max_size=80))
def test_each_adapter_row_is_in_exactly_one_tile_of_its_slot(slots: list[int]) -> None:
    plan = plan_rows(np.array(slots, dtype=np.int64))
    seen = {}
    for first, end, slot in plan.tiles.tolist():
        assert 0 < end - first <= TILE_ROWS
        for row in plan.rows[first:end].tolist():
            assert row not in seen
            seen[row] = slot
    assert seen == {row: slot for row, slot in enumerate(slots) if slot >= 0}
    assert plan.num_rows == len(slots)


@given(st.lists(st.integers(-1, 5), max_size=80))
def test_tiles_are_as_few_as_the_groups_allow(slots: list[int]) -> None:
    plan = plan_rows(np.array(slots, dtype=np.int64))
    sizes = [slots.count(slot) for slot in set(slots) if slot >= 0]
    assert len(plan.tiles) == sum(-(-size // TILE_ROWS) for size in sizes)


@given(
    st.lists(st.one_of(st.none(), st.integers(1, 2**31 - 1)), min_size=1, max_size=8, unique=True),
    st.lists(st.integers(0, 40), max_size=40),
)
def test_rows_find_the_slot_that_holds_their_adapter(resident: list[int | None], picks: list[int]) -> None:
    choices = [0, -1, *(held for held in resident if held)]
    ids = [choices[pick % len(choices)] for pick in picks]
    slots = slots_of_ids(np.array(ids, dtype=np.int64), resident)
    assert slots.tolist() == [resident.index(held) if held > 0 else -1 for held in ids]


@pytest.mark.parametrize("resident", [[None, None], [3, None], [None, 9]])
def test_an_adapter_without_slot_is_an_error_not_another_adapter(resident: list[int | None]) -> None:
    with pytest.raises(KeyError, match="7"):
        slots_of_ids(np.array([0, 7]), resident)
