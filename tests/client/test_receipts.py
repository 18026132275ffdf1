"""A trainer's reading of receipts, against the rows they were made of."""

from __future__ import annotations

import base64
import json
import math
import random
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from epochless_vllm.client import StreamedReceipts, receipt_of, token_records
from epochless_vllm.errors import ReceiptError, UnexpectedReplyError
from epochless_vllm.protocol.compact import encode_compact
from epochless_vllm.protocol.records import ONE
from epochless_vllm.protocol.spans import CONTINUE
from epochless_vllm.protocol.stream import encode_stream
from tests.protocol.receipt_factory import NONCE, NUCLEUS, SIGNER, entry, make_header, make_receipt


def b64(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def completion(receipt: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "x"}}
    if receipt is not None:
        choice["epochless"] = {"id": "sha256:1", "receipt": receipt}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def test_records_are_the_rows_of_the_receipt() -> None:
    moved = entry("revision-b", 8)
    header = make_header(max_tokens=150, sampler=NUCLEUS, on_publish=CONTINUE)
    receipt = make_receipt(150, header=header, moves=[(70, moved)])
    body = completion(b64(encode_compact(receipt)))
    for choice in (body["choices"][0], ChatCompletion.model_validate(body).choices[0]):
        records = token_records(receipt_of(choice), public_key=SIGNER.public_key, nonce=NONCE)
        verbose = [block.encode_json() for block in receipt.blocks]
        assert [record.token_id for record in records] == [token for block in verbose for token in block["tokens"]]
        widths = [width for block in verbose for width in block["width"]]
        assert [record.logprob for record in records] == pytest.approx([math.log(w / ONE) for w in widths], abs=0)
        kept = [mass for block in verbose for mass in block["kept"]]
        assert [record.kept_logmass for record in records] == pytest.approx([math.log(k / ONE) for k in kept], abs=0)
        assert {record.revision for record in records[:70]} == {header.revisions[0].revision}
        assert {(record.revision, record.step) for record in records[70:]} == {(moved.revision, 8)}


def test_an_unfiltered_token_has_its_whole_mass() -> None:
    assert {record.kept_logmass for record in token_records(encode_compact(make_receipt(10)))} == {0.0}


def test_a_greedy_token_has_probability_one() -> None:
    from tests.protocol.receipt_factory import GREEDY

    receipt = make_receipt(10, header=make_header(max_tokens=10, sampler=GREEDY))
    assert {record.logprob for record in token_records(encode_compact(receipt))} == {0.0}


def test_frames_of_a_stream_add_up_whatever_the_cuts() -> None:
    receipts = [make_receipt(200, rng_seed=seed) for seed in (1, 2)]
    rng, collected = random.Random(3), StreamedReceipts()
    streams = [encode_stream(receipt) for receipt in receipts]
    position = [0, 0]
    while any(position[index] < len(streams[index]) for index in range(2)):
        index = rng.randrange(2)
        piece = streams[index][position[index] : position[index] + rng.randrange(400)]
        position[index] += len(piece)
        ended = position[index] == len(streams[index])
        extension = {"frames": b64(piece), **({"id": receipts[index].receipt_id} if ended else {})}
        choice: dict[str, Any] = {"index": index, "delta": {}, "epochless": extension}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        collected.add(ChatCompletionChunk.model_validate(chunk) if rng.random() < 0.5 else chunk)
        collected.add({"choices": [{"index": index, "delta": {}}]})
    collected.add({"choices": [], "usage": {}})
    for index, receipt in enumerate(receipts):
        assert collected.receipt(index) == streams[index]
        assert collected.ids[index] == receipt.receipt_id
        assert len(token_records(collected.receipt(index), receipt_id=receipt.receipt_id)) == 200


def test_a_choice_without_a_receipt_says_how_to_ask() -> None:
    with pytest.raises(UnexpectedReplyError, match="attest='receipt'"):
        receipt_of(completion(None)["choices"][0])
    with pytest.raises(UnexpectedReplyError, match="base64"):
        receipt_of(completion("not base64")["choices"][0])
    with pytest.raises(UnexpectedReplyError, match="choice 1"):
        StreamedReceipts().receipt(1)


def test_a_tampered_receipt_gives_no_records() -> None:
    payload = encode_compact(make_receipt(100))
    for place in range(len(payload) - 400, len(payload), 37):
        with pytest.raises(ReceiptError):
            token_records(payload[:place] + bytes([payload[place] ^ 4]) + payload[place + 1 :], nonce=NONCE)


def test_an_answer_is_read_alike_whole_and_as_events() -> None:
    from epochless_vllm.verify import attested_choices

    receipt = make_receipt(100)
    stream = encode_stream(receipt)
    events = [
        {"choices": [{"index": 0, "epochless": {"frames": b64(stream[:100])}}]},
        {"choices": [{"index": 0, "epochless": {"frames": b64(stream[100:]), "id": receipt.receipt_id}}]},
        {"choices": []},
        {"error": {"message": "x"}},
    ]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    assert attested_choices(text.encode()) == [(0, stream)]
    whole = json.dumps(completion(b64(encode_compact(receipt)))).encode()
    assert attested_choices(whole) == [(0, encode_compact(receipt))]


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"[]", b"{}", b'{"choices": 1}', b'{"choices": []}', b"data: nonsense\n\n", b'{"choices": [{"index": 0}]}',
        b'{"choices": [{"index": 0, "epochless": {"receipt": "QR=="}}]}',
        b'{"choices": [{"index": 0, "epochless": {"receipt": 5}}]}',
        b'{"choices": [{"index": 0, "epochless": {"frames": "*"}}]}',
        b'data: {"choices": [{"index": "0", "epochless": {}}]}',
        b"\xff\xfe", b'{"choices": NaN}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_bytes_that_are_no_attested_answer_are_refused(payload: bytes) -> None:
    from epochless_vllm.verify import attested_choices

    with pytest.raises(ReceiptError):
        attested_choices(payload)
