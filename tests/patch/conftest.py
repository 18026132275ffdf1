"""The shipped series, and an original copy of the files it touches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from epochless_vllm.patch.pin import load_series
from tests.patch.trees import copy_files, copy_originals, installed_root

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def _no_power_cut_in_tests() -> Iterator[None]:
    """Spare a thousand fsyncs: what is checked here is which bytes are written, in which order, by which process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def patches() -> Path:
    """The directory of the series, as the repository holds it."""
    return REPOSITORY / "patches"


@pytest.fixture(scope="session")
def installed() -> Path:
    """The directory that holds the installed vLLM, patched or not; never written to."""
    root = installed_root()
    if root is None:
        pytest.skip("vLLM is not installed; run make setup")
    return root


@pytest.fixture(scope="session")
def original(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The touched files as upstream has them. Read only: use ``tree`` to change them."""
    return copy_originals(installed, tmp_path_factory.mktemp("original"))


@pytest.fixture
def tree(original: Path, tmp_path: Path) -> Path:
    """An original tree of one's own."""
    return copy_files(original, tmp_path / "tree", load_series().pin.files)
