"""Live revisions on the real engine, in process: what users reported, each with its right value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.errors import (
    AdapterConfigError,
    EpochlessError,
    HeadRetirementError,
    InvalidRequestError,
    RankRefusalError,
    RetiredRevisionError,
    StepConflictError,
)
from epochless_vllm.store.revisions import RevisionStore
from tests.adapters import encode_safetensors
from tests.engines import finish, generate, logprob_of, make_engine, start, tokens_of
from tests.tiny_model import make_adapter, make_model

pytestmark = pytest.mark.engine

PROMPT = "The trainer publishes a revision while this prompt is being answered, again and again. " * 3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("revisions")


@pytest.fixture(scope="module")
def llm(root: Path) -> Iterator[Any]:
    engine = make_engine(
        make_model(root / "model"), root / "store", epochless={"keep": None}, max_loras=2, max_cpu_loras=10
    )
    yield engine
    engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def adapters(root: Path) -> dict[str, Path]:
    return {name: make_adapter(root / name, seed=seed) for seed, name in enumerate("ABCDE", start=1)}


@pytest.fixture
def policy(request: pytest.FixtureRequest, llm: Any) -> Iterator[str]:
    """A policy of the test's own, retired afterwards."""
    from epochless_vllm.plugin.engine import retire, service_of

    name = request.node.name.translate({ord("["): "-", ord("]"): None, ord(" "): "-"})[:100]
    yield name
    finish(llm)
    service = service_of(llm)
    for held in service.journal.refresh().policies():
        if held.startswith(name):
            retire(llm, held)
    service.pump()


@pytest.fixture
def publish(llm: Any, policy: str) -> Callable[..., Any]:
    from epochless_vllm.plugin import engine

    def publish(path: Path, step: int | None = None, name: str = policy) -> Any:
        engine.publish(llm, path, policy=name, step=step)
        return engine.resolve(llm, name)

    return publish


@pytest.fixture
def fresh_oracle(llm: Any) -> Callable[[Any, int], Any]:
    """The output of an adapter under a salt nobody used: no cached prefix can serve it."""
    import itertools

    numbers = itertools.count()
    return lambda lora, tokens=16: generate(llm, PROMPT, lora, tokens, salt=f"unused-{id(numbers)}-{next(numbers)}")


def test_new_content_under_the_same_name_never_hits_the_old_prefix(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], fresh_oracle: Callable[..., Any]
) -> None:
    a = publish(adapters["A"])
    assert generate(llm, PROMPT, a).num_cached_tokens == 0
    b = publish(adapters["B"])
    output = generate(llm, PROMPT, b)
    assert output.num_cached_tokens == 0
    oracle = fresh_oracle(b)
    assert tokens_of(output) == tokens_of(oracle)
    assert logprob_of(output) == pytest.approx(logprob_of(oracle), abs=1e-4)
    assert tokens_of(output) != tokens_of(generate(llm, PROMPT, a))


def test_going_back_to_old_content_may_hit_its_own_blocks(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], fresh_oracle: Callable[..., Any]
) -> None:
    publish(adapters["A"], 1)
    generate(llm, PROMPT, publish(adapters["A"], 1))
    publish(adapters["B"], 2)
    a = publish(adapters["A"], 3)
    output = generate(llm, PROMPT, a)
    assert output.num_cached_tokens > 0
    assert tokens_of(output) == tokens_of(fresh_oracle(a))


def test_equal_content_under_two_names_shares_identity_and_cache(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], policy: str, root: Path
) -> None:
    first = publish(adapters["C"])
    generate(llm, PROMPT, first)
    copy = root / "C-again"
    shutil.copytree(adapters["C"], copy, dirs_exist_ok=True)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(dict(reversed(config.items())), indent=3))
    second = publish(copy, name=policy + "-twin")
    assert second.lora_int_id == first.lora_int_id
    assert second.lora_name.partition("@")[2] == first.lora_name.partition("@")[2]
    assert generate(llm, PROMPT, second).num_cached_tokens > 0


def test_running_streams_are_unchanged_by_publishes_beside_them(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], policy: str
) -> None:
    a, b = publish(adapters["A"]), publish(adapters["B"], name=policy + "-other")

    def run(actions: dict[int, Callable[[], None]]) -> list[Any]:
        ids = [start(llm, PROMPT, lora, 48, salt="streams") for lora in (a, b)]
        outputs = finish(llm, actions)
        return [outputs[i] for i in ids]

    run({})  # fills the prefix cache, so that both runs below see equal shapes
    quiet = run({})
    busy = run(
        {
            8: lambda: publish(adapters["C"]) and None,
            16: lambda: publish(adapters["D"]) and None,
            24: lambda: publish(adapters["E"], name=policy + "-third") and None,
        }
    )
    for before, after in zip(quiet, busy, strict=True):
        assert tokens_of(after) == tokens_of(before)
        assert logprob_of(after) == logprob_of(before)


def test_more_revisions_than_slots_in_one_batch_keep_their_own_rows(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], policy: str
) -> None:
    loras = [publish(adapters[name], name=f"{policy}-{name}") for name in "ABCD"] + [None]
    alone = [generate(llm, PROMPT, lora, 24, salt="mixed") for lora in loras]
    ids = [start(llm, PROMPT, lora, 24, salt="mixed") for lora in loras]
    outputs = finish(llm)
    for request_id, expected in zip(ids, alone, strict=True):
        assert tokens_of(outputs[request_id]) == tokens_of(expected)
        assert logprob_of(outputs[request_id]) == pytest.approx(logprob_of(expected), abs=1e-3)


def test_an_adapter_is_loaded_while_the_store_writes_it_and_read_from_there_if_it_was_not(
    llm: Any,
    publish: Callable[..., Any],
    policy: str,
    root: Path,
    fresh_oracle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways lead to one registered digest, one slot digest (or activation would fail) and the same tokens."""
    from safetensors.numpy import load_file

    from epochless_vllm.plugin.engine import publish as publish_directory
    from epochless_vllm.plugin.engine import resolve, retire, service_of

    read: list[str] = []
    store_read = RevisionStore.read

    def note_read(self: RevisionStore, revision_id: Any) -> Any:
        read.append(revision_id)
        return store_read(self, revision_id)

    monkeypatch.setattr(RevisionStore, "read", note_read)
    directory = make_adapter(root / "early", seed=11)
    publish(make_adapter(root / "first", seed=12), name=policy + "-first")  # the ranks' channels are open from here on
    read.clear()
    early = publish_directory(llm, directory, policy=policy)
    tokens = tokens_of(fresh_oracle(resolve(llm, policy)))
    assert read == []

    retire(llm, policy)
    service_of(llm).pump()
    backwards = root / "backwards"
    shutil.copytree(directory, backwards)
    tensors = load_file(directory / "adapter_model.safetensors")
    payload = encode_safetensors(tensors, order=sorted(tensors, reverse=True))
    (backwards / "adapter_model.safetensors").write_bytes(payload)
    late = publish_directory(llm, backwards, policy=policy)
    assert late.publication.revision_id == early.publication.revision_id
    assert read == [late.publication.revision_id] * 2  # the store's own copy is found sound, and the rank reads it
    assert late.receipts == early.receipts
    assert tokens_of(fresh_oracle(resolve(llm, policy))) == tokens


@pytest.mark.parametrize("name", ["manifest.json", "adapter_config.json"])
def test_a_revision_that_a_restart_could_not_read_is_not_committed(
    llm: Any, publish: Callable[..., Any], policy: str, root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A rank that has loaded it on its way into the store still looks at what the store holds."""
    from epochless_vllm.plugin.engine import publish as publish_directory
    from epochless_vllm.plugin.engine import service_of

    publish(make_adapter(root / f"sound-{name}", seed=13))
    ingest = RevisionStore.ingest_directory
    damaged: list[str] = []

    def ingest_and_damage(self: RevisionStore, *arguments: Any, **options: Any) -> Any:
        ingested = ingest(self, *arguments, **options)
        path = self.root / "revisions" / ingested.revision_id.removeprefix("sha256:") / name
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1])
        damaged.append(ingested.revision_id)
        return ingested

    monkeypatch.setattr(RevisionStore, "ingest_directory", ingest_and_damage)
    with pytest.raises(EpochlessError, match="publish the adapter again"):
        publish_directory(llm, make_adapter(root / f"damaged-{name}", seed=14), policy=policy)
    state = service_of(llm).journal.refresh()
    assert damaged[0] not in state.adapters


def test_failed_publish_leaves_old_revisions_as_they_were(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], policy: str, root: Path
) -> None:
    from epochless_vllm.plugin.engine import resolve, service_of

    a = publish(adapters["A"])
    before = generate(llm, PROMPT, a, salt="failed")
    wide = make_adapter(root / "wide", seed=7, intermediate_size=640)
    with pytest.raises(RankRefusalError, match=r"down_proj|gate_proj"):
        publish(wide)
    again = generate(llm, PROMPT, resolve(llm, policy), salt="failed")
    assert (tokens_of(again), logprob_of(again)) == (tokens_of(before), pytest.approx(logprob_of(before), abs=1e-5))
    assert len([p for p in service_of(llm).state().publications.values() if p.policy == policy]) == 1


def test_an_adapter_that_lost_a_whole_kind_of_target_is_refused_by_name(
    publish: Callable[..., Any], adapters: dict[str, Path], root: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    path = shutil.copytree(adapters["A"], root / "lossy") / "adapter_model.safetensors"
    save_file({name: data for name, data in load_file(path).items() if ".o_proj." not in name}, path)
    with pytest.raises(AdapterConfigError, match=r"target_modules selects 4 modules .*o_proj"):
        publish(path.parent)


def test_source_directory_may_change_or_go_after_publish(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], policy: str, root: Path
) -> None:
    source = root / "vanishing"
    shutil.copytree(adapters["A"], source)
    a = publish(source)
    before = generate(llm, PROMPT, a, salt="vanishing")
    shutil.copyfile(adapters["B"] / "adapter_model.safetensors", source / "adapter_model.safetensors")
    for name in "CD":  # other adapters take both slots
        generate(llm, PROMPT, publish(adapters[name], name=f"{policy}-{name}"))
    assert tokens_of(generate(llm, PROMPT, a, salt="vanishing")) == tokens_of(before)
    shutil.rmtree(source)
    assert tokens_of(generate(llm, PROMPT, a, salt="vanishing")) == tokens_of(before)


@pytest.mark.parametrize("form", ["lora_name", "revision_id", "tag", "base digest", "key"])
def test_no_salt_reaches_another_revisions_blocks(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], form: str
) -> None:
    from epochless_vllm.plugin.engine import service_of

    a = publish(adapters["A"])
    revision_id = a.lora_name.partition("@")[2]
    salts = {
        "lora_name": a.lora_name,
        "revision_id": revision_id,
        "tag": "epochless",
        "base digest": service_of(llm).base_digest,
        "key": str(("epochless", service_of(llm).base_digest, revision_id)),
    }
    prompt = f"{form}: {PROMPT}"
    generate(llm, prompt, a)
    assert generate(llm, prompt, None, salt=salts[form]).num_cached_tokens == 0
    assert generate(llm, prompt, None).num_cached_tokens == 0
    assert generate(llm, prompt, None).num_cached_tokens > 0


@pytest.mark.parametrize("defect", ["prefix", "missing layer", "unpaired", "non-finite", "rank", "embedding"])
def test_adapter_the_model_would_not_serve_exactly_is_refused_by_name(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], root: Path, defect: str, policy: str
) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    broken = root / f"broken-{defect}"
    shutil.copytree(adapters["A"], broken)
    weights = load_file(broken / "adapter_model.safetensors")
    names = sorted(weights)
    if defect == "prefix":
        weights = {name.replace("model.layers", "model.language_model.layers"): t for name, t in weights.items()}
    elif defect == "missing layer":
        weights = {name: t for name, t in weights.items() if ".layers.2." not in name}
    elif defect == "unpaired":
        del weights[names[1]]
    elif defect == "non-finite":
        weights[names[0]][0, 0] = np.nan
    elif defect == "rank":
        return_rank = make_adapter(root / "rank-64", seed=3, rank=64)
        weights = load_file(return_rank / "adapter_model.safetensors")
        shutil.copyfile(return_rank / "adapter_config.json", broken / "adapter_config.json")
    else:
        weights["base_model.model.model.embed_tokens.lora_embedding_A"] = np.ones((8, 258), np.float32)
        weights["base_model.model.model.embed_tokens.lora_embedding_B"] = np.ones((256, 8), np.float32)
    save_file(weights, broken / "adapter_model.safetensors")
    with pytest.raises(EpochlessError) as refusal:
        publish(broken)
    assert refusal.value.status == 422
    assert any(word in str(refusal.value) for word in ("layers", "lora_A", "lora_B", "rank", "embed", "q_proj"))
    output = generate(llm, PROMPT, None)
    assert len(tokens_of(output)) == 16


def test_a_hundred_bad_publishes_disturb_no_running_request(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], root: Path
) -> None:
    a = publish(adapters["A"])
    expected = generate(llm, PROMPT, a, 40, salt="hundred")
    expected = generate(llm, PROMPT, a, 40, salt="hundred")
    bad = make_adapter(root / "bad", seed=8, hidden_size=128)
    refused = []

    def attempt() -> None:
        for _ in range(5):
            try:
                publish(bad)
            except RankRefusalError as error:
                refused.append(error)

    request_id = start(llm, PROMPT, a, 40, salt="hundred")
    outputs = finish(llm, dict.fromkeys(range(2, 22), attempt))
    assert len(refused) == 100
    assert tokens_of(outputs[request_id]) == tokens_of(expected)


def test_alpha_pattern_scales_the_modules_it_names(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], policy: str, root: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    pattern, scaled = root / "pattern", root / "scaled"
    for directory in (pattern, scaled):
        shutil.copytree(adapters["A"], directory)
    config = json.loads((pattern / "adapter_config.json").read_text())
    (pattern / "adapter_config.json").write_text(
        json.dumps({**config, "alpha_pattern": {"q_proj": 4 * config["lora_alpha"]}})
    )
    weights = load_file(scaled / "adapter_model.safetensors")
    for name in weights:
        if "q_proj.lora_B" in name:
            weights[name] = weights[name] * 4
    save_file(weights, scaled / "adapter_model.safetensors")
    by_pattern = generate(llm, PROMPT, publish(pattern), salt="pattern")
    by_weights = generate(llm, PROMPT, publish(scaled, name=policy + "-scaled"), salt="pattern")
    plain = generate(llm, PROMPT, publish(adapters["A"], name=policy + "-plain"), salt="pattern")
    assert tokens_of(by_pattern) == tokens_of(by_weights)
    assert logprob_of(by_pattern) == pytest.approx(logprob_of(by_weights), abs=1e-4)
    assert logprob_of(by_pattern) != pytest.approx(logprob_of(plain), abs=1e-3)


def test_retired_revision_serves_its_requests_to_the_end_and_is_then_gone(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], policy: str
) -> None:
    from epochless_vllm.plugin.engine import resolve, retire, service_of

    a = publish(adapters["A"], 1)
    expected = generate(llm, PROMPT, a, 40, salt="retired")
    expected = generate(llm, PROMPT, a, 40, salt="retired")
    publish(adapters["B"], 2)
    request_id = start(llm, PROMPT, a, 40, salt="retired")
    drained: list[Any] = []
    outputs = finish(llm, {5: lambda: drained.extend(retire(llm, f"{policy}@1"))})
    assert [item.in_flight for item in drained] == [1]
    assert tokens_of(outputs[request_id]) == tokens_of(expected)
    assert service_of(llm).pump() == 0
    core = llm.llm_engine.engine_core.engine_core
    assert a.lora_int_id not in core.list_loras()
    with pytest.raises(RetiredRevisionError):
        resolve(llm, f"{policy}@1")
    with pytest.raises(RetiredRevisionError):
        generate(llm, PROMPT, a)  # a late arrival that resolved before
    c = publish(adapters["A"], 3)
    assert c.lora_int_id > a.lora_int_id


def test_head_cannot_be_retired_while_others_live(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], policy: str
) -> None:
    from epochless_vllm.plugin.engine import resolve, retire

    publish(adapters["A"], 1)
    publish(adapters["B"], 2)
    with pytest.raises(HeadRetirementError):
        retire(llm, f"{policy}@2")
    retire(llm, policy)
    with pytest.raises(RetiredRevisionError):
        resolve(llm, policy)


def test_same_step_with_other_content_is_a_conflict(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any]
) -> None:
    first = publish(adapters["A"], 1)
    assert publish(adapters["A"], 1) == first
    with pytest.raises(StepConflictError):
        publish(adapters["B"], 1)


def test_publish_and_retire_cycles_leave_nothing_in_the_engine(
    llm: Any, adapters: dict[str, Path], publish: Callable[..., Any], policy: str, root: Path
) -> None:
    from epochless_vllm.plugin.engine import retire, service_of

    core = llm.llm_engine.engine_core.engine_core
    before = core.list_loras()
    for cycle in range(20):
        lora = publish(adapters["AB"[cycle % 2]], cycle)
        generate(llm, "short", lora, 1)
        retire(llm, policy)
        assert service_of(llm).pump() == 0
    assert core.list_loras() == before


def test_hand_made_requests_and_direct_loads_are_refused(llm: Any, adapters: dict[str, Path]) -> None:
    from vllm.lora.request import LoRARequest

    with pytest.raises(InvalidRequestError, match="resolve"):
        generate(llm, PROMPT, LoRARequest("mine", 77, str(adapters["A"])))
    with pytest.raises(EpochlessError, match="publish"):
        llm.llm_engine.add_lora(LoRARequest("mine", 77, str(adapters["A"])))
    assert len(tokens_of(generate(llm, PROMPT, None))) == 16


def spoil_device(module: Any, slot: int) -> None:
    module.lora_b_stacked[0][slot, 0, 5, 3] += 0.125


def spoil_packed_copy(module: Any, slot: int) -> None:
    module.epochless.weights.b_SRO[slot, 3, 5] += 0.125


@pytest.mark.parametrize("spoil", [spoil_device, spoil_packed_copy])
def test_activation_that_reads_back_wrong_quarantines_the_revision_alone(
    llm: Any,
    adapters: dict[str, Path],
    publish: Callable[..., Any],
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Any, int], None],
) -> None:
    from vllm.lora.model_manager import LRUCacheLoRAModelManager

    from epochless_vllm.errors import QuarantinedRevisionError
    from epochless_vllm.plugin.engine import resolve

    good = publish(adapters["A"])
    expected = generate(llm, PROMPT, good, 24, salt="quarantine")
    expected = generate(llm, PROMPT, good, 24, salt="quarantine")
    bad = publish(adapters["E"], name=policy + "-bad")
    original = LRUCacheLoRAModelManager.activate_adapter

    def activate_adapter(self: Any, lora_id: int) -> bool:
        activated = original(self, lora_id)
        if activated:  # one weight of one module is copied wrongly
            slot = self.lora_index_to_id.index(lora_id)
            spoil(self.modules["model.layers.1.mlp.down_proj"], slot)
        return activated

    running = start(llm, PROMPT, good, 24, salt="quarantine")
    failing: list[str] = []

    def arrive() -> None:
        monkeypatch.setattr(LRUCacheLoRAModelManager, "activate_adapter", activate_adapter)
        failing.append(start(llm, PROMPT, bad, 24))

    outputs = finish(llm, {4: arrive})
    monkeypatch.undo()
    assert tokens_of(outputs[running]) == tokens_of(expected)
    assert outputs[failing[0]].outputs[0].finish_reason == "error"
    assert tokens_of(outputs[failing[0]]) == []
    with pytest.raises(QuarantinedRevisionError, match=r"engine0/rank0: .*model\.layers\.1\.mlp\.down_proj"):
        resolve(llm, policy + "-bad")
    again = publish(adapters["E"], 2, name=policy + "-bad")
    output = generate(llm, PROMPT, again, salt="never")
    assert tokens_of(output) == tokens_of(generate(llm, PROMPT, again))
