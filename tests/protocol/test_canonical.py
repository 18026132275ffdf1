"""One value, one spelling: the canonical profile against the json library and against every second spelling."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epochless_vllm.errors import EncodingError
from epochless_vllm.protocol.canonical import MAX_DEPTH, MAX_INTEGER, decode_canonical, encode_canonical

text = st.text(st.characters(exclude_categories=["Cs"]))
keys = st.text(st.characters(max_codepoint=127))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-MAX_INTEGER, MAX_INTEGER), text),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@given(values)
@example({"": {"\u0000": [], 'a"\\/': "\u2028\x7f\x1f\U0001f600"}})
@example([MAX_INTEGER, -MAX_INTEGER, 0])
def test_value_survives_its_encoding_and_any_json_reader_agrees(value: Any) -> None:
    payload = encode_canonical(value)
    assert decode_canonical(payload) == value == json.loads(payload)
    assert encode_canonical(decode_canonical(payload)) == payload


@given(st.dictionaries(keys, st.integers(0, 9), max_size=6), st.randoms())
def test_insertion_order_of_keys_does_not_matter(mapping: dict[str, int], random: Any) -> None:
    items = list(mapping.items())
    random.shuffle(items)
    assert encode_canonical(dict(items)) == encode_canonical(mapping)


@pytest.mark.parametrize(
    ("value", "payload"),
    [
        ({"b": 1, "a": [True, None]}, b'{"a":[true,null],"b":1}'),
        ({"Z": 0, "a": 0, "_": 0, "10": 0, "9": 0}, b'{"10":0,"9":0,"Z":0,"_":0,"a":0}'),
        ('\u00e9/\u0008"\\', b'"\xc3\xa9/\\b\\"\\\\"'),
        ("\x00\x1f\x7f", b'"\\u0000\\u001f\x7f"'),
        (-5, b"-5"),
        ((1, 2), b"[1,2]"),
        ({}, b"{}"),
    ],
)
def test_encoding_is_this(value: Any, payload: bytes) -> None:
    assert encode_canonical(value) == payload


@pytest.mark.parametrize(
    ("reason", "value"),
    [
        ("integer_range", MAX_INTEGER + 1),
        ("integer_range", -MAX_INTEGER - 1),
        ("integer_range", 1 << 200),
        ("lone_surrogate", "\ud800"),
        ("key", {"\u00e9": 1}),
        ("key", {1: 1}),
        ("key", {None: 1}),
        ("type", 1.0),
        ("type", float("nan")),
        ("type", b"bytes"),
        ("type", {1, 2}),
        ("type", object()),
        ("too_deep", json.loads("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))),
    ],
)
def test_value_outside_the_profile_is_refused(reason: str, value: Any) -> None:
    with pytest.raises(EncodingError) as caught:
        encode_canonical({"x": value} if reason != "too_deep" else value)
    assert caught.value.fields["reason"] == reason


@pytest.mark.parametrize(
    ("reason", "payload"),
    [
        ("not_utf8", b'"\xff"'),
        ("not_utf8", b'"\xed\xa0\x80"'),
        ("not_utf8", b'"\xc0\xaf"'),
        ("not_utf8", '{"a":1}'.encode("utf-16")),
        ("not_json", '{"a":1}'.encode("utf-16-le")),
        ("not_json", b"\xef\xbb\xbf{}"),
        ("not_json", b""),
        ("not_json", b"{} {}"),
        ("not_json", b"{}\0"),
        ("not_json", b"[1,]"),
        ("not_json", b"[01]"),
        ("not_json", b"[+1]"),
        ("not_json", b"'a'"),
        ("not_json", b'"\n"'),
        ("not_json", "[\uff11]".encode()),
        ("not_json", b"[0x10]"),
        ("not_json", b"[1_0]"),
        ("not_integer", b"[1.0]"),
        ("not_integer", b"[1E2]"),
        ("not_integer", b"[1e400]"),
        ("not_finite", b"[NaN]"),
        ("not_finite", b"[Infinity]"),
        ("not_finite", b"[-Infinity]"),
        ("integer_range", b"[-0]"),
        ("integer_range", b"[9007199254740992]"),
        ("integer_digits", b"[" + b"9" * 5000 + b"]"),
        ("duplicate_key", b'{"a":1,"a":1}'),
        ("duplicate_key", b'{"a":1,"\\u0061":2}'),
        ("too_deep", b"[" * 100_000),
        ("too_deep", b'{"a":' * 100_000),
        ("lone_surrogate", b'"\\ud800"'),
        ("key", '{"\u00e9":1}'.encode()),
        ("not_canonical", b'{"b":1,"a":2}'),
        ("not_canonical", b'{"a": 1}'),
        ("not_canonical", b'{"a":1}\n'),
        ("not_canonical", b" {}"),
        ("not_canonical", b'"\\u0041"'),
        ("not_canonical", b'"\\/"'),
        ("not_canonical", b'"\\u00e9"'),
        ("not_canonical", b'"\\u000A"'),
        ("not_canonical", b'"\\u000a"'),
    ],
)
def test_bytes_that_are_not_canonical_are_refused_with_their_own_reason(reason: str, payload: bytes) -> None:
    with pytest.raises(EncodingError) as caught:
        decode_canonical(payload)
    assert caught.value.fields["reason"] == reason


def test_payload_longer_than_allowed_is_refused_before_it_is_read() -> None:
    with pytest.raises(EncodingError) as caught:
        decode_canonical(b"[" + b"1," * 100 + b"1]", max_bytes=100)
    assert caught.value.fields["reason"] == "too_large"


def test_brackets_inside_strings_are_not_nesting() -> None:
    value = ["[" * 50, '"[{', "\\", '\\"[']
    assert decode_canonical(encode_canonical(value)) == value


json_like = st.text('{}[]",:0123456789.eE+-\\u trufalsn\u00e9', max_size=40).map(str.encode)


@given(st.binary(max_size=40) | json_like)
def test_any_bytes_are_canonical_or_an_encoding_error(payload: bytes) -> None:
    try:
        value = decode_canonical(payload)
    except EncodingError:
        return
    assert encode_canonical(value) == payload


@given(values, st.integers(0, 300), st.integers(0, 255))
def test_changed_byte_never_gives_the_same_value(value: Any, position: int, byte: int) -> None:
    payload = bytearray(encode_canonical(value))
    position %= len(payload)
    if payload[position] == byte:
        return
    payload[position] = byte
    try:
        changed = decode_canonical(bytes(payload))
    except EncodingError:
        return
    # Type-strict: True is not 1 here.
    assert repr(changed) != repr(value)
