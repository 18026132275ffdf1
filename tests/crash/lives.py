"""One life of a server on a store, in a process of its own: start, do what the script says, report, end.

Every step's outcome is written out at once, so that a life that is cut short has told what it had done.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from epochless_vllm.durable import CRASH_VARIABLE, FileLock
from epochless_vllm.errors import EpochlessError
from epochless_vllm.publication.coordinator import Coordinator
from epochless_vllm.publication.journal import Journal, JournalView
from epochless_vllm.store.revisions import RevisionStore
from tests.crash.ranks import NAMES, PipeRanks

POLICY = "p"
LONGEST_S = 180  # a busy machine may keep a process waiting for very long
FAILED = 70  # a life that raised what it should not


class Life:
    """What one server has open. Ranks first: they are forked, and nothing of the store may be open then."""

    def __init__(self, root: Path, say: Callable[[Any], None], at_start: tuple[str, str] | None) -> None:
        self.root, self.say = root, say
        self.ranks = PipeRanks(root)
        self.lock = FileLock(root / "lock", purpose="a server of the crash campaign")
        self.store = RevisionStore(root)
        if (root / "journal.sqlite").exists():
            view = JournalView(root / "journal.sqlite")
            say(["found", listing(view.current())])
            view.close()
        self.store.clear_incoming()
        self.journal = Journal(root / "journal.sqlite")
        self.journal.begin_epoch()
        if at_start is not None:
            self.do_arm(*at_start)
        self.coordinator = Coordinator(self.store, self.journal, self.ranks, keep=None, capacity=10, deadline_s=20.0)
        self.coordinator.recover()
        say(["ready", self.report()])

    def do(self, step: list[Any]) -> Any:
        verb, *arguments = step
        try:
            return getattr(self, f"do_{verb}")(*arguments)
        except EpochlessError as error:
            return {"error": error.code, "rank": error.fields.get("rank")}

    def do_publish(self, adapter: str, step: int) -> Any:
        revision_id = self.store.ingest_directory(adapter).revision_id
        published = self.coordinator.publish(revision_id, POLICY, step)
        return {"step": published.publication.step, "repeated": published.repeated}

    def do_retire(self, revision_id: str) -> Any:
        self.coordinator.retire(POLICY, revision_id)  # type: ignore[arg-type]
        remaining = self.coordinator.pump_retirements()
        failures = {failure.rank for failure in self.coordinator.retirement_failures.values()}
        return {"remaining": remaining, "failed": sorted(failures)}

    def do_arm(self, process: str, at: str) -> Any:
        if process == "server":
            os.environ[CRASH_VARIABLE] = at
        else:
            self.ranks.processes[process].ask({"kind": "arm", "at": at})
        return None

    def do_second_server(self) -> Any:
        FileLock(self.root / "lock", purpose="a second server")

    def do_old_messages(self, revision_id: str) -> Any:
        """What a server before this one may still send; returns the codes of the answers."""
        codes = set()
        for kind in ("prepare_begin", "commit", "abort", "retire"):
            order = {"epoch": self.journal.epoch - 1, "transaction_id": 1, "revision_id": revision_id}
            replies = self.ranks.call({"kind": kind, "lora_int_id": 1, "serial": 0, **order})
            codes |= {reply.get("code") for reply in replies.values()}
        return sorted(map(str, codes))

    def do_later_epoch(self) -> Any:
        """Another server takes the store over, as it could on a file system without locks."""
        later = Journal(self.root / "journal.sqlite")
        later.begin_epoch()
        later.close()

    def do_refuse(self, revision_id: str) -> Any:
        self.ranks.processes["tp1"].ask({"kind": "refuse", "revision_id": revision_id})
        return None

    def do_limit(self, size: int | None) -> Any:
        """No file may grow beyond ``size`` bytes: a full disk, as far as a process can arrange one for itself."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY if size is None else size, -1))
        return None

    def report(self) -> Any:
        shards = {name: self.ranks.processes[name].ask({"kind": "shards"}) for name in NAMES}
        check = self.store.fsck()
        return {
            **listing(self.journal.state),
            "shards": shards,
            "damaged": [damage.revision_id for damage in check.damaged],
            "leftovers": [*check.leftovers, *check.strays],
            "undecided": len(self.journal.state.intents),
        }


def listing(state: Any) -> dict[str, Any]:
    """What a client can see of a state, and the ids the ranks must hold."""
    return {
        "published": [
            [p.step, p.revision_id, p.lora_int_id, state.status(p.policy, p.revision_id).value]
            for p in state.publications.values()
            if state.is_held(p)
        ],
        "head": getattr(state.head(POLICY), "step", None),
        "adapters": dict(state.adapters),
    }


def live(root: Path, script: list[list[Any]], out: Path, *, at_start: tuple[str, str] | None = None) -> int:
    """Run a life in a forked process and return its wait status; what it said is in ``out``, a JSON line a saying.

    Args:
        at_start: a process and the crash point to arm in it before recovery.
    """
    out.unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    code = FAILED
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    try:
        with out.open("w") as file:

            def say(what: Any) -> None:
                file.write(json.dumps(what) + "\n")
                file.flush()

            try:
                server = Life(root, say, at_start)
            except EpochlessError as error:
                say(["refused", {"error": error.code, "rank": error.fields.get("rank")}])
            else:
                for step in script:
                    say([step[0], server.do(step)])
                say(["end", server.report()])
                server.journal.close()
                server.ranks.end()
        code = 0
    except Exception:  # noqa: BLE001 - shown, and told by the exit code; this copy of the caller must not go on
        traceback.print_exc()
    finally:
        os._exit(code)


def read_sayings(out: Path) -> dict[str, Any]:
    """Return what a life said, by its first word; the last saying of a word counts."""
    return dict(json.loads(line) for line in out.read_text().splitlines())
