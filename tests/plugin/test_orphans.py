"""A process that a deployment spawned ends with the one that spawned it; the owner of a deployment does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from epochless_vllm.plugin import orphans

# A parent that starts a child and says its process id; the child says so when it watches, and never ends by itself.
CHILD = """
import os, threading
from epochless_vllm.plugin import orphans
{mutant}
orphans.install()
orphans.install()
print(sum(t.name == "epochless-orphan-watch" for t in threading.enumerate()), os.getpid(), flush=True)
threading.Event().wait(50)
"""
PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]).wait()"


def start(child: str, owner: str) -> tuple[subprocess.Popen[str], int, int]:
    """Start a parent and its child; return the parent, the number of the child's watches, and the child's id."""
    environment = {**os.environ, "EPOCHLESS_DEPLOYMENT": owner}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    watches, pid = map(int, parent.stdout.readline().split())
    return parent, watches, pid


@pytest.mark.parametrize(
    "mutant", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); orphans.GRACE_S = 0.1"]
)
def test_a_spawned_process_ends_when_its_parent_is_killed(mutant: str) -> None:
    parent, watches, _ = start(CHILD.format(mutant=mutant), "1:7")
    assert watches == 1
    parent.kill()
    assert parent.stdout is not None
    assert "is gone" in parent.stdout.read()  # to the end: the child is the last to hold the pipe
    parent.wait()


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_process_whose_owner_ended_before_it_could_watch_ends(waited_for: bool) -> None:
    owner = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    owner.stdout.read()  # it ends, and stays in the table of processes until it is waited for
    if waited_for:
        owner.wait()
    environment = {**os.environ, "EPOCHLESS_DEPLOYMENT": f"{owner.pid}:7"}
    child = CHILD.format(mutant="")
    told = subprocess.run([sys.executable, "-c", PARENT, child], capture_output=True, text=True, env=environment)
    assert told.returncode == 0  # its parent was there all the time
    assert f"process {owner.pid}, which started this one, is gone" in told.stdout + told.stderr
    owner.wait()


def test_a_forked_process_watches_by_itself() -> None:
    fork = "orphans.install(); child = os.fork(); child and (os.waitpid(child, 0), os._exit(0))"
    parent, watches, pid = start(CHILD.format(mutant=fork), "1:7")
    assert watches == 1
    os.kill(pid, signal.SIGKILL)
    parent.wait()


@pytest.mark.parametrize("forked", [False, True])
def test_a_coordinator_runs_as_vllms_own_and_is_watched(monkeypatch: pytest.MonkeyPatch, forked: bool) -> None:
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    calls: list[object] = []
    monkeypatch.setattr(DPCoordinatorProc, "run_coordinator", staticmethod(lambda *a, **k: calls.append((a, k))))
    monkeypatch.setattr(orphans, "install", lambda: calls.append("watched"))
    monkeypatch.setattr(orphans, "_coordinator", None)
    if forked:  # a spawned process knows no replacement, a forked one has it twice
        orphans.watch_coordinator()
        orphans.watch_coordinator()
        assert DPCoordinatorProc.run_coordinator is orphans.run_coordinator
    orphans.run_coordinator(2, zmq_addr_pipe=None)
    assert calls == ["watched", ((2,), {"zmq_addr_pipe": None})]


@pytest.mark.parametrize("owner", ["", "its own"])
def test_the_owner_of_a_deployment_outlives_its_parent(owner: str) -> None:
    mutant = "os.environ['EPOCHLESS_DEPLOYMENT'] = f'{os.getpid()}:1'" if owner else ""
    parent, watches, pid = start(CHILD.format(mutant=mutant), "")
    assert watches == 0
    os.kill(pid, signal.SIGTERM)
    parent.wait()
