"""A single token shown with its block and its path: what proves it, and what must not."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.disclosure import make_disclosure
from epochless_vllm.protocol.merkle import leaf_hash, node_hash
from epochless_vllm.protocol.records import FILTERED, leaf_data
from epochless_vllm.protocol.verbose import decode_verbose
from epochless_vllm.verify.disclosure import verify_disclosure
from epochless_vllm.verify.expected import Expected
from tests.protocol.receipt_factory import NONCE, SIGNER, make_header, make_receipt
from tests.verify.bases import base_receipt, tokens_of
from tests.verify.forge import canonical
from tests.verify.mutants import MUTANTS

EXPECTED = Expected(public_key=SIGNER.public_key, nonce=NONCE)
LONG = make_receipt(700, header=make_header(max_tokens=700))


def refusal(payload: bytes, position: int, expected: Expected = EXPECTED) -> str:
    with pytest.raises(ReceiptError) as caught:
        verify_disclosure(payload, position, expected)
    return str(caught.value.fields["threat"])


def damaged(at: int, **changes: Any) -> bytes:
    doc = json.loads(make_disclosure(LONG, at).encode())
    doc.update(changes)
    return canonical(doc)


@pytest.mark.parametrize("name", ["sampled", "continued", "recomputed", "nucleus", "greedy", "seeded", "single"])
def test_tokens_of_a_receipt_can_be_disclosed_one_by_one(name: str) -> None:
    receipt, tokens = base_receipt(name), tokens_of(name)
    rows = [
        (low, most + 1) for block in receipt.blocks for low, most in zip(block.low, block.width_less_one, strict=True)
    ]
    kept = [value + 1 for block in receipt.blocks for value in block.kept_less_one]
    seen = {}
    for position in {*range(0, len(tokens), 9), *range(60, len(tokens), 64), len(tokens) - 1}:
        token = verify_disclosure(make_disclosure(receipt, position).encode(), position, EXPECTED)
        assert (token.position, token.token_id, token.low, token.width) == (position, tokens[position], *rows[position])
        span = next(span for span in receipt.final.sampling if position < span.end)
        table = [*receipt.header.revisions, *(entry for _, entry in receipt.final.added)]
        assert token.revision == table[span.revision].revision
        assert token.anchor == "signature"
        seen[position] = token.kept
    filtered = iter(kept)
    flags = [run.flags for block in receipt.blocks for run in block.runs for _ in range(run.rows)]
    every = [next(filtered) if mark & FILTERED else None for mark in flags]
    assert seen == {position: every[position] for position in seen}


def test_path_of_another_length_is_refused() -> None:
    path = json.loads(make_disclosure(LONG, 0).encode())["path"]
    assert len(path) == 4
    assert refusal(damaged(0, path=path[:-1]), 0) == "path_length"
    assert refusal(damaged(0, path=[*path, "ab" * 32]), 0) == "path_length"
    assert refusal(damaged(0, path=["ab" * 32] * 65), 0) == "limit_exceeded"
    assert refusal(damaged(0, path=path[::-1]), 0) == "root_mismatch"


def test_position_outside_the_tree_is_refused() -> None:
    assert refusal(damaged(699), 700) == "leaf_index"
    assert refusal(damaged(0), -1) == "leaf_index"
    with pytest.raises(ReceiptError):
        make_disclosure(LONG, 700)


def test_block_under_another_position_is_refused() -> None:
    assert refusal(damaged(0), 64) == "block_order"


def test_inner_node_passed_off_as_a_leaf_leads_elsewhere() -> None:
    # An inner node's preimage is two hashes; as leaf data they hash under another prefix.
    leaves = [leaf_hash(leaf_data(LONG.header.digest_bytes, block.encode())) for block in LONG.blocks]
    assert node_hash(leaves[0], leaves[1]) != leaf_hash(leaves[0] + leaves[1])
    body = base64.b64encode(leaves[0] + leaves[1]).decode()
    path = json.loads(make_disclosure(LONG, 0).encode())["path"][1:]
    assert refusal(damaged(0, block=body, path=path), 0) in ("block_size", "truncated")


def test_duplicated_last_leaf_is_another_tree() -> None:
    # Trees that pair an odd leaf with itself give n and n + 1 leaves one root; this one does not.
    final = json.loads(make_disclosure(LONG, 699).encode())["final"]
    assert refusal(damaged(699, final={**final, "blocks": 12}), 699) == "statement_mismatch"


def test_token_of_another_response_is_refused() -> None:
    tokens = [token for block in LONG.blocks for token in block.tokens]
    payload = make_disclosure(LONG, 100).encode()
    assert (
        verify_disclosure(payload, 100, Expected(public_key=SIGNER.public_key, token_ids=tokens)).token_id
        == tokens[100]
    )
    tokens[100] += 1
    assert refusal(payload, 100, Expected(token_ids=tokens)) == "token_swapped"


def test_edited_block_is_refused() -> None:
    disclosure = make_disclosure(LONG, 70)
    body = bytearray(disclosure.body)
    body[40] ^= 1
    block = base64.b64encode(bytes(body)).decode()
    assert refusal(damaged(70, block=block), 70) == "root_mismatch"
    longer = base64.b64encode(disclosure.body + b"\0").decode()
    assert refusal(damaged(70, block=longer), 70) == "trailing_bytes"


def test_disclosure_under_another_key_is_refused() -> None:
    other = make_receipt(10, signer=type(SIGNER)(2))
    assert refusal(make_disclosure(other, 3).encode(), 3) == "key_mismatch"


def test_path_grows_with_the_logarithm_of_the_length() -> None:
    sizes = {}
    for tokens in (64, 640, 6400):
        receipt = make_receipt(tokens, header=make_header(max_tokens=tokens), step=64)
        sizes[tokens] = len(make_disclosure(receipt, tokens // 2).path)
    assert sizes == {64: 0, 640: 4, 6400: 7}


def test_disclosed_draw_that_does_not_pick_its_token_is_refused() -> None:
    lie = next(mutant for mutant in MUTANTS if mutant.name == "draw outside its interval")
    receipt = decode_verbose(lie.payload("resigned"))
    assert refusal(make_disclosure(receipt, 100).encode(), 100) == "draw_outside_interval"
