"""``epochless generate``: greedy text of files alone, equal to transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.cli import main
from epochless_vllm.store.revisions import RevisionStore
from tests.tiny_model import make_adapter, make_model
from tests.verify.test_replay import SIZES

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    make_model(folder / "model", **SIZES)
    make_adapter(folder / "adapter", seed=1, **SIZES)
    return folder


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: object) -> tuple[int, str, str]:
        status = main.main(["generate", "--model", str(folder / "model"), *map(str, words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_text_is_that_of_transformers_with_and_without_the_adapter(run: Any, folder: Path) -> None:
    import torch

    from tests.reference.oracle import load_oracle

    seen = []
    for adapter in (None, folder / "adapter"):
        words = [] if adapter is None else ["--adapter", adapter]
        status, out, _ = run("--prompt", "Hello", "--tokens", 30, "--ignore-eos", "--json", *words)
        found = json.loads(out)
        oracle = load_oracle(folder / "model", adapter)
        options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = oracle.generate(torch.tensor([list(b"Hello")]), **options)[0, 5:].tolist()  # type: ignore[operator]
        assert (status, found["token_ids"]) == (0, expected)
        assert found["text"] == bytes(token for token in expected if token < 256).decode("utf-8", "replace")
        seen.append(expected)
    assert seen[0] != seen[1]


def test_revision_of_a_store_says_what_its_directory_does(run: Any, folder: Path) -> None:
    revision = RevisionStore(folder / "store").ingest_directory(folder / "adapter").revision_id
    words = ("--prompt", "Hello", "--tokens", 12)
    from_store = run(*words, "--revision", revision, "--store", folder / "store")
    assert from_store == run(*words, "--adapter", folder / "adapter")
    assert from_store[0] == 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "prompt"),
        (["--prompt", "x", "--tokens", "0"], 2, "tokens"),
        (["--prompt", "x", "--revision", "sha256:" + "ab" * 32], 2, "--store"),
        (["--prompt", "x", "--adapter", "a", "--revision", "b", "--store", "c"], 2, "not both"),
        (["--prompt", "x", "--adapter", "/nonexistent"], 1, "/nonexistent"),
        (["--prompt", "x", "--tokens", "600"], 1, "512"),
        (["--prompt", ""], 1, "empty prompt"),
    ],
)
def test_what_cannot_be_generated_says_why(run: Any, words: list[str], status: int, message: str) -> None:
    found, out, err = run(*words)
    assert (found, out) == (status, "")
    assert message in err
