"""Draws of one stream read forward in blocks, computed many at a time. Holds one window of 2048 draws."""

from __future__ import annotations

from epochless_vllm.protocol.draws import DrawKey, draw_range

_WINDOW = 2048  # beyond it the cost per draw no longer falls


class DrawWindow:
    """Reads the draws of consecutive output positions."""

    def __init__(self, key: DrawKey, total: int | None = None) -> None:
        """``total`` is how many draws the stream has, where known: a short one then computes no more."""
        self._key, self._total = key, total
        self._draws: list[int] = []
        self._start = 0

    def read(self, first: int, count: int) -> list[int]:
        """Return draws ``[first, first + count)``."""
        begin = first - self._start
        if begin < 0 or begin + count > len(self._draws):
            ahead = _WINDOW if self._total is None else min(_WINDOW, self._total - first)
            self._draws = draw_range(self._key, first, max(count, ahead))
            self._start, begin = first, 0
        return self._draws[begin : begin + count]
