"""``epochless verify`` on the golden receipts: verdicts, keys in every form, and refusals with their code."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.cli import main
from epochless_vllm.protocol.compact import encode_compact
from tests.protocol.receipt_factory import NONCE, SIGNER, make_header, make_receipt

VECTORS = Path(__file__).parents[1] / "vectors" / "receipts" / "v1"
INDEX = json.loads((VECTORS / "index.json").read_text())
FORMATS = ("json", "compact", "stream")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: object) -> tuple[int, str, str]:
        status = main.main(["verify", *map(str, words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(INDEX["public_key"] + "\n")
    return path


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", sorted(INDEX["receipts"]))
def test_every_golden_receipt_verifies_under_its_key(run: Any, key: Path, name: str, suffix: str) -> None:
    status, out, err = run(VECTORS / f"{name}.{suffix}", "--public-key", key, "--nonce", INDEX["nonce"], "--json")
    assert (status, err) == (0, "")
    described = json.loads(out)
    assert described["receipt_id"] == INDEX["receipts"][name]["receipt_id"]
    assert described["tokens"] == INDEX["receipts"][name]["tokens"]
    assert described["anchor"] == "signature"


def test_people_read_the_verdict_and_what_was_not_checked(run: Any) -> None:
    status, out, _ = run(VECTORS / "unseeded.json")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "SAMPLING-CONSISTENT  70 tokens, anchor: none"
    assert any(line.startswith("sampled  0-") for line in lines)
    assert any(line.startswith("caveat   unpinned") for line in lines)


@pytest.mark.parametrize("form", ["hex", "raw", "pem"])
def test_a_key_is_read_in_every_form_it_comes_in(run: Any, tmp_path: Path, form: str) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    raw = bytes.fromhex(INDEX["public_key"])
    pem = Ed25519PublicKey.from_public_bytes(raw).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path = tmp_path / "key"
    path.write_bytes({"hex": INDEX["public_key"].encode(), "raw": raw, "pem": pem}[form])
    status, out, _ = run(VECTORS / "example.json", "--public-key", path, "--json")
    assert status == 0
    assert json.loads(out)["anchor"] == "signature"


@pytest.mark.parametrize(
    "content", [b"", b"x" * 31, b"zz" * 32, b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"]
)
def test_what_is_no_key_is_a_usage_error(run: Any, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    status, _, err = run(VECTORS / "example.json", "--public-key", path)
    assert status == 2
    assert "not an Ed25519 public key" in err


def test_another_key_another_nonce_and_a_changed_byte_are_refused_with_their_code(
    run: Any, key: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(bytes(32))
    payload = (VECTORS / "example.json").read_bytes()
    changed = tmp_path / "changed.json"
    changed.write_bytes(payload[:-1])
    # A changed byte is refused at the bytes; the other two at what they pin.
    for words, threat in (
        ((VECTORS / "example.json", "--public-key", wrong), "key_mismatch"),
        ((VECTORS / "example.json", "--nonce", "another"), "nonce_mismatch"),
        ((VECTORS / "example.json", "--receipt-id", "sha256:" + "0" * 64), None),
        ((changed,), None),
    ):
        status, out, _ = run(*words, "--json")
        assert status == 1
        error = json.loads(out)["error"]
        assert error["code"] == "receipt_refused"
        assert threat is None or error["threat"] == threat


def test_a_missing_file_is_a_usage_error(run: Any, tmp_path: Path) -> None:
    assert run(tmp_path / "none")[0] == 2


def test_a_stream_cut_short_is_incomplete_unless_that_is_allowed(run: Any, tmp_path: Path) -> None:
    whole = (VECTORS / "unseeded.stream").read_bytes()
    statuses = set()
    for length in range(len(whole) - 200, len(whole)):
        path = tmp_path / "cut"
        path.write_bytes(whole[:length])
        status, _, _ = run(path)
        assert status == 1
        status, out, _ = run(path, "--allow-incomplete", "--json")
        statuses.add((status, json.loads(out).get("verdict")))
    assert statuses <= {(1, None), (0, "INCOMPLETE")}


def test_every_receipt_of_an_answer_is_verified_against_it(run: Any, tmp_path: Path) -> None:
    receipts = {index: make_receipt(80, header=make_header(max_tokens=80, choice_index=index)) for index in (0, 1)}
    choices = [
        {
            "index": index,
            "finish_reason": "length",
            "token_ids": [token for block in receipt.blocks for token in block.tokens],
            "epochless": {
                "id": receipt.receipt_id,
                "prompt_index": 0,
                "choice_index": index,
                "receipt": base64.b64encode(encode_compact(receipt)).decode(),
            },
        }
        for index, receipt in receipts.items()
    ]
    file = tmp_path / "answer.json"
    file.write_text(json.dumps({"choices": choices}))
    key = tmp_path / "raw-key"
    key.write_bytes(SIGNER.public_key)
    status, out, _ = run(str(file), "--key", str(key), "--nonce", NONCE, "--json")
    assert status == 0
    checked = json.loads(out)["choices"]
    assert [(item["index"], item["verdict"], item["anchor"]) for item in checked] == [
        (0, "SAMPLING-CONSISTENT", "signature"),
        (1, "SAMPLING-CONSISTENT", "signature"),
    ]
    choices[1]["token_ids"][3] += 1  # type: ignore[index]
    file.write_text(json.dumps({"choices": choices}))
    status, out, _ = run(str(file), "--json")
    assert (status, json.loads(out)["error"]["threat"]) == (1, "token_swapped")
    file.write_text(json.dumps({"choices": [{"index": 0}]}))
    status, out, _ = run(str(file), "--json")
    assert (status, json.loads(out)["error"]["threat"]) == (1, "response_form")


@pytest.mark.parametrize(
    "answer",
    [
        b'{"error": {"message": "walker has no step 9", "code": 404}}',
        b'data: {"error": {"message": "walker has no step 9", "code": 404}}\n\ndata: [DONE]\n\n',
        b'{"error": "walker has no step 9"}',
    ],
)
def test_an_answer_that_is_an_error_is_shown_as_one(run: Any, tmp_path: Path, answer: bytes) -> None:
    file = tmp_path / "answer.json"
    file.write_bytes(answer)
    status, _, err = run(file)
    assert status == 1
    assert err.startswith(f"error: {file}: no receipt")
    assert "it is an error, 'walker has no step 9'" in err


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"[]", b"data: {}", b"<html>"])
def test_a_file_that_is_neither_receipt_nor_answer_is_named(run: Any, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "what"
    file.write_bytes(content)
    status, out, _ = run(file, "--json")
    assert (status, json.loads(out)["error"]["threat"]) == (1, "response_form")
    assert json.loads(out)["error"]["message"].startswith(f"{file}: no receipt")


@pytest.mark.parametrize(
    ("option", "subject"),
    [
        ("--nonce", "nonce"),
        ("--request-id", "request id"),
        ("--base", "base"),
        ("--receipt-id", "receipt id"),
        ("--revision", "revision"),
        ("--seed-commitment", "seed commitment"),
    ],
)
def test_what_is_not_as_expected_is_named(run: Any, option: str, subject: str) -> None:
    status, _, err = run(VECTORS / "unseeded.json", option, "another")
    assert status == 1
    assert err.startswith(f"error: {subject}: ")
