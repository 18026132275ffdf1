"""The rows of a journal file: how they are laid out, opened and checked, for its writer and its readers alike.

Promises that a row which is missing, changed or out of place raises JournalError naming it. The file is created
under another name and renamed, so an empty file is always damage and never a first start. Knows no policy of writing:
see publication/journal.py.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from epochless_vllm.durable import exclusive_lock, rename_durable, storage_error
from epochless_vllm.errors import EncodingError, IllegalTransitionError, JournalError, StorageFullError, StoreError
from epochless_vllm.protocol.events import CHAIN_START, chain_row, decode_event, encode_event
from epochless_vllm.protocol.publication import Event, State, apply

APPLICATION_ID = 0x45504C4A  # "EPLJ" in the file's header
FORMAT = 1
BUSY_S = 10.0  # writers hold the file for a few fsyncs; readers for microseconds

# Of a damaged file, the text of an error itself may not decode.
READ_ERRORS = (sqlite3.Error, UnicodeDecodeError)

# The tip repeats the last row's place and chain on a page of its own: rows lost from the end show as a gap.
_SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
CREATE TABLE events(
    seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, kind TEXT NOT NULL, payload BLOB NOT NULL,
    evidence BLOB, chain BLOB NOT NULL);
CREATE TABLE receipts(
    sequence INTEGER PRIMARY KEY, seq INTEGER NOT NULL, lora_int_id INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE tip(seq INTEGER NOT NULL, chain BLOB NOT NULL);
"""


@dataclass(frozen=True)
class Row:
    """One event as the file keeps it."""

    seq: int
    epoch: int
    kind: str
    payload: bytes
    evidence: bytes | None
    chain: bytes


@dataclass(frozen=True)
class Replay:
    """The state after the first ``seq`` rows, and the chain that continues them."""

    seq: int = 0
    chain: bytes = CHAIN_START
    state: State = field(default_factory=State)

    def next_row(self, event: Event, *, receipts: bytes | None = None) -> tuple[Row, Replay]:
        """Return the row that records an event here, and the replay after it.

        Raises:
            IllegalTransitionError: the event is not allowed in this state.
            EncodingError: a field of the event has no canonical form.
        """
        state = apply(self.state, event)
        kind, payload = encode_event(event)
        evidence = None if receipts is None else hashlib.sha256(receipts).digest()
        seq = self.seq + 1
        chain = chain_row(self.chain, seq=seq, epoch=state.epoch, kind=kind, payload=payload, evidence=evidence)
        return Row(seq, state.epoch, kind, payload, evidence, chain), Replay(seq, chain, state)

    def read_new(self, connection: sqlite3.Connection, path: Path) -> Replay:
        """Return the replay after all rows the connection sees. Call inside a transaction.

        Raises:
            JournalError: a row is missing, changed or contradicts those before it; ``row`` names it.
        """
        replay = self
        try:
            for values in connection.execute(
                "SELECT seq, epoch, kind, payload, evidence, chain FROM events WHERE seq > ? ORDER BY seq", (self.seq,)
            ):
                replay = replay._read(values, path)
            tips = connection.execute("SELECT seq, chain FROM tip").fetchall()
        except READ_ERRORS as error:
            raise failure_from(error, path, "read", row=replay.seq + 1) from error
        if tips != [(replay.seq, replay.chain)]:
            last = tips[0][0] if len(tips) == 1 else "?"
            raise damage(path, replay.seq + 1, f"the journal should end at row {last} and ends at row {replay.seq}")
        return replay

    def _read(self, values: tuple[Any, ...], path: Path) -> Replay:
        row = Row(*values)
        if row.seq != self.seq + 1:
            raise damage(path, self.seq + 1, f"missing; the next row is {row.seq}")
        if not (type(row.epoch) is int and type(row.kind) is str and type(row.payload) is bytes):
            raise damage(path, row.seq, "a column has another type than it was written with")
        if not (row.evidence is None or type(row.evidence) is bytes) or row.epoch < 0:
            raise damage(path, row.seq, "a column has another type than it was written with")
        chain = chain_row(
            self.chain, seq=row.seq, epoch=row.epoch, kind=row.kind, payload=row.payload, evidence=row.evidence
        )
        if chain != row.chain:
            raise damage(path, row.seq, "its bytes, or those of its chain, were changed after they were written")
        try:
            state = apply(self.state, decode_event(row.kind, row.payload))
        except (EncodingError, IllegalTransitionError) as error:
            raise damage(path, row.seq, str(error)) from error
        if state.epoch != row.epoch:
            raise damage(path, row.seq, f"written in epoch {row.epoch}, recorded in epoch {state.epoch}")
        return replace(self, seq=row.seq, chain=row.chain, state=state)


def create_journal(path: Path) -> None:
    """Make an empty journal unless the file exists; several processes may try at once.

    Raises:
        StoreError: the file cannot be written; no journal was made.
    """
    if path.exists():  # the rename that makes it exist also makes it complete
        return
    temporary = path.with_name(f".{path.name}.new")
    with exclusive_lock(path.with_name(f"{path.name}.lock")):
        if path.exists():
            return
        for leftover in (temporary, Path(f"{temporary}-wal"), Path(f"{temporary}-shm")):
            leftover.unlink(missing_ok=True)
        try:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            connection = sqlite3.connect(temporary, isolation_level=None)
            try:
                connection.execute("PRAGMA synchronous = EXTRA")
                connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
                connection.execute("INSERT INTO tip VALUES (0, ?)", (CHAIN_START,))
                connection.execute("PRAGMA journal_mode = WAL")
            finally:
                connection.close()
        except OSError as error:
            raise storage_error(error, path, "create") from error
        except sqlite3.Error as error:
            raise failure_from(error, path, "create") from error
        rename_durable(temporary, path)


def open_connection(path: Path, *, read_only: bool = False, busy_s: float | None = None) -> sqlite3.Connection:
    """Return a connection to an existing journal, in autocommit mode, usable from any one thread at a time.

    Args:
        busy_s: how long its statements wait for other connections, in seconds; default BUSY_S.

    Raises:
        JournalError: the file is missing, empty, no journal of ours, or of a later format.
        StoreError: it cannot be opened.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}; restore the file", path=str(path)) from error
    if size == 0:
        raise JournalError(f"{path}: the journal is empty; restore it from a copy", path=str(path), row=1)
    connection: sqlite3.Connection | None = None
    try:
        connection = _connect(path, "ro" if read_only else "rw", BUSY_S if busy_s is None else busy_s)
        if read_only and not _is_readable(connection):
            # A reader that may not create the shared-memory file; nothing can be pending without a WAL.
            wal = Path(f"{path}-wal")
            if not wal.exists() or wal.stat().st_size == 0:
                connection.close()
                connection = _connect(path, "ro&immutable=1", BUSY_S)
        _check_format(connection, path)
        if not read_only:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
    except READ_ERRORS as error:
        if connection is not None:
            connection.close()
        raise failure_from(error, path, "open") from error
    except StoreError:
        if connection is not None:
            connection.close()
        raise
    return connection


@contextmanager
def read_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Give several reads one snapshot."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def damage(path: Path, row: int, detail: str) -> JournalError:
    return JournalError(
        f"{path}: row {row} is damaged: {detail}; restore the journal from a copy, serving from it is refused",
        path=str(path),
        row=row,
    )


def failure_from(error: Exception, path: Path, action: str, *, row: int | None = None) -> StoreError:
    """Return the error of our own tree for a SQLite error; Python 3.10 offers only its text to tell them apart."""
    text = str(error)
    if "locked" in text or "busy" in text:
        return StoreError(f"{path}: cannot {action}: another process holds the journal; retry", path=str(path))
    if any(word in text for word in ("full", "readonly", "I/O", "unable to open")):
        return StorageFullError(
            f"{path}: cannot {action}: {text}; free space or make it writable, then retry", path=str(path)
        )
    if row is not None:
        return damage(path, row, text)
    return JournalError(f"{path}: cannot {action}: {text}; restore the journal from a copy", path=str(path))


def _connect(path: Path, mode: str, busy_s: float) -> sqlite3.Connection:
    uri = f"file:{quote(str(path.absolute()))}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=busy_s)


def _is_readable(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("SELECT seq FROM tip").fetchall()
    except sqlite3.OperationalError as error:
        if "unable to open" not in str(error) and "readonly" not in str(error):
            raise
        return False
    return True


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise JournalError(f"{path}: not a journal of Epochless; name another store", path=str(path))
    if version != FORMAT:
        raise JournalError(
            f"{path}: format {version}, this release reads {FORMAT}; use the release that wrote it", path=str(path)
        )
