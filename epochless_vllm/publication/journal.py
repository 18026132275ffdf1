"""The journal of a store: every decision about publications, in order, durable before anyone acts on it.

SQLite in write-ahead mode, ``synchronous=FULL``. Promises that ``append`` returns only when its events survive a power
cut; that when it raises, they never happened, or UndecidedError says that this cannot be known; that several
processes append in one order and each applies the rules to the true state. A child forked while its parent has a
journal open must not open it as well: SQLite carries locks over a fork. Knows nothing of ranks: see coordinator.py.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from epochless_vllm.errors import JournalError, StaleEpochError, StorageFullError, StoreError, UndecidedError
from epochless_vllm.protocol.canonical import decode_canonical, encode_canonical
from epochless_vllm.protocol.publication import Aborted, Committed, EpochBegan, Event, Retired, State
from epochless_vllm.publication.checkpoint import Checkpointer, empty_log
from epochless_vllm.publication.rows import (
    BUSY_S,
    READ_ERRORS,
    Replay,
    create_journal,
    failure_from,
    open_connection,
    read_transaction,
)

_INSERT = "INSERT INTO events(seq, epoch, kind, payload, evidence, chain) VALUES (?, ?, ?, ?, ?, ?)"


class Journal:
    """The writing end. Thread-safe; one per process."""

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        """Open a journal, making it first if it does not exist.

        Raises:
            JournalError: the journal is damaged; ``row`` names the row.
            StoreError: it cannot be opened or made.
        """
        self.path = Path(path)
        self._read_only = read_only
        self._lock = threading.RLock()
        self._undecided: str | None = None
        if not read_only:
            create_journal(self.path)
        self._connection = open_connection(self.path, read_only=read_only)
        self._replay = Replay()
        self._checkpointer = Checkpointer(self.path)
        try:
            self.refresh()
        except StoreError:
            self._connection.close()
            raise
        self._epoch = self._replay.state.epoch

    @property
    def state(self) -> State:
        """The state as last read or written here; reads nothing."""
        return self._replay.state

    @property
    def replay(self) -> Replay:
        """The rows as last read or written here, with the state after them."""
        return self._replay

    @property
    def epoch(self) -> int:
        """The epoch this process writes in: the one it began, or found when it opened the journal."""
        return self._epoch

    def refresh(self) -> State:
        """Return the state after reading what other processes appended.

        Raises:
            JournalError: a row is damaged. StoreError: the file cannot be read.
        """
        with self._lock:
            try:
                with read_transaction(self._connection):
                    self._replay = self._replay.read_new(self._connection, self.path)
            except READ_ERRORS as error:
                raise failure_from(error, self.path, "read") from error
            return self._replay.state

    def begin_epoch(self) -> int:
        """Start a new epoch, abort what the one before left undecided, and return the new epoch.

        Raises:
            StoreError: nothing was written.
        """
        with self._lock:
            self._epoch = self._write(_begin_epoch, receipts=None, epoch=None).epoch
            return self._epoch

    def append(self, *events: Event, receipts: Mapping[str, Mapping[str, Any]] | None = None) -> State:
        """Record events, all or none, and return the state after them.

        Args:
            receipts: what each rank answered, kept beside a Committed event until its revision is retired.

        Raises:
            IllegalTransitionError: an event is not allowed in the state at its turn.
            StaleEpochError: a later server has begun an epoch on this store.
            StoreError: the disk refused; nothing was recorded.
            UndecidedError: the disk failed and whether they were recorded cannot be read back; nothing more is
                recorded until restart.
        """
        with self._lock:
            body = None if receipts is None else encode_canonical(receipts)
            return self._write(lambda _: events, receipts=body, epoch=self._epoch)

    def check_writable(self) -> None:
        """Raise unless ``append`` can be tried.

        Raises:
            StorageFullError: opened for reading only. UndecidedError: an earlier commit is undecided.
        """
        if self._read_only:
            raise StorageFullError(f"{self.path}: opened for reading only", path=str(self.path))
        if self._undecided is not None:
            raise UndecidedError(
                f"{self.path}: an earlier commit is undecided ({self._undecided}); restart the server",
                path=str(self.path),
            )

    def receipts(self, sequence: int) -> dict[str, dict[str, Any]]:
        """Return the receipts of a publication by rank; empty once its revision is retired.

        Raises:
            JournalError: they are not the ones recorded. StoreError: the file cannot be read.
        """
        with self._lock:
            try:
                found = self._connection.execute(
                    "SELECT body, evidence FROM receipts JOIN events ON events.seq = receipts.seq WHERE sequence = ?",
                    (sequence,),
                ).fetchone()
            except READ_ERRORS as error:
                raise failure_from(error, self.path, "read receipts") from error
        if found is None:
            return {}
        body, evidence = found
        if not isinstance(body, bytes) or hashlib.sha256(body).digest() != evidence:
            raise JournalError(
                f"{self.path}: the receipts of publication {sequence} were changed; restore the journal from a copy",
                path=str(self.path),
            )
        receipts: dict[str, dict[str, Any]] = decode_canonical(body)
        return receipts

    def close(self) -> None:
        """Empty the log into the main file and close."""
        self._checkpointer.close()
        with self._lock:
            self._connection.close()

    def _write(
        self, make_events: Callable[[State], Sequence[Event]], *, receipts: bytes | None, epoch: int | None
    ) -> State:
        self.check_writable()
        ready = False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._replay = self._replay.read_new(self._connection, self.path)
            self._check_epoch(epoch)
            after = self._insert(make_events(self._replay.state), receipts)
            ready = True
        except READ_ERRORS as error:  # before COMMIT, no frame of it can count as written
            raise failure_from(error, self.path, "append") from error
        finally:
            if not ready:
                self._roll_back()
        try:
            self._commit(self._connection)
        except sqlite3.Error as error:
            return self._settle(after, error)
        self._replay = after
        if not after.state.intents:  # between the events of one publication the log is left alone
            self._checkpointer.request()
        return after.state

    def _insert(self, events: Sequence[Event], receipts: bytes | None) -> Replay:
        after = self._replay
        for event in events:
            before = after
            kept = receipts if isinstance(event, Committed) else None
            row, after = after.next_row(event, receipts=kept)
            self._connection.execute(_INSERT, (row.seq, row.epoch, row.kind, row.payload, row.evidence, row.chain))
            if kept is not None:
                publication = after.state.publications[after.state.sequence]
                self._connection.execute(
                    "INSERT INTO receipts(sequence, seq, lora_int_id, body) VALUES (?, ?, ?, ?)",
                    (publication.sequence, row.seq, publication.lora_int_id, kept),
                )
            if isinstance(event, Retired) and event.revision_id not in after.state.adapters:
                engine_id = before.state.adapters[event.revision_id]
                self._connection.execute("DELETE FROM receipts WHERE lora_int_id = ?", (engine_id,))
        self._connection.execute("UPDATE tip SET seq = ?, chain = ?", (after.seq, after.chain))
        return after

    def _commit(self, connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")

    def _settle(self, after: Replay, error: sqlite3.Error) -> State:
        """Find out whether a COMMIT that raised has happened, and make the answer final.

        The frame that completes a commit is written last, so a failed write means that it has not happened. A failed
        fsync may leave a complete commit in the log that nobody sees now and a recovery would: emptying the log makes
        a visible commit durable in the main file, and an invisible one impossible.
        """
        try:
            final = _is_failed_write(error)
            if final:
                self._roll_back()
            else:
                self._connection.close()
                self._connection = open_connection(self.path)
                final = empty_log(self._connection, self.path, patience_s=BUSY_S)
            self.refresh()
            found = self._connection.execute("SELECT chain FROM events WHERE seq = ?", (after.seq,)).fetchone()
        except (*READ_ERRORS, StoreError) as second:
            raise self._refuse_from_now_on(error) from second
        if not final:
            raise self._refuse_from_now_on(error)
        if found == (after.chain,):
            return self._replay.state
        raise failure_from(error, self.path, "append") from error

    def _refuse_from_now_on(self, error: sqlite3.Error) -> UndecidedError:
        self._undecided = str(error)
        return UndecidedError(
            f"{self.path}: the disk failed at commit ({error}) and the outcome cannot be read back; "
            "serving goes on, publishing needs a restart on a working disk",
            path=str(self.path),
        )

    def _check_epoch(self, epoch: int | None) -> None:
        current = self._replay.state.epoch
        if epoch is not None and current != epoch:
            raise StaleEpochError(
                f"{self.path}: a later server began epoch {current}, this one writes in {epoch}; stop this server",
                epoch=epoch,
                current=current,
            )

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")


def _is_failed_write(error: sqlite3.Error) -> bool:
    name = getattr(error, "sqlite_errorname", "")  # from Python 3.11 on; before, a full disk is told by its text alone
    return name in ("SQLITE_FULL", "SQLITE_IOERR_WRITE") or "full" in str(error)


def _begin_epoch(state: State) -> list[Event]:
    aborts = [Aborted(intent, "the server stopped before it was decided") for intent in state.intents]
    return [EpochBegan(state.epoch + 1), *aborts]


class JournalView:
    """A reader's own connection, for admission: cheap while nothing changes. For one thread at a time.

    Separate from Journal because a connection does not see the file's change counter move by its own commits.
    """

    def __init__(self, path: Path | str, *, after: Journal | None = None) -> None:
        """Open an existing journal.

        Args:
            after: a journal of the same file that this process has open: what it has read is not read again.

        Raises:
            JournalError: it is missing or damaged. StoreError: it cannot be opened.
        """
        self.path = Path(path)
        self._connection = open_connection(self.path)
        self._connection.execute("PRAGMA query_only = ON")
        self._replay = Replay() if after is None else after.replay
        self._version = -1

    def current(self) -> State:
        """Return the committed state; reads rows only if another connection committed since the last call.

        Raises:
            JournalError: a row is damaged. StoreError: the file cannot be read.
        """
        try:
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
            if version != self._version:
                with read_transaction(self._connection):
                    self._replay = self._replay.read_new(self._connection, self.path)
                self._version = version
        except READ_ERRORS as error:
            raise failure_from(error, self.path, "read") from error
        return self._replay.state

    def close(self) -> None:
        self._connection.close()
