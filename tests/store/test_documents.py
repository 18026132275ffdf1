"""Strict reading of other people's JSON."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import InspectError
from epochless_vllm.store.documents import MAX_BYTES, MAX_DEPTH, parse_document


@pytest.mark.parametrize(
    ("reason", "payload"),
    [
        ("not_utf8", b'{"a":"\xff"}'),
        ("not_utf8", '{"a":1}'.encode("utf-16")),
        ("not_json", '\ufeff{"a":1}'.encode()),
        ("not_json", b""),
        ("not_json", b"{'a':1}"),
        ("not_json", b'{"a":1,}'),
        ("not_json", b'{"a":1} {"b":2}'),
        ("not_json", b'{"a":"\x00"}'),
        ("not_object", b"[1]"),
        ("not_object", b'"text"'),
        ("duplicate_key", b'{"r":1,"r":2}'),
        ("duplicate_key", b'{"r":1,"\\u0072":2}'),
        ("duplicate_key", b'{"a":{"b":1,"b":1}}'),
        ("not_finite", b'{"a":NaN}'),
        ("not_finite", b'{"a":-Infinity}'),
        ("not_finite", b'{"a":1e400}'),
        ("overflow", b'{"a":' + b"9" * 20 + b"}"),
        ("overflow", b'{"a":' + b"9" * 5000 + b"}"),
        ("too_deep", b'{"a":' + b"[" * 100_000),
        ("too_deep", b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1)),
        ("too_large", b'{"a":"' + b"x" * MAX_BYTES + b'"}'),
    ],
)
def test_document_is_refused_with_its_own_reason(reason: str, payload: bytes) -> None:
    with pytest.raises(InspectError) as caught:
        parse_document(payload, subject="adapter_config.json")
    assert caught.value.fields == {"reason": reason, "file": "adapter_config.json"}


def test_brackets_inside_strings_do_not_count_as_nesting() -> None:
    text = "[{" * 100 + '"' + "\\" + "]"
    assert parse_document(json.dumps({"a": text, "b": [text]}).encode(), subject="x") == {"a": text, "b": [text]}


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values, max_size=4), st.booleans(), st.sampled_from([None, 2]))
def test_any_spelling_of_a_document_is_read(document: dict, ascii_only: bool, indent: int | None) -> None:
    payload = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    try:
        payload.decode("utf-8")
    except UnicodeDecodeError:
        return
    assert parse_document(payload, subject="x") == document


@given(st.binary(max_size=60) | st.text('{}[]"\\:,0e-.anull \n', max_size=40).map(str.encode))
def test_any_bytes_are_a_document_or_an_inspect_error(payload: bytes) -> None:
    with contextlib.suppress(InspectError):
        assert isinstance(parse_document(payload, subject="x"), dict)
