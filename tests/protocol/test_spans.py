"""Spans: one encoding per history, and the KV rule against a simulation of an engine that changes revision."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.spans import (
    CONTINUE,
    PIN,
    RECOMPUTE,
    KVSpan,
    RevisionEntry,
    SamplingSpan,
    check_kv,
    check_partition,
    check_table_use,
    kv_positions,
    merge,
)
from tests.protocol.receipt_factory import named_digest


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ReceiptError) as caught:
        call(*args, **kwargs)
    return str(caught.value.fields["threat"])


class Engine:
    """Computes KV and samples step by step, as a serving engine would; positions hold the revision of their KV."""

    def __init__(self, prompt_length: int, mode: str) -> None:
        self.mode, self.prompt_length = mode, prompt_length
        self.kv: list[int] = []
        self.samplers: list[int] = []
        self.revision, self.rebuilds = 0, 0

    def move(self, revision: int) -> None:
        if revision != self.revision and self.mode == RECOMPUTE:
            self.kv = []
        self.revision = revision

    def preempt(self, cached: int) -> None:
        """Lose the KV but for a cached prefix."""
        self.kv = self.kv[:cached]
        self.rebuilds += 1

    def step(self) -> None:
        known = self.prompt_length + len(self.samplers)
        self.kv += [self.revision] * (known - len(self.kv))
        self.samplers.append(self.revision)

    def spans(self) -> tuple[list[KVSpan], list[SamplingSpan]]:
        kv = merge((i, i + 1, revision) for i, revision in enumerate(self.kv))
        sampling = [SamplingSpan(*span, 0) for span in merge((i, i + 1, r) for i, r in enumerate(self.samplers))]
        return kv, sampling


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    engine = Engine(draw(st.integers(1, 6)), draw(st.sampled_from([PIN, RECOMPUTE, CONTINUE])))
    for _ in range(draw(st.integers(1, 12))):
        event = draw(st.sampled_from(["step", "step", "move", "preempt"]))
        if event == "move" and engine.mode != PIN:
            engine.move(draw(st.integers(0, 3)))
        elif event == "preempt":
            # A prefix block is cached under the revisions that computed it; a recomputed one under the new revision.
            engine.preempt(draw(st.integers(0, len(engine.kv))))
        engine.step()
    return engine


@given(engines())
def test_kv_that_an_engine_can_leave_behind_is_accepted(engine: Engine) -> None:
    kv, sampling = engine.spans()
    check_partition(kv, kv_positions(engine.prompt_length, len(engine.samplers)), "kv")
    check_partition(sampling, len(engine.samplers), "sampling")
    check_kv(kv, sampling, prompt_length=engine.prompt_length, mode=engine.mode, rebuilds=engine.rebuilds)


@given(engines(), st.data())
def test_kv_without_rebuilds_admits_one_history_of_the_output(engine: Engine, data: st.DataObject) -> None:
    if engine.rebuilds:
        return
    place = data.draw(st.integers(engine.prompt_length - 1, len(engine.kv) - 1))
    engine.kv[place] += 1
    kv, sampling = engine.spans()
    assert (
        refusal(check_kv, kv, sampling, prompt_length=engine.prompt_length, mode=engine.mode, rebuilds=0)
        == "kv_not_active"
    )


def test_rebuilt_kv_of_a_revision_that_had_stopped_sampling_is_refused() -> None:
    sampling = [SamplingSpan(0, 5, 0, 0), SamplingSpan(5, 9, 1, 0)]
    check_kv([KVSpan(0, 12, 1)], sampling, prompt_length=4, mode=CONTINUE, rebuilds=1)
    wrong = [KVSpan(0, 12, 0)]
    assert refusal(check_kv, wrong, sampling, prompt_length=4, mode=CONTINUE, rebuilds=1) == "kv_not_active"


@pytest.mark.parametrize(
    ("spans", "total", "threat"),
    [
        ([(0, 3, 0), (4, 5, 1)], 5, "kv_gap"),
        ([(1, 3, 0)], 3, "kv_gap"),
        ([(0, 3, 0), (2, 5, 1)], 5, "kv_overlap"),
        ([(0, 0, 0)], 0, "kv_empty"),
        ([(0, 3, 0), (5, 3, 1)], 5, "kv_empty"),
        ([(0, 3, 0), (3, 5, 0)], 5, "kv_not_merged"),
        ([(0, 3, 0)], 4, "kv_total"),
        ([(0, 3, 0)], 2, "kv_total"),
        ([], 1, "kv_total"),
    ],
)
def test_spans_that_do_not_tile_their_range_are_refused(spans: list[Any], total: int, threat: str) -> None:
    assert refusal(check_partition, [KVSpan(*span) for span in spans], total, "kv") == threat


def test_table_index_out_of_range_or_row_never_used_is_refused() -> None:
    check_table_use(3, [2, 1, 1], "revision")
    check_table_use(1, [], "revision")
    assert refusal(check_table_use, 2, [2], "revision") == "revision_index"
    assert refusal(check_table_use, 3, [0, 1], "revision") == "table_unused"


@pytest.mark.parametrize(
    ("changes", "threat"),
    [
        ({"revision": "base:" + named_digest("b")}, "table_entry"),
        ({"revision": "base:sha256:" + "0" * 64, "policy": None, "step": None}, "digest_placeholder"),
        ({"revision": named_digest("a")[7:]}, "digest_form"),
        ({"revision": 7}, "digest_form"),
        ({"policy": None}, "text_form"),
        ({"policy": "../up"}, "text_form"),
        ({"policy": "a b"}, "text_form"),
        ({"step": -1}, "limit_exceeded"),
        ({"step": True}, "not_integer"),
        ({"step": None}, "not_integer"),
    ],
)
def test_table_row_outside_its_form_is_refused(changes: dict[str, Any], threat: str) -> None:
    value = {**RevisionEntry(named_digest("a"), "math", 3).encode(), **changes}
    assert refusal(RevisionEntry.decode, value) == threat


@pytest.mark.parametrize(
    "entry",
    [RevisionEntry(named_digest("a"), "math/v2", 0), RevisionEntry("base:" + named_digest("b"), None, None)],
)
def test_table_row_is_read_back(entry: RevisionEntry) -> None:
    assert RevisionEntry.decode_bytes(entry.encode_bytes()) == entry
