"""Publish the PEFT adapter in a directory as a revision of a policy. The same content under the same step again is the
same publication."""

from __future__ import annotations

import argparse
from pathlib import Path

from epochless_vllm.cli.connection import add_server_options, connect, parse_step_option
from epochless_vllm.cli.output import Output
from epochless_vllm.protocol.names import parse_policy


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("policy", help="the served name whose head moves; name-vN publishes step N of name")
    parser.add_argument("path", help="directory with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("--step", type=parse_step_option, help="the trainer's step (default: the next one)")
    parser.add_argument("--upload", action="store_true", help="send the files; the server need not see the directory")
    add_server_options(parser)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Publish and print the reply."""
    parse_policy(arguments.policy)
    with connect(arguments) as client:
        if arguments.upload:
            reply = client.upload(arguments.policy, arguments.path, step=arguments.step)
        else:
            reply = client.publish(arguments.policy, Path(arguments.path).absolute(), step=arguments.step)
    output.value(reply.model_dump())
    verb = "already published" if reply.repeated else "published"
    output.line(f"{verb} {reply.lora_name}")
    ranks = len(reply.receipts)
    output.line(f"step {reply.step}, sequence {reply.sequence}, on {ranks} rank{'' if ranks == 1 else 's'}")
    return 0
