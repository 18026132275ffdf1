"""The sink: the last receipts of a deployment, on disk, for ``GET /v1/receipts``.

One SQLite file in the store, shared by the API servers, written by a thread of each: receipts that are ready together
are one transaction. Bounded by bytes and by age, oldest dropped first. Promises that a receipt reported as kept
survives a power cut, that a disk which refuses costs receipts and never responses, and that what it drops is counted.
Knows receipts as bytes: see receipts.py for how they are made.
"""

from __future__ import annotations

import queue
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from epochless_vllm.durable import crash_point
from epochless_vllm.errors import StoreError
from epochless_vllm.plugin import metrics
from epochless_vllm.plugin.logs import logger

FILE_NAME = "receipts.sqlite"
BUSY_S = 10.0
SWITCH_INTERVAL_S = 5e-4
BATCH = 16  # receipts of one transaction
MAX_WAITING = 4096  # receipts that wait for the disk; beyond it a new one is not kept

_SCHEMA = """
CREATE TABLE IF NOT EXISTS receipts(
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, made INTEGER NOT NULL, request TEXT NOT NULL,
    prompt INTEGER NOT NULL, choice INTEGER NOT NULL, finish TEXT NOT NULL, tokens INTEGER NOT NULL,
    body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS receipts_by_request ON receipts(request);
CREATE TABLE IF NOT EXISTS held(bytes INTEGER NOT NULL);
INSERT INTO held SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM held);
"""

_OLDEST = "SELECT place, made, length(body) FROM receipts ORDER BY place LIMIT 1"


class Entry(NamedTuple):
    """A receipt as the sink keeps it; ``body`` is in the compact format."""

    receipt_id: str
    request_id: str
    prompt_index: int
    choice_index: int
    finish_reason: str
    tokens: int
    body: bytes


@dataclass(frozen=True)
class Outcome:
    """What became of a receipt: its entry, and why it was not kept, if it was not."""

    entry: Entry
    reason: str | None = None

    @property
    def kept(self) -> bool:
        return self.reason is None


class ReceiptSink:
    """Keeps receipts. ``submit`` and the readers may be called from any thread."""

    def __init__(self, store: Path | str, *, max_bytes: int, max_age_s: int) -> None:
        self.path = Path(store) / FILE_NAME
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Entry], Future[Outcome]] | None] = queue.SimpleQueue()
        self._refusal: str | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def refusal(self) -> str | None:
        """Why a receipt submitted now would probably not be kept; None while the sink is well."""
        if self._max_bytes == 0:
            return "this server keeps no receipts (--epochless-receipts-bytes 0)"
        if self._jobs.qsize() >= MAX_WAITING:
            return f"{MAX_WAITING} receipts wait for the disk already"
        return self._refusal

    def submit(self, make: Callable[[], Entry]) -> Future[Outcome]:
        """Have the sink's thread make a receipt and keep it; the future fails only if making it does."""
        future: Future[Outcome] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="epochless-receipts", daemon=True)
                self._thread.start()
        self._jobs.put((make, future))
        return future

    def close(self) -> None:
        """Keep what was submitted, then end the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def read(self, receipt_id: str) -> bytes | None:
        """Return the compact bytes of a receipt, or None. Blocking.

        Raises:
            StoreError: the file cannot be read, or holds no bytes there.
        """
        rows = self._select("SELECT body FROM receipts WHERE id = ? AND made >= ?", receipt_id)
        if rows and not isinstance(rows[0][0], bytes):  # SQLite keeps any type in any column
            raise StoreError(
                f"{self.path}: receipt {receipt_id[:80]} is damaged: not bytes; take it from the response itself",
                path=str(self.path),
            )
        return rows[0][0] if rows else None

    def find(self, request_id: str) -> list[dict[str, Any]]:
        """Return what is kept of a request, without the receipts themselves. Blocking.

        Raises:
            StoreError: the file cannot be read.
        """
        names = ("id", "prompt_index", "choice_index", "finish_reason", "tokens")
        rows = self._select(
            "SELECT id, prompt, choice, finish, tokens FROM receipts WHERE request = ? AND made >= ? "
            "ORDER BY prompt, choice, place",
            request_id,
        )
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _select(self, statement: str, value: str) -> list[Any]:
        if not self.path.exists():  # nothing was ever kept
            return []
        try:
            connection = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)
            try:
                return connection.execute(statement, (value, self._oldest())).fetchall()
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: cannot be read: {error}; check the disk", path=str(self.path)) from error

    def _oldest(self) -> int:
        return int(time.time()) - self._max_age_s

    # The thread.

    def _work(self) -> None:
        # Making a receipt takes milliseconds; at Python's default the event loop would wait 5 for its turn.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        connection: sqlite3.Connection | None = None
        closing = False
        while not closing:
            batch = [self._jobs.get()]
            while len(batch) < BATCH and batch[-1] is not None:
                with suppress(queue.Empty):
                    batch.append(self._jobs.get_nowait())
                    continue
                break
            closing = batch[-1] is None
            made = _make_all([job for job in batch if job is not None])
            reasons, connection = self._keep([entry for entry, _ in made], connection)
            for (entry, future), reason in zip(made, reasons, strict=True):
                metrics.count_receipt("kept" if reason is None else "failed")
                future.set_result(Outcome(entry, reason))
        if connection is not None:
            connection.close()

    def _keep(
        self, entries: list[Entry], connection: sqlite3.Connection | None
    ) -> tuple[list[str | None], sqlite3.Connection | None]:
        """Return for each entry why it was not kept, and the connection if it is still good."""
        if self._max_bytes == 0 or not entries:
            return [self.refusal] * len(entries), connection
        too_large = f"larger than --epochless-receipts-bytes {self._max_bytes}"
        reasons = [too_large if len(entry.body) > self._max_bytes else None for entry in entries]
        fitting = [entry for entry, reason in zip(entries, reasons, strict=True) if reason is None]
        try:
            connection = connection or self._open()
            dropped = self._write(connection, fitting)
        except sqlite3.Error as error:
            if self._refusal is None:
                logger.error("receipts are not kept: %s: %s", self.path, error)
            self._refusal = f"the receipts file cannot be written: {error}"
            with suppress(sqlite3.Error):  # a connection that failed is not asked again
                if connection is not None:
                    connection.close()
            return [reason or self._refusal for reason in reasons], None
        if self._refusal is not None:
            logger.info("receipts are kept again: %s", self.path)
            self._refusal = None
        if dropped:
            metrics.count_receipt("dropped", dropped)
        return reasons, connection

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        try:
            self.path.chmod(0o600)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA journal_size_limit = 4194304")
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _write(self, connection: sqlite3.Connection, entries: list[Entry]) -> int:
        """Write entries in one transaction; return how many older ones made room."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            now = int(time.time())
            for entry in entries:
                added = connection.execute(
                    "INSERT OR IGNORE INTO receipts(id, made, request, prompt, choice, finish, tokens, body) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (entry.receipt_id, now, *entry[1:]),
                ).rowcount
                if added:  # equal ids are equal receipts
                    connection.execute("UPDATE held SET bytes = bytes + ?", (len(entry.body),))
            dropped = self._make_room(connection)
            crash_point("receipt.sink")
            connection.execute("COMMIT")
        except BaseException:  # an open transaction would lock every other process out
            with suppress(sqlite3.Error):  # the file refuses; what was not committed never happened
                connection.execute("ROLLBACK")
            raise
        return dropped

    def _make_room(self, connection: sqlite3.Connection) -> int:
        dropped = 0
        while True:
            (held,) = connection.execute("SELECT bytes FROM held").fetchone()
            oldest = connection.execute(_OLDEST).fetchone()
            if oldest is None or (held <= self._max_bytes and oldest[1] >= self._oldest()):
                return dropped
            connection.execute("DELETE FROM receipts WHERE place = ?", (oldest[0],))
            connection.execute("UPDATE held SET bytes = bytes - ?", (oldest[2],))
            dropped += 1


def _make_all(jobs: list[tuple[Callable[[], Entry], Future[Outcome]]]) -> list[tuple[Entry, Future[Outcome]]]:
    made: list[tuple[Entry, Future[Outcome]]] = []
    for make, future in jobs:
        try:
            made.append((make(), future))
        except Exception as error:  # noqa: BLE001  # delivered to who waits for it, as an executor does
            metrics.count_receipt("failed")
            logger.error("a receipt cannot be made: %s", error)
            future.set_exception(error)
    return made
