"""``epochless audit`` on files: verdicts for people and machines, several receipts at once, every kind of refusal."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.cli import main
from epochless_vllm.protocol.compact import encode_compact
from epochless_vllm.protocol.digests import Digest
from epochless_vllm.protocol.receipts import Receipt
from epochless_vllm.protocol.spans import RevisionEntry
from epochless_vllm.protocol.stream import encode_stream
from epochless_vllm.protocol.verbose import encode_verbose
from epochless_vllm.reference.lora import adapter_from_directory
from epochless_vllm.reference.model import load_model
from epochless_vllm.store.revisions import RevisionStore
from tests.protocol.receipt_factory import NONCE, SIGNER
from tests.tiny_model import make_adapter, make_model
from tests.verify.replay_factory import Server, base_of
from tests.verify.test_replay import SIZES

TEXT = "The cat sat on"
PROMPT = list(TEXT.encode())


@dataclass
class Files:
    folder: Path
    honest: Receipt
    lying: Receipt

    @property
    def options(self) -> tuple[str, ...]:
        return ("--model", str(self.folder / "model"), "--store", str(self.folder / "store"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("audit")
    model = make_model(folder / "model", **SIZES)
    adapter = make_adapter(folder / "adapter", seed=1, **SIZES)
    entry = RevisionEntry(RevisionStore(folder / "store").ingest_directory(adapter).revision_id, "math", 7)
    loaded = load_model(model)
    factors = adapter_from_directory(adapter, loaded.config)
    server = Server(loaded, base_of(model, folder), rounding=1e-5, tokenizer=tokenizer_of(model))
    honest = server.answer(PROMPT, 80, entry=entry, adapter=factors)
    lying = server.answer(PROMPT, 80, entry=entry)
    for name, receipt in (("honest", honest), ("lying", lying)):
        (folder / f"{name}.json").write_bytes(encode_verbose(receipt))
        (folder / f"{name}.compact").write_bytes(encode_compact(receipt))
        (folder / f"{name}.stream").write_bytes(encode_stream(receipt))
    (folder / "prompt.json").write_text(json.dumps([[1, 2, 3], PROMPT]))
    (folder / "key").write_text(SIGNER.public_key.hex())
    return Files(folder, honest, lying)


def tokenizer_of(directory: Path) -> Digest:
    """Return the tokenizer digest of a directory with these two files, by the words of protocol/README.md."""
    listing = ",".join(
        f'["{name}","{hashlib.sha256((directory / name).read_bytes()).hexdigest()}"]'
        for name in ("tokenizer.json", "tokenizer_config.json")
    )
    text = f"[{listing}]".encode()
    whole = b"epochless/v1/tokenizer\0" + len(text).to_bytes(8, "big") + text
    return Digest("sha256:" + hashlib.sha256(whole).hexdigest())


@pytest.fixture
def run(files: Files, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: object) -> tuple[int, str, str]:
        status = main.main(["audit", *map(str, words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_people_read_the_verdict_and_how_close_it_was(run: Any, files: Files) -> None:
    key = files.folder / "key"
    status, out, err = run(
        files.folder / "honest.json", *files.options, "--prompt", TEXT, "--public-key", key, "--nonce", NONCE
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "REPLAYED  80 tokens, anchor: signature"
    assert any(line.startswith("replayed 80 of 80 tokens, 80 picked again exactly, 0 disagreements") for line in lines)
    assert any(line.startswith("worst    ") and "nats at token" in line for line in lines)


@pytest.mark.parametrize("suffix", ["json", "compact", "stream"])
def test_every_format_is_replayed(run: Any, files: Files, suffix: str) -> None:
    status, out, _ = run(
        files.folder / f"honest.{suffix}", *files.options, "--prompt-tokens", files.folder / "prompt.json", "--json"
    )
    (report,) = json.loads(out)["receipts"]
    assert (status, report["verdict"], report["replay"]["compared"]) == (0, "REPLAYED", 80)
    assert report["receipt_id"] == files.honest.receipt_id


def test_lie_is_named_with_its_first_token_and_does_not_hide_the_others(run: Any, files: Files) -> None:
    names = [files.folder / "lying.json", files.folder / "honest.json"]
    status, out, _ = run(*names, *files.options, "--prompt", TEXT, "--jobs", 2, "--json")
    assert status == 1
    result = json.loads(out)
    assert result["refused"] == 1
    lying, honest = result["receipts"]
    assert lying["error"]["threat"] == "replay_probability"
    assert lying["error"]["first_disagreement"]["position"] < 3
    assert honest["verdict"] == "REPLAYED"
    status, out, _ = run(*names, *files.options, "--prompt", TEXT)
    assert status == 1
    assert "REFUSED  replay_probability: token 0" in out
    assert "REPLAYED  80 tokens" in out


def test_several_receipts_are_also_judged_together(run: Any, files: Files) -> None:
    names = [files.folder / "honest.json", files.folder / "honest.stream"]
    status, out, _ = run(*names, *files.options, "--prompt", TEXT)
    assert status == 0
    assert "together 160 tokens, mean error" in out
    assert "together hotter -" in out
    assert out.count("sums     hotter -") == 2
    status, out, _ = run(*names, *files.options, "--prompt", TEXT, "--json")
    together = json.loads(out)["together"]
    assert 0 < together["drift"] < together["allowed"]
    assert max(together["scores"].values()) <= 0 < together["score_limit"]  # float32 has no third sum


def test_sample_says_how_many_tokens_it_compared(run: Any, files: Files) -> None:
    status, out, _ = run(files.folder / "honest.json", *files.options, "--prompt", TEXT, "--sample", 5)
    assert status == 0
    assert out.startswith("SAMPLING-CONSISTENT  80 tokens")
    assert "replayed 5 of 80 tokens" in out


def test_prompt_is_found_in_a_response(run: Any, files: Files, tmp_path: Path) -> None:
    tokens = [token for block in files.honest.blocks for token in block.tokens]
    choice = {"index": 0, "token_ids": tokens, "finish_reason": "length", "prompt_token_ids": PROMPT}
    response = tmp_path / "response.json"
    response.write_text(json.dumps({"choices": [choice]}))
    status, out, _ = run(files.folder / "honest.json", *files.options, "--response", response)
    assert status == 0
    assert out.startswith("REPLAYED")
    choice["token_ids"] = [*tokens[:-1], tokens[-1] ^ 1]
    response.write_text(json.dumps({"choices": [choice]}))
    status, out, _ = run(files.folder / "honest.json", *files.options, "--response", response)
    assert status == 1
    assert "token_swapped" in out


def test_text_is_checked_where_asked(run: Any, files: Files, tmp_path: Path) -> None:
    tokens = [token for block in files.honest.blocks for token in block.tokens]
    text = bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
    response = tmp_path / "response.json"
    words = (files.folder / "honest.json", *files.options, "--prompt", TEXT, "--check-text")
    for said, status in ((text, 0), (text[:5] + "x" + text[6:], 1)):
        response.write_text(json.dumps({"choices": [{"index": 0, "text": said}]}))
        found, out, _ = run(*words, "--response", response)
        assert (found, "text_mismatch" in out) == (status, bool(status))
    assert run(*words)[0] == 2


def test_receipt_of_another_prompt_is_refused(run: Any, files: Files) -> None:
    status, out, _ = run(files.folder / "honest.json", *files.options, "--prompt", "Another text")
    assert status == 1
    assert "prompt_mismatch" in out


def test_tolerance_can_be_stated(run: Any, files: Files) -> None:
    words = (files.folder / "honest.json", *files.options, "--prompt", TEXT, "--tolerance")
    assert run(*words, "1e-9")[0] == 1
    status, out, _ = run(*words, "0.05,0.01")
    assert status == 0
    assert "(0.05 + 0.01 of the largest logit)" in out
    assert "replay_drift" in run(*words, "1e-4,1e-4,1e-4")[1]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--prompt", TEXT, "--sample", "0"], 2, "sample"),
        (["--prompt", TEXT, "--jobs", "-1"], 2, "jobs"),
        (["--prompt", TEXT, "--tolerance", "x"], 2, "tolerance"),
        (["--prompt", TEXT, "--tolerance", "0,0,1"], 2, "tolerance"),
        (["--prompt", TEXT, "--tolerance", "1,1,1,1"], 2, "tolerance"),
        ([], 2, "prompt"),
        (["--prompt-tokens", "/nonexistent"], 2, "prompt-tokens"),
        (["--prompt", TEXT, "--model", "/nonexistent"], 1, "tokenizer.json"),
        (["--prompt-tokens", "PROMPT", "--model", "/nonexistent"], 2, "model"),
        (["--prompt", TEXT, "--store", "/nonexistent"], 1, "store"),
    ],
)
def test_what_cannot_be_audited_says_why(run: Any, files: Files, words: list[str], status: int, message: str) -> None:
    words = [str(files.folder / "prompt.json") if word == "PROMPT" else word for word in words]
    found, out, err = run(files.folder / "honest.json", *files.options, *words)
    assert (found, out) == (status, "")
    assert message in err


def test_receipt_that_does_not_verify_is_not_replayed(run: Any, files: Files, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_bytes((files.folder / "honest.json").read_bytes()[:-40])
    status, out, _ = run(broken, *files.options, "--prompt", TEXT, "--json")
    (report,) = json.loads(out)["receipts"]
    assert (status, report["error"]["threat"]) == (1, "not_json")


def test_malformed_prompt_tokens_are_refused(run: Any, files: Files, tmp_path: Path) -> None:
    for content in ("{}", "[]", "[1.5]", "[[1], []]", "[true]", "x", "[-1]"):
        (tmp_path / "tokens.json").write_text(content)
        status, _, err = run(
            files.folder / "honest.json", *files.options, "--prompt-tokens", tmp_path / "tokens.json"
        )  # fmt: skip
        assert (status, "token ids" in err) == (2, True)


@pytest.fixture
def copied(files: Files, tmp_path: Path) -> Path:
    """Return a copy of the model's directory that a test may damage."""
    return Path(shutil.copytree(files.folder / "model", tmp_path / "copy"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_receipt_of_another_tokenizer_is_refused(run: Any, files: Files, copied: Path, name: str) -> None:
    content = bytearray((copied / name).read_bytes())
    content[-2] ^= 1  # one bit, in the white space or the last word: it need not be a tokenizer to be another
    (copied / name).write_bytes(content)
    words = (files.folder / "honest.json", "--store", files.folder / "store", "--prompt-tokens")
    words = (*words, files.folder / "prompt.json", "--json", "--model")
    status, out, _ = run(*words, copied)
    (report,) = json.loads(out)["receipts"]
    assert (status, report["error"]["threat"]) == (1, "tokenizer_mismatch")
    assert "--tokenizer" in report["error"]["message"]
    status, out, _ = run(*words, copied, "--tokenizer", files.folder / "model")
    assert (status, json.loads(out)["receipts"][0]["tokenizer_checked"]) == (0, True)


@pytest.mark.parametrize("change", ["added", "removed"])
def test_a_tokenizer_of_more_or_fewer_files_is_another(run: Any, files: Files, copied: Path, change: str) -> None:
    if change == "added":
        (copied / "special_tokens_map.json").write_text("{}")
    else:
        (copied / "tokenizer_config.json").unlink()
    words = ("--store", files.folder / "store", "--prompt-tokens", files.folder / "prompt.json")
    status, out, _ = run(files.folder / "honest.json", "--model", copied, *words)
    assert status == 1
    assert "tokenizer_mismatch" in out


def test_without_tokenizer_files_the_audit_says_that_they_were_not_checked(
    run: Any, files: Files, copied: Path, tmp_path: Path
) -> None:
    for path in copied.glob("tokenizer*"):
        path.unlink()
    words = (files.folder / "honest.json", "--store", files.folder / "store")
    words = (*words, "--prompt-tokens", files.folder / "prompt.json", "--model", copied)
    status, out, _ = run(*words)
    assert status == 0
    assert "caveat   the tokenizer was not checked" in out
    status, out, err = run(*words, "--tokenizer", tmp_path)
    assert (status, out) == (2, "")
    assert "tokenizer" in err
