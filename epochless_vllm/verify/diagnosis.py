"""Names the fault behind draws that do not fit: which known misuse of the counter would explain them.

Called only on the way to a refusal. The code it picks is the best explanation of the rows at hand, not a proof; rows
that fit none keep the general code. Knows the ways a draw goes wrong, not how to make one right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.draws import DrawKey, Purpose, draw_at
from epochless_vllm.protocol.header import Header, reveal_key

_WORD = 0xFFFFFFFF
_NEIGHBOURS = 16  # choices and prompts whose keys are tried

Interval = tuple[int, int]
"""The least and the greatest draw that picks a row's token; (0, 2**32 - 1) where any does."""


def explain_draws(
    header: Header, seed: int | bytes, first: int, intervals: Sequence[Interval], *, threat: str
) -> ReceiptError:
    """Return the error for rows from position ``first`` whose draws under the revealed seed leave their intervals.

    ``threat`` is the code where no known misuse explains the rows.
    """
    key = reveal_key(header, seed)
    assert key is not None

    def fits(draw: Callable[[DrawKey, int], int], key: DrawKey, row: int) -> bool:
        return intervals[row][0] <= draw(key, first + row) <= intervals[row][1]

    rows = range(len(intervals))
    failing = next((row for row in rows if not fits(draw_at, key, row)), None)
    if failing is None:
        return ReceiptError("the draws are not those of the revealed seed", threat=threat)
    for name, words, draw in _HYPOTHESES:
        start = failing if name in ("draw_reused", "draw_skipped") else 0
        if all(fits(draw, key, row) for row in rows[start:]):
            return ReceiptError(f"draws from position {first + start} on {words}", threat=name)
    for whose, other in _other_keys(header, seed):
        if all(fits(draw_at, other, row) for row in rows):
            return ReceiptError(f"draws from position {first} on come from the key of {whose}", threat="draw_key")
    return ReceiptError(f"the draw at position {first + failing} does not pick its token", threat=threat)


def _other_keys(header: Header, seed: int | bytes) -> Iterator[tuple[str, DrawKey]]:
    others = [(f"choice {i}", replace(header, choice_index=i)) for i in range(_NEIGHBOURS)]
    others += [(f"prompt {i}", replace(header, prompt_index=i)) for i in range(_NEIGHBOURS)]
    others.append(("the request without its nonce", replace(header, nonce=None)))
    for whose, other in others:
        if (key := reveal_key(other, seed)) is not None:
            yield whose, key


def _philox(key: DrawKey, counter: tuple[int, int, int, int], rounds: int) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _seven_rounds(key: DrawKey, index: int) -> int:
    block = index >> 2
    return _philox(key, (block & _WORD, block >> 32, Purpose.SAMPLE, 0), 7)[index & 3]


def _wrapped(key: DrawKey, index: int) -> int:
    return draw_at(key, index & (1 << 34) - 1)


def _swapped_lanes(key: DrawKey, index: int) -> int:
    return draw_at(key, index ^ 3)


def _swapped_bytes(key: DrawKey, index: int) -> int:
    return int.from_bytes(draw_at(key, index).to_bytes(4, "little"), "big")


_HYPOTHESES: tuple[tuple[str, str, Callable[[DrawKey, int], int]], ...] = (
    ("draw_wrapped", "use a counter that wraps at 2**32", _wrapped),
    ("draw_rounds", "come from 7 rounds of Philox instead of 10", _seven_rounds),
    ("draw_word_order", "take the words of a block in reverse", _swapped_lanes),
    ("draw_word_order", "have their bytes reversed", _swapped_bytes),
    ("draw_purpose", "share the stream of draft tokens", lambda key, index: draw_at(key, index, Purpose.DRAFT)),
    ("draw_purpose", "share the stream of acceptances", lambda key, index: draw_at(key, index, Purpose.ACCEPT)),
    ("draw_reused", "repeat the counter before", lambda key, index: draw_at(key, max(index - 1, 0))),
    ("draw_skipped", "skip a counter", lambda key, index: draw_at(key, index + 1)),
)
