"""The verifier as its callers see it: verdicts, anchors, caveats, expectations, isolation, memory."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import epochless_vllm
from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.builder import ReceiptBuilder, sign_final
from epochless_vllm.protocol.columns import column
from epochless_vllm.protocol.compact import encode_compact
from epochless_vllm.protocol.draw_window import DrawWindow
from epochless_vllm.protocol.header import reveal_key, seed_commitment
from epochless_vllm.protocol.receipts import LENGTH
from epochless_vllm.protocol.records import ONE, Block, Run
from epochless_vllm.protocol.stream import encode_block_frame, encode_final_frame, encode_header_frame, encode_stream
from epochless_vllm.verify import expected as caveats
from epochless_vllm.verify.checker import check_draws
from epochless_vllm.verify.diagnosis import explain_draws
from epochless_vllm.verify.expected import Expected
from epochless_vllm.verify.receipt import StreamVerifier, verify_receipt
from epochless_vllm.verify.verified import Verdict, describe
from tests.protocol.receipt_factory import (
    NUCLEUS,
    PROMPT,
    REQUEST_SEED,
    SIGNER,
    make_header,
    make_receipt,
    named_digest,
)
from tests.verify.bases import NAMES, base_receipt, known, tokens_of, verbose_of
from tests.verify.forge import canonical, edited, resign
from tests.verify.philox_oracle import draw, key_of

PACKAGE = Path(epochless_vllm.__file__).parent


def refusal(payload: bytes, **pins: Any) -> str:
    with pytest.raises(ReceiptError) as caught:
        verify_receipt(payload, **pins)
    return str(caught.value.fields["threat"])


def everything(name: str) -> dict[str, Any]:
    receipt = base_receipt(name)
    return {
        **known(),
        "receipt_id": receipt.receipt_id,
        "request_id": receipt.header.request_id,
        "token_ids": tokens_of(name),
        "prompt_token_ids": PROMPT,
        "finish_reason": receipt.final.finish_reason,
        "base": receipt.header.base,
        "tokenizer": receipt.header.tokenizer,
    }


@pytest.mark.parametrize("name", NAMES)
def test_receipt_that_keeps_every_expectation_verifies_without_the_caveats_they_lift(name: str) -> None:
    verified = verify_receipt(encode_compact(base_receipt(name)), **everything(name), keep_blocks=True)
    assert verified.anchor == "signature"
    assert not {caveats.UNSIGNED, caveats.UNCHECKED_NONCE, caveats.UNCHECKED_TOKENS} & set(verified.caveats)
    assert verified.blocks == base_receipt(name).blocks
    json.dumps(describe(verified))


def test_receipt_without_key_or_pin_says_that_nobody_vouches_for_it() -> None:
    verified = verify_receipt(verbose_of("sampled"))
    assert verified.anchor == "none"
    assert caveats.UNSIGNED in verified.caveats
    forged = resign(edited(verbose_of("sampled"), lambda d: d["blocks"][0]["tokens"].__setitem__(0, 99)))
    assert verify_receipt(canonical(forged)).anchor == "none"


def test_pinned_id_binds_every_byte_but_the_signature() -> None:
    pinned = base_receipt("sampled").receipt_id
    assert verify_receipt(verbose_of("sampled"), receipt_id=pinned).anchor == "receipt_id"
    forged = resign(edited(verbose_of("sampled"), lambda d: d["blocks"][0]["tokens"].__setitem__(0, 99)))
    assert refusal(canonical(forged), receipt_id=pinned) == "receipt_id"


@pytest.mark.parametrize(
    ("pin", "value", "code"),
    [
        ("nonce", "nonce-of-the-client-0002", "nonce_mismatch"),
        ("request_id", "cmpl-other", "request_id_mismatch"),
        ("prompt_token_ids", [1, 2, 3], "prompt_mismatch"),
        ("finish_reason", "stop", "finish_mismatch"),
        ("base", named_digest("x"), "base_mismatch"),
        ("tokenizer", named_digest("x"), "tokenizer_mismatch"),
        ("revisions", [named_digest("x")], "revision_mismatch"),
        ("sampler", NUCLEUS, "sampler_mismatch"),
        ("seed", 7, "seed_mismatch"),
        ("seed_commitment", seed_commitment(REQUEST_SEED), "seed_commitment"),
        ("receipt_id", named_digest("x"), "receipt_id"),
        ("public_key", type(SIGNER)(2).public_key, "key_mismatch"),
        ("token_ids", [], "token_inserted"),
        ("logprobs", [], "logprob_mismatch"),
        ("logprobs", [float("nan")] * 150, "logprob_mismatch"),
        ("logprobs", [Decimal("1e999999")] * 150, "logprob_mismatch"),
        ("logprobs", [Decimal("-Infinity")] * 150, "logprob_mismatch"),
    ],
)
def test_expectation_that_is_not_kept_is_refused(pin: str, value: Any, code: str) -> None:
    assert refusal(encode_compact(base_receipt("sampled")), **{pin: value}) == code


def test_seed_is_chosen_by_the_server_unless_client_or_commitment_says_otherwise() -> None:
    assert caveats.SERVER_SEED in verify_receipt(verbose_of("sampled"), **known()).caveats
    commitment = seed_commitment(REQUEST_SEED)
    committed = encode_compact(make_receipt(9, header=make_header(max_tokens=9, commitment=commitment)))
    assert caveats.SERVER_SEED in verify_receipt(committed, **known()).caveats
    assert caveats.SERVER_SEED not in verify_receipt(committed, **known(), seed_commitment=commitment).caveats
    assert caveats.UNCHECKED_SEED in verify_receipt(verbose_of("seeded"), **known()).caveats
    assert caveats.UNCHECKED_SEED not in verify_receipt(verbose_of("seeded"), **known(), seed=1234).caveats


def test_verdict_without_draws_is_integrity_and_no_more() -> None:
    verified = verify_receipt(verbose_of("sampled"), **known(), check_draws=False)
    assert verified.verdict is Verdict.INTEGRITY
    stream = verify_receipt(encode_stream(base_receipt("sampled")), **known(), check_draws=False)
    assert stream.verdict is Verdict.INTEGRITY


def test_mislabelled_prefix_cache_is_beyond_offline_checks_and_no_verdict_claims_otherwise() -> None:
    # A server that serves revision A's KV under B's name signs a consistent receipt: only replay can tell.
    swap = {"policy": "math", "revision": named_digest("not what computed the KV"), "step": 7}
    lie = resign(edited(verbose_of("sampled"), lambda d: d["header"]["revisions"].__setitem__(0, swap)))
    verified = verify_receipt(canonical(lie), **known())
    assert verified.verdict is Verdict.SAMPLING_CONSISTENT
    assert Verdict.REPLAYED.name not in (PACKAGE / "verify" / "receipt.py").read_text()  # only a replay gives it


def test_preemption_left_unrecorded_under_one_revision_is_beyond_offline_checks() -> None:
    lie = resign(edited(verbose_of("sampled"), lambda d: d["final"].update(kv_rebuilds=3)))
    assert verify_receipt(canonical(lie), **known()).final.kv_rebuilds == 3  # type: ignore[union-attr]


def response(name: str, **changes: Any) -> bytes:
    receipt = base_receipt(name)
    table = [*receipt.header.revisions, *(entry for _, entry in receipt.final.added)]
    choice = {
        "index": 0,
        "text": "...",
        "finish_reason": receipt.final.finish_reason,
        "token_ids": tokens_of(name),
        "weight_versions": [
            {"version": table[s.revision].revision, "step": table[s.revision].step, "start": s.start, "end": s.end}
            for s in receipt.final.sampling
        ],
        "epochless": {
            "id": receipt.receipt_id,
            "logprobs": [
                float((Decimal(most + 1) / ONE).ln()) for block in receipt.blocks for most in block.width_less_one
            ],
        },
    }
    choice.update(changes)
    return json.dumps({"choices": [{"index": 1}, choice], "usage": {"x": 1.5}}).encode()


@pytest.mark.parametrize("name", ["sampled", "continued", "greedy", "stopped"])
def test_response_beside_its_receipt_is_accepted(name: str) -> None:
    verified = verify_receipt(encode_stream(base_receipt(name)), **known(), response=response(name))
    assert caveats.UNCHECKED_TOKENS not in verified.caveats


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"token_ids": [1, 2]}, "token_swapped"),
        ({"finish_reason": "stop"}, "finish_mismatch"),
        ({"weight_versions": [{"version": "base:x", "start": 0, "end": 150}]}, "revision_mismatch"),
        ({"epochless": {"id": named_digest("x")}}, "receipt_id"),
        ({"epochless": {"logprobs": [-0.5] * 150}}, "logprob_mismatch"),
        ({"epochless": {"logprobs": [-0.5]}}, "logprob_mismatch"),
        ({"epochless": {"logprobs": [10**400] * 150}}, "logprob_mismatch"),
        ({"epochless": {"logprobs": ["x"]}}, "response_form"),
        ({"token_ids": [1.5]}, "not_integer"),
        ({"token_ids": {}}, "wrong_type"),
        ({"index": 7}, "response_form"),
        ({"finish_reason": 3}, "response_form"),
        ({"weight_versions": [3]}, "response_form"),
    ],
)
def test_response_that_contradicts_its_receipt_is_refused(changes: dict[str, Any], code: str) -> None:
    assert refusal(verbose_of("sampled"), **known(), response=response("sampled", **changes)) == code


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"choices":3}',
        b"[" * 100_000,
        b'{"choices":NaN}',
        b'{"choices":' + b"1" * 5000 + b"}",
        b'{"choices":1e99999999999999999999}',
    ],
)
def test_bytes_that_are_no_response_are_refused(payload: bytes) -> None:
    assert refusal(verbose_of("sampled"), **known(), response=payload) == "response_form"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_verdict_on_a_stream_does_not_depend_on_how_it_was_cut(data: st.DataObject) -> None:
    stream = encode_stream(base_receipt(data.draw(st.sampled_from(["sampled", "continued", "greedy", "aborted"]))))
    if data.draw(st.booleans()):
        damaged = bytearray(stream)
        damaged[data.draw(st.integers(4, len(stream) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        stream = bytes(damaged)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))

    def outcome(pieces: list[bytes]) -> object:
        verifier = StreamVerifier(Expected(**known()))
        try:
            for piece in pieces:
                verifier.feed(piece)
            return verifier.close().receipt_id
        except ReceiptError as error:
            return error.fields["threat"]

    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert outcome(pieces) == outcome([stream])


def test_draws_wrapped_at_32_bits_are_named() -> None:
    # No test can hold 2**34 tokens; the rows of one block beyond that position can be judged alone.
    header, first = make_header(), 1 << 34
    key = reveal_key(header, REQUEST_SEED)
    assert key is not None
    plain = key_of(header.encode_json(), REQUEST_SEED.hex())
    wrapped = [draw(plain, first + i, wrap=True) for i in range(8)]
    error = explain_draws(header, REQUEST_SEED, first, [(r, r) for r in wrapped], threat="draw_outside_interval")
    assert error.fields["threat"] == "draw_wrapped"
    right = [draw(plain, first + i) for i in range(8)]
    assert DrawWindow(key).read(first, 8) == right != wrapped


def test_verifier_runs_isolated_with_nothing_installed_and_loads_nothing_but_the_standard_library() -> None:
    payload = encode_compact(base_receipt("continued"))
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from epochless_vllm.verify.receipt import verify_receipt\n"
        "import epochless_vllm.verify.disclosure, epochless_vllm.verify.pairs\n"
        "verified = verify_receipt(sys.stdin.buffer.read(), public_key=bytes.fromhex(sys.argv[2]), nonce=sys.argv[3])\n"
        "print(verified.verdict.value)\n"
        "roots = {name.split('.')[0] for name in sys.modules}\n"
        "print(*sorted(roots - set(sys.stdlib_module_names) - {'__main__', 'epochless_vllm'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(PACKAGE.parent), SIGNER.public_key.hex(), known()["nonce"]],
        input=payload,
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().split() == ["SAMPLING-CONSISTENT"], done.stderr


def test_verifier_contains_no_floating_point() -> None:
    replaying = ("replay.py", "findings.py", "series.py")  # compare logarithms, once the receipt itself is verified
    for path in sorted((PACKAGE / "verify").glob("*.py")):
        if path.name in replaying:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), path.name
            assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)), path.name
            assert not (isinstance(node, ast.Name) and node.id in ("float", "math", "cmath")), path.name


def honest_stream(blocks: int) -> Iterator[bytes]:
    """A stream of any length, made and given out block by block."""
    header = make_header(max_tokens=64 * blocks)
    builder = ReceiptBuilder(header, keep_blocks=False)
    key = reveal_key(header, REQUEST_SEED)
    assert key is not None
    window, rng = DrawWindow(key), random.Random(1)
    yield encode_header_frame(header)
    for number in range(blocks):
        draws = window.read(64 * number, 64)
        low = [rng.randint(0, value) for value in draws]
        width = [rng.randint(value - start + 1, ONE - start) for value, start in zip(draws, low, strict=True)]
        (block,) = builder.append([rng.randrange(3, 1000) for _ in range(64)], low, width)
        yield encode_block_frame(block, draws)
    _, final = builder.finish(LENGTH, seed=REQUEST_SEED)
    yield encode_final_frame(final, sign_final(final, SIGNER))


def test_memory_of_the_stream_verifier_does_not_grow_with_the_stream() -> None:
    def peak(blocks: int) -> int:
        verifier = StreamVerifier(Expected(**known()))
        tracemalloc.start()
        for frame in honest_stream(blocks):
            verifier.feed(frame)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert verifier.close().tokens == 64 * blocks
        return used

    peak(4)  # what is imported and cached at first use is not the stream's
    assert peak(320) < 2 * peak(40)


@pytest.mark.parametrize(("draw", "picks"), [(9, False), (10, True), (15, True), (16, False)])
def test_first_and_last_draw_of_an_interval_pick_its_token_and_their_neighbours_do_not(draw: int, picks: bool) -> None:
    header = base_receipt("sampled").header
    block = Block(0, column([7]), column([10]), column([5]), column(), (Run(1, 0, 0, 0),))
    with nullcontext() if picks else pytest.raises(ReceiptError):
        check_draws(block, [draw], header, None)
