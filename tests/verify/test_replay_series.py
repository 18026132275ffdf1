"""Series of answers of 16-bit servers: honest ones pass together wherever they round, small lies do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.sampler_config import sampler_from_parameters
from epochless_vllm.protocol.spans import RevisionEntry
from epochless_vllm.reference.buffers import Limits
from epochless_vllm.reference.forward import Engine
from epochless_vllm.reference.lora import Adapter
from epochless_vllm.reference.model import Linear, Model
from epochless_vllm.store.revisions import RevisionStore
from epochless_vllm.verify.findings import Replay, judge_together, require_replayed
from epochless_vllm.verify.replay import Auditor
from epochless_vllm.verify.verified import Verdict
from tests.tiny_model import make_adapter, make_model
from tests.verify.replay_factory import Server, base_of, verified
from tests.verify.test_replay import PROMPT, SIZES


@dataclass
class Half:
    """A bfloat16 server's world: what it computes with, and an auditor of it."""

    folder: Path
    auditor: Auditor
    adapter: Adapter
    entry: RevisionEntry

    def replays(self, model: Model, count: int = 8, tokens: int = 100, **options: Any) -> list[Replay]:
        """Return the replays of successive answers, under one revision unless ``adapter`` says otherwise."""
        replays = []
        rounding = options.pop("rounding", 0.0)
        for seed in range(count):
            server = Server(model, self.auditor.base, rounding=rounding, seed=seed)  # type: ignore[arg-type]
            prompt = [*PROMPT, seed]
            fields = {"entry": self.entry, "adapter": self.adapter, **options}
            replays.append(self.auditor.replay(verified(server.answer(prompt, tokens, **fields)), prompt))
        return replays


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Half:
    folder = tmp_path_factory.mktemp("series")
    model = make_model(folder / "model", **SIZES)
    store = RevisionStore(folder / "store")
    revision = store.ingest_directory(make_adapter(folder / "adapter", seed=1, **SIZES)).revision_id
    auditor = Auditor(model, base_of(model, folder, "bfloat16"), store)
    adapter = auditor.adapter(revision)
    assert adapter is not None
    return Half(folder, auditor, adapter, RevisionEntry(revision, "math", 1))


def quantised(model: Model) -> Model:
    """Return the model with every layer's matrices rounded to 8 bits a row."""

    def rounded(linear: Linear) -> Linear:
        step = np.abs(linear.weight).max(axis=1, keepdims=True) / 127
        return replace(linear, weight=(np.rint(linear.weight / step) * step).astype(np.float32))

    names = ("q", "k", "v", "o", "gate", "up", "down")
    layers = tuple(replace(each, **{name: rounded(getattr(each, name)) for name in names}) for each in model.layers)
    return replace(model, layers=layers)


def scaled(adapter: Adapter, factor: float) -> Adapter:
    return Adapter({name: replace(each, scaling=factor * each.scaling) for name, each in adapter.modules.items()})


def threat_together(replays: list[Replay]) -> str | None:
    try:
        judge_together(replays)
    except ReceiptError as refused:
        return str(refused.fields["threat"])
    return None


def test_honest_16_bit_servers_pass_together_wherever_they_round(half: Half) -> None:
    """One rounds as the auditor does; one rounds nothing, and errs in its logits as much as roundings make."""
    model = half.auditor.model
    same = half.replays(model)
    assert judge_together(same).series.rougher.score < 0
    plain = replace(model, rounding="float32")
    engines = [Engine(each, Limits(300, rank=8)) for each in (model, plain)]
    tokens = list(np.random.default_rng(0).integers(0, 256, 300))
    rows = [np.concatenate([block.copy() for _, block in each.prefill(tokens, half.adapter)]) for each in engines]
    elsewhere = half.replays(plain, rounding=float((rows[0] - rows[1]).std()))
    for replays in (same, elsewhere):
        assert {require_replayed(each).verdict for each in replays} == {Verdict.REPLAYED}
        assert threat_together(replays) is None
        assert judge_together(replays).rows > 500


WARMER = sampler_from_parameters(temperature=1.01)
LIES: dict[str, tuple[Callable[[Half], list[Replay]], str]] = {
    "8-bit base": (lambda h: h.replays(quantised(h.auditor.model)), "replay_drift"),
    "adapter scaled": (lambda h: h.replays(h.auditor.model, adapter=scaled(h.adapter, 1.01)), "replay_drift"),
    "temperature": (lambda h: h.replays(h.auditor.model, tokens=40, used=WARMER), "replay_temperature"),
}


@pytest.mark.parametrize("name", LIES)
def test_lie_that_no_16_bit_response_gives_away_is_refused_together(half: Half, name: str) -> None:
    lie, threat = LIES[name]
    replays = lie(half)
    assert [each.faults for each in replays if each.faults] == []
    assert threat_together(replays) == threat


def test_long_response_is_judged_by_its_own_sums(half: Half) -> None:
    (replay,) = half.replays(half.auditor.model, count=1, tokens=200, used=WARMER)
    assert [(each.position, each.threat) for each in replay.faults] == [(199, "replay_temperature")]
    with pytest.raises(ReceiptError, match=r"token 199: over [0-9]+ tokens the errors are those of a temperature"):
        require_replayed(replay)


def test_answer_given_again_is_no_second_witness(half: Half) -> None:
    replays = half.replays(half.auditor.model, count=2, tokens=20, used=WARMER)
    together = judge_together(replays).series
    assert judge_together(replays * 3).series == together
    assert max(each.series.hotter.score for each in replays) < together.hotter.score


def test_stated_tolerance_says_itself_what_roundings_do(half: Half) -> None:
    tolerance = replace(half.auditor.tolerance, drift=0.5)
    store = RevisionStore(half.folder / "store")
    stated = Auditor(half.folder / "model", half.auditor.base, store, tolerance=tolerance)
    replays = replace(half, auditor=stated).replays(quantised(half.auditor.model))
    assert threat_together(replays) is None
