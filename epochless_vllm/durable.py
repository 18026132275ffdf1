"""The only place that fsyncs, renames or locks files, and the names of the points where a crash may be injected.

Promises that a function returns only when its effect survives a power cut on a POSIX filesystem. Knows nothing of
what the bytes mean.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from epochless_vllm.errors import StorageFullError, StoreError, StoreLockedError

# Set to NAME, NAME:COUNT or NAME:COUNT:kill to stop this process at the COUNT-th pass of that point (default: the
# first), with exit code 91 or by SIGKILL. Read on each pass so that a test can set it inside one process.
CRASH_VARIABLE = "EPOCHLESS_CRASH_AT"
CRASH_EXIT_CODE = 91
FLUSH_BYTES = 8 << 20  # a disk is kept busy by pieces of this size, and a publication waits for the last one only

_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "let the user of this process read and write there"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "name a directory"),
}

_passes: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Stop the process here if ``EPOCHLESS_CRASH_AT`` names this point; otherwise return at once."""
    wanted = os.environ.get(CRASH_VARIABLE)
    if not wanted:
        return
    target, _, rest = wanted.partition(":")
    if target != name:
        return
    count, _, manner = rest.partition(":")
    _passes[name] += 1
    if _passes[name] < int(count or 1):
        return
    if manner == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(CRASH_EXIT_CODE)


def storage_error(error: OSError, path: Path | str, action: str) -> StoreError:
    """Return the error of our own tree for an operating-system error met while writing ``path``."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
        return StorageFullError(
            f"{path}: cannot {action}: {error.strerror}; free space or make it writable, then retry",
            path=str(path),
        )
    remedy = _REMEDIES.get(error.errno or 0, "check the disk, then retry")
    return StoreError(f"{path}: cannot {action}: {error.strerror}; {remedy}", path=str(path))


def fsync_directory(path: Path | str) -> None:
    """Make the names inside a directory durable.

    Raises:
        StoreError: the directory cannot be opened or synced.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(error, path, "fsync the directory") from error


def fsync_file(file: IO[bytes]) -> None:
    """Flush and make the bytes of an open file durable.

    Raises:
        StoreError: the bytes may not be on disk; after this the file must not be trusted.
    """
    try:
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise storage_error(error, getattr(file, "name", "?"), "fsync") from error


def fsync_files(files: Sequence[IO[bytes]]) -> None:
    """Make several open files durable at once: a disk that is asked together answers together.

    Raises:
        StoreError: one of them may not be on disk; after this none must be trusted.
    """
    with ThreadPoolExecutor(max(1, len(files) - 1)) as others:
        waiting = [others.submit(fsync_file, file) for file in files[1:]]
        fsync_file(files[0])
        for each in waiting:
            each.result()


@contextmanager
def flushing(file: IO[bytes]) -> Iterator[Callable[[int], None]]:
    """Send a file to the disk while it is written, so that the fsync at its end has little left to wait for.

    Yields:
        To be called with the number of bytes after each write.

    Raises:
        StoreError: the disk failed; it says so once, and the fsync at the end would not repeat it.
    """
    unsent, sending = 0, None
    with ThreadPoolExecutor(1) as disk:

        def flush(count: int) -> None:
            nonlocal unsent, sending
            unsent += count
            if unsent >= FLUSH_BYTES and (sending is None or sending.done()):
                if sending is not None:
                    sending.result()
                unsent, sending = 0, disk.submit(fsync_file, file)

        yield flush
        if sending is not None:
            sending.result()


def rename_durable(source: Path | str, target: Path | str) -> None:
    """Rename within one filesystem, atomically, then sync both parent directories.

    Raises:
        StoreError: the rename or a sync failed; either the old or the new name holds the bytes, never a part.
    """
    try:
        os.rename(source, target)
    except OSError as error:
        raise storage_error(error, target, "rename into place") from error
    fsync_directory(Path(target).parent)
    if Path(source).parent != Path(target).parent:
        fsync_directory(Path(source).parent)


def write_file_atomic(path: Path | str, data: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data`` so that a reader sees the old bytes or the new, also after a crash.

    Raises:
        StoreError: nothing was replaced; StorageFullError when the disk is full or read-only.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            fsync_file(file)
        rename_durable(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, path, "write") from error
    except StoreError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def exclusive_lock(path: Path | str) -> Iterator[None]:
    """Hold an exclusive advisory lock on one file for the length of a ``with`` block, waiting for it.

    The kernel gives it up when the process dies, so a crash cannot leave it taken.

    Raises:
        StoreError: the lock file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise storage_error(error, path, "open the lock file") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class FileLock:
    """An exclusive advisory lock on one file, held until ``release`` or the end of the process."""

    def __init__(self, path: Path | str, *, purpose: str) -> None:
        """Take the lock without waiting.

        Raises:
            StoreLockedError: another process holds it.
            StoreError: its file cannot be opened.
        """
        self.path = Path(path)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(error, self.path, "open the lock file") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "unknown process"
            os.close(descriptor)
            raise StoreLockedError(
                f"{self.path.parent}: in use by {holder}; stop that server or give this one another store",
                path=str(self.path.parent),
                holder=holder,
            ) from error
        with suppress(OSError):  # a note for people; on a full disk the lock counts without it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{purpose}, process {os.getpid()}\n".encode(), 0)
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
