"""Moves committed rows from the write-ahead log into the main file, behind the commits that wrote them.

SQLite cannot tell a damaged log from one torn by a crash and drops its tail without a word. So rows stay in the log
only for moments. A copy that fails loses nothing: the log keeps the rows and the next one takes them along.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from epochless_vllm.durable import fsync_file
from epochless_vllm.errors import StoreError
from epochless_vllm.publication.rows import open_connection


def empty_log(connection: sqlite3.Connection, path: Path) -> bool:
    """Move everything the log holds into the main file, durably, and cut the log to nothing.

    Returns False when a reader or writer of another connection was in the way.

    Raises:
        sqlite3.Error, StoreError: the disk refused; what was committed stays committed.
    """
    (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if busy:
        return False
    log_path = Path(f"{path}-wal")
    if log_path.exists():
        # SQLite does not sync the cut; a power failure could bring back frames of a commit that failed.
        with log_path.open("rb+") as log:
            fsync_file(log)
    return True


class Checkpointer:
    """A thread that empties the log when asked to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wanted = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Have the log emptied soon; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="epochless-checkpoint", daemon=True)
            self._thread.start()
        self._wanted.set()

    def close(self) -> None:
        """Finish what was asked and end the thread."""
        self._closing = True
        if self._thread is not None:
            self._wanted.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._wanted.wait()
            self._wanted.clear()
            try:
                connection = open_connection(self._path)
                try:
                    empty_log(connection, self._path)
                finally:
                    connection.close()
            except (sqlite3.Error, StoreError):  # the commits stand; the next request tries again
                continue
