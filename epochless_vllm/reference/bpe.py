"""Byte-pair merging over a vocabulary, one piece of text at a time, in the order the tokenizers library merges.

The pair of lowest rank goes first, the leftmost of equals; a pair made by a merge competes at once. Knows neither how
text is cut into pieces nor what bytes the symbols stand for.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

Merges = Mapping[tuple[int, int], tuple[int, int]]
"""(rank, merged id) by the pair of ids."""


def merge_symbols(symbols: Sequence[int], merges: Merges) -> list[int]:
    """Return the ids that remain when no pair can be merged any more. Takes time n log n in the symbols."""
    ids: list[int | None] = list(symbols)  # None once a symbol was merged into the one before it
    after = [*range(1, len(ids)), -1]
    before = list(range(-1, len(ids) - 1))
    queue: list[tuple[int, int, int]] = []

    def consider(left: int, right: int) -> None:
        first, second = ids[left], ids[right]
        assert first is not None
        assert second is not None
        found = merges.get((first, second))
        if found is not None:
            heapq.heappush(queue, (found[0], left, found[1]))

    for left in range(len(ids) - 1):
        consider(left, left + 1)
    while queue:
        _, left, merged = heapq.heappop(queue)
        first, right = ids[left], after[left]
        if first is None or right < 0:
            continue
        second = ids[right]
        assert second is not None
        # An entry outlives its pair; it still counts if the pair there now makes the same symbol.
        found = merges.get((first, second))
        if found is None or found[1] != merged:
            continue
        ids[left], ids[right] = merged, None
        after[left] = after[right]
        if after[left] >= 0:
            before[after[left]] = left
            consider(left, after[left])
        if before[left] >= 0:
            consider(before[left], left)
    return [symbol for symbol in ids if symbol is not None]
