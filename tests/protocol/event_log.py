"""The rules of publication a second time, as an oracle: a list of accepted events and questions answered by scanning.

Shares no state, index or helper with epochless_vllm/protocol/publication.py; slow on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epochless_vllm.protocol.events import (
    Aborted,
    Committed,
    EpochBegan,
    Event,
    Intended,
    Intent,
    Quarantined,
    RetireBegan,
    Retired,
)


@dataclass
class Commit:
    """A committed publication as the log tells it; ``phase`` is live, draining or retired."""

    intent: Intent
    sequence: int
    phase: str = "live"


@dataclass
class EventLog:
    events: list[Event] = field(default_factory=list)

    def undecided(self) -> list[Intent]:
        decided = {e.transaction_id for e in self.events if isinstance(e, Committed | Aborted)}
        intents = [e.intent for e in self.events if isinstance(e, Intended)]
        return [i for i in intents if i.transaction_id not in decided]

    def commits(self) -> list[Commit]:
        found: list[Commit] = []
        intents = {e.intent.transaction_id: e.intent for e in self.events if isinstance(e, Intended)}
        for event in self.events:
            if isinstance(event, Committed):
                found.append(Commit(intents[event.transaction_id], event.sequence))
            if isinstance(event, RetireBegan | Retired):
                for commit in found:
                    same = (commit.intent.policy, commit.intent.revision_id) == (event.policy, event.revision_id)
                    if same and commit.phase != "retired":
                        commit.phase = "draining" if isinstance(event, RetireBegan) else "retired"
        return found

    def held(self) -> list[Commit]:
        return [c for c in self.commits() if c.phase != "retired"]

    def engine_id(self, revision_id: str) -> int | None:
        return next((c.intent.lora_int_id for c in self.held() if c.intent.revision_id == revision_id), None)

    def quarantined(self) -> dict[str, tuple[str, str]]:
        reasons: dict[str, tuple[str, str]] = {}
        for position, event in enumerate(self.events):
            earlier = EventLog(self.events[: position + 1])
            if isinstance(event, Quarantined):
                reasons[event.revision_id] = (event.rank, event.reason)
            if isinstance(event, Committed):
                reasons.pop(earlier.commits()[-1].intent.revision_id, None)
            if isinstance(event, Retired) and earlier.engine_id(event.revision_id) is None:
                reasons.pop(event.revision_id, None)
        return reasons

    def status(self, policy: str, revision_id: str) -> str | None:
        mine = [c for c in self.commits() if (c.intent.policy, c.intent.revision_id) == (policy, revision_id)]
        if not mine:
            return None
        phase = mine[-1].phase
        return "quarantined" if phase == "live" and revision_id in self.quarantined() else phase

    def head(self, policy: str) -> int | None:
        return max((c.sequence for c in self.held() if c.intent.policy == policy), default=None)

    def at_step(self, policy: str, step: int) -> int | None:
        mine = [c.sequence for c in self.commits() if (c.intent.policy, c.intent.step) == (policy, step)]
        return max(mine, default=None)

    def allows(self, event: Event) -> bool:
        if isinstance(event, EpochBegan):
            return event.epoch == 1 + sum(isinstance(e, EpochBegan) for e in self.events)
        if isinstance(event, Intended):
            return self._allows_intent(event.intent)
        if isinstance(event, Aborted):
            return event.transaction_id in [i.transaction_id for i in self.undecided()]
        if isinstance(event, Committed):
            return self._allows_commit(event)
        if isinstance(event, RetireBegan):
            return self.status(event.policy, event.revision_id) in ("live", "quarantined")
        if isinstance(event, Retired):
            if self.status(event.policy, event.revision_id) != "draining":
                return False
            others = [c for c in self.held() if c.intent.revision_id == event.revision_id]
            last = all(c.intent.policy == event.policy for c in others)
            return not (last and any(i.revision_id == event.revision_id for i in self.undecided()))
        return self.engine_id(event.revision_id) is not None

    def _conflicts(self, intent: Intent) -> bool:
        return any(
            (c.intent.policy, c.intent.step) == (intent.policy, intent.step)
            and c.intent.revision_id != intent.revision_id
            for c in self.commits()
        )

    def _allows_intent(self, intent: Intent) -> bool:
        intents = [e.intent for e in self.events if isinstance(e, Intended)]
        if intent.transaction_id != len(intents) + 1 or self._conflicts(intent):
            return False
        pending = [i.lora_int_id for i in self.undecided() if i.revision_id == intent.revision_id]
        held = self.engine_id(intent.revision_id)
        fresh = 1 + max((i.lora_int_id for i in intents), default=0)
        expected = held if held is not None else pending[0] if pending else fresh
        return intent.lora_int_id == expected

    def _allows_commit(self, event: Committed) -> bool:
        chosen = [i for i in self.undecided() if i.transaction_id == event.transaction_id]
        if not chosen or event.sequence != len(self.commits()) + 1 or self._conflicts(chosen[0]):
            return False
        if self.status(chosen[0].policy, chosen[0].revision_id) == "draining":
            return False
        return self.engine_id(chosen[0].revision_id) in (None, chosen[0].lora_int_id)
