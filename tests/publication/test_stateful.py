"""Random lives of a server — publications, failures, retirements, crashes, restarts — against plain dictionaries.

The model is written from the promises: it knows no events, no transactions, no receipts.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from epochless_vllm.errors import (
    CapacityError,
    ConflictError,
    HeadRetirementError,
    PublicationError,
    QuarantinedRevisionError,
    RetiredRevisionError,
    StepConflictError,
    UnknownRevisionError,
)
from epochless_vllm.protocol.publication import Event, State
from epochless_vllm.protocol.resolution import resolve_model
from epochless_vllm.publication import coordinator, retirement, rounds
from epochless_vllm.publication.coordinator import Coordinator
from epochless_vllm.publication.journal import Journal, JournalView
from tests.publication.conftest import MEMORY, Revisions
from tests.publication.fakes import LocalRanks, altered, make_ranks, refuse

POLICIES = st.sampled_from(["p", "q"])
CHOICES = st.integers(0, 4)  # of revisions
STEPS = st.none() | st.integers(1, 4)
BEFORE_COMMIT = ("intend", "prepare.sent", "prepare.done")
AFTER_COMMIT = ("decide", "commit.reply")
RETIRING = ("retire.begin", "retire.fence", "retire.remove", "retire.decide")


class Died(BaseException):
    """The process ends here."""


class MortalJournal(Journal):
    """Once the process has died, nothing of it writes any more."""

    dead = False

    def append(self, *events: Event, **options: Any) -> State:
        if self.dead:
            raise Died
        return super().append(*events, **options)


class ServerLife(RuleBasedStateMachine):
    revisions: Revisions
    keep: int | None = None
    capacity = 100

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir=MEMORY)
        self.path = Path(self.directory.name) / "journal.sqlite"
        self.lines: dict[str, list[dict[str, Any]]] = {}  # every publication, oldest first
        self.broken: dict[str, str] = {}  # quarantined revision: rank
        self.absent: set[str] = set()  # quarantined revisions the ranks do not hold
        self.busy: dict[str, int] = {}  # requests by revision
        self.patch = pytest.MonkeyPatch()
        for module in (coordinator, retirement, rounds):
            self.patch.setattr(module, "crash_point", self.pass_point)
        self.fatal = ""
        self.start()
        self.view = JournalView(self.path)

    def start(self) -> None:
        self.journal = MortalJournal(self.path)
        self.journal.begin_epoch()
        self.ranks: LocalRanks = make_ranks(self.revisions.store, ("tp0", "tp1"))
        self.service = Coordinator(
            self.revisions.store, self.journal, self.ranks, keep=self.keep, capacity=self.capacity, deadline_s=20
        )
        self.service.recover()

    def teardown(self) -> None:
        self.patch.undo()
        self.view.close()
        self.journal.close()
        self.directory.cleanup()

    def pass_point(self, name: str) -> None:
        if name == self.fatal:
            self.journal.dead = True
            raise Died

    # The model

    def alive(self, policy: str) -> list[dict[str, Any]]:
        return [p for p in self.lines.get(policy, []) if p["phase"] != "retired"]

    def bound(self, policy: str, revision_id: str) -> str | None:
        """live, draining, or None for not bound."""
        return next((p["phase"] for p in self.alive(policy) if p["revision"] == revision_id), None)

    def engine_ids(self) -> dict[str, int]:
        return {p["revision"]: p["id"] for line in self.lines.values() for p in line if p["phase"] != "retired"}

    def set_phase(self, policy: str, revision_id: str, phase: str) -> None:
        for publication in self.alive(policy):
            if publication["revision"] == revision_id:
                publication["phase"] = phase
        if revision_id not in self.engine_ids():
            self.broken.pop(revision_id, None)
            self.absent.discard(revision_id)

    def expect_committed(self, policy: str, step: int, revision_id: str, engine_id: int) -> None:
        known = self.engine_ids()
        assert engine_id == known.get(revision_id, engine_id)
        used = {p["id"] for line in self.lines.values() for p in line}
        assert revision_id in known or engine_id not in used
        entry = {"step": step, "revision": revision_id, "phase": "live", "id": engine_id}
        self.lines.setdefault(policy, []).append(entry)
        self.broken.pop(revision_id, None)
        self.absent.discard(revision_id)

    def drain(self) -> None:
        """What one pump achieves."""
        for policy in list(self.lines):
            for publication in self.alive(policy):
                revision_id = publication["revision"]
                shared = any(self.bound(other, revision_id) for other in self.lines if other != policy)
                if publication["phase"] == "draining" and (shared or not self.busy.get(revision_id)):
                    self.set_phase(policy, revision_id, "retired")

    # What happens

    def outcome_of(self, policy: str, revision_id: str, step: int | None) -> tuple[str, int]:
        """What a publication should come to if no rank fails, and its step."""
        line, alive = self.lines.get(policy, []), self.alive(policy)
        if step is None:
            same = bool(alive) and alive[-1]["revision"] == revision_id
            step = alive[-1]["step"] if same else max((p["step"] for p in line), default=0) + 1
        taken = [p for p in line if p["step"] == step]
        if taken and taken[-1]["revision"] != revision_id:
            return "step conflict", step
        if taken and taken[-1]["phase"] == "live" and revision_id not in self.broken:
            return "repeated", step
        if self.bound(policy, revision_id) == "draining":
            self.drain()
            if self.bound(policy, revision_id) == "draining":
                return "conflict", step
        if revision_id in self.broken and self.busy.get(revision_id):
            return "conflict", step
        return "published", step

    @rule(policy=POLICIES, choice=CHOICES, step=STEPS)
    def publish(self, policy: str, choice: int, step: int | None) -> None:
        revision_id = self.revisions[choice]
        outcome, expected_step = self.outcome_of(policy, revision_id, step)
        if outcome in ("published", "repeated"):
            published = self.service.publish(revision_id, policy, step)
            assert published.repeated == (outcome == "repeated")
            assert published.publication.step == expected_step
            if outcome == "published":
                self.expect_committed(policy, expected_step, revision_id, published.publication.lora_int_id)
        else:
            with pytest.raises(StepConflictError if outcome == "step conflict" else ConflictError):
                self.service.publish(revision_id, policy, step)

    @rule(policy=POLICIES, choice=CHOICES, step=STEPS, how=st.sampled_from(["refuse", "lie", "register", "die"]))
    def publish_with_a_bad_rank(self, policy: str, choice: int, step: int | None, how: str) -> None:
        revision_id = self.revisions[choice]
        outcome, _ = self.outcome_of(policy, revision_id, step)
        if outcome != "published" or revision_id in self.engine_ids():
            self.pump_both()  # finding the outcome may have drained the model alone
            return
        installer = self.ranks.installers["tp1"]
        if how == "refuse":
            installer.on_load = refuse
        elif how == "register":
            installer.on_register = lambda shard: 1 // 0 and None
        elif how == "lie":
            lie = altered("prepare_poll", lambda reply: reply.get("receipt", {}).update(registered_digest="sha256:0"))
            self.ranks.faults["tp1"] = lie
        else:
            failed = {"ok": False, "code": "engine_dead", "reason": "gone"}
            self.ranks.faults["tp1"] = altered("prepare_begin", lambda reply: failed)
        with pytest.raises(PublicationError, match="tp1"):
            self.service.publish(revision_id, policy, step)
        installer.on_load = installer.on_register = lambda _: None  # type: ignore[assignment]
        self.ranks.faults.clear()

    @rule(policy=POLICIES, choice=CHOICES, step=STEPS)
    def publish_and_lose_the_acknowledgement(self, policy: str, choice: int, step: int | None) -> None:
        revision_id = self.revisions[choice]
        outcome, expected_step = self.outcome_of(policy, revision_id, step)
        if outcome != "published":
            self.pump_both()  # finding the outcome may have drained the model alone
            return
        refused = {"ok": False, "code": "failed", "reason": "lost it"}
        self.ranks.faults["tp0"] = altered("commit", lambda reply: refused)
        with pytest.raises(QuarantinedRevisionError, match="tp0"):
            self.service.publish(revision_id, policy, step)
        self.ranks.faults.clear()
        committed = self.journal.state.head(policy)
        assert committed is not None
        self.expect_committed(policy, expected_step, revision_id, committed.lora_int_id)
        self.broken[revision_id] = "tp0"

    @rule(policy=POLICIES, choice=st.none() | CHOICES)
    def retire(self, policy: str, choice: int | None) -> None:
        revision_id = None if choice is None else self.revisions[choice]
        alive = self.alive(policy)
        others = {p["revision"] for p in alive if p["phase"] == "live"} - {revision_id}
        known = {p["revision"] for p in self.lines.get(policy, [])}
        error: type[Exception] | None = None
        if not alive and (revision_id is None or revision_id not in known):
            error = RetiredRevisionError if known and revision_id is None else UnknownRevisionError
        elif revision_id is not None and self.bound(policy, revision_id) is None:
            error = RetiredRevisionError if revision_id in known else UnknownRevisionError
        elif revision_id is not None and alive[-1]["revision"] == revision_id and others:
            error = HeadRetirementError
        if error is not None:
            with pytest.raises(error):
                self.service.retire(policy, revision_id)
            return
        drained = self.service.retire(policy, revision_id)
        wanted = {p["revision"] for p in alive} if revision_id is None else {revision_id}
        assert {d.publication.revision_id for d in drained} == wanted
        assert all(d.in_flight == self.busy.get(d.publication.revision_id, 0) for d in drained)
        for gone in wanted:
            self.set_phase(policy, gone, "draining")

    @rule(choice=CHOICES, count=st.integers(0, 2))
    def requests_run(self, choice: int, count: int) -> None:
        self.busy[self.revisions[choice]] = count

    @rule()
    def pump(self) -> None:
        self.pump_both()

    def pump_both(self) -> None:
        self.drain()
        phases = [p["phase"] for policy in self.lines for p in {q["revision"]: q for q in self.alive(policy)}.values()]
        assert self.service.pump_retirements() == phases.count("draining")

    @rule(choice=CHOICES)
    def quarantine(self, choice: int) -> None:
        revision_id = self.revisions[choice]
        self.service.quarantine(revision_id, "tp1", "read-back differs")
        if revision_id in self.engine_ids():
            self.broken.setdefault(revision_id, "tp1")

    @rule()
    def restart(self) -> None:
        self.journal.close()
        self.revive()

    def revive(self) -> None:
        self.busy.clear()
        self.start()
        self.drain()
        self.absent = set(self.broken)

    @rule(policy=POLICIES, choice=CHOICES, step=STEPS, point=st.sampled_from(BEFORE_COMMIT + AFTER_COMMIT))
    def die_while_publishing(self, policy: str, choice: int, step: int | None, point: str) -> None:
        revision_id = self.revisions[choice]
        outcome, expected_step = self.outcome_of(policy, revision_id, step)
        if outcome != "published":
            self.pump_both()  # finding the outcome may have drained the model alone
            return
        self.fatal = point
        with pytest.raises(Died):
            self.service.publish(revision_id, policy, step)
        self.fatal = ""
        self.journal.close()
        if point in AFTER_COMMIT:
            engine_id = self.view.current().adapters[revision_id]
            self.expect_committed(policy, expected_step, revision_id, engine_id)
        self.revive()

    @precondition(lambda self: any(self.alive(policy) for policy in self.lines))
    @rule(policy=POLICIES, point=st.sampled_from(RETIRING))
    def die_while_retiring(self, policy: str, point: str) -> None:
        if not self.alive(policy):
            return
        self.fatal = point
        try:
            self.service.retire(policy, None)
            self.service.pump_retirements()
        except Died:
            self.journal.close()
            self.fatal = ""
            for publication in self.alive(policy):
                publication["phase"] = "draining"
            self.revive()
        else:
            self.fatal = ""
            for publication in self.alive(policy):
                publication["phase"] = "draining"
            self.drain()

    # What must always hold

    @invariant()
    def the_journal_tells_the_models_story(self) -> None:
        state = self.view.current()
        self.ranks.in_flight = {engine_id: self.busy.get(rev, 0) for rev, engine_id in state.adapters.items()}
        told = {
            policy: [
                (p.step, p.revision_id, p.lora_int_id)
                for p in state.publications.values()
                if p.policy == policy and state.is_held(p)
            ]
            for policy in ("p", "q")
        }
        model = {policy: [(p["step"], p["revision"], p["id"]) for p in self.alive(policy)] for policy in ("p", "q")}
        assert told == model
        assert state.adapters == self.engine_ids()
        assert {rev: rank for rev, (rank, _) in state.quarantine.items()} == self.broken
        assert state.intents == {}

    @invariant()
    def the_ranks_hold_what_is_committed_and_nothing_else(self) -> None:
        expected = {engine_id: rev for rev, engine_id in self.engine_ids().items() if rev not in self.absent}
        for rank, held in self.ranks.held().items():
            assert held == expected, rank

    @invariant()
    def admission_agrees(self) -> None:
        state = self.view.current()
        for policy in ("p", "q"):
            alive = self.alive(policy)
            if not self.lines.get(policy):
                assert resolve_model(state, policy) is None
            elif not alive or alive[-1]["phase"] == "draining":
                with pytest.raises(RetiredRevisionError):
                    resolve_model(state, policy)
            elif alive[-1]["revision"] in self.broken:
                with pytest.raises(QuarantinedRevisionError):
                    resolve_model(state, policy)
            else:
                assert resolve_model(state, policy).revision_id == alive[-1]["revision"]  # type: ignore[union-attr]


class CrowdedLife(RuleBasedStateMachine):
    """A small registry and a keep: bounds hold whatever comes, and a publication is made or refused, never lost."""

    revisions: Revisions

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir=MEMORY)
        self.journal = Journal(Path(self.directory.name) / "journal.sqlite")
        self.journal.begin_epoch()
        self.ranks = make_ranks(self.revisions.store, ("tp0",))
        self.service = Coordinator(self.revisions.store, self.journal, self.ranks, keep=2, capacity=4, deadline_s=20)

    def teardown(self) -> None:
        self.journal.close()
        self.directory.cleanup()

    @rule(policy=POLICIES, choice=st.integers(0, 9))
    def publish(self, policy: str, choice: int) -> None:
        before = self.journal.state.head(policy)
        refusal: ConflictError | None = None
        try:
            expected: Any = self.service.publish(self.revisions[choice], policy, None).publication
        except ConflictError as error:
            expected, refusal = before, error
        assert self.journal.state.head(policy) == expected
        if isinstance(refusal, CapacityError):
            assert len(refusal.fields["holders"]) >= 4
        elif refusal is not None:
            assert refusal.fields["in_flight"] > 0

    @rule(engine_id=st.integers(1, 12), count=st.integers(0, 1))
    def requests_run(self, engine_id: int, count: int) -> None:
        self.ranks.in_flight[engine_id] = count

    @rule()
    def pump(self) -> None:
        self.service.pump_retirements()

    @invariant()
    def bounds_hold(self) -> None:
        state = self.journal.state
        assert len(state.adapters) <= 4
        assert len(self.ranks.installers["tp0"].registered) == len(state.adapters)
        for policy in ("p", "q"):
            live = [key for key, holding in state.holdings.items() if key[0] == policy and not holding.draining]
            assert len(live) <= 2
            head = state.head(policy)
            assert head is None or (policy, head.revision_id) in live

    @invariant()
    def what_is_used_is_held(self) -> None:
        held = self.ranks.installers["tp0"].registered
        used = [engine_id for engine_id, count in self.ranks.in_flight.items() if count]
        retired = set(self.ranks.installers["tp0"].removed)
        self.ranks.in_flight = {engine_id: 0 if engine_id in retired else 1 for engine_id in used}
        assert all(engine_id in held for engine_id in used if engine_id in self.journal.state.adapters.values())


@pytest.mark.parametrize("life", [ServerLife, CrowdedLife])
def test_every_life_of_a_server_keeps_its_promises(life: type[ServerLife | CrowdedLife], revisions: Revisions) -> None:
    life.revisions = revisions
    run_state_machine_as_test(
        life,
        settings=settings(
            max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_the_model_notices_a_coordinator_that_forgets_to_abort(
    revisions: Revisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: the ranks keep what an aborted publication had them prepare."""
    monkeypatch.setattr(Coordinator, "_tell_abort", lambda self, intent: None)
    ServerLife.revisions = revisions
    machine = ServerLife()
    try:
        machine.publish_with_a_bad_rank("p", 0, None, "lie")
        with pytest.raises(AssertionError):
            machine.the_ranks_hold_what_is_committed_and_nothing_else()
    finally:
        machine.teardown()
