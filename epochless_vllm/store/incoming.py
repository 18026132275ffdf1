"""The part of a store where revisions are written before they have a name, and removed after they lose it.

An entry belongs to the process that holds ``<name>.lock`` beside it; without a holder it is a leftover of a crash.
Knows nothing of what the entries are.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from epochless_vllm.durable import FileLock, rename_durable, storage_error
from epochless_vllm.errors import StoreError, StoreLockedError

_NAME = re.compile(r"[0-9]+-[0-9a-f]{16}")


class Incoming:
    """One such directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a new empty directory (mode 0700), removed at the end of the block unless it was renamed away.

        Raises:
            StoreError: it cannot be made.
        """
        with self._owned() as directory:
            with storage_errors(directory, "make the directory"):
                directory.mkdir(mode=0o700)
            yield directory

    def remove(self, directory: Path) -> None:
        """Remove a directory of the same filesystem: whole under its name or gone, also after a crash.

        Raises:
            StoreError: it still has its name.
        """
        # Without a lock, since a full disk may have no room for one; another process may help to remove the remains.
        grave = self._fresh()
        rename_durable(directory, grave)
        self._discard(grave)

    def path_of(self, name: str) -> Path:
        """Return the path of an entry.

        Raises:
            StoreError: an entry is never named so.
        """
        if not _NAME.fullmatch(name):
            raise StoreError(f"{self.path}: no entry is named {name[:40]!a}", path=str(self.path))
        return self.path / name

    def has(self, name: str) -> bool:
        """Return whether there is an entry; no where the filesystem does not say.

        Raises:
            StoreError: as ``path_of``.
        """
        path = self.path_of(name)
        try:
            path.stat()
        except OSError:
            return False
        return True

    def names(self) -> tuple[str, ...]:
        """Return the entries, locks included, sorted."""
        return list_names(self.path)

    def clear(self) -> tuple[str, ...]:
        """Remove the entries whose owners are gone, and return their names."""
        removed = []
        for name in sorted({entry.removesuffix(".lock") for entry in self.names()}):
            try:
                with storage_errors(self.path, "collect leftovers"):
                    lock = FileLock(self.path / f"{name}.lock", purpose="collecting leftovers")
            except StoreLockedError:  # its writer lives
                continue
            self._discard(self.path / name)
            lock.release()
            removed.append(name)
        return tuple(removed)

    @contextlib.contextmanager
    def _owned(self) -> Iterator[Path]:
        """Yield a fresh path that this process owns for the block; whatever is there at its end is removed."""
        path = self._fresh()
        with storage_errors(path, "lock"):
            lock = FileLock(f"{path}.lock", purpose="writing a revision")
        try:
            yield path
        finally:
            self._discard(path)
            lock.release()

    def _fresh(self) -> Path:
        return self.path / f"{os.getpid()}-{secrets.token_hex(8)}"

    def _discard(self, path: Path) -> None:
        # What cannot be removed now is a leftover, removed at the next start.
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            Path(f"{path}.lock").unlink(missing_ok=True)


@contextlib.contextmanager
def storage_errors(path: Path, action: str) -> Iterator[None]:
    """Turn operating-system errors of the block into StoreError, or StorageFullError."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path, action) from error


def list_names(directory: Path) -> tuple[str, ...]:
    """Return the names in a directory, sorted.

    Raises:
        StoreError: it cannot be read.
    """
    with storage_errors(directory, "list"):
        return tuple(sorted(os.listdir(directory)))
