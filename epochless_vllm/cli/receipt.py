"""Fetch from a server a receipt it keeps, by id; or, by the id of a request, list what is kept of it; or, for `key`,
fetch the public key that signs. What is fetched is written as it is, for `epochless verify`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from epochless_vllm.cli.connection import add_server_options, connect
from epochless_vllm.cli.output import Output
from epochless_vllm.errors import InvalidRequestError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("id", help="id of a receipt (sha256:...), id of a request, or the word key")
    parser.add_argument(
        "--format", choices=("verbose", "compact", "stream"), default="verbose", help="default: verbose"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write to a file instead of standard output")
    add_server_options(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Fetch and write.

    Raises:
        UnknownReceiptError: it is not kept. InvalidRequestError: the file cannot be written.
    """
    with connect(arguments) as client:
        if arguments.id == "key":
            payload = client.receipt_key()
        elif arguments.id.startswith("sha256:"):
            payload = client.receipt(arguments.id, form=arguments.format)
        else:
            kept = client.receipts(arguments.id)
            output.value({"receipts": kept})
            columns = ("prompt_index", "choice_index", "finish_reason", "tokens", "id")
            output.table(columns, [tuple(item[name] for name in columns) for item in kept])
            return 0
    if arguments.output is None:
        sys.stdout.buffer.write(payload)
        return 0
    try:
        Path(arguments.output).write_bytes(payload)
    except OSError as error:
        raise InvalidRequestError(f"output: {arguments.output}: {error.strerror}", field="output") from error
    return 0
