"""The signed statement about a receipt: DSSE envelope, in-toto Statement v1, a predicate that is closed.

in-toto lets readers ignore fields they do not know; this predicate does not, because an unread field is an unread
claim. The statement is a function of the final record, so the short formats carry only a key id and a signature
and rebuild the envelope byte for byte. The receipt's id is the digest of the statement, never of the envelope.
Knows no curve: see verify/ed25519.py.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.digests import Digest, digest_from_bytes
from epochless_vllm.protocol.shapes import decode_json, read_base64, read_digest, read_list, read_object

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://epochless.dev/attestation/token-stream/v1"
SUBJECT = "token-stream"
SIGNATURE_BYTES = 64


def encode_statement(final: Mapping[str, Any], root: bytes) -> bytes:
    """Return the canonical statement whose predicate is the final record and whose subject is the tree root."""
    return encode_canonical(
        {
            "_type": STATEMENT_TYPE,
            "predicate": final,
            "predicateType": PREDICATE_TYPE,
            "subject": [{"digest": {"sha256": root.hex()}, "name": SUBJECT}],
        }
    )


def receipt_id_from_statement(statement: bytes) -> Digest:
    """Return the id of a receipt: the plain SHA-256 of its statement, as ``sha256sum`` would print it."""
    return digest_from_bytes(hashlib.sha256(statement).digest())


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes DSSE signs: lengths make the boundary between type and payload unambiguous."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def key_id(public_key: bytes) -> Digest:
    """Return the id of a raw 32-byte Ed25519 public key."""
    return digest_from_bytes(hashlib.sha256(public_key).digest())


@dataclass(frozen=True)
class Signature:
    """One Ed25519 signature and the id of the key that made it. The id is a hint and is never trusted."""

    keyid: Digest
    signature: bytes


@dataclass(frozen=True)
class Envelope:
    """A DSSE envelope around a statement, with exactly one signature."""

    payload: bytes
    signature: Signature

    def encode_json(self) -> dict[str, Any]:
        return {
            "payload": base64.b64encode(self.payload).decode("ascii"),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [
                {
                    "keyid": self.signature.keyid,
                    "sig": base64.b64encode(self.signature.signature).decode("ascii"),
                }
            ],
        }

    def encode(self) -> bytes:
        return encode_canonical(self.encode_json())


def decode_envelope(payload: bytes) -> Envelope:
    """Return the envelope of canonical JSON bytes.

    Raises:
        ReceiptError: it is not canonical JSON, or not an envelope of ours.
    """
    return decode_envelope_json(decode_json(payload))


def decode_envelope_json(value: Any) -> Envelope:
    """Return the envelope of a JSON value; its payload is not parsed.

    Raises:
        ReceiptError: another payload type, not exactly one signature, or malformed base64.
    """
    fields = read_object(value, ("payload", "payloadType", "signatures"), "envelope")
    if fields["payloadType"] != PAYLOAD_TYPE:
        raise ReceiptError(f"payloadType is not {PAYLOAD_TYPE}", threat="payload_type")
    signatures = read_list(fields["signatures"], "signatures")
    if len(signatures) != 1:
        raise ReceiptError(f"{len(signatures)} signatures; exactly one is read", threat="signature_count")
    entry = read_object(signatures[0], ("keyid", "sig"), "signature")
    signature = read_base64(entry["sig"], "sig", max_bytes=SIGNATURE_BYTES)
    if len(signature) != SIGNATURE_BYTES:
        raise ReceiptError(f"an Ed25519 signature of {len(signature)} bytes", threat="signature_form")
    return Envelope(
        read_base64(fields["payload"], "payload"), Signature(read_digest(entry["keyid"], "keyid"), signature)
    )
