"""A forger's tools: edit the JSON of a receipt, recompute what an attacker can recompute, sign or not.

Shares no code with the package: digests, leaf bytes, tree, statement and envelope are written again here from the
format's description, so that a forged receipt is refused for what it claims and not for a slip of the encoder, and
so that the format has a second implementation to agree with.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

from tests.protocol.receipt_factory import SIGNER, TestSigner

Doc = dict[str, Any]


def canonical(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode("utf-8", "surrogatepass")


def tagged(context: str, *fields: bytes) -> bytes:
    return hashlib.sha256(
        context.encode() + b"\0" + b"".join(struct.pack(">Q", len(field)) + field for field in fields)
    ).digest()


def header_digest(header: Doc) -> bytes:
    return tagged("epochless/v1/header", canonical(header))


def block_bytes(block: Doc) -> bytes:
    out = struct.pack(">QI", block["first"], len(block["tokens"]))
    out += struct.pack(">I", len(block["revisions"]))
    for entry in block["revisions"]:
        text = canonical(entry)
        out += struct.pack(">I", len(text)) + text
    out += struct.pack(">I", len(block["runs"]))
    for run in block["runs"]:
        out += struct.pack(">IIII", *run)
    for values in (block["tokens"], block["low"], [w - 1 for w in block["width"]], [k - 1 for k in block["kept"]]):
        out += b"".join(struct.pack("<I", value & 0xFFFFFFFF) for value in values)
    return out


def tree_root(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, as the recursion stands there; ``leaves`` is the data of each leaf."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return hashlib.sha256(b"\1" + tree_root(leaves[:split]) + tree_root(leaves[split:])).digest()


def leaf(header: Doc, block: Doc) -> bytes:
    return b"epochless/v1/block\0" + header_digest(header) + block_bytes(block)


def statement(final: Doc) -> bytes:
    return canonical(
        {
            "_type": "https://in-toto.io/Statement/v1",
            "predicate": final,
            "predicateType": "https://epochless.dev/attestation/token-stream/v1",
            "subject": [{"digest": {"sha256": final["root"]}, "name": "token-stream"}],
        }
    )


def pae(payload: bytes) -> bytes:
    kind = b"application/vnd.in-toto+json"
    return b"DSSEv1 " + str(len(kind)).encode() + b" " + kind + b" " + str(len(payload)).encode() + b" " + payload


def rehash(doc: Doc, *, count: bool = True) -> Doc:
    """Recompute header digest, root and statement, and with ``count`` the totals; the signature stays."""
    doc = copy.deepcopy(doc)
    final = doc["final"]
    final["header"] = "sha256:" + header_digest(doc["header"]).hex()
    final["root"] = tree_root([leaf(doc["header"], block) for block in doc["blocks"]]).hex()
    if count:
        final["blocks"] = len(doc["blocks"])
        final["tokens"] = sum(len(block["tokens"]) for block in doc["blocks"])
    doc["envelope"]["payload"] = base64.b64encode(statement(final)).decode()
    return doc


def resign(doc: Doc, signer: TestSigner = SIGNER, *, count: bool = True) -> Doc:
    """Recompute everything and sign it: the signer itself lies."""
    doc = rehash(doc, count=count)
    payload = base64.b64decode(doc["envelope"]["payload"])
    doc["envelope"]["signatures"] = [
        {"keyid": signer.keyid, "sig": base64.b64encode(signer.sign(pae(payload))).decode()}
    ]
    return doc


def edited(verbose: bytes, edit: Callable[[Doc], object]) -> Doc:
    """Return the JSON of a verbose receipt after an edit in place."""
    doc: Doc = json.loads(verbose)
    edit(doc)
    return doc
