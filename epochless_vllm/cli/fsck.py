"""Check a store: every byte of every revision, every row of the journal, that each revision the journal holds is there,
and that only its owner may change it. Changes nothing; a server may be running."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from epochless_vllm.cli.output import Output, short, size
from epochless_vllm.errors import EpochlessError, StoreError
from epochless_vllm.protocol.publication import State
from epochless_vllm.publication.journal import Journal
from epochless_vllm.store.permissions import find_shared
from epochless_vllm.store.revisions import RevisionStore

JOURNAL_NAME = "journal.sqlite"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("store", help="directory of the store (--epochless-store)")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the findings; 1 if anything is damaged or missing, or others may write there."""
    root = open_root(arguments.store)
    findings = check_store(root)
    output.value(findings)
    output.line(f"{findings['checked']} revisions, {size(findings['byte_length'])}")
    for item in findings["damaged"]:
        output.line(f"damaged   {short(item['revision_id'])}  {item['message']}")
    for revision_id in findings["missing"]:
        output.line(f"missing   {short(revision_id)}  the journal holds it; publish the adapter again")
    if findings["journal"]["error"] is not None:
        output.line(f"journal   {findings['journal']['error']}")
    else:
        output.line(
            f"journal   epoch {findings['journal']['epoch']}, {findings['journal']['publications']} publications"
        )
    for item in findings["shared"]:
        output.line(f"shared    {item['detail']}")
    for name in findings["strays"]:
        output.line(f"stray     {name}")
    for name in findings["leftovers"]:
        output.line(f"leftover  {name}  of an interrupted writer; the next start removes it")
    output.line("sound" if findings["sound"] else "not sound")
    return 0 if findings["sound"] else 1


def open_root(path: str) -> Path:
    """Return the directory of an existing store.

    Raises:
        StoreError: there is none; a check must not make one.
    """
    root = Path(path)
    if not (root / "revisions").is_dir():
        raise StoreError(f"{root}: is not a store; give the directory of --epochless-store", path=str(root))
    return root


def read_journal(root: Path) -> State:
    """Return the committed state of a store.

    Raises:
        JournalError: the journal is damaged.
        StoreError: it cannot be read.
    """
    if not (root / JOURNAL_NAME).exists():
        return State()
    journal = Journal(root / JOURNAL_NAME, read_only=True)
    try:
        return journal.state
    finally:
        journal.close()


def check_store(root: Path) -> dict[str, Any]:
    """Return everything a check found, as JSON types; ``sound`` says whether all that is held can be served."""
    shared = [{"path": str(item.path), "detail": item.detail} for item in find_shared(root)]
    store = RevisionStore(root)
    report = store.fsck()
    journal: dict[str, Any] = {"epoch": None, "publications": None, "error": None}
    held: set[str] = set()
    try:
        state = read_journal(root)
        journal |= {"epoch": state.epoch, "publications": len(state.publications)}
        held = {revision_id for _, revision_id in state.holdings}
    except EpochlessError as error:  # a finding like any other
        journal["error"] = error.message
    missing = sorted(held - set(store.list()))
    damaged = [{"revision_id": d.revision_id, "code": d.code, "message": d.message} for d in report.damaged]
    return {
        "sound": not damaged and not missing and not shared and journal["error"] is None,
        "checked": report.checked,
        "byte_length": report.byte_length,
        "damaged": damaged,
        "missing": missing,
        "shared": shared,
        "journal": journal,
        "strays": list(report.strays),
        "leftovers": list(report.leftovers),
    }
