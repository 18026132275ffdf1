"""Damaged ledgers: the publication journal and the receipts a server keeps, judged by each who reads them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from epochless_vllm.errors import ReceiptError, StoreError
from epochless_vllm.plugin import sink
from epochless_vllm.protocol.compact import decode_compact
from epochless_vllm.publication.journal import Journal, JournalView
from epochless_vllm.verify import verify_receipt
from tests.mutation.data import Checker, DataMutant, DataRoom, Refusal
from tests.plugin.sink_damage import ASKED, open_sink, write_sink
from tests.plugin.sink_damage import DAMAGE as SINK_DAMAGE
from tests.plugin.sink_damage import Damage as SinkDamage
from tests.publication.damage import CHANGED_RECEIPTS, DAMAGE, DAMAGED_TIPS, KEPT, Damage, write_journal
from tests.verify.bases import known

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


def _view(damage: Damage | None, files: Path, place: Path) -> Refusal | None:
    view = JournalView(_damaged(damage, files, place))
    refusal = _refusal_of(view.current)
    view.close()
    return refusal


def _open(damage: Damage | None, files: Path, place: Path, *, read_only: bool = False) -> Refusal | None:
    path = _damaged(damage, files, place)
    return _refusal_of(lambda: Journal(path, read_only=read_only).close())


CHECKERS: dict[str, Checker] = {
    RECEIPTS: _read_receipts,
    SERVING: _serve,
    VIEWED: _view,
    READ: partial(_open, read_only=True),
    OPENED: _open,
}
# A view takes what it has read as read, and notices what comes after it.
NOTICED = {*DAMAGED_TIPS, "one decision twice", "a row of epoch 0", "a row of epoch 2"}


def _mutant(name: str, damage: Damage, *checkers: str) -> DataMutant:
    return DataMutant(name, FILE, damage, dict.fromkeys(checkers, Refusal("journal_error", damage.words)))


def _read_sink(check: Callable[[bytes], object], damage: SinkDamage | None, files: Path, place: Path) -> Refusal | None:
    path = Path(shutil.copy(files / sink.FILE_NAME, place))
    if damage is not None:
        damage.act(path)
    try:
        body = open_sink(place).read(ASKED)
        assert body is not None, "it is not there"
        check(body)
    except StoreError as error:
        return Refusal(error.code, error.message)
    except ReceiptError as error:
        return Refusal(str(error.fields["threat"]), error.message)
    return None


BY_ID = "a client that verifies what it got, by the id it asked for"
READERS: dict[str, Checker] = {
    "the sink itself": partial(_read_sink, lambda body: None),
    "the server, which answers with it in another format": partial(_read_sink, decode_compact),
    "a client that verifies what it got, by the server's key": partial(
        _read_sink, partial(verify_receipt, public_key=known()["public_key"])
    ),
    BY_ID: partial(_read_sink, partial(verify_receipt, **known(), receipt_id=ASKED)),
}

ROOMS = (
    DataRoom(
        "data: journal",
        CHECKERS,
        {"as it was written": None},
        (
            *(
                _mutant(name, damage, *[SERVING] * (name in NOTICED), VIEWED, READ, OPENED)
                for name, damage in DAMAGE.items()
            ),
            *(_mutant(name, damage, RECEIPTS) for name, damage in CHANGED_RECEIPTS.items()),
        ),
        prepare=lambda files: write_journal(files / FILE),
    ),
    DataRoom(
        "data: receipt sink",
        READERS,
        {"as it was written": None},
        tuple(
            DataMutant(name, sink.FILE_NAME, damage, {BY_ID: Refusal(damage.code)})
            for name, damage in SINK_DAMAGE.items()
        ),
        prepare=write_sink,
    ),
)
