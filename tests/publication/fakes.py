"""Ranks in this process: real participants over an installer that holds shards of real tensors, with faults on order.

The digests expected of a rank are computed here from the adapter's source arrays' file, by other means than the
installer computes its own.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epochless_vllm.errors import RefusedAdapterError, StoreError
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.publication.participant import Participant, PrepareOrder
from epochless_vllm.store.revisions import RevisionStore, StoredRevision
from tests.adapters import MINUTE, make_adapter

Reply = dict[str, Any]
Deliver = Callable[[dict[str, Any]], Reply]
Fault = Callable[[dict[str, Any], Deliver], "Reply | None"]
"""Stands between a rank and its messages: may deliver, change the reply, or return None for no answer."""


@dataclass
class Shard:
    """A rank's part of a loaded adapter: every world-th byte row of each tensor, copied out of the store's memory."""

    lora_int_id: int
    revision_id: str
    tensors: dict[str, bytes]
    receipt: dict[str, Any]


def registered_digest(stored: StoredRevision) -> str:
    hasher = hashlib.sha256()
    for name in sorted(stored.tensors):
        hasher.update(name.encode() + b"\0" + bytes(stored.tensors[name]))
    return "sha256:" + hasher.hexdigest()


def expected_registered(root: Path, revision_id: str) -> str:
    """The same digest from the file itself: its JSON header and offsets, no code of the store."""
    path = root / "revisions" / revision_id.removeprefix("sha256:") / "adapter_model.safetensors"
    try:
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
    except (OSError, struct.error) as error:
        raise StoreError(f"{path}: cannot be read", path=str(path)) from error
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    parts = []
    for name, entry in sorted(header.items()):
        begin, end = entry["data_offsets"]
        parts += [name.encode(), b"\0", raw[8 + length + begin : 8 + length + end]]
    return "sha256:" + hashlib.sha256(b"".join(parts)).hexdigest()


class ShardInstaller:
    """Holds shards as a worker would: loads from the store, registers, removes."""

    def __init__(self, rank: str, index: int, world: int, store: RevisionStore) -> None:
        self.rank, self.index, self.world, self.store = rank, index, world, store
        self.registered: dict[int, Shard] = {}
        self.loads: list[str] = []
        self.removed: list[int] = []
        self.on_load: Callable[[PrepareOrder], None] = lambda order: None
        self.on_register: Callable[[Shard], None] = lambda shard: None

    def load(self, order: PrepareOrder) -> Shard:
        self.on_load(order)
        stored = self.store.read(order.revision_id)
        self.loads.append(order.revision_id)
        tensors = {name: bytes(view)[self.index :: self.world] for name, view in stored.tensors.items()}
        receipt = {
            "rank": self.rank,
            "source_digest": stored.manifest.revision_id,
            "registered_digest": registered_digest(stored),
        }
        return Shard(order.lora_int_id, order.revision_id, tensors, receipt)

    def register(self, loaded: Any) -> None:
        self.on_register(loaded)
        assert loaded.lora_int_id not in self.registered
        self.registered[loaded.lora_int_id] = loaded

    def remove(self, lora_int_id: int) -> dict[str, Any]:
        del self.registered[lora_int_id]
        self.removed.append(lora_int_id)
        return {"rank": self.rank, "zeroed": True}

    def held(self) -> dict[int, str]:
        return {engine_id: shard.revision_id for engine_id, shard in self.registered.items()}


@dataclass
class LocalRanks:
    """The Ranks port over participants of this process."""

    installers: dict[str, ShardInstaller]
    participants: dict[str, Participant]
    root: Path
    faults: dict[str, Fault] = field(default_factory=dict)
    in_flight: dict[int, int] = field(default_factory=dict)
    sent: list[dict[str, Any]] = field(default_factory=list)
    step: threading.Lock = field(default_factory=threading.Lock)  # an engine answers one message at a time

    def names(self) -> tuple[str, ...]:
        return tuple(self.participants)

    def call(self, message: dict[str, Any]) -> Mapping[str, Reply]:
        json.dumps(message)
        replies: dict[str, Reply] = {}
        with self.step:
            self.sent.append(message)
            for rank, participant in self.participants.items():
                fault = self.faults.get(rank)
                reply = fault(message, participant.handle) if fault else participant.handle(message)
                if reply is not None:
                    replies[rank] = json.loads(json.dumps(reply))
        return replies

    def holders(self, lora_int_id: int) -> int:
        return self.in_flight.get(lora_int_id, 0)

    def holders_of(self, lora_int_ids: Sequence[int]) -> dict[int, int]:
        return {lora_int_id: self.holders(lora_int_id) for lora_int_id in lora_int_ids}

    def expected_registered(self, revision_id: RevisionId) -> str | None:
        return expected_registered(self.root, revision_id)

    def held(self) -> dict[str, dict[int, str]]:
        return {rank: installer.held() for rank, installer in self.installers.items()}


def make_ranks(store: RevisionStore, names: tuple[str, ...] = ("tp0", "tp1", "tp2")) -> LocalRanks:
    installers = {name: ShardInstaller(name, index, len(names), store) for index, name in enumerate(names)}
    participants = {name: Participant(name, installer) for name, installer in installers.items()}
    return LocalRanks(installers, participants, store.root)


def add_revisions(store: RevisionStore, directory: Path, count: int) -> list[RevisionId]:
    """Ingest ``count`` different small adapters and return their names."""
    return [
        store.ingest_directory(make_adapter(directory / str(seed), seed=seed, shape=MINUTE, rank=2)).revision_id
        for seed in range(count)
    ]


def refuse(order: PrepareOrder) -> None:
    raise RefusedAdapterError("tensor x.lora_A.weight is consumed by no module", tensor="x.lora_A.weight")


def silent(*kinds: str) -> Fault:
    """A rank that acts on messages of these kinds (default: all) and never answers them."""
    return lambda message, deliver: (
        deliver(message) and None if not kinds or message["kind"] in kinds else deliver(message)
    )


def muted(kind: str, count: int) -> Fault:
    """A rank whose first ``count`` replies to a kind are lost on the way."""
    lost = [0]

    def fault(message: dict[str, Any], deliver: Deliver) -> Reply | None:
        reply = deliver(message)
        lost[0] += message["kind"] == kind
        return None if message["kind"] == kind and lost[0] <= count else reply

    return fault


def dead(*kinds: str) -> Fault:
    """A rank that dies on the first message of these kinds: it sees neither that one nor any later."""
    gone = [False]

    def fault(message: dict[str, Any], deliver: Deliver) -> Reply | None:
        gone[0] = gone[0] or message["kind"] in kinds
        return None if gone[0] else deliver(message)

    return fault


def deaf_once(kind: str) -> Fault:
    """A rank that misses the first message of a kind altogether."""
    missed = [False]

    def fault(message: dict[str, Any], deliver: Deliver) -> Reply | None:
        if message["kind"] == kind and not missed[0]:
            missed[0] = True
            return None
        return deliver(message)

    return fault


def one_behind() -> Fault:
    """A rank whose every reply is the one to the message before: an executor out of step."""
    last: list[Reply | None] = [None]

    def fault(message: dict[str, Any], deliver: Deliver) -> Reply | None:
        previous, last[0] = last[0], deliver(message)
        return previous

    return fault


def twice() -> Fault:
    """A rank that is given every message twice."""

    def fault(message: dict[str, Any], deliver: Deliver) -> Reply | None:
        deliver(message)
        return deliver(message)

    return fault


def altered(kind: str, change: Callable[[Reply], object]) -> Fault:
    """A rank whose replies to a kind are changed in place, or replaced when ``change`` returns something."""

    def fault(message: dict[str, Any], deliver: Deliver) -> Reply | None:
        reply = deliver(message)
        if message["kind"] == kind:
            return change(reply) or reply  # type: ignore[return-value]
        return reply

    return fault


def run_processes(target: Callable[..., None], calls: list[tuple[Any, ...]]) -> None:
    """Run calls at once, each in a process of its own; the caller must have none of their files open."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=target, args=arguments) for arguments in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * len(calls)
