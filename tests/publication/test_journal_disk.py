"""A disk that fails while the journal is written: what append says is what is found, also by a later process."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from epochless_vllm.errors import StoreError, UndecidedError
from epochless_vllm.protocol.publication import Aborted, Committed, Intended, Intent, RetireBegan, Status
from epochless_vllm.publication.journal import Journal, JournalView
from tests.protocol.test_publication import A, B
from tests.publication import disk_faults
from tests.publication.disk_faults import EDQUOT, EIO, ENOSPC

SETUP = """
from epochless_vllm.errors import StoreError
from epochless_vllm.protocol.publication import *
from epochless_vllm.publication.checkpoint import Checkpointer
from epochless_vllm.publication.journal import Journal, JournalView
from pathlib import Path
A = "sha256:" + "a" * 64
path = Path(sys.argv[1])
journal = Journal(path)
journal.begin_epoch()
journal._checkpointer.close()  # its own syncs are not to meet the fault
journal._checkpointer = Checkpointer(path)
view = JournalView(path) if sys.argv[2] == "watched" else None
journal.append(Intended(Intent(1, "p", 1, A, 1)))
def attempt(*events):
    try:
        journal.append(*events)
    except StoreError as error:
        return error.code
    return "done"
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return disk_faults.build(tmp_path_factory.mktemp("shim"))


def run(library: Path, path: Path, script: str, *arguments: object) -> list[str]:
    return disk_faults.run(library, path.with_name("control"), SETUP + script, path, *arguments).split()


@pytest.mark.parametrize("watched", ["watched", "alone"])
@pytest.mark.parametrize(
    ("call", "file", "code", "count", "outcome"),
    [
        ("write", "-wal", ENOSPC, 0, "storage_full"),
        ("write", "-wal", EDQUOT, 0, "storage_full"),
        ("write", "-wal", EIO, 1, "storage_full"),
        ("sync", "-wal", EIO, 1, "storage_full"),
        ("sync", "-wal", EIO, 0, "undecided"),
        ("sync", "journal.sqlite", EIO, 0, "undecided"),
    ],
)
def test_a_failed_commit_is_not_committed_or_says_that_it_cannot_know(
    library: Path, journal_path: Path, call: str, file: str, code: int, count: int, outcome: str, watched: str
) -> None:
    script = """
fail(*sys.argv[3:])
print(attempt(Committed(1, 1)))
print(journal.state.sequence, view.current().sequence if view else 0, flush=True)
os._exit(0)  # as a kill would: nothing is closed
"""
    said, sequence, seen = run(library, journal_path, script, watched, call, file, code, count)
    assert said == outcome
    assert (sequence, seen) == ("0", "0")
    recovered = Journal(journal_path)
    if said == "undecided":  # either answer is allowed, and it must be one of the two
        assert recovered.state.sequence in (0, 1)
    else:
        assert recovered.state.sequence == 0
        assert list(recovered.state.intents) == [1]
    recovered.begin_epoch()
    assert not recovered.state.intents
    recovered.close()


def test_after_an_undecided_commit_nothing_is_appended_and_readers_go_on(library: Path, journal_path: Path) -> None:
    script = """
fail("sync", "journal.sqlite", 5)
print(attempt(Committed(1, 1)))
heal()
print(attempt(Committed(1, 1)), attempt(Aborted(1, "x")), attempt(RetireBegan("p", A)))
print(view.current().sequence, journal.state.sequence)
sys.stdout.flush()
os._exit(0)
"""
    assert run(library, journal_path, script, "watched") == ["undecided"] * 4 + ["0", "0"]
    with Journal(journal_path)._connection as raw:
        assert raw.execute("SELECT count(*) FROM events").fetchone()[0] in (2, 3)


def test_a_full_disk_refuses_and_a_freed_one_takes_the_same_append(library: Path, journal_path: Path) -> None:
    script = """
fail("write", "journal.sqlite", 28)
print(*(attempt(Committed(1, 1)) for _ in range(3)))
heal()
print(attempt(Committed(1, 1)), view.current().sequence)
fail("write", "journal.sqlite", 28)
print(attempt(RetireBegan("p", A)), journal.state.status("p", A).value)
heal()
print(attempt(RetireBegan("p", A)), view.current().status("p", A).value)
journal.close()
"""
    printed = run(library, journal_path, script, "watched")
    assert printed == ["storage_full"] * 3 + ["done", "1", "storage_full", "live", "done", "draining"]


def test_a_failed_copy_into_the_main_file_loses_nothing(library: Path, journal_path: Path) -> None:
    script = """
fail("write", "journal.sqlite$", 5)
print(attempt(Committed(1, 1)))
journal._checkpointer.close()
print(os.path.getsize(str(path) + "-wal") > 0, flush=True)
os._exit(0)
"""
    assert run(library, journal_path, script, "alone") == ["done", "True"]
    recovered = Journal(journal_path)
    assert recovered.state.adapters == {A: 1}
    recovered.append(RetireBegan("p", A))
    recovered.close()
    assert Journal(journal_path, read_only=True).state.status("p", A) is Status.DRAINING


LIMITED = """
import resource, sys
from epochless_vllm.errors import StoreError
from epochless_vllm.protocol.publication import *
from epochless_vllm.publication.journal import Journal
journal = Journal(sys.argv[1])
journal.begin_epoch()
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
try:
    journal.append(Intended(Intent(1, "p", 1, "sha256:" + "a" * 64, 1)))
except StoreError as error:
    print(error.code, error.status)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(journal.append(Intended(Intent(1, "p", 1, "sha256:" + "a" * 64, 1))).last_transaction_id)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tells a failed write from a failed sync by a name new in 3.11")
def test_a_file_size_limit_is_met_like_a_full_disk(journal_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", LIMITED, str(journal_path)], capture_output=True, text=True, cwd=disk_faults.ROOT
    )
    assert finished.stdout.split() == ["storage_full", "507", "1"], finished.stderr


class FailingJournal(Journal):
    """Raises at its next commit, before or after the commit itself."""

    fail_before = False
    fail_after = False

    def _commit(self, connection: sqlite3.Connection) -> None:
        if self.fail_before:
            self.fail_before = False
            raise sqlite3.OperationalError("disk I/O error")
        super()._commit(connection)
        if self.fail_after:
            self.fail_after = False
            raise sqlite3.OperationalError("disk I/O error")


@pytest.fixture
def failing(journal_path: Path) -> Iterator[FailingJournal]:
    journal = FailingJournal(journal_path)
    journal.begin_epoch()
    yield journal
    journal.close()


def test_a_commit_that_raised_and_is_found_counts_as_committed(failing: FailingJournal) -> None:
    failing.append(Intended(Intent(1, "p", 1, A, 1)))
    failing.fail_after = True
    assert failing.append(Committed(1, 1)).sequence == 1
    assert failing.append(RetireBegan("p", A)).status("p", A) is Status.DRAINING


def test_a_commit_that_raised_and_is_not_found_never_happens(failing: FailingJournal, journal_path: Path) -> None:
    failing.append(Intended(Intent(1, "p", 1, A, 1)))
    failing.fail_before = True
    with pytest.raises(StoreError):
        failing.append(Committed(1, 1))
    assert failing.append(Aborted(1, "disk")).sequence == 0
    assert JournalView(journal_path).current() == failing.state


def test_a_commit_that_cannot_be_made_final_is_undecided(
    failing: FailingJournal, journal_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of another program keeps its snapshot open, so the log cannot be emptied."""
    for module in ("rows", "journal"):
        monkeypatch.setattr(f"epochless_vllm.publication.{module}.BUSY_S", 0.05)
    failing.append(Intended(Intent(1, "p", 1, A, 1)))
    reader = sqlite3.connect(journal_path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM events").fetchall()
    failing.fail_after = True
    with pytest.raises(UndecidedError):
        failing.append(Committed(1, 1))
    reader.close()
    for _ in range(2):
        with pytest.raises(UndecidedError, match="restart"):
            failing.append(Aborted(1, "x"))
    assert JournalView(journal_path).current().sequence == 1  # serving goes on with what is there


def test_a_locked_journal_is_a_plain_refusal(
    failing: FailingJournal, journal_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epochless_vllm.publication.rows.BUSY_S", 0.05)
    quick = Journal(journal_path)
    holder = sqlite3.connect(journal_path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another process"):
        quick.append(Intended(Intent(1, "p", 1, B, 1)))
    holder.close()
    assert quick.append(Intended(Intent(1, "p", 1, B, 1))).last_transaction_id == 1
    quick.close()
