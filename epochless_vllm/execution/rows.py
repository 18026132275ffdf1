"""Which rows of a step belong to which slot: found once per step, used by every layer.

Promises that a row without an adapter appears nowhere in a plan, and that planning costs the same number of array
operations however many slots are live. Knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TILE_ROWS = 8  # rows that share one read of a slot's weights; more starves many-core machines of tasks in decode

NO_SLOT = -1


@dataclass(frozen=True, eq=False)
class RowPlan:
    """The adapter rows of a step, grouped by slot.

    Attributes:
        num_rows: rows the step has, with or without adapter; rows beyond are padding.
        num_slots: slots that have rows.
        rows: int64 [M], row numbers that carry an adapter, those of a slot side by side, in batch order within.
        tiles: int64 [T, 3], (first, end, slot): ``rows[first:end]`` all belong to ``slot``, at most TILE_ROWS of them.
    """

    num_rows: int
    num_slots: int
    rows: npt.NDArray[np.int64]
    tiles: npt.NDArray[np.int64]


def plan_rows(slots_N: npt.NDArray[np.int64]) -> RowPlan:
    """Group rows by slot.

    Args:
        slots_N: the slot of each row; negative for a row without an adapter.
    """
    order_N = np.argsort(slots_N, kind="stable")
    rows_M = order_N[np.searchsorted(slots_N[order_N], 0) :]
    slots_M = slots_N[rows_M]
    positions_M = np.arange(len(rows_M))
    opens_group_M = np.diff(slots_M, prepend=NO_SLOT) != 0
    group_starts_M = np.maximum.accumulate(np.where(opens_group_M, positions_M, 0))
    firsts_T = np.flatnonzero((positions_M - group_starts_M) % TILE_ROWS == 0)
    ends_T = np.append(firsts_T[1:], len(rows_M))
    tiles_T3 = np.stack([firsts_T, ends_T[: len(firsts_T)], slots_M[firsts_T]], axis=1).astype(np.int64)
    return RowPlan(
        num_rows=len(slots_N),
        num_slots=int(opens_group_M.sum()),
        rows=rows_M.astype(np.int64),
        tiles=np.ascontiguousarray(tiles_T3),
    )


def slots_of_ids(ids_N: npt.NDArray[np.int64], resident_ids: list[int | None]) -> npt.NDArray[np.int64]:
    """Return the slot of each row from the adapter id of each row.

    Args:
        ids_N: adapter id of each row; zero or negative for none.
        resident_ids: adapter id held by each slot, None where the slot is free.

    Raises:
        KeyError: an id is resident in no slot; the argument is that id.
    """
    held_S = np.array([held or 0 for held in resident_ids], dtype=np.int64)
    by_id_S = np.argsort(held_S, kind="stable")
    places_N = np.minimum(np.searchsorted(held_S[by_id_S], ids_N), len(held_S) - 1)
    found_N = by_id_S[places_N]
    has_adapter_N = ids_N > 0
    absent_N = has_adapter_N & (held_S[found_N] != ids_N)
    if absent_N.any():
        raise KeyError(int(ids_N[absent_N][0]))
    return np.where(has_adapter_N, found_N, NO_SLOT)
