"""Moves committed rows from the write-ahead log into the main file, behind the commits that wrote them.

SQLite cannot tell a damaged log from one torn by a crash and drops its tail without a word. So rows stay in the log
only for moments. A copy that fails loses nothing: the log keeps the rows and the next one takes them along.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

from epochless_vllm.durable import fsync_file, storage_error
from epochless_vllm.errors import StoreError
from epochless_vllm.publication.rows import READ_ERRORS, open_connection

RETRY_S = 0.02
PATIENCE_S = 1.0  # a process that reads for longer keeps the log; the next decision tries again
WAIT_S = 0.05  # while it waits for readers, a copy keeps writers out


def empty_log(connection: sqlite3.Connection, path: Path, *, patience_s: float) -> bool:
    """Move everything the log holds into the main file, durably, and cut the log to nothing.

    Returns False when a reader, a writer or another copy was in the way all the time.

    Raises:
        sqlite3.Error, StoreError: the disk refused; what was committed stays committed.
    """
    end = time.monotonic() + patience_s
    while connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        if time.monotonic() > end:
            return False
        time.sleep(RETRY_S)  # SQLite itself does not wait for another copy to end
    # SQLite does not sync the cut; a power failure could bring back frames of a commit that failed.
    log_path = f"{path}-wal"
    try:
        with open(log_path, "rb+") as log:
            fsync_file(log)
    except FileNotFoundError:  # the last connection to close takes the log with it
        return True
    except OSError as error:
        raise storage_error(error, log_path, "sync") from error
    return True


class Checkpointer:
    """A thread that empties the log when asked to, and once more when it ends."""

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
        while not self._closing or self._wanted.is_set():
            self._wanted.wait()
            self._wanted.clear()
            try:
                connection = open_connection(self._path, busy_s=WAIT_S)
                try:
                    empty_log(connection, self._path, patience_s=PATIENCE_S)
                finally:
                    connection.close()
            except (*READ_ERRORS, StoreError):  # the commits stand; the next request tries again
                continue
