"""Columns and packed offsets against a reader that spells the bits out one by one."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.columns import (
    Cursor,
    column,
    decode_column,
    decode_ids,
    encode_column,
    encode_ids,
    id_width,
    pack_offsets,
    unpack_offsets,
)

ONE = 1 << 32


EDGES = st.one_of(st.sampled_from([0, 1, ONE // 2 - 1, ONE // 2, ONE - 2, ONE - 1]), st.integers(0, ONE - 1))


def place(word: int, below: int, above: int) -> tuple[int, int, int]:
    """Return (low, width, draw) with the draw inside the interval."""
    low, high = below % (word + 1), word + 1 + above % (ONE - word)
    return low, high - low, word


def rows() -> st.SearchStrategy[list[tuple[int, int, int]]]:
    return st.lists(st.tuples(EDGES, EDGES, EDGES).map(lambda row: place(*row)), min_size=1, max_size=12)


def spell_bits(rows: list[tuple[int, int, int]]) -> str:
    """The bits of the offsets, first token first, lowest bit first, from the definition of the range."""
    bits = ""
    for low, width, word in rows:
        possible = [word - width + 1, 0], [word, ONE - width]
        least_low, greatest_low = max(possible[0]), min(possible[1])
        value, room = greatest_low - low, greatest_low - least_low
        bits += format(value, "b").zfill(room.bit_length())[::-1] if room else ""
    return bits


@given(rows())
def test_offsets_are_packed_as_their_definition_says_and_read_back(rows: list[tuple[int, int, int]]) -> None:
    low, width, draws = (list(part) for part in zip(*rows, strict=True))
    most = [value - 1 for value in width]
    packed = pack_offsets(low, most, draws)
    bits = spell_bits(rows)
    assert "".join(format(byte, "08b")[::-1] for byte in packed) == bits.ljust(-(-len(bits) // 8) * 8, "0")
    for tail in (b"", b"\xff\xff"):
        restored, consumed = unpack_offsets(packed + tail, most, draws)
        assert (restored.tolist(), consumed) == (low, len(packed))


@given(rows())
def test_record_of_a_block_takes_at_most_eight_bytes_a_token(rows: list[tuple[int, int, int]]) -> None:
    low, width, draws = (list(part) for part in zip(*rows, strict=True))
    packed = pack_offsets(low, [value - 1 for value in width], draws)
    assert 4 * len(rows) + len(packed) <= 8 * len(rows)


@given(rows(), st.data())
def test_offsets_cut_short_are_refused(rows: list[tuple[int, int, int]], data: st.DataObject) -> None:
    low, width, draws = (list(part) for part in zip(*rows, strict=True))
    most = [value - 1 for value in width]
    packed = pack_offsets(low, most, draws)
    if packed:
        with pytest.raises(ReceiptError) as refusal:
            unpack_offsets(packed[: data.draw(st.integers(0, len(packed) - 1))], most, draws)
        assert refusal.value.fields["threat"] == "truncated"


@given(st.binary(min_size=256, max_size=256), rows())
def test_any_bits_are_offsets_inside_their_intervals_or_refused(
    payload: bytes, rows: list[tuple[int, int, int]]
) -> None:
    draws, most = [row[2] for row in rows], [row[1] - 1 for row in rows]
    try:
        low, consumed = unpack_offsets(payload, most, draws)
    except ReceiptError:
        return
    assert all(start <= word <= start + wide < ONE for start, wide, word in zip(low, most, draws, strict=True))
    assert pack_offsets(low, most, draws) == payload[:consumed]


@pytest.mark.parametrize(("low", "width", "word"), [(5, 1, 4), (5, 1, 6), (0, 10, 10), (ONE - 1, 2, ONE - 1)])
def test_draw_outside_its_interval_has_no_offset(low: int, width: int, word: int) -> None:
    with pytest.raises(ReceiptError) as refusal:
        pack_offsets([low], [width - 1], [word])
    assert refusal.value.fields["threat"] == "draw_outside_interval"


@given(st.lists(st.integers(0, ONE - 1)))
def test_columns_are_little_endian_words(values: list[int]) -> None:
    encoded = encode_column(column(values))
    assert encoded == struct.pack(f"<{len(values)}I", *values)
    assert decode_column(encoded).tolist() == values


@given(st.integers(1, ONE), st.data())
def test_token_ids_take_the_bytes_their_vocabulary_needs(vocab_size: int, data: st.DataObject) -> None:
    width = id_width(vocab_size)
    assert 256 ** (width - 1) < vocab_size <= 256**width or (width, vocab_size) == (1, 1)
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=80))
    encoded = encode_ids(column(ids), width)
    assert encoded == b"".join(value.to_bytes(width, "little") for value in ids)
    assert decode_ids(encoded, width).tolist() == decode_ids(memoryview(encoded), width).tolist() == ids


@pytest.mark.parametrize("value", [-1, ONE, 1.0, "1", None])
def test_value_that_is_no_word_is_refused(value: object) -> None:
    with pytest.raises(ReceiptError) as refusal:
        column([value])  # type: ignore[list-item]
    assert refusal.value.fields["threat"] == "column_range"


def test_cursor_refuses_to_read_past_the_end_or_a_length_beyond_its_limit() -> None:
    cursor = Cursor(b"\0\0\0\x05abc")
    assert cursor.length(5) == 5
    with pytest.raises(ReceiptError) as refusal:
        cursor.take(4)
    assert refusal.value.fields["threat"] == "truncated"
    with pytest.raises(ReceiptError) as refusal:
        Cursor(b"\0\0\0\x06").length(5)
    assert refusal.value.fields["threat"] == "limit_exceeded"
