"""The verbose format: a receipt as one canonical JSON object, for reading, archiving and diffing."""

from __future__ import annotations

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.envelope import decode_envelope_json
from epochless_vllm.protocol.header import decode_header
from epochless_vllm.protocol.receipts import Receipt, decode_final
from epochless_vllm.protocol.records import decode_block_json
from epochless_vllm.protocol.shapes import decode_json, read_list, read_object


def encode_verbose(receipt: Receipt) -> bytes:
    """Return the canonical JSON bytes of a receipt."""
    return encode_canonical(
        {
            "blocks": [block.encode_json() for block in receipt.blocks],
            "envelope": receipt.envelope.encode_json(),
            "final": receipt.final.encode_json(),
            "header": receipt.header.encode_json(),
        }
    )


def decode_verbose(payload: bytes) -> Receipt:
    """Return the receipt of verbose bytes; its parts are well-formed, their relations are not checked.

    Raises:
        ReceiptError: the bytes are not the canonical JSON of a receipt.
    """
    fields = read_object(decode_json(payload), ("blocks", "envelope", "final", "header"), "receipt")
    header, final = decode_header(fields["header"]), decode_final(fields["final"])
    blocks = tuple(decode_block_json(block) for block in read_list(fields["blocks"], "blocks"))
    envelope = decode_envelope_json(fields["envelope"])
    if envelope.payload != final.statement:  # compared, never parsed: the statement is a function of the final record
        raise ReceiptError("the envelope's statement is not this receipt's", threat="statement_mismatch")
    return Receipt(header, blocks, final, envelope.signature)
