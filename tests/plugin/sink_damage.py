"""A receipts file of three receipts, and each way in which it is damaged, with the code a careful client is given."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from epochless_vllm.plugin.sink import Entry, ReceiptSink
from epochless_vllm.protocol.compact import encode_compact
from tests.verify.bases import base_receipt

NAMES = ("sampled", "greedy", "aborted")
ASKED = base_receipt("sampled").receipt_id  # what the client asks for
OTHER = base_receipt("greedy").receipt_id


def open_sink(store: Path) -> ReceiptSink:
    return ReceiptSink(store, max_bytes=1 << 20, max_age_s=1 << 40)


def write_sink(store: Path) -> None:
    """Write the file, everything in its main file."""
    sink = open_sink(store)
    for name in NAMES:
        receipt = base_receipt(name)
        final = receipt.final
        made = Entry(receipt.receipt_id, name, 0, 0, final.finish_reason, final.tokens, encode_compact(receipt))
        outcome = sink.submit(lambda made=made: made).result(60)  # type: ignore[misc]
        assert outcome.kept, outcome.reason
    sink.close()


class Damage(NamedTuple):
    """What is done to the file, and the code of the refusal."""

    act: Callable[[Path], None]
    code: str


def _run(script: str, path: Path) -> None:
    with closing(sqlite3.connect(path)) as raw:
        raw.executescript(script)


def by_sql(script: str, code: str) -> Damage:
    return Damage(partial(_run, f"{script};"), code)


def by_body(expression: str, code: str) -> Damage:
    return by_sql(f"UPDATE receipts SET body = {expression} WHERE id = '{ASKED}'", code)


def _cut(share: float, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def _overwrite(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to look like one" * 100)


DAMAGE = {
    "the last byte changed": by_body("CAST(substr(body, 1, length(body) - 1) || x'5a' AS BLOB)", "offset_range"),
    "the last byte lost": by_body("substr(body, 1, length(body) - 1)", "truncated"),
    "a byte too many": by_body("CAST(body || x'00' AS BLOB)", "trailing_bytes"),
    "half of it": by_body("substr(body, 1, length(body) / 2)", "truncated"),
    "nothing of it": by_body("x''", "format"),
    "zeros": by_body("zeroblob(length(body))", "format"),
    "in hexadecimal": by_body("CAST(hex(body) AS BLOB)", "format"),
    "as text": by_body("hex(body)", "store_error"),
    "as a number": by_body("7", "store_error"),
    "another receipt in its place": by_body(f"(SELECT body FROM receipts WHERE id = '{OTHER}')", "receipt_id"),
    "two ids exchanged": by_sql(
        f"UPDATE receipts SET id = 'x' WHERE id = '{ASKED}'; UPDATE receipts SET id = '{ASKED}' WHERE id = '{OTHER}'",
        "receipt_id",
    ),
    "no table": by_sql("DROP TABLE receipts", "store_error"),
    "half of the file": Damage(partial(_cut, 0.5), "store_error"),
    "another file in its place": Damage(_overwrite, "store_error"),
}
