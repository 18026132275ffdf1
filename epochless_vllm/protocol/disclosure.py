"""One block of a receipt with its way to the root: enough to check a single token without the others.

The block (up to 64 rows) is the unit a tree leaf binds, so a disclosure shows a token's block and, for the rest of
the response, one hash per level. Promises one encoding. Checks shapes only: see verify/disclosure.py.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.envelope import Envelope, Signature, decode_envelope_json
from epochless_vllm.protocol.header import Header, decode_header
from epochless_vllm.protocol.merkle import inclusion_path
from epochless_vllm.protocol.receipts import Final, Receipt, decode_final
from epochless_vllm.protocol.records import BLOCK_TOKENS, leaf_of
from epochless_vllm.protocol.shapes import (
    decode_json,
    read_base64,
    read_choice,
    read_hex64,
    read_list,
    read_object,
)

FORMAT = "epochless/disclosure/v1"
_KEYS = ("block", "envelope", "final", "format", "header", "path")
_MAX_PATH = 64


@dataclass(frozen=True)
class Disclosure:
    """The bytes of the block that holds a token, and the sibling hashes up to the root.

    Which of the block's tokens is meant is the asker's question and no claim of the disclosure.
    """

    header: Header
    final: Final
    signature: Signature
    body: bytes
    path: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Return canonical JSON bytes."""
        return encode_canonical(
            {
                "block": base64.b64encode(self.body).decode("ascii"),
                "envelope": Envelope(self.final.statement, self.signature).encode_json(),
                "final": self.final.encode_json(),
                "format": FORMAT,
                "header": self.header.encode_json(),
                "path": [node.hex() for node in self.path],
            }
        )


def make_disclosure(receipt: Receipt, position: int) -> Disclosure:
    """Return the disclosure of the token at an output position.

    Raises:
        ReceiptError: the receipt has no such token.
    """
    if not 0 <= position < receipt.final.tokens:
        raise ReceiptError(f"no token at position {position}", threat="leaf_index")
    bodies = [block.encode() for block in receipt.blocks]
    leaves = [leaf_of(receipt.header.digest_bytes, body) for body in bodies]
    index = position // BLOCK_TOKENS
    path = tuple(inclusion_path(leaves, index))
    return Disclosure(receipt.header, receipt.final, receipt.signature, bodies[index], path)


def decode_disclosure(payload: bytes) -> Disclosure:
    """Return the disclosure of canonical JSON bytes.

    Raises:
        ReceiptError: the bytes are malformed, or the envelope is not the final record's.
    """
    fields = read_object(decode_json(payload), _KEYS, "disclosure")
    read_choice(fields["format"], "format", (FORMAT,), threat="format")
    final = decode_final(fields["final"])
    envelope = decode_envelope_json(fields["envelope"])
    if envelope.payload != final.statement:
        raise ReceiptError("the envelope's statement is not this final record's", threat="statement_mismatch")
    path = read_list(fields["path"], "path", at_most=_MAX_PATH)
    return Disclosure(
        header=decode_header(fields["header"]),
        final=final,
        signature=envelope.signature,
        body=read_base64(fields["block"], "block"),
        path=tuple(read_hex64(node, "path") for node in path),
    )
