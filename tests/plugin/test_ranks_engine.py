"""Two tensor-parallel ranks of the real engine: published on all or none, each shard read back, draws attested."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.errors import RankRefusalError
from epochless_vllm.protocol.compact import encode_compact
from epochless_vllm.store.revisions import RevisionStore
from epochless_vllm.verify import Verdict, verify_receipt
from epochless_vllm.verify.findings import require_replayed
from epochless_vllm.verify.replay import Auditor
from tests.engines import finish, generate, logprob_of, make_engine, start, tokens_of
from tests.tiny_model import make_adapter, make_model

pytestmark = pytest.mark.engine

PROMPT = "Two ranks hold one policy, or neither does. " * 5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def llm(root: Path) -> Iterator[Any]:
    engine = make_engine(
        make_model(root / "model"),
        root / "store",
        epochless={"keep": None},
        tensor_parallel_size=2,
        max_loras=2,
        max_cpu_loras=6,
    )
    yield engine
    engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def publish(llm: Any) -> Callable[..., Any]:
    from epochless_vllm.plugin import engine

    def publish(path: Path, policy: str) -> Any:
        published = engine.publish(llm, path, policy=policy)
        return published, engine.resolve(llm, policy)

    return publish


def test_every_rank_gives_its_receipt(publish: Callable[..., Any], root: Path) -> None:
    published, _ = publish(make_adapter(root / "a", seed=1), "first")
    assert sorted(published.receipts) == ["engine0/rank0", "engine0/rank1"]
    digests = {receipt["registered_digest"] for receipt in published.receipts.values()}
    assert len(digests) == 1
    for receipt in published.receipts.values():
        assert receipt["source_digest"] == published.publication.revision_id


def test_running_stream_is_unchanged_by_publishes_beside_it(llm: Any, publish: Callable[..., Any], root: Path) -> None:
    _, lora = publish(make_adapter(root / "b", seed=2), "second")
    new = [make_adapter(root / f"new-{seed}", seed=seed) for seed in (3, 4)]

    def run(actions: dict[int, Callable[[], Any]]) -> Any:
        request_id = start(llm, PROMPT, lora, 40, salt="ranks")
        return finish(llm, actions)[request_id]

    run({})
    quiet = run({})
    busy = run({6: lambda: publish(new[0], "second"), 14: lambda: publish(new[1], "third")})
    assert tokens_of(busy) == tokens_of(quiet)
    assert logprob_of(busy) == logprob_of(quiet)


def test_revisions_in_one_batch_keep_their_own_rows(llm: Any, publish: Callable[..., Any], root: Path) -> None:
    loras = [publish(root / name, policy)[1] for name, policy in (("a", "first"), ("b", "mixed"))] + [None]
    alone = [generate(llm, PROMPT, lora, 20, salt="mixed") for lora in loras]
    ids = [start(llm, PROMPT, lora, 20, salt="mixed") for lora in loras]
    outputs = finish(llm)
    assert [tokens_of(outputs[i]) for i in ids] == [tokens_of(output) for output in alone]


def test_both_ranks_draw_the_same_tokens_and_their_rows_name_the_revision(
    llm: Any, publish: Callable[..., Any], root: Path
) -> None:
    """Every rank samples for itself: a draw that differed would part their sequences without a sign."""
    from vllm import SamplingParams

    from epochless_vllm.plugin.token_rows import LORA, W

    _, lora = publish(root / "a", "drawn")
    engine = llm.llm_engine
    core = engine.engine_core.engine_core

    def run(neighbours: int) -> Any:
        for number in range(neighbours):
            params = SamplingParams(max_tokens=6 + number, ignore_eos=True, top_p=0.9)
            engine.add_request(f"neighbour-{neighbours}-{number}", {"prompt": PROMPT}, params)
        params = SamplingParams(seed=17, max_tokens=24, ignore_eos=True, logprobs=0)
        name = f"drawn-{neighbours}"
        engine.add_request(name, {"prompt": PROMPT, "cache_salt": "drawn"}, params, lora_request=lora)
        emitted: list[Any] = []
        actions = {10: lambda: emitted.extend(core.collective_rpc(_emitted_tokens))}
        output = finish(llm, actions)[name].outputs[0]
        assert len(emitted) == 2
        assert emitted[0] == emitted[1]
        (own,) = [tokens for request_id, tokens in emitted[0].items() if request_id.startswith(name)]
        assert own == list(output.token_ids)[: len(own)]
        assert len(own) > 4
        return output

    run(0)  # fills the prefix cache
    alone, mixed = run(0), run(5)
    assert list(mixed.token_ids) == list(alone.token_ids)
    for output in (alone, mixed):
        assert output.token_attest[:, LORA].tolist() == [lora.lora_int_id] * 24
        for token, row, values in zip(output.token_ids, output.token_attest, output.logprobs, strict=True):
            assert values[token].logprob == pytest.approx(math.log(row[W] / 2**32), abs=4e-4)


@pytest.mark.parametrize("adapted", [True, False], ids=["adapter", "base"])
def test_receipts_of_what_both_ranks_drew_verify_and_are_replayed(
    llm: Any, publish: Callable[..., Any], root: Path, adapted: bool
) -> None:
    from vllm import SamplingParams

    from epochless_vllm.plugin.engine import receipts

    lora = publish(root / "a", "attested")[1] if adapted else None
    params = SamplingParams(n=2, seed=21, temperature=0.8, top_p=0.9, max_tokens=40, ignore_eos=True)
    name = f"attested-{adapted}"
    llm.llm_engine.add_request(name, {"prompt": PROMPT}, params, lora_request=lora)
    output = finish(llm)[name]
    sealed = receipts(output)
    auditor = Auditor(root / "model", sealed[0].header.base, RevisionStore(root / "store"))
    for receipt, completion in zip(sealed, output.outputs, strict=True):
        verified = verify_receipt(
            encode_compact(receipt),
            token_ids=list(completion.token_ids),
            prompt_token_ids=output.prompt_token_ids,
            keep_blocks=True,
        )
        replayed = require_replayed(auditor.replay(verified, output.prompt_token_ids))
        assert replayed.verdict is Verdict.REPLAYED


def _emitted_tokens(worker: Any) -> dict[str, list[int]]:
    return {name: list(state.output_token_ids) for name, state in worker.model_runner.requests.items()}


def test_a_wrong_shard_on_one_rank_is_found_before_its_first_step(
    llm: Any, publish: Callable[..., Any], root: Path
) -> None:
    core = llm.llm_engine.engine_core.engine_core
    _, lora = publish(root / "new-4", "corrupt")
    # The registry of both ranks is edited in place; rank 1's shard then differs from the file's.
    core.collective_rpc(_corrupt_rank_one, args=(lora.lora_int_id,))
    request_id = start(llm, PROMPT, lora, 8)
    output = finish(llm)[request_id]
    assert output.outputs[0].finish_reason == "error"
    from epochless_vllm.errors import QuarantinedRevisionError
    from epochless_vllm.plugin.engine import resolve

    with pytest.raises(QuarantinedRevisionError, match="engine0/rank1"):
        resolve(llm, "corrupt")
    assert len(tokens_of(generate(llm, PROMPT, resolve(llm, "first")))) == 16


def _corrupt_rank_one(worker: Any, lora_int_id: int) -> None:
    worker.list_loras()  # the registry takes in what was published when it is looked at
    if worker.rank == 1:
        lora = worker.model_runner.lora_manager._adapter_manager._registered_adapters[lora_int_id]
        lora.loras["model.layers.0.mlp.down_proj"].lora_a[0, -1] += 1.0


def test_refusal_of_the_ranks_leaves_both_as_they_were(llm: Any, publish: Callable[..., Any], root: Path) -> None:
    core = llm.llm_engine.engine_core.engine_core
    before = core.collective_rpc("list_loras")
    with pytest.raises(RankRefusalError, match=r"engine0/rank[01]"):
        publish(make_adapter(root / "wide", seed=9, intermediate_size=640), "first")
    assert core.collective_rpc("list_loras") == before
    assert before[0] == before[1]
