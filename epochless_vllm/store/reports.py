"""What a check and a clean-up of a store report. Knows no files."""

from __future__ import annotations

from dataclasses import dataclass

from epochless_vllm.protocol.manifest import RevisionId


@dataclass(frozen=True)
class Damage:
    """A revision whose bytes are not those of its name, and the error a reader of it would get."""

    revision_id: RevisionId
    code: str
    message: str


@dataclass(frozen=True)
class FsckReport:
    """What a check of every byte found; ``strays`` are names that do not belong, ``leftovers`` interrupted work."""

    checked: int
    byte_length: int
    damaged: tuple[Damage, ...]
    strays: tuple[str, ...]
    leftovers: tuple[str, ...]


@dataclass(frozen=True)
class CollectReport:
    """What ``collect`` removed and kept."""

    removed: tuple[RevisionId, ...]
    kept: int
    freed_bytes: int
