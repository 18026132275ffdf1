"""List the policies of a server, or the revisions of one, newest first."""

from __future__ import annotations

import argparse
from typing import Any

from epochless_vllm.cli.connection import add_server_options, connect
from epochless_vllm.cli.output import Output, short
from epochless_vllm.protocol.names import parse_policy


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("policy", nargs="?", help="show this policy only")
    parser.add_argument("--retired", action="store_true", help="show retired revisions, too")
    parser.add_argument("--full", action="store_true", help="show whole digests")
    add_server_options(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print what the server describes."""
    if arguments.policy is not None:
        parse_policy(arguments.policy)
    with connect(arguments) as client:
        described = client.policies(arguments.policy)
    output.value(described)
    policies = [described] if arguments.policy else described["policies"]
    rows = [row for policy in policies for row in _rows(policy, arguments)]
    if rows:
        output.table(("policy", "step", "revision", "status", "sequence", "id"), rows)
    else:
        output.line("no revisions")
    more = sum(policy.get("more", 0) for policy in policies)
    if more and arguments.retired:
        output.line(f"and {more} more: name a step or digest in GET /v1/policies/POLICY/revisions/REVISION")
    return 0


def _rows(policy: dict[str, Any], arguments: argparse.Namespace) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for item in policy["revisions"]:
        if item["status"] == "retired" and not arguments.retired:
            continue
        revision = item["revision_id"] if arguments.full else short(item["revision_id"])
        status = f"{item['status']}, head" if item["head"] else item["status"]
        if item.get("reason"):
            status += f" ({item['rank']}: {item['reason']})"
        rows.append((policy["policy"], item["step"], revision, status, item["sequence"], item["lora_int_id"]))
    return rows
