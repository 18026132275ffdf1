"""All publications of a store in order, with the lookups admission needs, shared by successive states.

A state sees the publications up to its own length, so the next state costs one append and not a copy; two different
continuations of one state part ways by copying. Knows nothing of what is still served: see publication.py.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from epochless_vllm.protocol.events import Intent
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.names import lora_name_from


@dataclass(frozen=True)
class Publication:
    """One committed (policy, step, revision); ``sequence`` orders all publications of a store."""

    policy: str
    step: int
    revision_id: RevisionId
    lora_int_id: int
    sequence: int

    @property
    def lora_name(self) -> str:
        return lora_name_from(self.policy, self.revision_id)


def publication_from_intent(intent: Intent, sequence: int) -> Publication:
    return Publication(intent.policy, intent.step, intent.revision_id, intent.lora_int_id, sequence)


@dataclass
class _Line:
    """One policy's publications. Lists of sequences only grow at the end; ``ordered`` is read under the lock."""

    first: int
    sequences: list[int] = field(default_factory=list)
    steps: dict[int, list[int]] = field(default_factory=dict)
    revisions: dict[RevisionId, list[int]] = field(default_factory=dict)
    ordered: list[RevisionId] = field(default_factory=list)
    peaks: list[tuple[int, int]] = field(default_factory=list)  # (sequence, highest step so far), at each new height

    def add(self, publication: Publication) -> None:
        sequence, revision_id = publication.sequence, publication.revision_id
        if revision_id not in self.revisions:
            bisect.insort(self.ordered, revision_id)
        if not self.peaks or publication.step > self.peaks[-1][1]:
            self.peaks.append((sequence, publication.step))
        self.sequences.append(sequence)
        self.revisions.setdefault(revision_id, []).append(sequence)
        self.steps.setdefault(publication.step, []).append(sequence)


class _Shared:
    """What the states of one lineage share."""

    def __init__(self) -> None:
        self.log: list[Publication] = []
        self.lines: dict[str, _Line] = {}
        self.lock = threading.Lock()

    def add(self, publication: Publication) -> None:
        self.log.append(publication)
        self.lines.setdefault(publication.policy, _Line(first=publication.sequence)).add(publication)


class History(Mapping[int, Publication]):
    """Publications by sequence, 1 to ``len``. Immutable to its users."""

    __slots__ = ("_length", "_shared")

    def __init__(self) -> None:
        self._shared = _Shared()
        self._length = 0

    def extended(self, publication: Publication) -> History:
        """Return the history that ends in ``publication``, whose sequence must be ``len(self) + 1``."""
        assert publication.sequence == self._length + 1
        with self._shared.lock:
            longer = History.__new__(History)
            longer._length = self._length + 1
            longer._shared = self._shared
            following = self._shared.log[self._length : longer._length]
            if following and following[0] != publication:  # another continuation owns what follows
                longer._shared = _Shared()
                for earlier in self._shared.log[: self._length]:
                    longer._shared.add(earlier)
            if following != [publication]:
                longer._shared.add(publication)
        return longer

    def __getitem__(self, sequence: int) -> Publication:
        if not 1 <= sequence <= self._length:
            raise KeyError(sequence)
        return self._shared.log[sequence - 1]

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, self._length + 1))

    def __len__(self) -> int:
        return self._length

    def knows(self, policy: str) -> bool:
        """Whether anything was ever committed under the policy."""
        line = self._shared.lines.get(policy)
        return line is not None and line.first <= self._length

    def policies(self) -> list[str]:
        """Return every policy anything was ever committed under, the one published to last first."""
        latest = {name: next(self.of_policy(name), None) for name in list(self._shared.lines)}
        known = [(publication.sequence, name) for name, publication in latest.items() if publication is not None]
        return [name for _, name in sorted(known, reverse=True)]

    def of_policy(self, policy: str) -> Iterator[Publication]:
        """Yield the policy's publications, latest first."""
        line = self._shared.lines.get(policy)
        if line is not None:
            yield from self._backwards(line.sequences)

    def count_of_policy(self, policy: str) -> int:
        """Return how many publications were ever committed under the policy."""
        line = self._shared.lines.get(policy)
        return bisect.bisect_right(line.sequences, self._length) if line is not None else 0

    def all_of_revision(self, policy: str, revision_id: RevisionId) -> Iterator[Publication]:
        """Yield the policy's publications of a revision, latest first."""
        line = self._shared.lines.get(policy)
        if line is not None:
            yield from self._backwards(line.revisions.get(revision_id, []))

    def at_step(self, policy: str, step: int) -> Publication | None:
        """Return the policy's latest publication of that step, or None."""
        line = self._shared.lines.get(policy)
        return self._latest(line.steps.get(step)) if line else None

    def of_revision(self, policy: str, revision_id: RevisionId) -> Publication | None:
        """Return the policy's latest publication of that revision, or None."""
        line = self._shared.lines.get(policy)
        return self._latest(line.revisions.get(revision_id)) if line else None

    def revisions_with_prefix(self, policy: str, prefix: str) -> list[RevisionId]:
        """Return the policy's revisions whose id opens with ``prefix``, sorted."""
        line = self._shared.lines.get(policy)
        if line is None:
            return []
        with self._shared.lock:
            begin = bisect.bisect_left(line.ordered, prefix)
            end = bisect.bisect_left(line.ordered, prefix + "~", lo=begin)  # "~" sorts after every digit
            found = line.ordered[begin:end]
        return [revision_id for revision_id in found if self.of_revision(policy, revision_id)]

    def highest_step(self, policy: str) -> int | None:
        """Return the highest step ever committed under the policy, or None."""
        line = self._shared.lines.get(policy)
        for sequence, step in reversed(line.peaks if line else []):
            if sequence <= self._length:
                return step
        return None

    def _latest(self, sequences: list[int] | None) -> Publication | None:
        return next(self._backwards(sequences or []), None)

    def _backwards(self, sequences: list[int]) -> Iterator[Publication]:
        for sequence in reversed(sequences):
            if sequence <= self._length:
                yield self[sequence]
