"""Damage to a journal is named by its row or changes nothing; it never changes what was decided."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from epochless_vllm.errors import JournalError, StoreError
from epochless_vllm.protocol.events import chain_row
from epochless_vllm.protocol.publication import (
    Aborted,
    Committed,
    Event,
    Intended,
    Intent,
    Quarantined,
    RetireBegan,
    Retired,
    State,
    apply,
)
from epochless_vllm.publication.checkpoint import Checkpointer
from epochless_vllm.publication.journal import Journal, JournalView
from tests.protocol.test_publication import A, B, C

EVENTS: list[Event] = [
    Intended(Intent(1, "policy", 1, A, 1)),
    Committed(1, 1),
    Intended(Intent(2, "policy", 2, B, 2)),
    Aborted(2, "tp1: wrong digest"),
    Intended(Intent(3, "policy", 2, C, 3)),
    Committed(3, 2),
    RetireBegan("policy", A),
    Retired("policy", A),
    Quarantined(C, "tp0", "no memory"),
]
RECEIPTS = {"tp0": {"rank": "tp0", "source_digest": A}}


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of ten rows, everything in its main file."""
    path = tmp_path_factory.mktemp("closed") / "journal.sqlite"
    journal = Journal(path)
    journal.begin_epoch()
    for event in EVENTS:
        journal.append(event, receipts=RECEIPTS if isinstance(event, Committed) else None)
    journal.close()
    return path


@pytest.fixture
def copy(closed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(closed, tmp_path / "journal.sqlite"))


def prefixes() -> list[State]:
    """The states a journal of EVENTS passes through."""
    states = [State(), State(epoch=1)]
    for event in EVENTS:
        states.append(apply(states[-1], event))
    return states


@pytest.mark.parametrize("row", range(1, 11))
@pytest.mark.parametrize(
    "change",
    [
        "payload = CAST(replace(CAST(payload AS TEXT), substr(CAST(payload AS TEXT), -3, 1), '!') AS BLOB)",
        "payload = CAST(payload AS TEXT)",
        "payload = x''",
        "kind = upper(kind)",
        "kind = CAST(kind AS BLOB)",
        "epoch = epoch + 1",
        "epoch = 'one'",
        "evidence = zeroblob(32)",
        "evidence = 7",
        "chain = zeroblob(32)",
        "chain = hex(chain)",
        "seq = seq + 100",
    ],
)
def test_a_changed_row_is_named(copy: Path, row: int, change: str) -> None:
    with sqlite3.connect(copy) as raw:
        raw.execute(f"UPDATE events SET {change} WHERE seq = ?", (row,))
    for opening in (Journal, JournalView):
        with pytest.raises(JournalError, match=f"row {row} is damaged") as caught:
            opening(copy).current() if opening is JournalView else opening(copy)
        assert caught.value.fields["row"] == row


@pytest.mark.parametrize("row", range(1, 11))
def test_a_missing_row_is_named(copy: Path, row: int) -> None:
    with sqlite3.connect(copy) as raw:
        raw.execute("DELETE FROM events WHERE seq = ?", (row,))
    with pytest.raises(JournalError, match=f"row {row} is damaged"):
        Journal(copy)


def test_rows_lost_from_the_end_show_by_the_tip(copy: Path) -> None:
    with sqlite3.connect(copy) as raw:
        raw.execute("DELETE FROM events WHERE seq > 6")
    with pytest.raises(JournalError, match="should end at row 10 and ends at row 6"):
        Journal(copy)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM tip",
        "INSERT INTO tip SELECT * FROM tip",
        "UPDATE tip SET seq = 11",
        "UPDATE tip SET chain = x'00'",
    ],
)
def test_a_damaged_tip_is_an_error(copy: Path, change: str) -> None:
    with sqlite3.connect(copy) as raw:
        raw.execute(change)
    with pytest.raises(JournalError):
        Journal(copy)


def test_two_rows_that_changed_places_are_an_error(copy: Path) -> None:
    with sqlite3.connect(copy) as raw:
        raw.executescript(
            "UPDATE events SET seq = 100 WHERE seq = 4; UPDATE events SET seq = 4 WHERE seq = 5;"
            "UPDATE events SET seq = 5 WHERE seq = 100"
        )
    with pytest.raises(JournalError, match="row 4 is damaged"):
        Journal(copy)


def test_a_row_of_another_journal_is_an_error(copy: Path) -> None:
    with sqlite3.connect(copy) as raw:
        raw.execute(
            "UPDATE events SET (payload, chain) = (SELECT payload, chain FROM events WHERE seq = 2) WHERE seq = 6"
        )
    with pytest.raises(JournalError, match="row 6 is damaged"):
        Journal(copy)


def test_rows_that_break_the_rules_are_an_error_although_their_chain_is_right(tmp_path: Path) -> None:
    """A journal written by a program without the rules: the same decision twice."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.begin_epoch()
    journal.append(Intended(Intent(1, "p", 1, A, 1)))
    journal.append(Committed(1, 1))
    row, after = journal._replay.next_row(Quarantined(A, "tp0", "x"))
    payload = b'{"sequence":2,"transaction_id":1}'
    chain = chain_row(journal._replay.chain, seq=row.seq, epoch=1, kind="committed", payload=payload, evidence=None)
    journal.close()
    with sqlite3.connect(path) as raw:
        raw.execute("INSERT INTO events VALUES (?, 1, 'committed', ?, NULL, ?)", (after.seq, payload, chain))
        raw.execute("UPDATE tip SET seq = ?, chain = ?", (after.seq, chain))
    with pytest.raises(JournalError, match="row 4 is damaged: transaction 1 is not undecided"):
        Journal(path)


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_row_of_another_epoch_is_an_error_although_its_chain_is_right(tmp_path: Path, epoch: int) -> None:
    """A journal written by a server that did not notice that its epoch was over."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.begin_epoch()
    row, after = journal._replay.next_row(Intended(Intent(1, "p", 1, A, 1)))
    chain = chain_row(
        journal._replay.chain, seq=row.seq, epoch=epoch, kind=row.kind, payload=row.payload, evidence=None
    )
    journal.close()
    with sqlite3.connect(path) as raw:
        raw.execute("INSERT INTO events VALUES (?, ?, ?, ?, NULL, ?)", (row.seq, epoch, row.kind, row.payload, chain))
        raw.execute("UPDATE tip SET seq = ?, chain = ?", (after.seq, chain))
    with pytest.raises(JournalError, match=f"row 2 is damaged: written in epoch {epoch}, recorded in epoch 1"):
        Journal(path)


def test_any_flipped_byte_of_the_file_is_an_error_or_changes_nothing(closed: Path, copy: Path) -> None:
    original, expected = closed.read_bytes(), prefixes()[-1]
    generator = random.Random(5)
    outcomes = {"named": 0, "refused": 0, "unchanged": 0}
    used = [position for position in range(len(original)) if original[position]]
    for position in generator.sample(used, 500):
        damaged = bytearray(original)
        damaged[position] ^= 1 << generator.randrange(8)
        copy.write_bytes(damaged)
        try:
            journal = Journal(copy, read_only=True)
        except JournalError as error:
            outcomes["named" if "row" in error.fields else "refused"] += 1
        except StoreError:
            outcomes["refused"] += 1
        else:
            assert journal.state == expected
            outcomes["unchanged"] += 1
            journal.close()
    assert outcomes["named"] > 200
    assert outcomes["unchanged"] > 20  # text of the schema, receipts, free space: both sides are reached


def test_every_truncation_of_the_file_is_an_error(closed: Path, copy: Path) -> None:
    original = closed.read_bytes()
    for length in range(0, len(original), 257):
        copy.write_bytes(original[:length])
        with pytest.raises(StoreError):
            Journal(copy, read_only=True)


@pytest.fixture
def with_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a kill leaves behind while the rows are still in the write-ahead log."""
    monkeypatch.setattr(Checkpointer, "request", lambda self: None)
    path = tmp_path / "live" / "journal.sqlite"
    path.parent.mkdir()
    journal = Journal(path)
    journal.begin_epoch()
    for event in EVENTS:
        journal.append(event)
    target = tmp_path / "killed"
    target.mkdir()
    for name in ("journal.sqlite", "journal.sqlite-wal"):
        shutil.copy(path.with_name(name), target / name)
    journal.close()
    return target / "journal.sqlite"


def restore(path: Path, target: Path, log: bytes) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    shutil.copy(path, target / path.name)
    (target / f"{path.name}-wal").write_bytes(log)
    return target / path.name


def test_a_log_torn_anywhere_is_not_fatal_and_yields_a_state_that_was(with_log: Path, tmp_path: Path) -> None:
    log = with_log.with_name("journal.sqlite-wal").read_bytes()
    known = prefixes()
    reached = []
    for length in range(0, len(log) + 1, 1021):
        journal = Journal(restore(with_log, tmp_path / "torn", log[:length]))
        reached.append(known.index(journal.state))
        journal.close()
    journal = Journal(restore(with_log, tmp_path / "torn", log))
    assert journal.state == known[-1]
    assert reached == sorted(reached)
    assert len(set(reached)) > 8
    journal.append(RetireBegan("policy", C))  # and it goes on from there
    journal.close()


def test_garbage_behind_the_log_is_dropped(with_log: Path, tmp_path: Path) -> None:
    log = with_log.with_name("journal.sqlite-wal").read_bytes()
    for garbage in (b"\0" * 5000, random.Random(1).randbytes(9000), log[-4120:]):
        journal = Journal(restore(with_log, tmp_path / "torn", log + garbage))
        assert journal.state == prefixes()[-1]
        journal.close()


def test_decisions_leave_the_log_within_moments_so_that_tearing_it_loses_none(tmp_path: Path) -> None:
    path = tmp_path / "live" / "journal.sqlite"
    path.parent.mkdir()
    journal = Journal(path)
    journal.begin_epoch()
    for event in EVENTS:
        journal.append(event)
    journal._checkpointer.close()  # finishes what was asked of it
    assert path.with_name("journal.sqlite-wal").stat().st_size == 0
    killed = Path(shutil.copy(path, tmp_path / "journal.sqlite"))
    assert Journal(killed).state == prefixes()[-1]
    journal.close()


def test_damage_met_while_serving_is_an_error_of_the_view(copy: Path) -> None:
    journal, view = Journal(copy), JournalView(copy)
    view.current()
    journal.append(RetireBegan("policy", C))
    with sqlite3.connect(copy) as raw:
        raw.execute("UPDATE events SET payload = x'00' WHERE seq = 11")
    with pytest.raises(JournalError, match="row 11"):
        view.current()
    view.close()
    journal.close()
