"""Adapter directories of strangers: opened without following links out, without blocking, without reading a device.

Promises that the bytes read come from a regular file that was inside the import root when it was opened, and that a
file which changes while it is read is noticed. Knows file names, not contents.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from epochless_vllm.errors import AdapterNotFoundError, InspectError, PathRefusedError

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
MAX_PATH_LENGTH = 4096  # PATH_MAX
MAX_ENTRIES = 10_000  # an adapter directory holds a dozen files

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NONBLOCK
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")


@dataclass(frozen=True)
class SourceFile:
    """An open regular file and what the system said of it when it was opened."""

    name: str
    file: io.FileIO
    opened: os.stat_result

    @property
    def byte_size(self) -> int:
        return self.opened.st_size

    def read(self, count: int) -> bytes:
        """Return up to ``count`` next bytes, empty at the end."""
        with _reported(self.name):
            return self.file.read(count)

    def read_into(self, view: memoryview) -> int:
        """Fill the front of ``view`` with the next bytes and return the count, 0 at the end."""
        with _reported(self.name):
            return self.file.readinto(view)

    def check_unchanged(self) -> None:
        """Check that nobody wrote to the file since it was opened.

        Raises:
            InspectError: its size or a time stamp moved.
        """
        now = os.fstat(self.file.fileno())
        if _version_of(now) != _version_of(self.opened):
            raise InspectError(
                f"{self.name}: changed while it was read; write adapters to a new directory, then publish that",
                reason="changed_while_read",
                file=self.name,
            )


@dataclass(frozen=True)
class AdapterSource:
    """The two files of an adapter directory, open for one reading from start to end."""

    config: SourceFile
    tensors: SourceFile


@contextmanager
def open_adapter_directory(path: Path | str, import_root: Path | str | None = None) -> Iterator[AdapterSource]:
    """Open the files of an adapter directory; other files in it are never opened.

    Args:
        path: a local directory; relative to ``import_root`` if one is given.
        import_root: when given, the directory must lie inside it, links resolved.

    Raises:
        AdapterNotFoundError: no such local directory, or it lacks one of the two files.
        PathRefusedError: outside the import root, ``..``, a link, a device, a pipe, or not a path at all.
        InspectError: only a pickle or shards are there, or a name that looks like one of the two files.
    """
    descriptor = _open_directory(path, import_root)
    try:
        names = _list_names(descriptor, path)
        with (
            _open_regular(descriptor, CONFIG_NAME, names, path) as config,
            _open_regular(descriptor, TENSORS_NAME, names, path) as tensors,
        ):
            yield AdapterSource(config, tensors)
    finally:
        os.close(descriptor)


@contextmanager
def _reported(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InspectError(f"{name}: cannot be read: {error.strerror}", reason="unreadable", file=name) from error


def _version_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _refusal(path: Path | str, detail: str) -> PathRefusedError:
    shown = ascii(str(path)[:200])
    return PathRefusedError(f"adapter path {shown}: {detail}", path=shown)


def _open_directory(path: Path | str, import_root: Path | str | None) -> int:
    text = os.fspath(path)
    if not text or "\0" in text or len(text) > MAX_PATH_LENGTH:
        raise _refusal(path, "not a path of this system; name a local directory")
    if ".." in text.split("/"):
        raise _refusal(path, "'..' is not allowed; name the directory itself")
    try:
        if import_root is None:
            return os.open(text, _DIRECTORY)
        return _walk(*_confine(text, import_root))
    except UnicodeEncodeError:
        raise _refusal(path, "not a path of this system; name a local directory") from None
    except OSError as error:
        raise _path_error(path, error) from error


def _confine(text: str, import_root: Path | str) -> tuple[str, str]:
    """Return the root and the path below it, links resolved."""
    root = os.path.realpath(import_root)
    try:
        real = os.path.realpath(os.path.join(root, text))
        inside = os.path.commonpath([root, real]) == root
    except OSError:  # a link that may not be read
        inside = False
    if not inside:
        # Said alike whether or not it exists: the answer must not map the disk.
        raise _refusal(text, "outside the import root; copy the adapter into it")
    return root, os.path.relpath(real, root)


def _path_error(path: Path | str, error: OSError) -> AdapterNotFoundError | PathRefusedError:
    if error.errno == errno.ENOENT:
        shown = ascii(str(path)[:200])
        return AdapterNotFoundError(
            f"adapter path {shown}: no such directory on this server; hub ids are not downloaded", path=shown
        )
    details = {
        errno.ENOTDIR: "not a directory; name the directory that holds adapter_config.json",
        errno.ELOOP: "goes through a link that changed, or loops",
        errno.ENAMETOOLONG: "too long",
        errno.EACCES: "not readable by this server",
    }
    return _refusal(path, details.get(error.errno or 0, error.strerror or "cannot be opened"))


def _walk(root: str, relative: str) -> int:
    """Open a directory below ``root`` step by step, so that a link put in between is met and refused."""
    descriptor = os.open(root, _DIRECTORY)
    try:
        for part in relative.split("/"):
            below = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _list_names(descriptor: int, path: Path | str) -> list[str]:
    names: list[str] = []
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                names.append(entry.name)
                if len(names) > MAX_ENTRIES:
                    raise _refusal(path, f"more than {MAX_ENTRIES} files; give the adapter a directory of its own")
    except OSError as error:
        raise _path_error(path, error) from error
    return names


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


@contextmanager
def _open_regular(directory: int, name: str, names: list[str], path: Path | str) -> Iterator[SourceFile]:
    twins = [other for other in names if other != name and _folded(other) == name]
    if twins:
        raise InspectError(
            f"{twins[0]!a} looks like {name}; remove one of them", reason="lookalike_file", file=ascii(twins[0])
        )
    if name not in names:
        raise _missing(name, names, path)
    try:
        # Asked before opening: opening some devices has effects.
        if not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            raise _refusal(path, f"{name} is a link or not a regular file; copy the file itself there")
        descriptor = os.open(name, _FILE, dir_fd=directory)
    except OSError as error:
        raise _path_error(f"{path}/{name}", error) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _refusal(path, f"{name} is not a regular file")
    with io.FileIO(descriptor, "rb") as file:
        yield SourceFile(name, file, status)


def _missing(name: str, names: list[str], path: Path | str) -> InspectError | AdapterNotFoundError:
    if name == TENSORS_NAME:
        pickles = [other for other in _PICKLES if other in names]
        if pickles:
            return InspectError(
                f"{pickles[0]} is a pickle, which can run code; save the adapter with safe_serialization=True",
                reason="pickle",
                file=pickles[0],
            )
        if any(other.startswith("adapter_model") and other.endswith(".safetensors") for other in names):
            return InspectError(f"the adapter is in shards; save it as one {name}", reason="sharded", file=name)
    shown = ascii(str(path)[:200])
    return AdapterNotFoundError(f"adapter path {shown}: {name} is not there", path=shown, file=name)
