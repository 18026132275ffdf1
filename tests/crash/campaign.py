"""The crash campaign: every named point cut, by exit code 91 and by SIGKILL, and what a restart makes of it.

    python -m tests.crash.campaign             run every cut, print the table, end with "N passed, N failed"
    python -m tests.crash.campaign --servers   and a real server's cuts, several minutes more
    python -m tests.crash.campaign --write     both, and write tests/crash/README.md from them
    python -m tests.crash.campaign --place DIR   with the stores below DIR; default: in memory where possible

A scenario starts from a store whose policy serves two revisions on three rank processes. One life of the server is cut
while it publishes, retires or starts. The next life must find exactly what was committed, the ranks must hold exactly
its bytes, and the operation, tried again, must end as if nothing had happened.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epochless_vllm.durable import CRASH_EXIT_CODE
from epochless_vllm.store.revisions import RevisionStore
from tests import campaigns
from tests.adapters import MINUTE, make_adapter
from tests.crash import server_cuts
from tests.crash.lives import live, read_sayings
from tests.crash.ranks import NAMES, shard_digest
from tests.crash.server_cuts import HEADINGS, Outcome
from tests.publication.conftest import MEMORY

README = Path(__file__).with_name("README.md")


@dataclass(frozen=True)
class World:
    """The starting point every scenario copies: adapters 0 and 1 published as steps 1 and 2; 2 and 3 not yet."""

    directory: Path
    adapters: list[str]
    ids: list[str]
    shards: list[dict[str, str]]  # by adapter: digest of each rank's shard

    @property
    def root(self) -> Path:
        return self.directory / "store"


@dataclass(frozen=True)
class Scenario:
    """One cut and what must come of it.

    Attributes:
        during: what the server was doing.
        process: ``server`` or a rank.
        point: the crash point, or the fault.
        manner: ``exit`` or ``kill``; empty for faults that end no process.
        script: the steps of the life that is cut.
        expected: step by step number of each publication held after the restart, with its status.
        retry: the steps of the next life.
        finally_: as ``expected``, at the end.
        damage: changes the store between the lives.
        check: looks at what the lives said; raises AssertionError.
        starts: False if the next life must refuse to start.
        at_start: a process and the cut to arm in it before it recovers what is committed.
    """

    during: str
    process: str
    point: str
    manner: str
    script: list[list[Any]]
    expected: dict[int, str]
    retry: list[list[Any]]
    finally_: dict[int, str]
    outcome: str
    damage: Callable[[World, Path], None] = lambda world, root: None
    check: Callable[[dict[str, Any], dict[str, Any]], None] = lambda first, second: None
    starts: bool = True
    at_start: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        return f"{self.during}-{self.process}-{self.point}{'-' + self.manner if self.manner else ''}"


def make_world(directory: Path) -> World:
    adapters = [str(make_adapter(directory / str(n), seed=n, shape=MINUTE, rank=2)) for n in range(4)]
    probe = RevisionStore(directory / "probe")
    ids = [probe.ingest_directory(path).revision_id for path in adapters]
    shards = []
    for revision_id in ids:
        tensors = probe.read(revision_id).tensors
        shards.append(
            {
                rank: shard_digest({name: bytes(view)[index :: len(NAMES)] for name, view in tensors.items()})
                for index, rank in enumerate(NAMES)
            }
        )
    world = World(directory, adapters, [str(i) for i in ids], shards)
    script = [["publish", adapters[0], 1], ["publish", adapters[1], 2]]
    status = live(world.root, script, directory / "first.jsonl")
    assert status == 0, (directory / "first.jsonl").read_text()
    return world


BASE = {1: "live", 2: "live"}
PUBLISHED = {**BASE, 3: "live"}


def scenarios(world: World) -> Iterator[Scenario]:
    """Every cut of the campaign."""
    yield from _cuts_of_the_server(world)
    yield from _cuts_of_ranks(world)
    yield from _faults(world)


def _armed(process: str, point: str, manner: str, steps: list[list[Any]]) -> list[list[Any]]:
    return [["arm", process, _spec(point, manner)], *steps]


def _spec(point: str, manner: str) -> str:
    return f"{point}:1:kill" if manner == "kill" else point


def _cuts_of_the_server(world: World) -> Iterator[Scenario]:
    for manner in ("exit", "kill"):
        yield from _cuts_of_the_server_by(world, manner)


def _cuts_of_the_server_by(world: World, manner: str) -> Iterator[Scenario]:
    publish = [["publish", world.adapters[2], 3]]
    retire = [["retire", world.ids[0]]]

    def cut(during: str, point: str, script: list[list[Any]], expected: dict[int, str], **more: Any) -> Scenario:
        return Scenario(during, "server", point, manner, _armed("server", point, manner, script), expected, **more)

    for point in ("ingest.copy", "ingest.fsync", "ingest.rename", "ingest.directory"):
        yield cut("ingest", point, publish, BASE, retry=publish, finally_=PUBLISHED, outcome="not published")
    for point in ("intend", "prepare.sent", "prepare.done"):
        yield cut("publish", point, publish, BASE, retry=publish, finally_=PUBLISHED, outcome="aborted")
    for point in ("decide", "commit.reply"):
        yield cut(
            "publish",
            point,
            publish,
            PUBLISHED,
            retry=publish,
            finally_=PUBLISHED,
            outcome="committed",
            check=_retry_is_the_same,
        )
    refused = [["refuse", world.ids[2]], *publish]
    yield cut("refused publish", "abort", refused, BASE, retry=publish, finally_=PUBLISHED, outcome="aborted")
    for point in ("retire.begin", "retire.fence", "retire.remove", "retire.decide"):
        yield cut(
            "retire",
            point,
            retire,
            {2: "live"},
            retry=retire,
            finally_={2: "live"},
            outcome="retired",
            check=_retry_says_retired,
        )
    yield Scenario(
        "start",
        "server",
        "prepare.sent",
        manner,
        [],
        BASE,
        retry=publish,
        finally_=PUBLISHED,
        outcome="as committed",
        at_start=("server", _spec("prepare.sent", manner)),
    )


def _cuts_of_ranks(world: World) -> Iterator[Scenario]:
    for manner in ("exit", "kill"):
        for rank in NAMES:
            yield from _cuts_of_a_rank_by(world, rank, manner)


def _cuts_of_a_rank_by(world: World, rank: str, manner: str) -> Iterator[Scenario]:
    publish = [["publish", world.adapters[2], 3]]
    retire = [["retire", world.ids[0]]]

    def cut(during: str, point: str, steps: list[list[Any]], expected: dict[int, str], **more: Any) -> Scenario:
        return Scenario(during, rank, point, manner, _armed(rank, point, manner, steps), expected, **more)

    for point in ("rank.load", "rank.register"):
        yield cut(
            "publish",
            point,
            publish,
            BASE,
            retry=publish,
            finally_=PUBLISHED,
            outcome="aborted, rank named",
            check=_said("publish", {"error": "publication_aborted", "rank": rank}),
        )
    yield cut(
        "publish",
        "rank.commit",
        publish,
        {**BASE, 3: "quarantined"},
        retry=publish,
        finally_=PUBLISHED,
        outcome="committed, quarantined naming the rank; lifted by the retry",
        check=_said("publish", {"error": "quarantined_revision", "rank": rank}),
    )
    yield cut(
        "retire",
        "rank.remove",
        retire,
        {2: "live"},
        retry=publish,
        finally_={2: "live", 3: "live"},
        outcome="draining, rank named; retired by the restart",
        check=_said("retire", {"remaining": 1, "failed": [rank]}),
    )
    yield Scenario(
        "start",
        rank,
        "rank.load",
        manner,
        [],
        BASE,
        retry=publish,
        finally_=PUBLISHED,
        outcome="refused to start, rank named; as committed",
        at_start=(rank, _spec("rank.load", manner)),
        check=_said("refused", {"error": "store_error", "rank": rank}),
    )


def _faults(world: World) -> Iterator[Scenario]:
    publish = [["publish", world.adapters[2], 3]]

    def blob(root: Path, index: int) -> Path:
        path = root / "revisions" / world.ids[index].removeprefix("sha256:") / "adapter_model.safetensors"
        path.chmod(0o600)
        return path

    def flip(root: Path, index: int) -> None:
        path = blob(root, index)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    def tear(root: Path) -> None:
        log = root / "journal.sqlite-wal"
        with log.open("ab") as file:
            file.truncate(max(0, log.stat().st_size - 100))

    def fault(point: str, script: list[list[Any]], expected: dict[int, str], outcome: str, **more: Any) -> Scenario:
        settings = {"retry": publish, "finally_": {**expected, 3: "live"}, **more}
        return Scenario("fault", "disk", point, "", script, expected, outcome=outcome, **settings)

    yield Scenario(
        "fault",
        "server",
        "log torn after a kill",
        "kill",
        _armed("server", "intend", "kill", publish),
        BASE,
        retry=publish,
        finally_=PUBLISHED,
        outcome="not fatal",
        damage=lambda _, root: tear(root),
    )
    yield fault(
        "journal emptied",
        [],
        {},
        "refuses to start",
        starts=False,
        damage=lambda _, root: (root / "journal.sqlite").write_bytes(b"") and None,
    )
    yield fault("head's bytes flipped", [], {}, "refuses to start", starts=False, damage=lambda _, root: flip(root, 1))
    for name, harm in (
        ("older bytes flipped", lambda root: flip(root, 0)),
        ("older file emptied", lambda root: blob(root, 0).write_bytes(b"")),
    ):
        yield fault(
            name,
            [],
            {1: "quarantined", 2: "live"},
            "that one 410, others serve",
            damage=lambda _, root, harm=harm: harm(root) and None,
        )
    full = ["limit", 2048]
    yield fault(
        "disk full at ingest",
        [full, *publish, ["limit", None]],
        BASE,
        "refused, 507",
        check=_said("publish", {"error": "storage_full", "rank": None}),
    )
    yield fault(
        "disk full at publish",
        [["publish", world.adapters[2], 1], full, *publish, ["limit", None]],
        BASE,
        "refused, 507",
        check=_said("publish", {"error": "storage_full", "rank": None}),
    )
    yield fault(
        "disk full at retire",
        [full, ["retire", world.ids[0]], ["limit", None]],
        BASE,
        "refused, 507; stays live",
        check=_said("retire", {"error": "storage_full", "rank": None}),
    )
    yield Scenario(
        "fault",
        "server",
        "second server on the store",
        "",
        [["second_server"]],
        BASE,
        retry=publish,
        finally_=PUBLISHED,
        outcome="refused",
        check=_said("second_server", {"error": "store_locked", "rank": None}),
    )
    yield Scenario(
        "fault",
        "server",
        "messages of an earlier epoch",
        "",
        [["old_messages", world.ids[0]]],
        BASE,
        retry=publish,
        finally_=PUBLISHED,
        outcome="refused by every rank",
        check=_said("old_messages", ["stale_epoch"]),
    )
    yield Scenario(
        "fault",
        "server",
        "publishing after a later server began",
        "",
        [["later_epoch"], *publish],
        BASE,
        retry=publish,
        finally_=PUBLISHED,
        outcome="refused",
        check=_said("publish", {"error": "stale_epoch", "rank": None}),
    )


def _said(step: str, expected: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """A check of what the life that was cut had said."""

    def check(first: dict[str, Any], second: dict[str, Any]) -> None:
        assert first[step] == expected, f"it said {first[step]}"

    return check


def _retry_is_the_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert second["publish"] == {"step": 3, "repeated": True}, second["publish"]


def _retry_says_retired(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert second["retire"] == {"error": "retired_revision", "rank": None}, second["retire"]


@dataclass
class Result:
    scenario: Scenario
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems


def run(world: World, scenario: Scenario, directory: Path) -> Result:
    """Run a scenario in a directory of its own and say what went wrong, if anything."""
    result = Result(scenario)
    root = directory / "store"
    shutil.copytree(world.root, root)
    try:
        status = live(root, scenario.script, directory / "cut.jsonl", at_start=scenario.at_start)
        first = read_sayings(directory / "cut.jsonl")
        _check_ending(scenario, status)
        scenario.damage(world, root)
        status = live(root, scenario.retry, directory / "next.jsonl")
        assert status == 0, f"the next life ended with {status}"
        second = read_sayings(directory / "next.jsonl")
        if not scenario.starts:
            assert "refused" in second, "it started"
            return result
        assert "refused" not in second, f"it refuses to start: {second.get('refused')}"
        _check_state(world, second["ready"], scenario.expected)
        _check_state(world, second["end"], scenario.finally_)
        found = {entry[0] for entry in second["found"]["published"]}
        assert found <= {*scenario.expected, 1}, f"listed before recovery: {sorted(found)}"
        scenario.check(first, second)
    except AssertionError as error:
        result.problems.append(str(error))
    return result


def _check_ending(scenario: Scenario, status: int) -> None:
    if scenario.process != "server" or not scenario.manner:
        assert status == 0, f"the life ended with {status}"
    elif scenario.manner == "exit":
        assert os.waitstatus_to_exitcode(status) == CRASH_EXIT_CODE, f"not cut: {status}"
    else:
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"not cut: {status}"


def _check_state(world: World, report: dict[str, Any], expected: dict[int, str]) -> None:
    """The report shows exactly the expected publications, and every rank exactly their shards."""
    latest = {step: (revision_id, engine_id, status) for step, revision_id, engine_id, status in report["published"]}
    assert {step: entry[2] for step, entry in latest.items()} == expected, f"published: {latest}"
    for step, (revision_id, _, _) in latest.items():
        assert revision_id == world.ids[step - 1], f"step {step} is {revision_id}"
    assert report["head"] == max(expected), f"head: {report['head']}"
    adapters = {world.ids[step - 1] for step in expected}
    assert set(report["adapters"]) == adapters, f"adapters: {report['adapters']}"
    serving = {
        str(engine_id): world.shards[step - 1] for step, (_, engine_id, status) in latest.items() if status == "live"
    }
    for rank in NAMES:
        held = report["shards"][rank]
        assert held == {engine_id: shards[rank] for engine_id, shards in serving.items()}, f"{rank} holds {held}"
    assert not report["undecided"], f"undecided: {report['undecided']}"
    assert not report["leftovers"], f"leftovers: {report['leftovers']}"
    damaged = set(report["damaged"])
    assert damaged <= {entry[0] for entry in latest.values() if entry[2] == "quarantined"}, f"damaged: {damaged}"


def table(results: Sequence[Result]) -> str:
    """Return the rows of the runs without an engine."""
    return campaigns.table(HEADINGS, (_row(result) for result in results))


def _row(result: Result) -> tuple[str, ...]:
    s = result.scenario
    verdict = "passed" if result.passed else f"FAILED: {result.problems[0]}"
    return s.during, s.process, f"`{s.point}`", s.manner or "-", s.outcome, verdict


def render(results: list[Result], outcomes: list[Outcome]) -> str:
    return f"""# Crash campaign

Generated by `python -m tests.crash.campaign --write`; `make crash` runs the same and prints it.

## Three ranks, without an engine

Each row is one run: a server with three rank processes that hold real tensor shards is cut at a named point, by exit
code 91 or SIGKILL, or its disk is damaged; the next server on the same store must find exactly what was committed,
serve exactly its bytes on every rank, leave nothing over, and take the same operation again.

{table(results)}

## `vllm serve`

Each row is one life of a real server on the same store, with a stream running beside the cut. The stream must have
said only what its revision says; every process of the server must end; the next life must list and serve exactly what
was committed, token for token what a stock engine says alone with that adapter, leave nothing over, and take the same
operation again. In the fast suite, three of these run.

{server_cuts.table(outcomes)}

{campaigns.summary([*results, *outcomes])}
"""


def run_all(directory: Path, chosen: Callable[[Scenario], bool] = lambda scenario: True) -> list[Result]:
    world = make_world(directory)
    results = []
    for number, scenario in enumerate(filter(chosen, scenarios(world))):
        place = directory / f"run{number}"
        place.mkdir()
        results.append(run(world, scenario, place))
        shutil.rmtree(place)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", action="store_true", help="cut real servers, too")
    parser.add_argument("--write", action="store_true", help="cut real servers, and write tests/crash/README.md")
    parser.add_argument("--place", default=MEMORY, help="where to put the stores")
    arguments = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.place) as directory:
        results = run_all(Path(directory))
    print(table(results), flush=True)
    outcomes = []
    if arguments.servers or arguments.write:
        with tempfile.TemporaryDirectory() as directory:
            outcomes = server_cuts.Chain(Path(directory), server_cuts.CUTS).run()
        print(server_cuts.table(outcomes))
    print(f"{time.monotonic() - begin:.1f} s")
    print(campaigns.summary([*results, *outcomes]))
    if arguments.write:
        README.write_text(render(results, outcomes), encoding="utf-8")
    return 0 if all(result.passed for result in [*results, *outcomes]) else 1


if __name__ == "__main__":
    sys.exit(main())
