"""Who else may change a store: its directory and what is directly in it must be writable for its owner only.

The journal says what is served, and nothing but the permissions of these files says that the server wrote it. What is
below `revisions/` needs no such check: it is hashed on every read. Knows modes, not access control lists.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from epochless_vllm.durable import storage_error
from epochless_vllm.errors import StoreError
from epochless_vllm.store.incoming import storage_errors

_WRITERS = ((stat.S_IWGRP, "its group", "g"), (stat.S_IWOTH, "everybody", "o"))


class SharedPath(NamedTuple):
    """A path that others may write to: who, and the command that ends it."""

    path: Path
    writers: str
    remedy: str

    @property
    def detail(self) -> str:
        return f"{self.writers} may write to {self.path}; run: {self.remedy}"


def find_shared(root: Path) -> Iterator[SharedPath]:
    """Yield what of a store others may write to: the directory itself, and the entries directly in it.

    Raises:
        StoreError: the directory cannot be read.
    """
    with storage_errors(root, "list"):
        entries = sorted(root.iterdir())
    for path in (root, *entries):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:  # a side file of SQLite's that just went, or a link to nothing
            continue
        except OSError as error:
            raise storage_error(error, path, "look at it") from error
        found = [(who, letter) for bit, who, letter in _WRITERS if mode & bit]
        if found:
            who = " and ".join(name for name, _ in found)
            yield SharedPath(path, who, f"chmod {''.join(letter for _, letter in found)}-w {path}")


def require_private(root: Path) -> None:
    """Require that nobody but its owner may change a store.

    Raises:
        StoreError: others may, or the directory cannot be read; names the path and the remedy.
    """
    for shared in find_shared(root):
        raise StoreError(f"{root}: {shared.detail}", path=str(shared.path))


def make_private_directory(path: Path) -> None:
    """Make a directory (mode 0700) and its missing parents, none of them writable for others whatever the umask.

    Raises:
        StoreError: it cannot be made.
    """
    with storage_errors(path, "make the directory"):
        for parent in reversed(path.parents):
            if not parent.exists():
                parent.mkdir(mode=0o755, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
