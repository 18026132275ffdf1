"""Copies of the installed vLLM to work on, without importing it and without touching the installed files."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


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
