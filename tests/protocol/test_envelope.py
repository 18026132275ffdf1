from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.envelope import (
    decode_envelope,
    key_id,
    pre_authentication_encoding,
)
from tests.protocol.receipt_factory import SIGNER, make_receipt


def test_bytes_to_sign_are_those_of_the_dsse_specification() -> None:
    encoded = pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
    assert encoded == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


@given(st.text(), st.binary(), st.text(), st.binary())
def test_two_pairs_of_type_and_payload_never_sign_alike(one: str, first: bytes, other: str, second: bytes) -> None:
    try:
        alike = pre_authentication_encoding(one, first) == pre_authentication_encoding(other, second)
    except UnicodeEncodeError:  # a lone surrogate is no text
        return
    assert alike == ((one, first) == (other, second))


def test_statement_is_in_toto_and_its_digest_is_the_receipts_id() -> None:
    receipt = make_receipt(5)
    statement = json.loads(receipt.envelope.payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"digest": {"sha256": receipt.final.root.hex()}, "name": "token-stream"}]
    assert statement["predicate"] == receipt.final.encode_json()
    assert receipt.receipt_id == "sha256:" + hashlib.sha256(receipt.envelope.payload).hexdigest()


def test_envelope_is_read_back() -> None:
    envelope = make_receipt(5).envelope
    assert decode_envelope(envelope.encode()) == envelope
    assert envelope.signature.keyid == key_id(SIGNER.public_key)


@pytest.mark.parametrize(
    ("changes", "threat"),
    [
        ({"payloadType": "application/vnd.in-toto+jsonx"}, "payload_type"),
        ({"payloadType": 7}, "payload_type"),
        ({"signatures": []}, "signature_count"),
        ({"signatures": [{}, {}]}, "signature_count"),
        ({"signatures": [{"sig": "AAAA"}]}, "missing_field"),
        ({"signatures": [{"keyid": "sha256:" + "ab" * 32, "sig": "AAAA"}]}, "signature_form"),
        ({"signatures": [{"keyid": "me", "sig": base64.b64encode(b"\1" * 64).decode()}]}, "digest_form"),
        ({"payload": "-_-_"}, "base64"),
        ({"extra": 1}, "unknown_field"),
    ],
)
def test_envelope_outside_its_form_is_refused(changes: dict[str, Any], threat: str) -> None:
    value = {**make_receipt(5).envelope.encode_json(), **changes}
    payload = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(ReceiptError) as refusal:
        decode_envelope(payload)
    assert refusal.value.fields["threat"] == threat
