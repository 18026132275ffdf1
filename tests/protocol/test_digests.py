"""Tagged digests: the recipe by hand, no two purposes or field boundaries alike, one text form."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import EncodingError
from epochless_vllm.protocol.digests import Digest, bytes_from_digest, digest, digest_from_bytes, parse_digest

contexts = st.sampled_from(["epochless/manifest/v1", "epochless/base/full/v1", "a", "ab"])
fields = st.lists(st.binary(max_size=12), max_size=4)


def by_hand(context: str, parts: list[bytes]) -> str:
    joined = context.encode() + b"\0" + b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return "sha256:" + hashlib.sha256(joined).hexdigest()


@given(contexts, fields)
def test_digest_is_the_hash_of_context_zero_byte_and_length_prefixed_fields(context: str, parts: list[bytes]) -> None:
    assert digest(context, *parts) == by_hand(context, parts)


@given(contexts, fields, contexts, fields)
def test_different_purposes_or_fields_have_different_digests(
    one_context: str, one: list[bytes], other_context: str, other: list[bytes]
) -> None:
    same = (one_context, one) == (other_context, other)
    assert (digest(one_context, *one) == digest(other_context, *other)) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [((b"ab", b"c"), (b"a", b"bc")), ((b"abc",), (b"ab", b"c")), ((b"",), ()), ((b"", b"a"), (b"a", b""))],
)
def test_moving_a_field_boundary_changes_the_digest(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> None:
    assert digest("t", *one) != digest("t", *other)


def test_digest_of_nothing_is_this() -> None:
    assert digest("epochless/test/v1") == "sha256:" + hashlib.sha256(b"epochless/test/v1\0").hexdigest()


@given(st.binary(min_size=32, max_size=32))
def test_text_form_holds_the_raw_bytes(raw: bytes) -> None:
    value = digest_from_bytes(raw)
    assert bytes_from_digest(value) == raw
    assert parse_digest(value) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "sha256:", "0" * 64, "sha256:" + "0" * 63, "sha256:" + "0" * 65, "sha256:" + "A" * 64, "SHA256:" + "0" * 64,
        "sha512:" + "0" * 64, " sha256:" + "0" * 64, "sha256:" + "0" * 64 + "\n", "sha256:" + "\uff10" * 64,
        "sha256:0x" + "0" * 62, None, 5, b"sha256:" + b"0" * 64, ["sha256:" + "0" * 64],
    ],
)  # fmt: skip
def test_any_other_text_is_refused(text: object) -> None:
    with pytest.raises(EncodingError) as caught:
        parse_digest(text)
    assert caught.value.fields["reason"] == "digest"
    assert isinstance(Digest("x"), str)
