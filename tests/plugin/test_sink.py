"""The sink: what was reported as kept is there after a kill, limits hold, a disk that refuses costs receipts only."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.errors import ReceiptError, StoreError, TokenRowsError
from epochless_vllm.plugin import sink as sink_module
from epochless_vllm.plugin.sink import FILE_NAME, Entry, Outcome, ReceiptSink
from epochless_vllm.verify import verify_receipt
from tests.plugin.sink_damage import ASKED, DAMAGE, open_sink, write_sink
from tests.verify.bases import known

ROOT = Path(__file__).parents[2]


def entry(number: int, size: int = 100, request: str = "cmpl-1") -> Entry:
    return Entry(f"sha256:{number:064x}", request, 0, number, "length", 7, bytes([number % 256]) * size)


def make_sink(store: Path, max_bytes: int = 1 << 20, max_age_s: int = 3600) -> ReceiptSink:
    return ReceiptSink(store, max_bytes=max_bytes, max_age_s=max_age_s)


def keep(sink: ReceiptSink, *entries: Entry) -> list[Outcome]:
    futures: list[Future[Outcome]] = [sink.submit(lambda item=item: item) for item in entries]  # type: ignore[misc]
    return [future.result(60) for future in futures]


def test_what_was_kept_is_read_by_every_process(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    assert [outcome.kept for outcome in keep(sink, *map(entry, range(200)))] == [True] * 200
    other = make_sink(tmp_path)
    assert other.read(entry(150).receipt_id) == entry(150).body
    assert [item["choice_index"] for item in other.find("cmpl-1")] == list(range(200))
    assert keep(other, entry(201))[0].kept
    assert sink.read(entry(201).receipt_id) == entry(201).body
    assert sink.read("sha256:" + "f" * 64) is None
    assert sink.find("cmpl-2") == []
    assert (sink.path.stat().st_mode & 0o077) == 0


def test_nothing_is_read_and_nothing_made_before_the_first_receipt(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    assert sink.read("sha256:" + "0" * 64) is None
    sink.close()
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_make_room(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, max_bytes=1000)
    keep(sink, *(entry(number, 100) for number in range(25)))
    kept = [item["choice_index"] for item in sink.find("cmpl-1")]
    assert kept == list(range(15, 25))
    keep(sink, entry(25, 950))
    assert [item["choice_index"] for item in sink.find("cmpl-1")] == [25]
    (outcome,) = keep(sink, entry(26, 1001))
    assert (outcome.kept, "larger than" in (outcome.reason or "")) == (False, True)
    assert sink.read(entry(25).receipt_id) is not None


def test_the_same_receipt_twice_counts_once(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, max_bytes=250)
    for _ in range(5):
        assert all(outcome.kept for outcome in keep(sink, entry(1, 100), entry(2, 100)))
    assert len(sink.find("cmpl-1")) == 2


def test_receipts_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("epochless_vllm.plugin.sink.time.time", lambda: now[0])
    sink = make_sink(tmp_path, max_age_s=60)
    keep(sink, entry(1))
    now[0] = 1060.0
    assert sink.read(entry(1).receipt_id) is not None
    now[0] = 1061.0
    assert sink.read(entry(1).receipt_id) is None
    keep(sink, entry(2))
    with sqlite3.connect(sink.path) as connection:
        assert connection.execute("SELECT count(*) FROM receipts").fetchone() == (1,)


def test_a_sink_of_no_bytes_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    sink = make_sink(tmp_path, max_bytes=0)
    assert "keeps no receipts" in (sink.refusal or "")
    (outcome,) = keep(sink, entry(1))
    assert (outcome.kept, outcome.reason) == (False, sink.refusal)
    assert not sink.path.exists()


def test_a_receipt_that_cannot_be_made_fails_its_own_future_only(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)

    def fail() -> Entry:
        raise TokenRowsError("no rows")

    failed, fine = sink.submit(fail), sink.submit(lambda: entry(1))
    with pytest.raises(TokenRowsError):
        failed.result(60)
    assert fine.result(60).kept


def test_a_full_disk_costs_receipts_and_heals(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    keep(sink, entry(1))
    sink.close()
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
        outcomes = keep(sink, *(entry(number, 64 << 10) for number in range(2, 40)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        signal.signal(signal.SIGXFSZ, before)
    refused = [outcome for outcome in outcomes if not outcome.kept]
    assert refused
    assert "cannot be written" in (refused[0].reason or "")
    for outcome in outcomes:  # reported as it is, each of them
        assert (sink.read(outcome.entry.receipt_id) is not None) == outcome.kept
    assert keep(sink, entry(50))[0].kept
    assert sink.refusal is None
    assert sink.read(entry(1).receipt_id) is not None


def test_a_damaged_file_is_an_error_of_the_store_to_read_and_no_error_to_serve(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    sink.path.write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(StoreError):
        sink.read(entry(1).receipt_id)
    (outcome,) = keep(sink, entry(1))
    assert not outcome.kept


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_receipt_is_an_error_of_the_store_or_refused_by_its_id(name: str, tmp_path: Path) -> None:
    write_sink(tmp_path)
    assert verify_receipt(open_sink(tmp_path).read(ASKED) or b"", **known(), receipt_id=ASKED).tokens == 150
    damage = DAMAGE[name]
    damage.act(tmp_path / FILE_NAME)
    if damage.code == StoreError.code:
        with pytest.raises(StoreError):
            open_sink(tmp_path).read(ASKED)
    else:
        with pytest.raises(ReceiptError) as caught:
            verify_receipt(open_sink(tmp_path).read(ASKED) or b"", **known(), receipt_id=ASKED)
        assert caught.value.fields["threat"] == damage.code


def test_a_writer_that_stands_still_bounds_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "MAX_WAITING", 3)
    sink = make_sink(tmp_path)
    gate, begun = threading.Event(), threading.Event()

    def wait() -> Entry:
        begun.set()
        gate.wait()
        return entry(0)

    futures = [sink.submit(wait)]
    begun.wait()
    assert sink.refusal is None
    futures += [sink.submit(lambda number=number: entry(number)) for number in range(1, 4)]  # type: ignore[misc]
    assert "wait for the disk" in (sink.refusal or "")
    gate.set()
    assert all(future.result(60).kept for future in futures)


WRITER = """
import sys
from epochless_vllm.plugin.sink import Entry, ReceiptSink
sink = ReceiptSink(sys.argv[1], max_bytes=1 << 30, max_age_s=3600)
for number in range(10_000):
    made = Entry(f"sha256:{number:064x}", "cmpl-1", 0, number, "length", 7, bytes(1000))
    if sink.submit(lambda made=made: made).result().kept:
        print(number, flush=True)
"""


def _writer(store: Path, **environment: str) -> subprocess.Popen[Any]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen([sys.executable, "-c", WRITER, str(store)], stdout=subprocess.PIPE, env=settings)


def test_a_kill_loses_nothing_that_was_reported_as_kept(tmp_path: Path) -> None:
    writer = _writer(tmp_path)
    assert writer.stdout is not None
    for _ in range(20):
        writer.stdout.readline()
    writer.kill()
    reported = 20 + len(writer.stdout.read().split())
    writer.wait()
    sink = make_sink(tmp_path)
    kept = [item["choice_index"] for item in sink.find("cmpl-1")]
    assert kept[:reported] == list(range(reported))
    assert len(kept) - reported in (0, 1)  # the one in the making
    assert keep(sink, entry(99_999))[0].kept


def test_a_crash_before_the_commit_leaves_what_was_there(tmp_path: Path) -> None:
    writer = _writer(tmp_path, EPOCHLESS_CRASH_AT="receipt.sink:4:kill")
    assert writer.stdout is not None
    assert writer.stdout.read().split() == [b"0", b"1", b"2"]
    assert writer.wait() == -signal.SIGKILL
    assert len(make_sink(tmp_path).find("cmpl-1")) == 3
