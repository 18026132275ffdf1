from __future__ import annotations

import json
from typing import Any

import pytest

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.digests import bytes_from_digest
from epochless_vllm.protocol.header import SEEDED, decode_header, prompt_digest, reveal_key, seed_commitment
from epochless_vllm.protocol.receipts import decode_final
from tests.protocol.receipt_factory import GREEDY, NUCLEUS, REQUEST_SEED, make_header, make_receipt, named_digest
from tests.verify.forge import header_digest, tagged
from tests.verify.philox_oracle import key_of


@pytest.mark.parametrize(
    "changes", [{}, {"sampler": GREEDY}, {"sampler": NUCLEUS}, {"nonce": None}, {"draw_kind": SEEDED}]
)
def test_header_is_read_back_from_its_json(changes: dict[str, Any]) -> None:
    header = make_header(**changes)
    assert decode_header(json.loads(header.encoded)) == header
    assert bytes_from_digest(header.digest) == header_digest(header.encode_json())


def test_key_follows_from_header_and_seed_as_the_format_says() -> None:
    for header, seed, spelled in (
        (make_header(), REQUEST_SEED, REQUEST_SEED.hex()),
        (make_header(nonce=None, choice_index=4), REQUEST_SEED, REQUEST_SEED.hex()),
        (make_header(draw_kind=SEEDED, prompt_index=2), -5, "-5"),
    ):
        assert reveal_key(header, seed) == key_of(header.encode_json(), spelled)
    assert reveal_key(make_header(sampler=GREEDY), None) is None


@pytest.mark.parametrize("seed", [None, 7])
def test_seed_of_another_kind_reveals_no_key(seed: int | None) -> None:
    with pytest.raises(ReceiptError) as refusal:
        reveal_key(make_header(), seed)
    assert refusal.value.fields["threat"] == "seed_kind"


def test_seed_must_open_its_commitment() -> None:
    header = make_header(commitment=seed_commitment(REQUEST_SEED))
    assert reveal_key(header, REQUEST_SEED) == reveal_key(make_header(), REQUEST_SEED)
    with pytest.raises(ReceiptError) as refusal:
        reveal_key(header, bytes(32))
    assert refusal.value.fields["threat"] == "seed_commitment"


def test_digests_have_a_purpose_each() -> None:
    assert bytes_from_digest(prompt_digest([1, 2])) == tagged("epochless/v1/prompt", b"\1\0\0\0\2\0\0\0")
    assert bytes_from_digest(seed_commitment(bytes(32))) == tagged("epochless/v1/seed-commitment", bytes(32))


def test_fields_that_share_letters_do_not_share_a_digest() -> None:
    one = make_header(request_id="ab", nonce="c" * 16)
    other = make_header(request_id="abc", nonce="c" * 15 + "d")
    assert one.digest != other.digest
    assert reveal_key(one, REQUEST_SEED) != reveal_key(other, REQUEST_SEED)


@pytest.mark.parametrize(
    ("path", "value", "threat"),
    [
        (("samplers",), [], "missing_field"),
        (("revisions",), [], "missing_field"),
        (("samplers",), [make_header().encode_json()["samplers"][0]] * 2, "table_duplicate"),
        (("vocab_size",), 0, "limit_exceeded"),
        (("vocab_size",), 1 << 40, "limit_exceeded"),
        (("stop_token_ids",), [151_936], "token_out_of_vocabulary"),
        (("stop_token_ids",), [3, 2], "not_canonical"),
        (("on_publish",), "later", "unknown_word"),
        (("draws", "kind"), "none", "draw_kind"),
        (("draws", "kind"), "quantum", "unknown_word"),
        (("draws", "algorithm"), "philox2x32", "draw_algorithm"),
        (("engine", "name"), "", "text_form"),
        (("prompt", "length"), 0, "limit_exceeded"),
        (("choice_index",), -1, "limit_exceeded"),
        (("request_id",), "x" * 257, "text_form"),
        (("nonce",), "x" * 15, "text_form"),
        (("nonce",), 5, "wrong_type"),
        (("samplers", 0, "temperature"), "9" * 340 + "/1", "sampler_form"),
        (("samplers", 0, "temperature"), "1/" + "9" * 340, "sampler_form"),
        (("samplers", 0, "top_p"), "0/1", "sampler_form"),
    ],
)
def test_header_field_outside_its_form_is_refused(path: tuple[Any, ...], value: Any, threat: str) -> None:
    doc = json.loads(make_header().encoded)
    target = doc
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    encode_canonical(doc)
    with pytest.raises(ReceiptError) as refusal:
        decode_header(doc)
    assert refusal.value.fields["threat"] == threat


def test_commitment_beside_a_clients_seed_is_refused() -> None:
    doc = json.loads(make_header(draw_kind=SEEDED).encoded)
    doc["draws"]["commitment"] = named_digest("c")
    with pytest.raises(ReceiptError) as refusal:
        decode_header(doc)
    assert refusal.value.fields["threat"] == "draw_kind"


@pytest.mark.parametrize("changes", [{}, {"header": make_header(draw_kind=SEEDED, max_tokens=3)}])
def test_final_record_is_read_back_from_its_json(changes: dict[str, Any]) -> None:
    final = make_receipt(3, **changes).final
    assert decode_final(json.loads(final.encoded)) == final
