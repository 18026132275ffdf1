"""The journal as a value: what is appended is what is read, by whom, and who may append."""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochless_vllm.errors import (
    EncodingError,
    IllegalTransitionError,
    JournalError,
    StaleEpochError,
    StorageFullError,
    StoreError,
)
from epochless_vllm.protocol.publication import (
    Aborted,
    Committed,
    Intended,
    Intent,
    Quarantined,
    RetireBegan,
    Retired,
    State,
    apply,
)
from epochless_vllm.publication.journal import Journal, JournalView
from epochless_vllm.publication.rows import Replay
from tests.protocol.test_publication import A, B, answers, likely_events
from tests.publication.conftest import MEMORY
from tests.publication.fakes import run_processes


@pytest.fixture
def journal(journal_path: Path) -> Iterator[Journal]:
    opened = Journal(journal_path)
    opened.begin_epoch()
    yield opened
    opened.close()


def publish(journal: Journal, step: int, revision_id: str = A, policy: str = "p", **options: object) -> State:
    state = journal.refresh()
    transaction = state.last_transaction_id + 1
    engine_id = state.adapters.get(revision_id, state.last_lora_int_id + 1)  # type: ignore[call-overload]
    journal.append(Intended(Intent(transaction, policy, step, revision_id, engine_id)))  # type: ignore[arg-type]
    return journal.append(Committed(transaction, state.sequence + 1), **options)  # type: ignore[arg-type]


def test_a_new_journal_is_empty_private_and_leaves_no_half_made_file(journal_path: Path) -> None:
    journal = Journal(journal_path)
    assert answers(journal.state) == answers(State())
    assert stat.S_IMODE(journal_path.stat().st_mode) == 0o600
    journal.close()
    assert not [name for name in os.listdir(journal_path.parent) if name.startswith(".")]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_reading_back_is_folding_the_rules_over_what_was_appended(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        path = Path(directory) / "journal.sqlite"
        journal = Journal(path)
        view = JournalView(path)
        expected = State()
        for _ in range(data.draw(st.integers(1, 12))):
            event = data.draw(likely_events(expected))
            before = journal.state
            try:
                expected = apply(expected, event)
            except IllegalTransitionError:
                with pytest.raises((IllegalTransitionError, EncodingError)):
                    journal.append(event)
                assert journal.state == before
            else:
                if type(event).__name__ == "EpochBegan":
                    # What begins an epoch also aborts; the rules see the same events.
                    for transaction in list(expected.intents):
                        expected = apply(expected, Aborted(transaction, "the server stopped before it was decided"))
                    journal.begin_epoch()
                else:
                    journal.append(event)
            assert answers(journal.state) == answers(view.current()) == answers(expected)
        view.close()
        journal.close()
        again = Journal(path, read_only=True)
        assert again.state == expected
        again.close()


def test_events_of_one_append_are_recorded_all_or_none(journal: Journal) -> None:
    publish(journal, 1, A)
    before = journal.state
    with pytest.raises(IllegalTransitionError):
        journal.append(RetireBegan("p", A), Retired("p", A), Retired("p", A))
    assert journal.refresh() == before
    assert journal.append(RetireBegan("p", A), Retired("p", A)).adapters == {}


def test_an_event_that_could_not_be_read_back_is_refused_and_leaves_nothing(journal: Journal) -> None:
    publish(journal, 1, A)
    before = journal.state
    with pytest.raises(EncodingError):
        journal.append(Quarantined(A, "tp0", "\ud800"))
    assert journal.refresh() == before
    publish(journal, 2, B)


def test_a_new_epoch_aborts_each_undecided_intent_with_its_own_event(journal: Journal, journal_path: Path) -> None:
    journal.append(Intended(Intent(1, "p", 1, A, 1)))
    journal.append(Intended(Intent(2, "p", 2, B, 2)))
    again = Journal(journal_path)
    assert again.begin_epoch() == again.epoch == 2
    assert not again.state.intents
    assert again.state.last_lora_int_id == 2
    rows = sqlite3.connect(journal_path).execute("SELECT kind, epoch FROM events ORDER BY seq").fetchall()
    assert [kind for kind, _ in rows[-3:]] == ["epoch_began", "aborted", "aborted"]
    assert {epoch for _, epoch in rows[-3:]} == {2}
    again.close()


def test_a_server_whose_epoch_is_over_cannot_append(journal: Journal, journal_path: Path) -> None:
    later = Journal(journal_path)
    later.begin_epoch()
    with pytest.raises(StaleEpochError) as caught:
        publish(journal, 1, A)
    assert caught.value.fields == {"epoch": 1, "current": 2}
    assert publish(later, 1, A).sequence == 1
    later.close()


def test_two_writers_of_one_epoch_each_apply_the_rules_to_both_their_events(
    journal: Journal, journal_path: Path
) -> None:
    other = Journal(journal_path)
    assert other.epoch == journal.epoch
    journal.append(Intended(Intent(1, "p", 1, A, 1)))
    with pytest.raises(IllegalTransitionError):
        other.append(Intended(Intent(1, "p", 2, B, 1)))
    other.append(Committed(1, 1))
    with pytest.raises(IllegalTransitionError):
        journal.append(Committed(1, 1))
    assert journal.refresh() == other.state
    other.close()


def _publish_many(path: Path, policy: str) -> None:
    journal = Journal(path)
    for step in range(8):
        while True:
            try:
                publish(journal, step, f"sha256:{policy * 63}{step}", policy)
                break
            except IllegalTransitionError:  # another process took the number; aborts are the coordinator's affair
                for transaction, intent in journal.refresh().intents.items():
                    if intent.policy == policy:
                        journal.append(Aborted(transaction, "again"))
    journal.close()


def test_four_processes_append_in_one_order_and_lose_nothing(journal_path: Path) -> None:
    run_processes(_publish_many, [(journal_path, policy) for policy in "abcd"])
    state = Journal(journal_path, read_only=True).state
    assert sorted((p.policy, p.step) for p in state.publications.values()) == [(p, s) for p in "abcd" for s in range(8)]
    assert len(set(state.adapters.values())) == 32


def test_a_view_sees_commits_of_others_and_of_its_own_process(journal: Journal, journal_path: Path) -> None:
    view = JournalView(journal_path)
    for step in range(3):
        publish(journal, step, A)
        head = view.current().head("p")
        assert head is not None
        assert head.step == step
    view.close()


def test_a_view_reads_rows_only_when_the_file_changed(
    journal: Journal, journal_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A copy into the main file counts as a change: the one that the epoch asked for is made now, and no other.
    journal._checkpointer.close()
    monkeypatch.setattr(journal._checkpointer, "request", lambda: None)
    publish(journal, 1, A)
    view = JournalView(journal_path)
    state = view.current()
    statements: list[str] = []
    view._connection.set_trace_callback(statements.append)
    for _ in range(100):
        assert view.current() is state
    assert set(statements) == {"PRAGMA data_version"}
    view.close()


def test_a_view_may_start_from_what_the_journal_has_read(
    journal: Journal, journal_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(journal, 1, A)
    view = JournalView(journal_path, after=journal)
    read: list[int] = []
    original = Replay._read
    monkeypatch.setattr(
        Replay, "_read", lambda self, values, path: read.append(values[0]) or original(self, values, path)
    )
    assert view.current() == journal.state
    for step in (2, 3):
        publish(journal, step, B if step == 2 else A)
        assert view.current() == journal.state
    assert read == [4, 5, 6, 7]
    assert view.current().publications._shared is journal.state.publications._shared
    view.close()


def test_a_view_cannot_write(journal: Journal, journal_path: Path) -> None:
    view = JournalView(journal_path)
    with pytest.raises(sqlite3.OperationalError):
        view._connection.execute("DELETE FROM events")
    view.close()


def test_a_reader_of_a_file_elsewhere_can_read_and_not_append(journal: Journal, journal_path: Path) -> None:
    publish(journal, 1, A)
    reader = Journal(journal_path, read_only=True)
    assert reader.state == journal.state
    with pytest.raises(StorageFullError, match="opened for reading only"):
        reader.append(RetireBegan("p", A))
    reader.close()


def test_reading_needs_no_file_beside_a_closed_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.begin_epoch()
    state = publish(journal, 1, A)
    journal.close()
    assert sorted(os.listdir(tmp_path)) == ["journal.sqlite", "journal.sqlite.lock"]
    assert Journal(tmp_path / "journal.sqlite", read_only=True).state == state


RECEIPTS = {"tp0": {"rank": "tp0", "source_digest": A}, "tp1": {"rank": "tp1", "source_digest": A}}


def test_receipts_are_kept_until_the_revision_is_retired_from_every_policy(journal: Journal) -> None:
    publish(journal, 1, A, receipts=RECEIPTS)
    publish(journal, 1, A, "q", receipts={"tp0": {"other": 1}})
    assert journal.receipts(1) == RECEIPTS
    journal.append(RetireBegan("p", A), Retired("p", A))
    assert journal.receipts(1) == RECEIPTS
    journal.append(RetireBegan("q", A), Retired("q", A))
    assert journal.receipts(1) == journal.receipts(2) == {}
    assert journal.receipts(99) == {}


def test_changed_receipts_are_an_error(journal: Journal, journal_path: Path) -> None:
    publish(journal, 1, A, receipts=RECEIPTS)
    with sqlite3.connect(journal_path) as raw:
        raw.execute("UPDATE receipts SET body = replace(body, 'tp1', 'tp2')")
    with pytest.raises(JournalError, match="publication 1"):
        journal.receipts(1)


def test_a_publish_and_retire_cycle_leaves_less_than_a_kilobyte(journal_path: Path) -> None:
    journal = Journal(journal_path)
    journal.begin_epoch()
    journal._connection.execute("PRAGMA synchronous = OFF")  # sizes are the question here

    def run(first: int, last: int) -> int:
        for step in range(first, last):
            revision_id = f"sha256:{step:064x}"
            receipts = {f"engine{n}.tp{n}": {"registered_digest": A, "source_digest": revision_id} for n in range(8)}
            publish(journal, step, revision_id, "team/policy-of-a-usual-length", receipts=receipts)
            key = ("team/policy-of-a-usual-length", revision_id)
            journal.append(RetireBegan(*key), Retired(*key))  # type: ignore[arg-type]
        journal._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return journal_path.stat().st_size

    early = run(0, 50)
    assert (run(50, 350) - early) / 300 <= 1000
    journal.close()


def test_receipts_belong_to_the_commit_among_the_events_of_one_append(journal: Journal) -> None:
    publish(journal, 1, A)
    state = journal.append(Intended(Intent(2, "p", 2, B, 2)))
    receipts = {"tp0": {"rank": "tp0"}}
    journal.append(Committed(2, state.sequence + 1), RetireBegan("p", A), receipts=receipts)
    assert journal.receipts(2) == receipts


def test_an_empty_file_is_told_from_one_that_was_never_a_journal(journal_path: Path) -> None:
    journal_path.touch()
    with pytest.raises(JournalError, match="the journal is empty"):
        JournalView(journal_path)


@pytest.mark.parametrize("content", [b"", b"not a database", b"SQLite format 3\0" + bytes(84)])
def test_a_file_that_is_no_journal_is_refused(journal_path: Path, content: bytes) -> None:
    journal_path.write_bytes(content)
    for opening in (Journal, JournalView):
        with pytest.raises(JournalError):
            opening(journal_path)
    assert journal_path.read_bytes() == content


def test_databases_of_others_and_of_later_releases_are_refused(journal_path: Path) -> None:
    sqlite3.connect(journal_path).executescript("CREATE TABLE events(seq)")
    with pytest.raises(JournalError, match="not a journal"):
        Journal(journal_path)
    journal_path.unlink()
    Journal(journal_path).close()
    sqlite3.connect(journal_path).executescript("PRAGMA user_version = 2")
    with pytest.raises(JournalError, match="format 2"):
        Journal(journal_path)


def test_a_missing_journal_is_made_by_a_writer_only(journal_path: Path) -> None:
    with pytest.raises(JournalError, match="restore"):
        JournalView(journal_path)
    with pytest.raises(JournalError):
        Journal(journal_path, read_only=True)
    with pytest.raises(StoreError):
        Journal(journal_path / "below" / "nothing")
