"""Verify a receipt, offline: its bytes, its tree and final record, its draws, and that it agrees with what you give: a
key, a nonce, the response. What you leave out is named in the caveats. Given an answer of the server instead, whole or
a saved event stream, every receipt in it is verified against it."""

from __future__ import annotations

import argparse
import base64
import binascii
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from epochless_vllm.cli.output import Output
from epochless_vllm.errors import InvalidRequestError, ReceiptError

MAX_RECEIPT_BYTES = 256 << 20  # a verbose receipt of the longest context is far below
# What precedes the 32 bytes of an Ed25519 key in a SubjectPublicKeyInfo, which PEM files hold.
ED25519_PREFIX = bytes.fromhex("302a300506032b6570032100")
KEY_BYTES = 32
# Of the compact, the streaming and the verbose format; anything else must be an answer.
RECEIPT_STARTS = (b"EPc1", b"EPs1", b'{"blocks":')


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument(
        "receipt", help="file of the receipt in any format, or of the answer that carries it; - for standard input"
    )
    add_expectations(parser)
    parser.add_argument("--allow-incomplete", action="store_true", help="accept a stream that lacks its final record")


def add_expectations(parser: argparse.ArgumentParser) -> None:
    """Add the options that pin a receipt's claims to what the caller knows."""
    parser.add_argument(
        "--public-key", "--key", metavar="FILE", help="the server's Ed25519 key: PEM, 64 hex digits or 32 bytes"
    )
    parser.add_argument("--receipt-id", metavar="ID", help="the id you learned over another channel")
    parser.add_argument("--response", metavar="FILE", help="the response as received: pins tokens, reason and versions")
    parser.add_argument("--nonce", help="the nonce you sent")
    parser.add_argument("--request-id", metavar="ID", help="the request id you were answered with")
    parser.add_argument("--base", metavar="DIGEST", help="the base model you trust")
    parser.add_argument("--revision", action="append", metavar="DIGEST", help="a revision you trust; repeatable")
    parser.add_argument("--seed", type=int, help="the seed you sent")
    parser.add_argument("--seed-commitment", metavar="DIGEST", help="the commitment published before your request")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Verify and print the verdict.

    Raises:
        ReceiptError: refused; ``threat`` says what it would have got away with.
    """
    from epochless_vllm.verify import describe, verify_receipt

    expected = read_expectations(arguments)

    def verify(payload: bytes, response: bytes | None) -> dict[str, Any]:
        options = {**expected, "response": response}
        return describe(verify_receipt(payload, allow_incomplete=arguments.allow_incomplete, **options))

    found = read_receipts(arguments.receipt, expected["response"])
    if found[0].choice is None:
        described = verify(found[0].payload, found[0].response)
        output.value(described)
        print_verified(described, output)
        return 0
    verified = [(each.choice, verify(each.payload, each.response)) for each in found]
    output.value({"choices": [{"index": index, **described} for index, described in verified]})
    for index, described in verified:
        output.line(f"choice {index}")
        print_verified(described, output)
    return 0


class FoundReceipt(NamedTuple):
    """A receipt's bytes, the answer to hold it against, and the choice of the answer that carried it, if one did."""

    payload: bytes
    response: bytes | None
    choice: int | None


def read_receipts(name: str, response: bytes | None) -> list[FoundReceipt]:
    """Return the receipt of a file, or every receipt of the answer it holds.

    Args:
        response: the answer, where it was given apart; the file is then a receipt.

    Raises:
        InvalidRequestError: the file cannot be read.
        ReceiptError: it is an answer without receipts, or neither.
    """
    from epochless_vllm.verify import attested_choices

    payload = read_file(name, field="receipt")
    if payload.startswith(RECEIPT_STARTS) or response is not None:
        return [FoundReceipt(payload, response, None)]
    try:
        return [FoundReceipt(each.receipt, payload, each.choice) for each in attested_choices(payload)]
    except ReceiptError as error:
        raise ReceiptError(
            f"{name}: no receipt, and as an answer of the server: {error.message}", **error.fields
        ) from error


def read_expectations(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of ``verify_receipt`` that the options of ``add_expectations`` give.

    Raises:
        InvalidRequestError: a file cannot be read, or is no key.
    """
    return {
        "public_key": None if arguments.public_key is None else read_public_key(arguments.public_key),
        "receipt_id": arguments.receipt_id,
        "nonce": arguments.nonce,
        "request_id": arguments.request_id,
        "base": arguments.base,
        "revisions": arguments.revision,
        "seed": arguments.seed,
        "seed_commitment": arguments.seed_commitment,
        "response": None if arguments.response is None else read_file(arguments.response, field="response"),
    }


def print_verified(described: dict[str, Any], output: Output) -> None:
    """Print what ``describe`` returns for people."""
    output.line(f"{described['verdict']}  {described['tokens']} tokens, anchor: {described['anchor']}")
    output.line(f"receipt  {described['receipt_id'] or 'incomplete'}")
    output.line(f"request  {described['request_id']}, nonce {described['nonce'] or 'none'}")
    for span in described["weight_versions"] or ():
        step = "" if span["step"] is None else f" (step {span['step']})"
        output.line(f"sampled  {span['start']}-{span['end']}  {span['version']}{step}")
    for span in described["kv"] or ():
        output.line(f"kv       {span['start']}-{span['end']}  {span['version']}")
    for caveat in described["caveats"]:
        output.line(f"caveat   {caveat}")


def read_file(name: str, *, field: str) -> bytes:
    """Return the bytes of a file, or of standard input for ``-``.

    Raises:
        InvalidRequestError: it cannot be read, or is larger than any receipt.
    """
    try:
        if name == "-":
            payload = sys.stdin.buffer.read(MAX_RECEIPT_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                payload = file.read(MAX_RECEIPT_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"{field}: {name}: {error.strerror}", field=field) from error
    if len(payload) > MAX_RECEIPT_BYTES:
        raise InvalidRequestError(f"{field}: {name}: larger than {MAX_RECEIPT_BYTES} bytes", field=field)
    return payload


def read_public_key(name: str) -> bytes:
    """Return the raw 32 bytes of an Ed25519 key file.

    Raises:
        InvalidRequestError: the file holds no such key.
    """
    content = read_file(name, field="public-key")
    if len(content) == KEY_BYTES:
        return content
    text = content.decode("ascii", "replace").strip()
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text)
    pem = re.fullmatch(r"-----BEGIN PUBLIC KEY-----\s+([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----", text)
    if pem is not None:
        try:
            encoded = base64.b64decode("".join(pem[1].split()), validate=True)
        except binascii.Error:
            encoded = b""
        if encoded.startswith(ED25519_PREFIX) and len(encoded) == len(ED25519_PREFIX) + KEY_BYTES:
            return encoded[len(ED25519_PREFIX) :]
    raise InvalidRequestError(
        f"public-key: {name}: not an Ed25519 public key; give a PEM file, 64 hexadecimal digits or 32 bytes",
        field="public-key",
    )
