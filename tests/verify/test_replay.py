"""Replays of receipts: honest ones pass whatever the sampler and mixture, and each lie is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epochless_vllm.errors import (
    DigestMismatchError,
    ModelRefusedError,
    ReceiptError,
    ReplayError,
    UnknownRevisionError,
)
from epochless_vllm.protocol.builder import ReceiptBuilder
from epochless_vllm.protocol.receipts import ABORT, LENGTH
from epochless_vllm.protocol.records import MASKED, ONE
from epochless_vllm.protocol.sampler_config import processor_entries, sampler_from_parameters
from epochless_vllm.protocol.spans import RevisionEntry
from epochless_vllm.reference.lora import Adapter, adapter_from_directory
from epochless_vllm.reference.rows import Tolerance
from epochless_vllm.store.revisions import RevisionStore
from epochless_vllm.verify.findings import Fault, Replay, describe_replay, judge_together, require_replayed
from epochless_vllm.verify.replay import Auditor
from epochless_vllm.verify.verified import Verdict
from tests.protocol.receipt_factory import SIGNER
from tests.tiny_model import make_adapter, make_model
from tests.verify.replay_factory import PLAIN, Server, base_of, verified

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
PROMPT = list(b"The cat sat on")
ROUNDING = 1e-5  # ten times what float32 engines differ by on this model
SAMPLERS = {
    "plain": PLAIN,
    "nucleus": sampler_from_parameters(temperature=0.7, top_p=0.9),
    "top-k": sampler_from_parameters(temperature=1.3, top_k=20),
    "min-p": sampler_from_parameters(temperature=0.5, min_p=0.05),
    "greedy": sampler_from_parameters(temperature=0.0),
}


@dataclass
class World:
    """A model, two revisions in a store, and an auditor of them."""

    folder: Path
    base: str
    store: RevisionStore
    auditor: Auditor
    entries: list[RevisionEntry]
    adapters: list[Adapter]

    def server(self, **options: Any) -> Server:
        return Server(self.auditor.model, self.base, **{"rounding": ROUNDING, **options})  # type: ignore[arg-type]

    def replay(self, receipt: Any, **options: Any) -> Replay:
        return self.auditor.replay(verified(receipt), PROMPT, **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("replay")
    model = make_model(folder / "model", **SIZES)
    store = RevisionStore(folder / "store")
    ids = [store.ingest_directory(make_adapter(folder / f"a{n}", seed=n, **SIZES)).revision_id for n in (1, 2)]
    base = base_of(model, folder)
    auditor = Auditor(model, base, store)
    entries = [RevisionEntry(each, "math", step) for step, each in enumerate(ids)]
    # Read apart from the store, so that the auditor's own reading is checked too.
    adapters = [adapter_from_directory(folder / f"a{n}", auditor.model.config) for n in (1, 2)]
    return World(folder, base, store, auditor, entries, adapters)


def refusal(replay: Replay) -> str:
    with pytest.raises(ReceiptError) as error:
        require_replayed(replay)
    return str(error.value.fields["threat"])


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_honest_receipt_is_replayed(world: World, name: str, adapted: bool) -> None:
    revision = {"entry": world.entries[0], "adapter": world.adapters[0]} if adapted else {}
    receipt = world.server().answer(PROMPT, 100, claimed=SAMPLERS[name], **revision)
    replay = world.replay(receipt)
    assert require_replayed(replay).verdict is Verdict.REPLAYED
    assert replay.compared == 100
    assert replay.exact >= 98
    assert replay.worst_ratio[0] < 0.3


def test_one_disagreement_is_enough(world: World) -> None:
    replay = replace(world.replay(world.server().answer(PROMPT, 20)), faults=(Fault(7, "replay_draw", "a word"),))
    with pytest.raises(ReceiptError, match="token 7: a word") as error:
        require_replayed(replay)
    assert error.value.fields["first_disagreement"]["threat"] == "replay_draw"


def test_report_names_the_worst_token(world: World) -> None:
    replay = world.replay(world.server().answer(PROMPT, 40))
    described = describe_replay(replay)
    assert described["disagreements"] == 0
    assert described["first_disagreement"] is None
    assert 0 < replay.worst_nats[0] < 1e-3
    assert 0 < replay.drift < 0.25


CHEATS: dict[str, Callable[[World], Any]] = {
    "another revision": lambda w: w.server().answer(PROMPT, 60, entry=w.entries[0], adapter=w.adapters[1]),
    "the base for a revision": lambda w: w.server().answer(PROMPT, 60, entry=w.entries[0]),
    "a revision for the base": lambda w: w.server().answer(PROMPT, 60, adapter=w.adapters[0]),
    "another temperature": lambda w: w.server().answer(
        PROMPT, 60, used=sampler_from_parameters(temperature=1.1)
    ),
    "another prompt": lambda w: w.server().answer(PROMPT, 60, computed_prompt=PROMPT[1:]),
    "greedy by another revision": lambda w: w.server().answer(
        PROMPT, 60, claimed=SAMPLERS["greedy"], entry=w.entries[0], adapter=w.adapters[1]
    ),
    "a bias that is not recorded": lambda w: w.server().answer(
        PROMPT, 60, processors=lambda row, output, position: row.__setitem__(65, row[65] + 1)
    ),
}  # fmt: skip


def test_prefix_cache_of_another_revision_is_refused(world: World) -> None:
    cached = (len(PROMPT) - 2, world.adapters[1])
    receipt = world.server().answer(PROMPT, 20, entry=world.entries[0], adapter=world.adapters[0], cached=cached)
    assert refusal(world.replay(receipt)) in {"replay_probability", "replay_interval"}


@pytest.mark.parametrize("name", CHEATS)
def test_cheat_is_refused_within_a_few_tokens(world: World, name: str) -> None:
    replay = world.replay(CHEATS[name](world))
    assert refusal(replay) in {"replay_probability", "replay_interval", "replay_greedy", "replay_filter"}
    assert replay.faults[0].position < 16


def test_refusal_carries_the_findings(world: World) -> None:
    with pytest.raises(ReceiptError) as error:
        require_replayed(world.replay(CHEATS["another revision"](world)))
    fields = error.value.fields
    assert fields["disagreements"] > 30
    assert fields["first_disagreement"]["position"] == 0
    assert fields["worst_nats"]["value"] > 0.3


def test_small_lie_on_every_token_is_drift(world: World) -> None:
    """Noise a third of what one row may err, on every row: no row gives it away, all together do."""
    tolerance = world.auditor.tolerance.of_row(np.array([6], np.float32))
    replay = world.replay(world.server(rounding=0.45 * tolerance).answer(PROMPT, 200))
    assert {each.threat for each in replay.faults} <= {"replay_drift", "replay_probability", "replay_interval"}
    assert "replay_drift" in {each.threat for each in replay.faults}


def test_what_hides_in_each_response_shows_in_many(world: World) -> None:
    replay = world.replay(world.server().answer(PROMPT, 100))
    just_allowed = replace(replay, drift=0.95 * replay.tolerance.drift_of(replay.drift_rows))
    assert require_replayed(just_allowed).verdict is Verdict.REPLAYED
    assert judge_together([just_allowed]).rows == replay.drift_rows
    with pytest.raises(ReceiptError, match="20 receipts") as error:
        judge_together([just_allowed] * 20)
    assert error.value.fields["threat"] == "replay_drift"
    assert judge_together([replay] * 20).drift == pytest.approx(replay.drift)
    assert judge_together([replace(replay, drift_rows=0)]).rows == 0


@pytest.mark.parametrize("mode", ["recompute", "continue"])
def test_moved_request_is_replayed_under_its_mixture(world: World, mode: str) -> None:
    moves = [(0, world.entries[0], world.adapters[0]), (30, world.entries[1], world.adapters[1])]
    moves.append((55, world.server().base_entry(), None))
    receipt = world.server().continued(PROMPT, moves, 80, mode=mode)
    replay = world.replay(receipt)
    assert require_replayed(replay).verdict is Verdict.REPLAYED
    assert replay.exact >= 78


def test_kept_kv_labelled_as_recomputed_is_refused(world: World) -> None:
    moves = [(0, world.entries[0], world.adapters[0]), (30, world.entries[1], world.adapters[1])]
    honest = world.server().continued(PROMPT, moves, 60, mode="recompute")
    assert require_replayed(world.replay(honest)).verdict is Verdict.REPLAYED
    kept = world.server().continued(PROMPT, moves, 60, mode="continue")
    receipt = verified(kept)
    assert receipt.final is not None
    as_recomputed = replace(receipt, header=replace(receipt.header, on_publish="recompute"))
    replay = world.auditor.replay(as_recomputed, PROMPT)
    assert [each for each in replay.faults if each.position < 30] == []
    assert replay.faults[0].position < 34


def test_kv_rebuilt_among_revisions_is_not_replayable_but_for_the_last_token(world: World) -> None:
    moves = [(0, world.entries[0], world.adapters[0]), (10, world.entries[1], world.adapters[1])]
    receipt = world.server().continued(PROMPT, moves, 40, mode="continue", rebuilt_at=25)
    replay = world.replay(receipt)
    assert replay.not_replayable == {"rebuilt_kv": 39}
    assert (replay.compared, replay.faults) == (1, ())
    assert require_replayed(replay).verdict is Verdict.SAMPLING_CONSISTENT


@pytest.mark.parametrize(
    ("entries", "flags", "reason"),
    [
        ({"grammar": "sha256:" + "ab" * 32}, MASKED, "grammar"),
        ({"custom": (("my_plugin", None),)}, 0, "my_plugin"),
        ({}, MASKED, "masked"),
    ],
)
def test_rows_that_cannot_be_recomputed_never_are_replayed(
    world: World, entries: dict[str, Any], flags: int, reason: str
) -> None:
    sampler = sampler_from_parameters(temperature=1.0, processors=processor_entries(**entries))
    replay = world.replay(world.server().answer(PROMPT, 30, claimed=sampler, flags=flags))
    assert replay.not_replayable == {reason: 30}
    assert replay.compared == 0
    assert require_replayed(replay).verdict is Verdict.SAMPLING_CONSISTENT


def test_recorded_processors_are_applied(world: World) -> None:
    entries = processor_entries(
        min_tokens=20, min_tokens_stop_ids=[257], logit_bias={65: 3.0}, repetition_penalty=1.2, frequency_penalty=0.3
    )

    def change(row: np.ndarray, output: list[int], position: int) -> None:
        row[257] = -np.inf if position < 20 else row[257]
        row[65] += np.float32(3)
        for token in {*PROMPT, *output}:
            row[token] = row[token] / np.float32(1.2) if row[token] > 0 else row[token] * np.float32(1.2)
        for token in output:
            row[token] -= np.float32(0.3)

    sampler = sampler_from_parameters(temperature=1.0, processors=entries)
    honest = world.server().answer(PROMPT, 60, claimed=sampler, processors=change)
    assert require_replayed(world.replay(honest)).verdict is Verdict.REPLAYED
    ignored = world.server().answer(PROMPT, 60, claimed=sampler)
    assert refusal(world.replay(ignored)).startswith("replay_")


def test_sample_compares_so_many_tokens_and_is_no_full_replay(world: World) -> None:
    receipt = world.server().answer(PROMPT, 100, entry=world.entries[0], adapter=world.adapters[0])
    done: list[int] = []
    replay = world.replay(receipt, positions=[3, 50, 97], progress=done.append)
    assert replay.compared == sum(done) == 3
    assert require_replayed(replay).verdict is Verdict.SAMPLING_CONSISTENT
    whole = world.replay(receipt)
    assert replay.worst_nats[0] <= whole.worst_nats[0] + 1e-6


def test_another_prompt_base_or_vocabulary_is_refused(world: World) -> None:
    receipt = verified(world.server().answer(PROMPT, 10))
    for wrong, prompt, threat in (
        (receipt, PROMPT[:-1], "prompt_mismatch"),
        (receipt, [*PROMPT[:-1], 0], "prompt_mismatch"),
        (replace(receipt, header=replace(receipt.header, base="sha256:" + "ab" * 32)), PROMPT, "base_mismatch"),
        (replace(receipt, header=replace(receipt.header, vocab_size=300)), PROMPT, "token_out_of_vocabulary"),
        (replace(receipt, verdict=Verdict.INCOMPLETE), PROMPT, "incomplete"),
    ):
        with pytest.raises(ReceiptError) as error:
            world.auditor.replay(wrong, prompt)
        assert error.value.fields["threat"] == threat


def test_revision_that_the_store_does_not_hold_is_refused(world: World) -> None:
    unknown = replace(world.entries[0], revision="sha256:" + "cd" * 32)
    receipt = world.server().answer(PROMPT, 10, entry=unknown)
    with pytest.raises(UnknownRevisionError):
        world.replay(receipt)
    alone = Auditor(world.folder / "model", world.base, None)
    with pytest.raises(ReceiptError, match="store"):
        alone.replay(verified(receipt), PROMPT)


def test_revision_changed_in_the_store_is_refused(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.store.root, tmp_path / "store")
    store = RevisionStore(tmp_path / "store")
    hexadecimal = world.entries[0].revision.removeprefix("sha256:")
    file = tmp_path / "store" / "revisions" / hexadecimal / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    auditor = Auditor(world.folder / "model", world.base, store)
    with pytest.raises(DigestMismatchError):
        auditor.adapter(world.entries[0].revision)


def test_model_that_is_not_the_receipts_base_is_refused(world: World, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=1, **SIZES)
    with pytest.raises(DigestMismatchError):
        Auditor(other, world.base, world.store)


def test_rounded_kv_is_refused_and_other_dtypes_have_their_tolerance(world: World, tmp_path: Path) -> None:
    model = world.folder / "model"
    with pytest.raises(ModelRefusedError) as error:
        Auditor(model, base_of(model, tmp_path, "bfloat16", "fp8"), world.store)
    assert error.value.fields["field"] == "kv_cache_dtype"
    half = Auditor(model, base_of(model, tmp_path, "bfloat16"), world.store)
    assert half.tolerance.absolute > world.auditor.tolerance.absolute
    assert not np.array_equal(half.model.embedding, world.auditor.model.embedding)
    own = Auditor(model, world.base, world.store, tolerance=Tolerance(1.0, 0.0, 1.0))
    assert require_replayed(own.replay(verified(world.server(rounding=0.2).answer(PROMPT, 40)), PROMPT))


def test_sequence_beyond_the_models_context_is_refused(world: World) -> None:
    prompt, server = [65] * 600, world.server()
    header = server.header(prompt, [server.base_entry()], 3, sampler=SAMPLERS["greedy"])
    builder = ReceiptBuilder(header)
    builder.append([1, 2, 3], [0] * 3, [ONE] * 3)
    with pytest.raises(ReplayError, match="512"):
        world.auditor.replay(verified(builder.seal(LENGTH, SIGNER, seed=None)), prompt)


def test_empty_receipt_has_nothing_to_replay(world: World) -> None:
    server = world.server()
    header = server.header(PROMPT, [server.base_entry()], 5)
    receipt = ReceiptBuilder(header).seal(ABORT, SIGNER, seed=bytes(range(32)))
    replay = world.replay(receipt)
    assert (replay.compared, replay.faults, replay.complete) == (0, (), True)
