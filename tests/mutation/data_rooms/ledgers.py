"""Damaged ledgers: the publication journal, judged by each who opens it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from epochless_vllm.errors import StoreError
from epochless_vllm.publication.journal import Journal, JournalView
from tests.mutation.data import Checker, DataMutant, DataRoom, Refusal
from tests.publication.damage import CHANGED_RECEIPTS, DAMAGE, KEPT, Damage, write_journal

FILE = "journal.sqlite"
SERVING, RECEIPTS, OPENED, READ, VIEWED = (
    "a view that had read it, still serving",
    "who reads the receipts of a publication",
    "who opens it to write",
    "who opens it to read, as fsck does",
    "a view that reads it for the first time",
)


def _refusal_of(check: Callable[[], object]) -> Refusal | None:
    try:
        check()
    except StoreError as error:
        return Refusal(error.code, error.message)
    return None


def _damaged(damage: Damage | None, files: Path, place: Path) -> Path:
    path = Path(shutil.copy(files / FILE, place))
    if damage is not None:
        damage.act(path)
    return path


def _serve(damage: Damage | None, files: Path, place: Path) -> Refusal | None:
    path = _damaged(None, files, place)
    view = JournalView(path)
    view.current()
    if damage is not None:
        damage.act(path)
    refusal = _refusal_of(view.current)
    view.close()
    return refusal


def _read_receipts(damage: Damage | None, files: Path, place: Path) -> Refusal | None:
    path = _damaged(None, files, place)
    journal = Journal(path)
    if damage is not None:
        damage.act(path)
    refusal = _refusal_of(lambda: journal.receipts(KEPT))
    journal.close()
    return refusal


CHECKERS: dict[str, Checker] = {
    RECEIPTS: _read_receipts,
    SERVING: _serve,
    VIEWED: lambda *given: _refusal_of(JournalView(_damaged(*given)).current),
    READ: lambda *given: _refusal_of(lambda path=_damaged(*given): Journal(path, read_only=True)),
    OPENED: lambda *given: _refusal_of(lambda path=_damaged(*given): Journal(path)),
}


def _mutant(name: str, damage: Damage, *checkers: str) -> DataMutant:
    return DataMutant(name, FILE, damage, dict.fromkeys(checkers, Refusal("journal_error", damage.words)))


ROOMS = (
    DataRoom(
        "data: journal",
        CHECKERS,
        {"as it was written": None},
        (
            *(_mutant(name, damage, VIEWED, READ, OPENED) for name, damage in DAMAGE.items()),
            *(_mutant(name, damage, RECEIPTS) for name, damage in CHANGED_RECEIPTS.items()),
        ),
        prepare=lambda files: write_journal(files / FILE),
    ),
)
