"""Threats to the bytes themselves: second spellings, hostile JSON, frames and sections out of place."""

from __future__ import annotations

import base64
import json
import struct

import pytest

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.compact import encode_compact
from epochless_vllm.protocol.stream import encode_stream
from epochless_vllm.verify.receipt import verify_receipt
from epochless_vllm.verify.verified import Verdict
from tests.verify.bases import base_receipt, known, verbose_of


def refusal(payload: bytes, **changes: object) -> str:
    with pytest.raises(ReceiptError) as caught:
        verify_receipt(payload, **{**known(), **changes})
    return str(caught.value.fields["threat"])


def text() -> str:
    return verbose_of("sampled").decode()


def replaced(old: str, new: str) -> bytes:
    assert text().count(old) >= 1
    return text().replace(old, new, 1).encode("utf-8", "surrogatepass")


NUMBER = '"max_tokens":150'


@pytest.mark.parametrize(
    ("literal", "code"),
    [
        ("NaN", "not_finite"),
        ("Infinity", "not_finite"),
        ("-Infinity", "not_finite"),
        ("1e400", "not_integer"),
        ("150.0", "not_integer"),
        ("15E1", "not_integer"),
        ("-0", "integer_range"),
        ("true", "not_integer"),
        ("9007199254740993", "integer_range"),
        ("1" * 18, "integer_digits"),
        ("9" * 5000, "integer_digits"),
        ('"150"', "not_integer"),
        ("0150", "not_json"),
    ],
)
def test_number_that_is_not_a_plain_integer_is_refused(literal: str, code: str) -> None:
    assert refusal(replaced(NUMBER, f'"max_tokens":{literal}')) == code


@pytest.mark.parametrize("twin", ["max_tokens", "max_\\u0074okens"])
def test_key_named_twice_is_refused(twin: str) -> None:
    assert refusal(replaced(NUMBER, f'{NUMBER},"{twin}":150')) == "duplicate_key"


def test_nesting_bomb_is_refused_before_it_is_parsed() -> None:
    assert refusal(b'{"a":' + b"[" * 200_000) == "too_deep"


@pytest.mark.parametrize(
    "spelling",
    [
        replaced(NUMBER, '"max_tokens": 150'),
        replaced('"policy":"math"', '"policy":"m\\u0061th"'),
        replaced("epochless/receipt/v1", "epochless\\/receipt\\/v1"),
        verbose_of("sampled") + b"\n",
        json.dumps(dict(reversed(json.loads(verbose_of("sampled")).items())), separators=(",", ":")).encode(),
    ],
    ids=["space", "escaped letter", "escaped slash", "newline", "key order"],
)
def test_second_spelling_is_refused(spelling: bytes) -> None:
    assert refusal(spelling) == "not_canonical"


def test_byte_order_mark_and_other_encodings_are_refused() -> None:
    assert refusal(b"\xef\xbb\xbf" + verbose_of("sampled")) == "format"
    assert refusal(text().encode("utf-16")) == "format"
    assert refusal(text().encode("utf-16-be")) == "format"
    assert refusal(b"{" + text().encode("utf-16-le")) == "not_json"
    assert refusal(replaced("math", "m\udce4th").replace(b"\xed\xb3\xa4", b"\xe4")) == "not_utf8"


def test_lone_surrogate_is_refused() -> None:
    assert refusal(replaced('"policy":"math"', '"policy":"m\\ud800th"')) == "lone_surrogate"


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ('"policy":"math"', '"policy":"m\u0430th"', "text_form"),
        ('"policy":"math"', '"policy":"math\\u0000"', "text_form"),
        ('"request_id":"cmpl-3f1a"', '"request_id":"cmpl-3f1\u00e4"', "text_form"),
        ('"request_id":"cmpl-3f1a"', '"request_id":"cmpl 3f1a"', "text_form"),
        ('"nonce":"nonce-of-the-client-0001"', '"nonce":"short"', "text_form"),
        (NUMBER, '"max_tokens":150,"m\u0430x_tokens":1', "key"),
        (NUMBER, '"max_tokens":150,"zz":1', "not_canonical"),
        ('"vocab_size":151936', '"vocab_size":151936,"zz":1', "unknown_field"),
        ('"vocab_size":151936', '"wocab_size":151936', "missing_field"),
        ('"finish_reason":"length"', '"finish_reason":"done"', "unknown_word"),
        ('"blocks":3', '"blocks":{}', "not_integer"),
        ('"added":[]', '"added":{}', "wrong_type"),
        ('"samplers":[', '"samplers":[[],', "sampler_form"),
        ("epochless/receipt/v1", "epochless/receipt/v2", "format"),
        ("philox4x32-10", "philox4x32-7", "draw_algorithm"),
        ('"stop_token_ids":[2]', '"stop_token_ids":[2,2]', "not_canonical"),
    ],
)
def test_field_outside_its_form_is_refused(old: str, new: str, code: str) -> None:
    assert refusal(replaced(old, new)) == code


@pytest.mark.parametrize(
    "seed",
    [
        "\uff11\uff12\uff13\uff14",
        "1_234",
        " 1234",
        "+1234",
        "01234",
        "0x4d2",
        "1234.",
        "-0",
        "9223372036854775808",
        "9" * 39,
    ],
)
def test_decimal_text_that_python_would_read_leniently_is_refused(seed: str) -> None:
    payload = verbose_of("seeded").decode().replace('"seed":"1234"', f'"seed":"{seed}"').encode()
    assert refusal(payload) in ("decimal_form", "limit_exceeded")


def test_base64_that_python_would_read_leniently_is_refused() -> None:
    signature = json.loads(verbose_of("sampled"))["envelope"]["signatures"][0]["sig"]
    assert signature.endswith("==")
    other_padding = signature[:-3] + chr(ord(signature[-3]) + 1) + "=="
    assert base64.b64decode(other_padding, validate=True) == base64.b64decode(signature)
    for wrong in (other_padding, signature[:-2], signature[:40] + "\\n" + signature[40:], "!" + signature[1:]):
        assert refusal(replaced(signature, wrong)) == "base64"
    assert refusal(replaced(signature, base64.b64encode(bytes(63)).decode())) == "signature_form"


@pytest.mark.parametrize("payload", [b"", b"E", b"EPc", b"EPc2", b"EPs2", b"[]", b"null", b"\x00" * 100])
def test_what_is_no_receipt_is_refused(payload: bytes) -> None:
    assert refusal(payload) in ("format", "truncated")


# Streams


def frames(stream: bytes) -> list[bytes]:
    found, position = [], 4
    while position < len(stream):
        size = struct.unpack(">I", stream[position + 1 : position + 5])[0]
        found.append(stream[position : position + 5 + size])
        position += 5 + size
    return found


STREAM = encode_stream(base_receipt("sampled"))
HEADER, FIRST, SECOND, THIRD, FINAL = frames(STREAM)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((HEADER, FIRST, THIRD, SECOND, FINAL), "block_order"),
        ((HEADER, FIRST, SECOND, SECOND, THIRD, FINAL), "block_repeated"),
        ((HEADER, FIRST, SECOND, FINAL), "count_mismatch"),
        ((HEADER, SECOND, THIRD, FINAL), "block_order"),
        ((HEADER, FIRST, SECOND, THIRD), "incomplete"),
        ((HEADER, FIRST, SECOND), "incomplete"),
        ((HEADER,), "incomplete"),
        ((HEADER, FIRST, SECOND, THIRD, FINAL, FINAL), "second_final"),
        ((HEADER, FIRST, SECOND, THIRD, FINAL, THIRD), "trailing_bytes"),
        ((HEADER, FIRST, SECOND, THIRD, FINAL, b"\n"), "trailing_bytes"),
        ((HEADER, FIRST, SECOND, THIRD, FINAL, b"Z\0\0\0\0"), "trailing_bytes"),
        ((HEADER, FIRST, FINAL, SECOND), "trailing_bytes"),
        ((HEADER, HEADER, FIRST, SECOND, THIRD, FINAL), "frame_order"),
        ((FIRST, HEADER, SECOND, THIRD, FINAL), "frame_order"),
        ((HEADER, b"Z\0\0\0\0"), "frame_order"),
        ((HEADER, b"B\xff\xff\xff\xff"), "limit_exceeded"),
        ((HEADER, FIRST[:-1]), "truncated"),
        ((HEADER, FIRST, SECOND, THIRD, FINAL[:-1]), "truncated"),
    ],
)
def test_frames_out_of_place_are_refused(parts: tuple[bytes, ...], code: str) -> None:
    assert refusal(b"EPs1" + b"".join(parts)) == code


def test_every_truncation_of_a_stream_is_refused_and_never_taken_for_complete() -> None:
    cuts = {4 + len(HEADER) + len(FIRST), 4 + len(HEADER), 4 + len(HEADER) + len(FIRST) + len(SECOND)}
    cuts.add(len(STREAM) - len(FINAL))
    for end in sorted({*range(0, len(STREAM), 5), *cuts, *(cut - 1 for cut in cuts), *(cut + 1 for cut in cuts)}):
        if end in cuts:  # between frames: incomplete, a verdict of its own
            verified = verify_receipt(STREAM[:end], **known(), allow_incomplete=True)
            assert verified.verdict is Verdict.INCOMPLETE
            assert verified.final is None
            assert verified.receipt_id is None
        else:
            assert refusal(STREAM[:end], allow_incomplete=True) == ("format" if end < 4 else "truncated")


def test_stream_whose_draws_are_not_those_of_the_revealed_seed_is_refused() -> None:
    other = encode_stream(base_receipt("two_blocks"))
    assert refusal(b"EPs1" + b"".join([*frames(other)[:2], *frames(STREAM)[2:]])) != ""
    block = bytearray(FIRST)
    claimed = len(block) - 4 * 64  # the draws are the last column
    receipt = base_receipt("sampled")
    place = next(i for i in range(64) if receipt.blocks[0].width_less_one[i] > 1)
    low = receipt.blocks[0].low[place]
    original = struct.unpack_from("<I", block, claimed + 4 * place)[0]
    struct.pack_into("<I", block, claimed + 4 * place, low if original != low else low + 1)
    assert refusal(b"EPs1" + b"".join([HEADER, bytes(block), SECOND, THIRD, FINAL])) == "draw_mismatch"


# Compact


def compact_sections() -> tuple[bytes, int, int]:
    """Return (payload, offset of the flag runs, offset of the first block)."""
    payload = encode_compact(base_receipt("sampled"))
    position = 4
    for _ in range(2):
        position += 4 + struct.unpack_from(">I", payload, position)[0]
    flags = position + 96
    return payload, flags, flags + 4 + 9 * struct.unpack_from(">I", payload, flags)[0]


def test_every_truncation_of_a_compact_receipt_is_refused() -> None:
    payload, _, _ = compact_sections()
    for end in [*range(4, len(payload), 5), *range(len(payload) - 300, len(payload))]:
        assert refusal(payload[:end]) in ("truncated", "limit_exceeded")


def test_bytes_after_the_last_block_are_refused() -> None:
    payload, _, _ = compact_sections()
    assert refusal(payload + b"\0") == "trailing_bytes"


def test_padding_bits_that_are_not_zero_are_refused() -> None:
    payload = bytearray(encode_compact(base_receipt("single")))
    payload[-1] |= 0x80
    assert refusal(bytes(payload)) in ("padding", "offset_range")
    several = bytearray(compact_sections()[0])
    several[-1] |= 0x80
    assert refusal(bytes(several)) == "padding"


@pytest.mark.parametrize(
    "runs",
    [
        [(150, 8)],  # an unknown flag
        [(149, 0)],  # too short
        [(151, 0)],  # too long
        [(70, 0), (150, 0)],  # not merged
        [(70, 0), (70, 2), (150, 0)],  # empty
        [(80, 0), (70, 2), (150, 0)],  # descending
        [],
    ],
)
def test_flag_runs_with_a_second_spelling_are_refused(runs: list[tuple[int, int]]) -> None:
    payload, flags, blocks = compact_sections()
    section = struct.pack(">I", len(runs)) + b"".join(struct.pack(">QB", end, mark) for end, mark in runs)
    assert refusal(payload[:flags] + section + payload[blocks:]) in ("flag_runs", "flags")


def test_offset_beyond_its_interval_is_refused() -> None:
    payload, _, blocks = compact_sections()
    offsets = blocks + 64 * 3 + 64 * 4  # after the ids and widths of the first block
    refused = []
    for byte in range(40):
        damaged = bytearray(payload)
        damaged[offsets + byte] = 0xFF
        if bytes(damaged) != payload:
            refused.append(refusal(bytes(damaged)))
    assert set(refused) <= {"offset_range", "root_mismatch", "padding", "truncated", "trailing_bytes"}
    assert "offset_range" in refused
