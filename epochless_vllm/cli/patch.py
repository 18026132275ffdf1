"""The patch of vLLM that Epochless needs: `status` says what a tree is, `verify` runs every check, `apply` patches it,
`revert` restores the original bytes. Applying or reverting twice changes nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from epochless_vllm.cli.output import Output

ACTIONS = {
    "status": "say what the tree is",
    "verify": "run every check, change nothing",
    "apply": "patch the tree",
    "revert": "restore the original bytes",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="|".join(ACTIONS))
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary)
        action.add_argument(
            "--tree",
            type=Path,
            metavar="DIR",
            help="directory that holds the package vllm (default: the installed one)",
        )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Run one action and print what the tree is then; 1 if a check of ``status`` or ``verify`` found it wanting."""
    from epochless_vllm.patch import installation
    from epochless_vllm.patch.tree import find_installed_tree

    root = arguments.tree or find_installed_tree()
    act = {
        "status": installation.patch_status,
        "verify": installation.verify_tree,
        "apply": installation.apply_patch,
        "revert": installation.revert_patch,
    }[arguments.action]
    status = act(root)
    output.value(status.describe())
    output.line(f"vLLM {status.version or 'of unknown version'} in {status.root}")
    output.line(f"{status.state}: {status.reason}")
    return 0 if status.state in ("patched", "unpatched") else 1
