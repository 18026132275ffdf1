"""The reference engine and the auditor against real vLLM engines: stock, patched and idle, and serving a revision.

One trained model, one prompt list, four engines one after another, each in a process of its own.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epochless_vllm.cli import main
from epochless_vllm.reference.buffers import Limits
from epochless_vllm.reference.forward import Engine
from epochless_vllm.reference.lora import Adapter, adapter_from_directory
from epochless_vllm.reference.model import Model, load_model
from epochless_vllm.reference.tokenizer import read_tokenizer
from tests.reference.engine_child import make_plan, start
from tests.reference.trained import prompts, train

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::FutureWarning")]

TOKENS = 256
TIE = 1e-4  # logits; sums in another order move one of about ten by a few units in its last place, 1e-6
MOST_TIES = 2  # of 1,024 tokens
PROMPTS = prompts(4)
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.0, "seed": 7, "n": 2},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 0.6, "min_p": 0.05},
    {"temperature": 0.0},
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": -0.1},
    {"temperature": 1.0, "logit_bias": {"32": 1.5, "101": -2.0}},
    {"temperature": 1.0, "min_tokens": 100, "stop_token_ids": [32]},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    train(folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    attested = [
        {
            "prompt": prompt,
            "adapted": bool(number % 2),
            "parameters": {"max_tokens": TOKENS, "ignore_eos": True, "seed": number, **each},
        }
        for number, prompt in enumerate(PROMPTS[:2])
        for each in SAMPLERS
    ]
    grammar = {"prompt": PROMPTS[0], "adapted": False, "parameters": {"max_tokens": 8}, "choice": ["yes", "no"]}
    served = {"epochless": True, "attested": [*attested, grammar]}
    plans = [
        make_plan("stock", folder / "model", folder / "adapter", stock=True, prompts=PROMPTS, tokens=TOKENS),
        make_plan("idle", folder / "model", folder / "adapter", prompts=PROMPTS, tokens=TOKENS),
        *(
            make_plan(
                f"revision-{dtype}", folder / "model", folder / "adapter", prompts=PROMPTS, tokens=TOKENS, dtype=dtype,
                store=str(folder / f"store-{dtype}"), **served,
            )
            for dtype in ("float32", "bfloat16")
        ),
    ]  # fmt: skip
    return {plan["name"]: start(plan, folder) for plan in plans}


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder / "model")


def audit(result: dict[str, Any], folder: Path, dtype: str, capsys: Any, *options: str) -> list[dict[str, Any]]:
    """Return what ``epochless audit`` says of every attested receipt, run as a user would."""
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    receipts = [path for each in result["attested"] for path in each["receipts"]]
    words = ["--model", str(folder / "model"), "--store", str(folder / f"store-{dtype}"), "--jobs", "2", "--json"]
    main.main(["audit", *receipts, *words, "--prompt-tokens", str(folder / "prompts.json"), *options])
    reports: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["receipts"]
    return reports


def follow(engine: Engine, prompt: list[int], tokens: list[int], adapter: Adapter | None) -> np.ndarray:
    """Return how much less likely than the best each token is after those before it, in logits."""
    engine.rewind(0)
    for _, logits_ZV in engine.prefill(prompt, adapter, logits_from=len(prompt) - 1):
        logits = logits_ZV[-1]
    behind = [float(logits.max() - logits[tokens[0]])]
    for before, token in itertools.pairwise(tokens):
        logits = engine.step(before, adapter)
        behind.append(float(logits.max() - logits[token]))
    return np.array(behind)


@pytest.mark.parametrize("name", ["base", "adapter"])
def test_float32_greedy_tokens_and_bytes_are_those_of_the_reference_engine(
    results: dict[str, Any], folder: Path, model: Model, name: str
) -> None:
    """Where two logits are equal but for the order of sums either token is the best, and the rest follows it."""
    adapter: Adapter | None = adapter_from_directory(folder / "adapter", model.config) if name == "adapter" else None
    tokenizer = read_tokenizer(folder / "model")
    engine = Engine(model, Limits(len(PROMPTS[0]) + TOKENS))
    seen: set[int] = set()
    ties = 0
    for prompt, served in zip(PROMPTS, results["revision-float32"]["greedy"][name], strict=True):
        tokens = served["tokens"]
        assert len(tokens) == TOKENS
        behind = follow(engine, prompt, tokens, adapter)
        assert behind.max() < TIE
        ties += np.count_nonzero(behind)
        seen |= set(tokens)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == served["text"]
    assert ties <= MOST_TIES
    assert len(seen) > 3, "constant texts prove little"  # what the model learns changes with every text of the package


def test_logits_of_the_trained_model_are_not_flat(model: Model) -> None:
    engine = Engine(model, Limits(len(PROMPTS[0])))
    rows = np.concatenate([logits.copy() for _, logits in engine.prefill(PROMPTS[0])])
    spread = rows.max(axis=1) - np.median(rows, axis=1)
    assert spread.min() > 3


def test_stock_idle_and_serving_engines_give_the_same_tokens_and_bytes(results: dict[str, Any]) -> None:
    stock, idle, serving = (results[name] for name in ("stock", "idle", "revision-float32"))
    assert (stock["patched"], idle["patched"], serving["patched"]) == (False, True, True)
    assert stock["greedy"]["base"] != stock["greedy"]["adapter"]
    assert stock["greedy"] == idle["greedy"]
    assert idle["greedy"] == serving["greedy"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_receipt_of_the_engine_is_replayed(
    results: dict[str, Any], folder: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *reports, grammar = audit(results[f"revision-{dtype}"], folder, dtype, capsys)
    assert [report.get("error") for report in reports] == [None] * len(reports)
    assert {report["verdict"] for report in reports} == {"REPLAYED"}
    compared = sum(report["replay"]["compared"] for report in reports)
    exact = sum(report["replay"]["exact"] for report in reports)
    worst = max(report["replay"]["worst_ratio"]["value"] for report in reports)
    print(f"{dtype}: {compared} tokens, {exact} exact, worst {worst:.3f} of the tolerance")
    assert compared > 3000
    assert exact > (0.999 if dtype == "float32" else 0.9) * compared
    assert worst < (0.2 if dtype == "float32" else 1)
    assert (grammar["verdict"], grammar["replay"]["compared"]) == ("SAMPLING-CONSISTENT", 0)
    assert set(grammar["replay"]["not_replayable"]) == {"grammar"}


def test_receipts_name_tokens_that_were_answered(results: dict[str, Any], folder: Path) -> None:
    from epochless_vllm.verify import verify_receipt

    for each in results["revision-float32"]["attested"]:
        for path, tokens in zip(each["receipts"], each["tokens"], strict=True):
            verify_receipt(Path(path).read_bytes(), token_ids=tokens, prompt_token_ids=each["prompt"])


def test_revision_swapped_in_the_store_is_noticed(
    results: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a store of other revisions nothing can be replayed; with an adapter's bytes changed, nothing is."""
    from epochless_vllm.store.revisions import RevisionStore

    (revision,) = RevisionStore(folder / "store-float32").list()
    file = folder / "store-float32" / "revisions" / revision.removeprefix("sha256:") / "adapter_model.safetensors"
    original = file.read_bytes()
    file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    try:
        reports = audit(results["revision-float32"], folder, "float32", capsys)
    finally:
        file.write_bytes(original)
    codes = {report["error"]["code"] if "error" in report else report["verdict"] for report in reports}
    assert codes == {"REPLAYED", "SAMPLING-CONSISTENT", "digest_mismatch"}
