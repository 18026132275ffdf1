"""Damage to a journal is named by its row or changes nothing; it never changes what was decided."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from epochless_vllm.errors import JournalError, StoreError
from epochless_vllm.protocol.publication import RetireBegan, State, apply
from epochless_vllm.publication.checkpoint import Checkpointer
from epochless_vllm.publication.journal import Journal, JournalView
from tests.protocol.test_publication import C
from tests.publication.damage import (
    CHANGED_RECEIPTS,
    CHANGED_ROWS,
    CHANGES,
    DAMAGED_TIPS,
    DECIDED_TWICE,
    EVENTS,
    EXCHANGED_ROWS,
    KEPT,
    LOST_END,
    MISSING_ROWS,
    OTHER_EPOCHS,
    ROW_OF_ANOTHER,
    ROWS,
    Damage,
    write_journal,
)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of ten rows, everything in its main file."""
    path = tmp_path_factory.mktemp("closed") / "journal.sqlite"
    write_journal(path)
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


def refusal_of(path: Path, damage: Damage) -> JournalError:
    damage.act(path)
    with pytest.raises(JournalError) as caught:
        Journal(path)
    assert damage.words in str(caught.value)
    return caught.value


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_row_is_named(copy: Path, row: int, change: str) -> None:
    damage = CHANGED_ROWS[f"{change}, row {row}"]
    assert refusal_of(copy, damage).fields["row"] == row
    with pytest.raises(JournalError, match=damage.words) as caught:
        JournalView(copy).current()
    assert caught.value.fields["row"] == row


@pytest.mark.parametrize("name", MISSING_ROWS)
def test_a_missing_row_is_named(copy: Path, name: str) -> None:
    refusal_of(copy, MISSING_ROWS[name])


def test_rows_lost_from_the_end_show_by_the_tip(copy: Path) -> None:
    refusal_of(copy, LOST_END)


@pytest.mark.parametrize("name", DAMAGED_TIPS)
def test_a_damaged_tip_is_an_error(copy: Path, name: str) -> None:
    refusal_of(copy, DAMAGED_TIPS[name])


def test_two_rows_that_changed_places_are_an_error(copy: Path) -> None:
    refusal_of(copy, EXCHANGED_ROWS)


def test_a_row_of_another_journal_is_an_error(copy: Path) -> None:
    refusal_of(copy, ROW_OF_ANOTHER)


def test_rows_that_break_the_rules_are_an_error_although_their_chain_is_right(copy: Path) -> None:
    """A journal written by a program without the rules: the same decision twice."""
    refusal_of(copy, DECIDED_TWICE)


@pytest.mark.parametrize("epoch", OTHER_EPOCHS)
def test_a_row_of_another_epoch_is_an_error_although_its_chain_is_right(copy: Path, epoch: int) -> None:
    """A journal written by a server that did not notice that its epoch was over."""
    refusal_of(copy, OTHER_EPOCHS[epoch])


@pytest.mark.parametrize("name", CHANGED_RECEIPTS)
def test_changed_receipts_are_an_error_of_whoever_reads_them(copy: Path, name: str) -> None:
    damage = CHANGED_RECEIPTS[name]
    damage.act(copy)
    journal = Journal(copy)
    with pytest.raises(JournalError, match=damage.words):
        journal.receipts(KEPT)
    journal.close()


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
