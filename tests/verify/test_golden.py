"""Receipts of format v1 stay what they are: they verify, and are encoded to the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.protocol.compact import decode_compact
from epochless_vllm.protocol.disclosure import decode_disclosure
from epochless_vllm.protocol.verbose import decode_verbose
from epochless_vllm.verify.disclosure import verify_disclosure
from epochless_vllm.verify.expected import Expected
from epochless_vllm.verify.receipt import verify_receipt
from epochless_vllm.verify.verified import Verdict
from tests.verify.golden import FOLDER, FORMATS, regenerate

INDEX: dict[str, Any] = json.loads((FOLDER / "index.json").read_text())
KNOWN = {"public_key": bytes.fromhex(INDEX["public_key"]), "nonce": INDEX["nonce"]}


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", INDEX["receipts"])
def test_golden_receipt_verifies(name: str, suffix: str) -> None:
    facts = INDEX["receipts"][name]
    verified = verify_receipt((FOLDER / f"{name}.{suffix}").read_bytes(), **KNOWN)
    assert verified.verdict is Verdict.SAMPLING_CONSISTENT
    assert (verified.receipt_id, verified.tokens) == (facts["receipt_id"], facts["tokens"])
    assert verified.final is not None
    assert verified.final.root.hex() == facts["root"]


@pytest.mark.parametrize("name", INDEX["receipts"])
def test_golden_receipt_is_one_receipt_in_three_formats_and_is_encoded_to_the_same_bytes(name: str) -> None:
    verbose = decode_verbose((FOLDER / f"{name}.json").read_bytes())
    compact = decode_compact((FOLDER / f"{name}.compact").read_bytes())
    assert verbose == compact
    for suffix, encode in FORMATS.items():
        assert encode(compact) == (FOLDER / f"{name}.{suffix}").read_bytes()


def test_golden_disclosure_verifies_and_is_encoded_to_the_same_bytes() -> None:
    payload = (FOLDER / "unseeded_token_65.disclosure").read_bytes()
    assert verify_disclosure(payload, 65, Expected(**KNOWN)).position == 65
    assert decode_disclosure(payload).encode() == payload


def test_script_regenerates_the_golden_files(tmp_path: Path) -> None:
    regenerate(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in FOLDER.iterdir()}
