"""Look after a store: `fsck` checks every byte; `collect` removes revisions that no policy holds any more and that
nobody published for a while."""

from __future__ import annotations

import argparse
import re

from epochless_vllm.cli import fsck
from epochless_vllm.cli.output import Output, short, size
from epochless_vllm.durable import FileLock
from epochless_vllm.store.permissions import require_private
from epochless_vllm.store.revisions import RevisionStore

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# A revision is ingested before the journal holds it; younger ones may be on their way unless no server runs.
SAFE_AGE_S = 3600.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="fsck|collect")
    fsck.configure(actions.add_parser("fsck", help="check every byte", description=fsck.__doc__))
    collect = actions.add_parser("collect", help="remove old revisions", description=__doc__)
    fsck.configure(collect)
    collect.add_argument(
        "--older-than", required=True, type=parse_age, metavar="AGE", help="only if not published for so long: 12h, 7d"
    )


def parse_age(text: str) -> float:
    """Return the seconds that an age such as ``90m`` or ``7d`` means."""
    match = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age; give a number and s, m, h, d or w, as in 7d")
    return float(int(match[1]) * SECONDS[match[2]])


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Run one action."""
    if arguments.action == "fsck":
        return fsck.run(arguments, output)
    return run_collect(arguments, output)


def run_collect(arguments: argparse.Namespace, output: Output) -> int:
    """Collect, and print what was removed.

    Raises:
        JournalError: a damaged journal cannot say what is held; nothing is removed.
        StoreError: others may write to the store.
        StoreLockedError: a server runs, and the age is too short to be safe beside one.
    """
    root = fsck.open_root(arguments.store)
    require_private(root)  # the journal decides what is removed
    lock = None
    if arguments.older_than < SAFE_AGE_S:
        lock = FileLock(root / "lock", purpose="epochless store collect")
    try:
        state = fsck.read_journal(root)
        keep = {revision_id for _, revision_id in state.holdings}
        keep |= {intent.revision_id for intent in state.intents.values()}
        report = RevisionStore(root).collect(keep, arguments.older_than)
    finally:
        if lock is not None:
            lock.release()
    output.value({"removed": list(report.removed), "kept": report.kept, "freed_bytes": report.freed_bytes})
    for revision_id in report.removed:
        output.line(f"removed {short(revision_id)}")
    output.line(f"{len(report.removed)} removed, {report.kept} kept, {size(report.freed_bytes)} freed")
    return 0
