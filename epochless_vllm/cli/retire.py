"""Retire a policy, or the one revision that policy-vN, policy@N or policy@sha256:<hex> names. Requests on it finish."""

from __future__ import annotations

import argparse
import re
import time

from epochless_vllm.cli.connection import add_server_options, connect
from epochless_vllm.cli.output import Output, short
from epochless_vllm.client.client import EpochlessClient
from epochless_vllm.wire import RetireReply

POLL_S = 0.5


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("model", help="a policy, policy-vN, policy@N or policy@sha256:<hex>")
    parser.add_argument(
        "--wait", type=parse_wait, metavar="SECONDS", help="wait until the engines have let go, at most so long"
    )
    add_server_options(parser)


def parse_wait(text: str) -> float:
    """Return a number of seconds given on the command line."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; give one such as 60")
    return float(text)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Retire and print what still runs; 1 if ``--wait`` ran out."""
    with connect(arguments) as client:
        reply = client.retire(arguments.model)
        gone = arguments.wait is None or _wait(client, reply, arguments.wait)
    output.value({**reply.model_dump(), "retired": gone and arguments.wait is not None})
    for item in reply.revisions:
        output.line(
            f"{item.policy}@{short(item.weight_version)} (step {item.step}): draining, {item.in_flight} in flight"
        )
    if arguments.wait is not None:
        output.line("retired" if gone else f"still draining after {arguments.wait:g} s; requests on it are running")
    return 0 if gone else 1


def _wait(client: EpochlessClient, reply: RetireReply, seconds: float) -> bool:
    waiting = {(item.policy, item.weight_version) for item in reply.revisions}
    deadline = time.monotonic() + seconds
    while True:
        described = {policy["policy"]: policy["revisions"] for policy in client.policies()["policies"]}
        waiting = {
            (policy, revision)
            for policy, revision in waiting
            if any(i["revision_id"] == revision and i["status"] == "draining" for i in described.get(policy, []))
        }
        if not waiting or time.monotonic() >= deadline:
            return not waiting
        time.sleep(POLL_S)
