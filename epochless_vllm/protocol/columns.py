"""Columns of 32-bit integers and their bytes: fixed width, token ids by vocabulary, offsets bit by bit.

A token's record is (low, width): the draw r picked it because low <= r < low + width, all in units of 2**-32. Whoever
knows r needs only ``width - 1`` and the offset ``r - low``, and the offset lies in a range that r and the width
bound from both sides; it is packed in as many bits as that range needs, at most 31. Promises one encoding per
value: padding is zero and an offset beyond its range is refused. Does not know where draws come from.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

from epochless_vllm.errors import ReceiptError

WORD = 0xFFFFFFFF
"""The largest value of a column, and the largest draw."""

_LENGTH = struct.Struct(">I")
_MASKS = tuple((1 << bits) - 1 for bits in range(33))
_SWAP = sys.byteorder == "big"  # columns are little-endian on the wire


def column(values: Iterable[int] = ()) -> array[int]:
    """Return a column of unsigned 32-bit integers.

    Raises:
        ReceiptError: a value does not fit.
    """
    try:
        return array("I", values)
    except (OverflowError, TypeError) as error:
        raise ReceiptError("a column value is not an unsigned 32-bit integer", threat="column_range") from error


def encode_column(values: array[int]) -> bytes:
    """Return four little-endian bytes per value."""
    if _SWAP:
        values = array("I", values)
        values.byteswap()
    return values.tobytes()


def decode_column(payload: bytes | memoryview) -> array[int]:
    """Return the column of bytes whose length is a multiple of four."""
    values = array("I")
    values.frombytes(payload)
    if _SWAP:
        values.byteswap()
    return values


def id_width(vocab_size: int) -> int:
    """Return the bytes, 1 to 4, that every token id of a vocabulary fits."""
    return max(1, ((vocab_size - 1).bit_length() + 7) // 8)


def encode_ids(ids: array[int], width: int) -> bytes:
    """Return ``width`` little-endian bytes per token id; every id fits."""
    wide = encode_column(ids)
    if width == 4:
        return wide
    narrow = bytearray(len(ids) * width)
    for plane in range(width):
        narrow[plane::width] = wide[plane::4]
    return bytes(narrow)


def decode_ids(payload: bytes | memoryview, width: int) -> array[int]:
    """Return the token ids of ``encode_ids`` bytes."""
    if width == 4:
        return decode_column(payload)
    wide = bytearray(len(payload) // width * 4)
    for plane in range(width):
        wide[plane::4] = payload[plane::width]
    return decode_column(bytes(wide))


def pack_offsets(low: Sequence[int], width_less_one: Sequence[int], draws: Sequence[int]) -> bytes:
    """Return the packed offsets ``draw - low``, first token in the lowest bits, zero-padded to a byte.

    Raises:
        ReceiptError: a draw lies outside its token's interval, so no offset exists.
    """
    packed, used = 0, 0
    for start, most, draw in zip(low, width_less_one, draws, strict=True):
        above = WORD - most
        greatest, least = min(draw, above), max(draw - most, 0)
        if not least <= start <= greatest:
            raise ReceiptError("a draw lies outside the interval of its token", threat="draw_outside_interval")
        packed |= (greatest - start) << used
        used += (greatest - least).bit_length()
    return packed.to_bytes((used + 7) // 8, "little")


def unpack_offsets(
    payload: bytes | memoryview, width_less_one: Sequence[int], draws: Sequence[int]
) -> tuple[array[int], int]:
    """Return (low column, bytes consumed) from packed offsets at the head of ``payload``.

    Raises:
        ReceiptError: the bytes end early, padding is not zero, or an offset is beyond what its draw allows.
    """
    ahead = payload[: 4 * len(draws)]  # an offset takes at most 31 bits
    packed = int.from_bytes(ahead, "little")
    used = 0
    low: list[int] = []
    append, masks, word = low.append, _MASKS, WORD  # locals: this loop is most of a verification's time
    for most, draw in zip(width_less_one, draws, strict=True):
        above = word - most  # the greatest low that keeps the interval inside the whole
        if draw <= above:
            start, room = draw, draw if draw < most else most
        else:
            rest = word - draw
            start, room = above, above if above < rest else rest
        bits = room.bit_length()
        value = packed & masks[bits]
        if value > room:
            raise ReceiptError("an offset is beyond the interval its width allows", threat="offset_range")
        packed >>= bits
        used += bits
        append(start - value)
    consumed = (used + 7) // 8
    if consumed > len(ahead):
        raise ReceiptError("the packed offsets end early", threat="truncated")
    if used & 7 and ahead[consumed - 1] >> (used & 7):
        raise ReceiptError("padding bits are not zero", threat="padding")
    return array("I", low), consumed


class Cursor:
    """Reads forward over bytes and refuses to read past their end."""

    def __init__(self, payload: bytes | memoryview, position: int = 0) -> None:
        self.payload = memoryview(payload)
        self.position = position

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self.payload):
            raise ReceiptError("the bytes end early", threat="truncated")
        taken = self.payload[self.position : end]
        self.position = end
        return taken

    def length(self, maximum: int) -> int:
        """Return a big-endian 32-bit length that is at most ``maximum``."""
        value: int = _LENGTH.unpack(self.take(4))[0]
        if value > maximum:
            raise ReceiptError(f"a length of {value}; at most {maximum}", threat="limit_exceeded")
        return value
