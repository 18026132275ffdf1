"""One meaning in three formats, and how many bytes it takes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.builder import ReceiptBuilder
from epochless_vllm.protocol.columns import column, id_width
from epochless_vllm.protocol.compact import decode_compact, encode_compact
from epochless_vllm.protocol.draws import draw_range
from epochless_vllm.protocol.header import NO_DRAWS, SEEDED, UNSEEDED, Header, reveal_key
from epochless_vllm.protocol.receipts import ABORT, Receipt
from epochless_vllm.protocol.records import FILTERED, FORCED, MASKED, ONE, decode_block, decode_block_json
from epochless_vllm.protocol.spans import CONTINUE, KVSpan, RevisionEntry
from epochless_vllm.protocol.stream import StreamDecoder, encode_stream
from epochless_vllm.protocol.verbose import decode_verbose, encode_verbose
from tests.protocol.receipt_factory import (
    GREEDY,
    NUCLEUS,
    SAMPLED,
    SIGNER,
    entry,
    make_header,
    make_receipt,
    make_rows,
    named_digest,
    seed_of,
)
from tests.verify.forge import block_bytes, edited, tree_root


def fixed_bytes(receipt: Receipt) -> int:
    """Bytes of a compact receipt that do not depend on its rows."""
    runs, previous = 0, None
    for block in receipt.blocks:
        for run in block.runs:
            runs += run.flags != previous
            previous = run.flags
    return 4 + 4 + len(receipt.header.encoded) + 4 + len(receipt.final.encoded) + 96 + 4 + 9 * runs


def proof_bytes(receipt: Receipt) -> int:
    """Bytes of a compact receipt beyond the fixed ones and the token ids."""
    ids = receipt.final.tokens * id_width(receipt.header.vocab_size)
    return len(encode_compact(receipt)) - fixed_bytes(receipt) - ids


@st.composite
def receipts(draw: st.DrawFn) -> Receipt:
    sampler = draw(st.sampled_from([SAMPLED, NUCLEUS, GREEDY]))
    kind = NO_DRAWS if sampler.greedy else draw(st.sampled_from([SEEDED, UNSEEDED]))
    tokens = draw(st.one_of(st.integers(0, 4), st.integers(60, 70), st.integers(120, 200)))
    pinned = draw(st.booleans())
    header = make_header(
        sampler=sampler,
        draw_kind=kind,
        max_tokens=300,
        on_publish="pin" if pinned else CONTINUE,
        vocab_size=draw(st.sampled_from([200, 50_000, 151_936])),
    )
    positions = st.integers(0, max(0, tokens - 1))
    moves = {} if pinned else draw(st.dictionaries(positions, st.sampled_from("bcde"), max_size=4))
    marks = draw(st.dictionaries(positions, st.sampled_from([0, MASKED, FORCED, MASKED | FORCED]), max_size=5))
    return make_receipt(
        tokens,
        header=header,
        finish_reason=ABORT,
        rng_seed=draw(st.integers(0, 1 << 20)),
        moves=[(position, entry(name, 8)) for position, name in sorted(moves.items()) if position < tokens],
        flags=sorted(marks.items()),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(receipts())
def test_receipt_is_read_back_from_every_format_and_compact_expands_to_the_exact_verbose_bytes(
    receipt: Receipt,
) -> None:
    verbose, compact = encode_verbose(receipt), encode_compact(receipt)
    assert decode_verbose(verbose) == decode_compact(compact) == receipt
    assert encode_verbose(decode_compact(compact)) == verbose
    assert encode_compact(decode_verbose(verbose)) == compact
    frames = StreamDecoder().feed(encode_stream(receipt))
    assert frames[0] == receipt.header
    assert [frame.block for frame in frames[1:-1]] == list(receipt.blocks)  # type: ignore[union-attr]
    assert frames[-1] == (receipt.final, receipt.signature)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(receipts())
def test_leaves_and_root_are_those_of_the_formats_description(receipt: Receipt) -> None:
    doc = edited(encode_verbose(receipt), lambda _: None)
    bodies = [block_bytes(block) for block in doc["blocks"]]
    assert bodies == [block.encode() for block in receipt.blocks]
    leaves = [b"epochless/v1/block\0" + receipt.header.digest_bytes + body for body in bodies]
    assert receipt.final.root == tree_root(leaves)


@pytest.mark.parametrize("sharpness", [0.05, 0.5, 1.0, 4.0, 40.0])
def test_proof_takes_at_most_eight_bytes_a_token_and_less_on_average(sharpness: float) -> None:
    total = tokens = 0
    for count in (*range(1, 12), 63, 64, 65, 500, 3000):
        header = make_header(max_tokens=count)
        builder = ReceiptBuilder(header)
        builder.append(*make_rows(header, 0, count, random.Random(count), sharpness=sharpness))
        receipt = builder.seal("length", SIGNER, seed=seed_of(header))
        size = proof_bytes(receipt)
        assert size <= 8 * count
        total, tokens = total + size, tokens + count
    assert total / tokens < 7.9


def test_worst_rows_stay_below_eight_bytes_a_token() -> None:
    # Half the mass around every draw leaves the widest choice of offsets: 63 bits a row.
    header = make_header(max_tokens=640)
    builder = ReceiptBuilder(header)
    tokens, _, _ = make_rows(header, 0, 640, random.Random(1))
    key = reveal_key(header, seed_of(header))
    assert key is not None
    draws = draw_range(key, 0, 640)
    low = [0 if word < ONE // 2 else ONE // 2 for word in draws]
    builder.append(tokens, low, [ONE // 2] * 640)
    assert proof_bytes(builder.seal("length", SIGNER, seed=seed_of(header))) / 640 <= 7.9


def test_filtered_row_adds_the_four_bytes_of_its_kept_mass_and_a_greedy_row_nothing() -> None:
    filtered = make_receipt(640, header=make_header(sampler=NUCLEUS, max_tokens=640))
    assert proof_bytes(filtered) <= (8 + 4) * 640
    assert proof_bytes(make_receipt(640, header=make_header(sampler=GREEDY, max_tokens=640))) == 0


def test_what_does_not_depend_on_the_tokens_takes_at_most_two_kibibytes() -> None:
    header = make_header(max_tokens=131_072, request_id="chatcmpl-" + "f" * 36, nonce="n" * 64, sampler=NUCLEUS)
    receipt = make_receipt(1000, header=header, finish_reason=ABORT, flags=[(500, MASKED)])
    assert fixed_bytes(receipt) <= 2048


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.booleans())
def test_receipt_does_not_depend_on_how_rows_were_appended(steps: list[int], keep: bool) -> None:
    total = sum(steps)
    header = make_header(max_tokens=total, sampler=NUCLEUS)
    tokens, low, width = make_rows(header, 0, total, random.Random(5))
    marks = [FILTERED | (MASKED if i % 7 == 0 else 0) for i in range(total)]
    kept = [ONE - i for i in range(total)]
    whole = ReceiptBuilder(header)
    whole.append(tokens, low, width, flags=marks, kept=kept)
    builder = ReceiptBuilder(header, keep_blocks=keep)
    blocks, start = [], 0
    for step in steps:
        end = start + step
        blocks += builder.append(
            tokens[start:end], low[start:end], width[start:end], flags=marks[start:end], kept=kept[start:end]
        )
        start = end
        assert builder.tokens == start
    rest, final = builder.finish("length", seed=seed_of(header))
    receipt = whole.seal("length", SIGNER, seed=seed_of(header))
    assert (tuple(blocks + rest), final) == (receipt.blocks, receipt.final)
    assert builder.blocks == (blocks + rest if keep else [])


@pytest.mark.parametrize(
    ("rows", "options", "threat"),
    [
        (([5], [0], [0]), {}, "column_range"),
        (([5], [1], [ONE]), {}, "interval_bounds"),
        (([5], [-1], [1]), {}, "column_range"),
        (([151_936], [0], [ONE]), {}, "token_out_of_vocabulary"),
        (([5, 6], [0], [ONE]), {}, "column_lengths"),
        (([5], [0], [ONE]), {"flags": FILTERED}, "column_lengths"),
        (([5], [0], [ONE]), {"flags": FILTERED, "kept": [ONE]}, "filter_flag"),
        (([5], [0], [ONE]), {"revision": 1}, "revision_index"),
        (([5], [0], [ONE]), {"sampler": 1}, "sampler_index"),
        (([5], [0], [7]), {"flags": FORCED}, "greedy_width"),
    ],
)
def test_builder_refuses_a_row_that_no_verifier_would_accept(
    rows: tuple[list[int], ...], options: dict[str, Any], threat: str
) -> None:
    builder = ReceiptBuilder(make_header())

    def build() -> None:
        builder.append(*rows, **options)
        builder.finish(ABORT, seed=None)

    with pytest.raises(ReceiptError) as refusal:
        build()
    assert refusal.value.fields["threat"] == threat


def test_builder_knows_a_revision_it_has_seen_and_refuses_another_base_model() -> None:
    builder = ReceiptBuilder(make_header())
    assert builder.revision_index(entry("revision-a", 7)) == 0
    assert builder.revision_index(entry("revision-b", 8)) == builder.revision_index(entry("revision-b", 8)) == 1
    base = RevisionEntry("base:" + named_digest("base"), None, None)
    assert builder.revision_index(base) == 2
    with pytest.raises(ReceiptError):
        builder.revision_index(RevisionEntry("base:" + named_digest("other"), None, None))


def test_compact_refuses_a_receipt_whose_blocks_and_final_record_disagree() -> None:
    receipt = make_receipt(130)
    other = make_receipt(130, rng_seed=2)
    for blocks in (receipt.blocks[:2], receipt.blocks[::-1], (*receipt.blocks, other.blocks[2])):
        with pytest.raises(ReceiptError):
            encode_compact(Receipt(receipt.header, blocks, receipt.final, receipt.signature))


@pytest.mark.parametrize("count", [0, 65])
def test_block_of_another_size_is_refused(count: int) -> None:
    block = make_receipt(64).blocks[0]
    value = block.encode_json()
    value["tokens"] = [5] * count
    with pytest.raises(ReceiptError):
        decode_block_json(value)
    with pytest.raises(ReceiptError):
        decode_block(block.encode()[:8] + count.to_bytes(4, "big") + block.encode()[12:])


def test_block_is_read_back_from_its_bytes_wherever_they_end() -> None:
    block = make_receipt(70, header=make_header(sampler=NUCLEUS), finish_reason=ABORT).blocks[0]
    body = block.encode()
    assert decode_block(body + b"rest") == (block, len(body))
    for end in range(len(body)):
        with pytest.raises(ReceiptError):
            decode_block(body[:end])
    assert block.kept_less_one != column()


def test_natural_kv_of_a_builder_starts_with_the_first_revision() -> None:
    header: Header = make_header(on_publish=CONTINUE)
    receipt = make_receipt(20, header=header, finish_reason=ABORT, moves=[(5, entry("b", 8))])
    assert receipt.final.kv == (KVSpan(0, 11, 0), KVSpan(11, 26, 1))
