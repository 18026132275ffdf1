"""The options of verbs that talk to a server, and the client they make."""

from __future__ import annotations

import argparse
import os

from epochless_vllm.client.client import EpochlessClient

URL_VARIABLE = "EPOCHLESS_URL"
DEFAULT_URL = "http://127.0.0.1:8000"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--url`` and ``--api-key``."""
    parser.add_argument(
        "--url",
        default=os.environ.get(URL_VARIABLE, DEFAULT_URL),
        help=f"the server (default: ${URL_VARIABLE}, else {DEFAULT_URL})",
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key (default: $VLLM_API_KEY)")


def connect(arguments: argparse.Namespace) -> EpochlessClient:
    """Return a client of the named server."""
    return EpochlessClient(arguments.url, api_key=arguments.api_key)


def parse_step_option(text: str) -> int:
    """Return a step given on the command line."""
    if not text.isascii() or not text.isdigit() or len(text) > 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step; give an integer of at least 0")
    return int(text)
