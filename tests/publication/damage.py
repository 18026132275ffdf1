"""A journal of ten rows, and each way in which it is damaged, with the words it is refused in."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from epochless_vllm.protocol.events import chain_row, encode_event
from epochless_vllm.protocol.publication import (
    Aborted,
    Committed,
    Event,
    Intended,
    Intent,
    Quarantined,
    RetireBegan,
    Retired,
)
from epochless_vllm.publication.journal import Journal
from tests.protocol.test_publication import A, B, C

EVENTS: list[Event] = [
    Intended(Intent(1, "policy", 1, A, 1)),
    Committed(1, 1),
    Intended(Intent(2, "policy", 2, B, 2)),
    Aborted(2, "tp1: wrong digest"),
    Intended(Intent(3, "policy", 2, C, 3)),
    Committed(3, 2),
    RetireBegan("policy", A),
    Retired("policy", A),
    Quarantined(C, "tp0", "no memory"),
]
RECEIPTS = {"tp0": {"rank": "tp0", "source_digest": A}}
KEPT = 2  # the sequence of the publication whose receipts are kept: the other's revision is retired
ROWS = range(1, 11)


def write_journal(path: Path) -> None:
    """Write the journal, everything in its main file."""
    journal = Journal(path)
    journal.begin_epoch()
    for event in EVENTS:
        journal.append(event, receipts=RECEIPTS if isinstance(event, Committed) else None)
    journal.close()


class Damage(NamedTuple):
    """What is done to the file, and what its refusal says."""

    act: Callable[[Path], None]
    words: str


def _run(script: str, path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.executescript(script)


def by_sql(script: str, words: str) -> Damage:
    return Damage(partial(_run, script), words)


def _append(kind: str, payload: bytes, epoch: int, path: Path) -> None:
    """Append what a program without the rules would: the chain is right."""
    with closing(sqlite3.connect(path)) as raw, raw:
        seq, before = raw.execute("SELECT seq + 1, chain FROM tip").fetchone()
        chain = chain_row(before, seq=seq, epoch=epoch, kind=kind, payload=payload, evidence=None)
        raw.execute("INSERT INTO events VALUES (?, ?, ?, ?, NULL, ?)", (seq, epoch, kind, payload, chain))
        raw.execute("UPDATE tip SET seq = ?, chain = ?", (seq, chain))


CHANGES = {
    "a byte of the payload": "payload = "
    "CAST(replace(CAST(payload AS TEXT), substr(CAST(payload AS TEXT), -3, 1), '!') AS BLOB)",
    "the payload as text": "payload = CAST(payload AS TEXT)",
    "no payload": "payload = x''",
    "another kind": "kind = upper(kind)",
    "the kind as bytes": "kind = CAST(kind AS BLOB)",
    "another epoch": "epoch = epoch + 1",
    "an epoch in words": "epoch = 'one'",
    "other evidence": "evidence = zeroblob(32)",
    "evidence that is a number": "evidence = 7",
    "another chain": "chain = zeroblob(32)",
    "the chain in hexadecimal": "chain = hex(chain)",
    "another place": "seq = seq + 100",
}
CHANGED_ROWS = {
    f"{name}, row {row}": by_sql(f"UPDATE events SET {change} WHERE seq = {row}", f"row {row} is damaged")
    for name, change in CHANGES.items()
    for row in ROWS
}
MISSING_ROWS = {
    f"row {row} missing": by_sql(f"DELETE FROM events WHERE seq = {row}", f"row {row} is damaged") for row in ROWS
}
LOST_END = by_sql("DELETE FROM events WHERE seq > 6", "should end at row 10 and ends at row 6")
DAMAGED_TIPS = {
    "no tip": by_sql("DELETE FROM tip", "row 11 is damaged: the journal should end at row ?"),
    "two tips": by_sql("INSERT INTO tip SELECT * FROM tip", "row 11 is damaged: the journal should end at row ?"),
    "a tip beyond the end": by_sql("UPDATE tip SET seq = 11", "should end at row 11 and ends at row 10"),
    "a tip of another chain": by_sql("UPDATE tip SET chain = x'00'", "row 11 is damaged"),
}
EXCHANGED_ROWS = by_sql(
    "UPDATE events SET seq = 100 WHERE seq = 4; UPDATE events SET seq = 4 WHERE seq = 5;"
    "UPDATE events SET seq = 5 WHERE seq = 100",
    "row 4 is damaged",
)
ROW_OF_ANOTHER = by_sql(
    "UPDATE events SET (payload, chain) = (SELECT payload, chain FROM events WHERE seq = 2) WHERE seq = 6",
    "row 6 is damaged",
)
DECIDED_TWICE = Damage(
    partial(_append, "committed", b'{"sequence":3,"transaction_id":1}', 1),
    "row 11 is damaged: transaction 1 is not undecided",
)
OTHER_EPOCHS = {
    epoch: Damage(
        partial(_append, *encode_event(RetireBegan("policy", C)), epoch),
        f"row 11 is damaged: written in epoch {epoch}, recorded in epoch 1",
    )
    for epoch in (0, 2)
}
CHANGED_RECEIPTS = {
    "a rank's receipt changed": by_sql(
        "UPDATE receipts SET body = CAST(replace(CAST(body AS TEXT), 'tp0', 'tp9') AS BLOB)", f"publication {KEPT}"
    ),
    "a rank's receipt as text": by_sql("UPDATE receipts SET body = CAST(body AS TEXT)", f"publication {KEPT}"),
    "no rank's receipt": by_sql("UPDATE receipts SET body = x''", f"publication {KEPT}"),
    "receipts of another row": by_sql("UPDATE receipts SET seq = 2", f"publication {KEPT}"),
}
DAMAGE: dict[str, Damage] = {
    **CHANGED_ROWS,
    **MISSING_ROWS,
    "rows lost from the end": LOST_END,
    **DAMAGED_TIPS,
    "two rows exchanged": EXCHANGED_ROWS,
    "a row of another journal": ROW_OF_ANOTHER,
    "one decision twice": DECIDED_TWICE,
    **{f"a row of epoch {epoch}": damage for epoch, damage in OTHER_EPOCHS.items()},
}
