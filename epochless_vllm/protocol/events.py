"""The events a journal records, their one encoding, and the chain that makes a changed row show.

``decode_event`` accepts exactly what ``encode_event`` writes. Which events may follow which state is
publication.py's question; where the rows are kept is publication/journal.py's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epochless_vllm.errors import EncodingError
from epochless_vllm.protocol.canonical import MAX_INTEGER, encode_canonical
from epochless_vllm.protocol.digests import parse_digest
from epochless_vllm.protocol.manifest import RevisionId

CHAIN_CONTEXT = b"epochless/v1/journal-row\0"
CHAIN_START = bytes(32)  # what the first row is chained to
MAX_TEXT = 400  # characters of a reason or a rank's name: keeps what remains of a publication under 1 KB


@dataclass(frozen=True)
class Intent:
    """A publication being prepared; it has no sequence before commit."""

    transaction_id: int
    policy: str
    step: int
    revision_id: RevisionId
    lora_int_id: int


@dataclass(frozen=True)
class EpochBegan:
    """A server started on the store; every intent it finds is aborted by its own event afterwards."""

    epoch: int


@dataclass(frozen=True)
class Intended:
    intent: Intent


@dataclass(frozen=True)
class Committed:
    transaction_id: int
    sequence: int


@dataclass(frozen=True)
class Aborted:
    transaction_id: int
    reason: str


@dataclass(frozen=True)
class RetireBegan:
    policy: str
    revision_id: RevisionId


@dataclass(frozen=True)
class Retired:
    policy: str
    revision_id: RevisionId


@dataclass(frozen=True)
class Quarantined:
    revision_id: RevisionId
    rank: str
    reason: str


Event = EpochBegan | Intended | Committed | Aborted | RetireBegan | Retired | Quarantined


def _check_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _check_text(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT


def _check_digest(value: object) -> bool:
    return bool(parse_digest(value))


# The fields of each kind, with what each must be.
_KINDS: dict[str, tuple[type, dict[str, Callable[[object], bool]]]] = {
    "epoch_began": (EpochBegan, {"epoch": _check_count}),
    "intended": (
        Intent,
        {
            "transaction_id": _check_count,
            "policy": _check_text,
            "step": _check_count,
            "revision_id": _check_digest,
            "lora_int_id": _check_count,
        },
    ),
    "committed": (Committed, {"transaction_id": _check_count, "sequence": _check_count}),
    "aborted": (Aborted, {"transaction_id": _check_count, "reason": _check_text}),
    "retire_began": (RetireBegan, {"policy": _check_text, "revision_id": _check_digest}),
    "retired": (Retired, {"policy": _check_text, "revision_id": _check_digest}),
    "quarantined": (Quarantined, {"revision_id": _check_digest, "rank": _check_text, "reason": _check_text}),
}
_KIND_OF: dict[type, str] = {kind: name for name, (kind, _) in _KINDS.items()}


def encode_event(event: Event) -> tuple[str, bytes]:
    """Return the kind of an event and its canonical bytes.

    Raises:
        EncodingError: a field is not what the kind asks for, or is outside the canonical profile.
    """
    recorded = event.intent if isinstance(event, Intended) else event
    kind = _KIND_OF[type(recorded)]
    _check_fields(kind, vars(recorded))
    return kind, encode_canonical(vars(recorded))


def decode_event(kind: str, payload: bytes) -> Event:
    """Return the event of a kind and its canonical bytes, strictly.

    Raises:
        EncodingError: the kind is unknown, or the bytes are not those ``encode_event`` writes for it.
    """
    if kind not in _KINDS:
        raise EncodingError(f"journal event of unknown kind {str(kind)[:40]!r}", reason="event_kind")
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise EncodingError(f"{kind} event: not JSON", reason="not_json") from error
    if not isinstance(value, dict):
        raise EncodingError(f"{kind} event: not an object", reason="event_fields")
    _check_fields(kind, value)
    # Compared with a second encoding instead of decode_canonical: these flat values need no look at nesting, and a
    # start replays every event of a store's life.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    try:
        canonical = text.encode("utf-8") == payload
    except UnicodeEncodeError:  # json.loads lets lone surrogates through
        canonical = False
    if not canonical:
        raise EncodingError(f"{kind} event: not the canonical spelling", reason="not_canonical")
    made: Any = _KINDS[kind][0](**value)
    event: Event = Intended(made) if isinstance(made, Intent) else made
    return event


def chain_row(previous: bytes, *, seq: int, epoch: int, kind: str, payload: bytes, evidence: bytes | None) -> bytes:
    """Return the 32 bytes that bind a row to all rows before it.

    Args:
        previous: the chain of the row before, or CHAIN_START.
        evidence: SHA-256 of the receipts kept beside the row, or None when it has none.
    """
    hasher = hashlib.sha256(CHAIN_CONTEXT)
    hasher.update(previous)
    hasher.update(seq.to_bytes(8, "big") + epoch.to_bytes(8, "big"))
    for part in (kind.encode("utf-8"), payload, evidence or b""):
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()


def _check_fields(kind: str, value: dict[str, Any]) -> None:
    checks = _KINDS[kind][1]
    if value.keys() != checks.keys():
        raise EncodingError(f"{kind} event: wrong fields", reason="event_fields")
    for name, check in checks.items():
        if not check(value[name]):
            raise EncodingError(f"{kind} event: {name} is out of range or of another type", reason="event_field")
