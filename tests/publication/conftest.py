"""A store with a few revisions, made once; each test works on its own journal and ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.publication.coordinator import Coordinator
from epochless_vllm.publication.journal import Journal
from epochless_vllm.store.revisions import RevisionStore
from tests.publication.fakes import LocalRanks, add_revisions, make_ranks

MEMORY = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True)
class Revisions:
    store: RevisionStore
    ids: list[RevisionId]

    def __getitem__(self, index: int) -> RevisionId:
        return self.ids[index]


@dataclass
class Service:
    """A coordinator with its journal and ranks, as one process has them."""

    coordinator: Coordinator
    journal: Journal
    ranks: LocalRanks


MakeService = Callable[..., Service]


@pytest.fixture(scope="session")
def revisions(tmp_path_factory: pytest.TempPathFactory) -> Revisions:
    root = tmp_path_factory.mktemp("revisions")
    store = RevisionStore(root / "store")
    return Revisions(store, add_revisions(store, root, 24))


@pytest.fixture
def journal_path(tmp_path: Path) -> Iterator[Path]:
    """A place in memory where there is one: the disk's part is tested by failing it, not by waiting for it."""
    with tempfile.TemporaryDirectory(dir=MEMORY or tmp_path) as directory:
        yield Path(directory) / "journal.sqlite"


@pytest.fixture
def make_service(revisions: Revisions, journal_path: Path) -> Iterator[MakeService]:
    """Start services on one journal: each begins an epoch unless told to join, with fresh ranks unless given some."""
    journals = []

    def make(*, join: bool = False, ranks: LocalRanks | None = None, **options: Any) -> Service:
        journal = Journal(journal_path)
        journals.append(journal)
        if not join:
            journal.begin_epoch()
        ranks = ranks or make_ranks(revisions.store)
        settings = {"keep": None, "capacity": 100, "deadline_s": 0.3, **options}
        return Service(Coordinator(revisions.store, journal, ranks, **settings), journal, ranks)

    yield make
    for journal in journals:
        journal.close()
