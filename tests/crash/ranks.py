"""Ranks as processes of their own, spoken to over pipes, one JSON line a message.

A rank ends when its pipe does, as a worker ends with its engine. It can be told to crash at a point, to refuse a
revision, and to show the digests of the shards it really holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from epochless_vllm.durable import CRASH_VARIABLE
from epochless_vllm.errors import RefusedAdapterError
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.publication.participant import Participant, PrepareOrder
from epochless_vllm.store.revisions import RevisionStore
from tests.publication.fakes import ShardInstaller, expected_registered

NAMES = ("tp0", "tp1", "tp2")
ANSWER_S = 5.0  # long for a message without loading; a dead rank is known by its closed pipe, not by this

GONE = {"ok": False, "code": "rank_died", "reason": "its process ended"}  # as an engine's client reports it


class RankProcess:
    """One rank, forked from a process that has nothing of the store open."""

    def __init__(self, name: str, root: Path, elder: Iterable[RankProcess]) -> None:
        self.name = name
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(down_write)
            os.close(up_read)
            for sibling in elder:  # a rank ends with its server only if nobody else holds its pipe open
                sibling.drop()
            _serve(name, root, os.fdopen(down_read, "rb"), os.fdopen(up_write, "wb", buffering=0))
        os.close(down_read)
        os.close(up_write)
        self._down = os.fdopen(down_write, "wb", buffering=0)
        self._up: BinaryIO | None = os.fdopen(up_read, "rb", buffering=0)
        self._pending = b""

    def drop(self) -> None:
        """Close this process's ends of the pipes."""
        self._down.close()
        if self._up is not None:
            self._up.close()

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send a message and return its reply: None when the rank is silent, a failure when it is gone."""
        if self._up is None:
            return dict(GONE)
        try:
            self._down.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            return self._lose()
        end = time.monotonic() + ANSWER_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._up, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                piece = os.read(self._up.fileno(), 1 << 16)
                if not piece:
                    return self._lose()
                self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _lose(self) -> dict[str, Any]:
        if self._up is not None:
            self._up.close()
            self._up = None
        return dict(GONE)

    def end(self) -> int:
        """Close the pipe and return how the rank ended, as ``os.waitpid`` tells it."""
        self._down.close()
        return os.waitpid(self.pid, 0)[1]


class PipeRanks:
    """The Ranks port over such processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: dict[str, RankProcess] = {}
        for name in NAMES:
            self.processes[name] = RankProcess(name, root, list(self.processes.values()))

    def names(self) -> tuple[str, ...]:
        return NAMES

    def call(self, message: dict[str, Any]) -> Mapping[str, dict[str, Any]]:
        replies = {name: process.ask(message) for name, process in self.processes.items()}
        return {name: reply for name, reply in replies.items() if reply is not None}

    def holders(self, lora_int_id: int) -> int:
        return 0

    def holders_of(self, lora_int_ids: Sequence[int]) -> dict[int, int]:
        return {lora_int_id: self.holders(lora_int_id) for lora_int_id in lora_int_ids}

    def expected_registered(self, revision_id: RevisionId) -> str | None:
        return expected_registered(self.root, revision_id)

    def end(self) -> dict[str, int]:
        return {name: process.end() for name, process in self.processes.items()}


def shard_digest(tensors: Mapping[str, bytes]) -> str:
    hasher = hashlib.sha256()
    for name, content in sorted(tensors.items()):
        hasher.update(name.encode() + b"\0" + content)
    return hasher.hexdigest()


def _serve(name: str, root: Path, down: BinaryIO, up: Any) -> None:
    """Answer messages until the pipe ends; never returns."""
    os.environ.pop(CRASH_VARIABLE, None)  # the cut is the server's, unless this rank is told otherwise
    installer = ShardInstaller(name, NAMES.index(name), len(NAMES), RevisionStore(root))
    participant = Participant(name, installer)
    refused: set[str] = set()

    def check(order: PrepareOrder) -> None:
        if order.revision_id in refused:
            raise RefusedAdapterError("tensor x.lora_A.weight is consumed by no module")

    installer.on_load = check
    for line in down:
        message = json.loads(line)
        if message["kind"] == "arm":
            os.environ[CRASH_VARIABLE] = message["at"]
            reply: dict[str, Any] = {}
        elif message["kind"] == "refuse":
            refused.add(message["revision_id"])
            reply = {}
        elif message["kind"] == "shards":
            reply = {str(i): shard_digest(shard.tensors) for i, shard in installer.registered.items()}
        else:
            reply = participant.handle(message)
        up.write(json.dumps(reply).encode() + b"\n")
    os._exit(0)
