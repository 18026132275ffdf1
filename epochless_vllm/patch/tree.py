"""A vLLM tree on disk: which version it is, in which state, and the replacement of its files.

A tree is a directory that holds the package vllm: the site-packages of an installed wheel, an unpacked wheel or sdist,
or a git checkout. Nothing of it is imported. Promises that each file has its old bytes or its new ones at every
moment, so that an interrupted change leaves a tree these functions recognise and can finish.
"""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from epochless_vllm.durable import crash_point, write_file_atomic
from epochless_vllm.errors import PatchError
from epochless_vllm.patch.diff import blob_id
from epochless_vllm.patch.pin import UPSTREAM, Pin, read_plain_file, refuse

State = Literal["unpatched", "patched", "interrupted", "foreign"]


@dataclass(frozen=True)
class TreeStatus:
    """What a tree is. ``foreign`` files are neither original nor patched; ``reason`` says why the state is what it is.

    ``commit`` is the HEAD of a git checkout, None elsewhere or where git is not installed.
    """

    root: Path
    state: State
    version: str | None
    patched: tuple[str, ...]
    unpatched: tuple[str, ...]
    foreign: tuple[str, ...]
    commit: str | None
    reason: str

    def describe(self) -> dict[str, Any]:
        """Return the status as JSON types."""
        return {
            "root": str(self.root),
            "state": self.state,
            "version": self.version,
            "commit": self.commit,
            "patched": list(self.patched),
            "unpatched": list(self.unpatched),
            "foreign": list(self.foreign),
            "reason": self.reason,
        }


def find_installed_tree() -> Path:
    """Return the directory that holds the vLLM installed for this interpreter.

    Raises:
        PatchError: there is none.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise PatchError(
            "vLLM is not installed for this interpreter; install it or name its directory", step="preimages"
        )
    return Path(spec.origin).parent.parent


def read_contents(root: Path, pin: Pin) -> dict[str, bytes]:
    """Return the content of every pinned file.

    Raises:
        PatchError: at step ``preimages``, for a missing file or a symbolic link.
    """
    return {path: read_plain_file(root, path, "preimages") for path in pin.files}


def read_status(root: Path, pin: Pin, contents: Mapping[str, bytes]) -> TreeStatus:
    """Return the status of the tree at ``root``, whose pinned files have ``contents``."""
    kinds = {
        path: {before: "unpatched", after: "patched"}.get(blob_id(contents[path]), "foreign")
        for path, (before, after) in pin.files.items()
    }
    count = Counter(kinds.values())
    version = read_version(root)
    head = read_head(root, pin)
    state: State
    if version is not None and not is_pinned_version(version):
        state, reason = "foreign", f"foreign version: this is vLLM {version}, the patch is for {UPSTREAM['version']}"
    elif count["foreign"]:
        names = ", ".join(sorted(path for path, kind in kinds.items() if kind == "foreign"))
        other = head is not None and head.other_version
        cause = "the checkout is of another version" if other else "edited locally, or patched by something else"
        state, reason = "foreign", f"{cause}, neither the original nor the patched file: {names}"
    elif len(count) > 1:
        state = "interrupted"
        reason = f"{count['patched']} of {len(kinds)} files are patched: apply again to finish, or revert"
    else:
        state = "patched" if count["patched"] else "unpatched"
        reason = f"every touched file is {'the patched' if count['patched'] else 'the original'} one"

    def named(wanted: str) -> tuple[str, ...]:
        return tuple(path for path, kind in kinds.items() if kind == wanted)

    commit = head.commit if head is not None else None
    return TreeStatus(root, state, version, named("patched"), named("unpatched"), named("foreign"), commit, reason)


def replace_files(root: Path, contents: Mapping[str, bytes]) -> None:
    """Give each file its new bytes, atomically and keeping its mode, and drop what Python compiled from the old ones.

    Raises:
        StoreError: the disk refused; the files so far have their new bytes and the rest their old ones.
    """
    for path, content in contents.items():
        place = root / path
        mode = stat.S_IMODE(place.stat().st_mode)
        for abandoned in place.parent.glob(f".{place.name}.*.tmp"):  # left by an interrupted write
            abandoned.unlink(missing_ok=True)
        write_file_atomic(place, content, mode=mode)
        os.chmod(place, mode)  # whatever the umask is
        for compiled in (place.parent / "__pycache__").glob(f"{place.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
        crash_point("patch.file_replaced")


def read_version(root: Path) -> str | None:
    """Return the version a wheel or sdist says it is; None for a checkout, which does not say."""
    if not (root / "vllm" / "_version.py").is_file():
        return None
    text = read_plain_file(root, "vllm/_version.py", "preimages")
    found = re.search(rb"^__version__(?: = version)? = ['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1].decode("utf-8", "replace") if found else "of an unknown version"


def is_pinned_version(version: str) -> bool:
    """Tell whether a version string is the pinned release, or a development build of the pinned commit."""
    release, _, local = version.partition("+")
    return release == UPSTREAM["version"] or f"g{UPSTREAM['commit'][:9]}" in local


@dataclass(frozen=True)
class Head:
    """The commit a checkout is at, and whether its own files differ from the pinned originals."""

    commit: str
    other_version: bool


def read_head(root: Path, pin: Pin) -> Head | None:
    """Return the HEAD of the git checkout at ``root``; None if it is not one, or git cannot tell."""
    if not (root / ".git").exists():
        return None
    try:
        import git
    except ImportError:  # GitPython refuses to load where there is no git; the files alone decide then
        return None
    try:
        commit = git.Repo(root).head.commit
        held = {path: commit.tree.join(path).hexsha for path in pin.files}
    except KeyError:  # a touched file does not exist in that commit
        return Head(commit.hexsha, other_version=True)
    except (git.GitError, ValueError):  # no commit yet, or not a repository after all
        return None
    return Head(commit.hexsha, any(held[path] not in blobs for path, blobs in pin.files.items()))


def require_known(status: TreeStatus) -> None:
    """Raise PatchError at step ``preimages`` if the tree is of another version or has a file of unknown content."""
    if status.state == "foreign":
        advice = f"install vLLM {UPSTREAM['version']} afresh"
        raise refuse("preimages", f"{status.reason}; {advice}", files=list(status.foreign), version=status.version)
