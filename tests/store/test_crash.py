"""A process stopped anywhere in ingest leaves a whole revision or none, and the next one carries on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from epochless_vllm.durable import CRASH_EXIT_CODE, CRASH_VARIABLE
from epochless_vllm.store.revisions import RevisionStore
from tests.adapters import MINUTE, make_adapter

POINTS = ("ingest.copy", "ingest.fsync", "ingest.rename", "ingest.directory")
PROGRAM = (
    "import sys\n"
    "from epochless_vllm.store.revisions import RevisionStore\n"
    "print(RevisionStore(sys.argv[1]).ingest_directory(sys.argv[2]).revision_id)\n"
)


def ingest_in_a_process(store: Path, adapter: Path, crash_at: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, CRASH_VARIABLE: crash_at}
    command = [sys.executable, "-c", PROGRAM, str(store), str(adapter)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("manner", ["exit", "kill"])
@pytest.mark.parametrize("point", POINTS)
def test_crash_leaves_a_whole_revision_or_none(tmp_path: Path, point: str, manner: str) -> None:
    adapter = make_adapter(tmp_path / "adapter", shape=MINUTE)
    died = ingest_in_a_process(tmp_path / "store", adapter, f"{point}:1:kill" if manner == "kill" else point)
    assert died.returncode == (-signal.SIGKILL if manner == "kill" else CRASH_EXIT_CODE), died.stderr
    store = RevisionStore(tmp_path / "store")
    before = store.fsck()
    assert (before.damaged, before.strays) == ((), ())
    assert before.checked == (1 if point == "ingest.directory" else 0)
    cleared = store.clear_incoming()
    assert len(cleared) == 1
    assert store.fsck().leftovers == ()
    again = store.ingest_directory(adapter)
    assert again.created == (point != "ingest.directory")
    store.read(again.revision_id)


def test_crash_while_replacing_a_damaged_revision_leaves_no_damaged_one(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", shape=MINUTE)
    store = RevisionStore(tmp_path / "store")
    revision_id = store.ingest_directory(adapter).revision_id
    manifest = store.root / "revisions" / revision_id.removeprefix("sha256:") / "manifest.json"
    manifest.chmod(0o600)
    manifest.write_bytes(b"{}")
    assert ingest_in_a_process(tmp_path / "store", adapter, "ingest.rename").returncode == CRASH_EXIT_CODE
    assert store.list() == ()
    assert store.ingest_directory(adapter).revision_id == revision_id
    store.clear_incoming()
    assert store.fsck().leftovers == store.fsck().damaged == ()


def test_every_crash_point_of_the_store_is_tried(tmp_path: Path) -> None:
    source = Path(sys.modules[RevisionStore.__module__].__file__ or "").read_text()
    named = {line.split('"')[1] for line in source.splitlines() if line.strip().startswith("crash_point(")}
    assert named == set(POINTS)


def test_process_without_a_crash_point_ingests(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", shape=MINUTE)
    done = ingest_in_a_process(tmp_path / "store", adapter, "nothing")
    assert done.stdout.strip() == RevisionStore(tmp_path / "store").list()[0]
