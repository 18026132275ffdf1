"""Event encoding: one spelling, strict reading, and a chain in which every byte counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import EncodingError
from epochless_vllm.protocol.events import (
    CHAIN_START,
    MAX_TEXT,
    Aborted,
    Committed,
    EpochBegan,
    Event,
    Intended,
    Intent,
    Quarantined,
    RetireBegan,
    Retired,
    chain_row,
    decode_event,
    encode_event,
)
from epochless_vllm.protocol.manifest import RevisionId

COUNTS = st.integers(0, (1 << 53) - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
DIGESTS = st.binary(min_size=32, max_size=32).map(lambda raw: RevisionId("sha256:" + raw.hex()))
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(EpochBegan, COUNTS),
    st.builds(Intended, st.builds(Intent, COUNTS, TEXTS, COUNTS, DIGESTS, COUNTS)),
    st.builds(Committed, COUNTS, COUNTS),
    st.builds(Aborted, COUNTS, TEXTS),
    st.builds(RetireBegan, TEXTS, DIGESTS),
    st.builds(Retired, TEXTS, DIGESTS),
    st.builds(Quarantined, DIGESTS, TEXTS, TEXTS),
)
A = RevisionId("sha256:" + "a" * 64)
INTENDED = Intended(Intent(1, "p", 2, A, 3))
PAYLOAD = b'{"lora_int_id":3,"policy":"p","revision_id":"' + A.encode() + b'","step":2,"transaction_id":1}'


@given(EVENTS)
def test_every_event_reads_back_as_itself(event: Event) -> None:
    assert decode_event(*encode_event(event)) == event


@given(EVENTS)
def test_the_bytes_are_sorted_compact_json_of_the_fields(event: Event) -> None:
    kind, payload = encode_event(event)
    fields = vars(event.intent) if isinstance(event, Intended) else vars(event)
    assert payload == json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert kind.replace("_", "") == type(event).__name__.lower()


def test_the_format_is_frozen() -> None:
    assert encode_event(INTENDED) == ("intended", PAYLOAD)
    chain = chain_row(CHAIN_START, seq=1, epoch=1, kind="intended", payload=PAYLOAD, evidence=None)
    assert chain.hex() == "c5a4944dd0324e9bbcd4350cd586b84fa07d24d649ee68cab17ade3df64e0898"


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("intended", PAYLOAD + b" "),
        ("intended", PAYLOAD.replace(b'"step":2', b'"step":2.0')),
        ("intended", PAYLOAD.replace(b'"step":2', b'"step":-1')),
        ("intended", PAYLOAD.replace(b'"step":2', b'"step":true')),
        ("intended", PAYLOAD.replace(b'"step":2', b'"step":NaN')),
        ("intended", PAYLOAD.replace(b'"step":2', b'"step":9007199254740992')),
        ("intended", PAYLOAD.replace(b'"step":2', b'"step":' + b"9" * 5000)),
        ("intended", PAYLOAD.replace(b'"step":2,', b"")),
        ("intended", PAYLOAD.replace(b'"step":2', b'"extra":1,"step":2')),
        ("intended", PAYLOAD.replace(b"{", b'{"extra":1,')),
        ("intended", PAYLOAD.replace(b'"step":2', b'"step":2,"step":2')),
        ("intended", PAYLOAD.replace(b"aaaa", b"AAAA")),
        ("intended", PAYLOAD.replace(b'"p"', b'"\\u0070"')),
        ("intended", PAYLOAD.replace(b'"p"', b"7")),
        ("intended", PAYLOAD.replace(b'"p"', b'"' + b"p" * (MAX_TEXT + 1) + b'"')),
        ("intended", PAYLOAD.replace(b'"p"', b'"\\ud800"')),
        ("intended", PAYLOAD.replace(b'"p"', b'"\xed\xa0\x80"')),
        ("intended", PAYLOAD.replace(b'"p"', b'"\xff"')),
        ("intended", PAYLOAD.decode().encode("utf-16")),
        ("intended", b"\xef\xbb\xbf" + PAYLOAD),
        ("committed", PAYLOAD),
        ("Intended", PAYLOAD),
        ("", b""),
        ("intended", b""),
        ("intended", b"[]"),
        ("intended", b"[" * 100_000),
    ],
)
def test_other_bytes_are_refused(kind: str, payload: bytes) -> None:
    with pytest.raises(EncodingError):
        decode_event(kind, payload)


@given(
    st.sampled_from(["epoch_began", "intended", "committed", "aborted", "quarantined", "x"]), st.binary(max_size=200)
)
def test_arbitrary_bytes_raise_only_our_error(kind: str, payload: bytes) -> None:
    with pytest.raises(EncodingError):
        decode_event(kind, payload)


@pytest.mark.parametrize(
    "event",
    [Aborted(1, "x" * (MAX_TEXT + 1)), Aborted(1, "\ud800"), Aborted(-1, ""), EpochBegan(1 << 53), Committed(1, True)],
)
def test_events_that_could_not_be_read_back_are_not_written(event: Event) -> None:
    with pytest.raises(EncodingError):
        encode_event(event)


def test_the_chain_binds_every_field_and_no_two_splits_agree() -> None:
    base: dict[str, Any] = {"seq": 1, "epoch": 2, "kind": "aborted", "payload": b"{}", "evidence": b"e" * 32}
    changes: list[dict[str, Any]] = [
        {"seq": 2},
        {"epoch": 3},
        {"kind": "abortee"},
        {"payload": b"{} "},
        {"evidence": None},
        {"evidence": b"f" * 32},
        {"kind": "aborted{", "payload": b"}"},
        {"payload": b"{}" + b"e" * 32, "evidence": None},
        {"seq": 2, "epoch": 1},
    ]
    rows = [chain_row(CHAIN_START, **{**base, **change}) for change in [{}, *changes]]
    rows.append(chain_row(b"\1" + CHAIN_START[1:], **base))
    assert len(set(rows)) == len(rows)
