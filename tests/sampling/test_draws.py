from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import EncodingError
from epochless_vllm.protocol import draws
from epochless_vllm.protocol.draws import DrawKey, Purpose, draw_at, draw_range, philox_block, seeded_key, unseeded_key
from epochless_vllm.reference import philox
from epochless_vllm.sampling.arithmetic import draw_of
from epochless_vllm.sampling.torch_path import draw_words

VECTORS = Path(__file__).parent.parent / "vectors" / "sampler" / "philox4x32.txt"
WORDS = st.integers(0, 2**32 - 1)
REQUEST_SEED = bytes(range(32))


def known_answers(rounds: int) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    lines = [line.split() for line in VECTORS.read_text().splitlines() if not line.startswith("#")]
    rows = [[int(word, 16) for word in line[1:]] for line in lines if line[0] == str(rounds)]
    assert rows
    return [(tuple(row[:4]), tuple(row[4:6]), tuple(row[6:])) for row in rows]


def test_philox_gives_the_known_answers() -> None:
    for counter, key, expected in known_answers(10):
        assert philox_block(DrawKey(*key), counter) == expected
        assert philox.block_of(counter, key) == expected


def test_seven_rounds_give_their_own_known_answers_and_not_ours() -> None:
    for counter, key, expected in known_answers(7):
        assert philox.block_of(counter, key, rounds=7) == expected
        assert philox_block(DrawKey(*key), counter) != expected


def test_every_implementation_draws_the_reference_word() -> None:
    generator = np.random.default_rng(3)
    keys_B2 = generator.integers(0, 1 << 32, (2000, 2), dtype=np.uint32)
    positions_B = generator.integers(0, 1 << 62, 2000) >> generator.integers(0, 62, 2000)
    key_words_2B = torch.from_numpy(keys_B2.astype(np.int64).T.copy())
    for purpose in Purpose:
        expected_B = philox.draws(keys_B2, positions_B, purpose)
        by_torch_B = draw_words(key_words_2B, torch.from_numpy(positions_B), purpose).numpy()
        assert (by_torch_B == expected_B).all()
        for row in range(0, 2000, 50):
            key, position = DrawKey(*map(int, keys_B2[row])), int(positions_B[row])
            assert draw_at(key, position, purpose) == expected_B[row] == philox.draw(key, position, purpose)
            assert draw_of(keys_B2[row, 0], keys_B2[row, 1], positions_B[row], int(purpose)) == expected_B[row]


@given(
    st.tuples(WORDS, WORDS),
    st.one_of(st.integers(0, 5000), st.integers(2**34 - 3000, 2**34 + 3000), st.integers(0, 2**64 - 10_000)),
    st.integers(0, 2600),
    st.sampled_from(Purpose),
)
def test_a_range_of_draws_is_its_single_draws(words: tuple[int, int], start: int, count: int, purpose: Purpose) -> None:
    key = DrawKey(*words)
    found = draw_range(key, start, count, purpose)
    assert len(found) == count
    for offset in {0, 1, 2, 3, count // 2, count - 1} & set(range(count)):
        assert found[offset] == draw_at(key, start + offset, purpose)


def test_one_block_serves_four_indices_and_the_block_number_fills_two_words() -> None:
    key = DrawKey(1, 2)
    index = (0x12345678_9ABCDEF0 << 2) | 3
    assert draw_at(key, index & (2**64 - 1)) == philox_block(key, ((index >> 2) & 0xFFFFFFFF, 0x12345678, 0, 0))[3]
    assert [draw_at(key, i) for i in range(4)] == list(philox_block(key, (0, 0, 0, 0)))
    assert draw_at(key, 2**34) != draw_at(key, 0)


def test_purposes_never_share_a_word() -> None:
    key = DrawKey(5, 6)
    streams = [set(draw_range(key, 0, 3000, purpose)) for purpose in Purpose]
    assert sum(map(len, streams)) - len(set.union(*streams)) < 10  # 9,000 words of 32 bits barely collide
    assert draw_at(key, 7, Purpose.DRAFT) == philox_block(key, (1, 0, 1, 0))[3]


def test_draws_beyond_the_counter_are_refused() -> None:
    for start, count in ((-1, 1), (0, -1), (2**64, 1), (2**64 - 2, 2)):
        with pytest.raises(EncodingError):
            draw_range(DrawKey(0, 0), start, count)
    with pytest.raises(EncodingError):
        draw_at(DrawKey(0, 0), -1)


def test_keys_are_the_ones_of_format_one() -> None:
    assert seeded_key(seed=42, prompt_index=0, choice_index=0) == (1563142929, 3209694835)
    key = unseeded_key(
        request_seed=REQUEST_SEED, client_nonce=b"nonce", external_request_id="cmpl-1", prompt_index=1, choice_index=2
    )
    assert key == (942941344, 3405131561)


def test_a_seeded_key_depends_on_seed_prompt_and_choice_alone() -> None:
    keys = {seeded_key(seed=s, prompt_index=p, choice_index=c) for s in (-1, 0, 1, 12) for p in (0, 1) for c in (0, 1)}
    assert len(keys) == 16
    assert seeded_key(seed=1, prompt_index=21, choice_index=0) != seeded_key(seed=12, prompt_index=1, choice_index=0)


def test_every_field_moves_an_unseeded_key_and_no_field_boundary_can_shift() -> None:
    base = {
        "request_seed": REQUEST_SEED,
        "client_nonce": b"ab",
        "external_request_id": "c",
        "prompt_index": 0,
        "choice_index": 0,
    }
    changes = [
        {"request_seed": bytes(32)},
        {"client_nonce": b"a", "external_request_id": "bc"},
        {"client_nonce": b""},
        {"external_request_id": ""},
        {"prompt_index": 1},
        {"choice_index": 1},
    ]
    keys = {unseeded_key(**{**base, **change}) for change in [{}, *changes]}
    assert len(keys) == 1 + len(changes)
    assert seeded_key(seed=0, prompt_index=0, choice_index=0) not in keys


def test_a_request_seed_of_another_length_or_an_unencodable_id_is_refused() -> None:
    rest = {"client_nonce": b"", "prompt_index": 0, "choice_index": 0}
    for seed in (b"", bytes(31), bytes(33)):
        with pytest.raises(EncodingError):
            unseeded_key(request_seed=seed, external_request_id="r", **rest)
    with pytest.raises(EncodingError):
        unseeded_key(request_seed=REQUEST_SEED, external_request_id="\ud800", **rest)


def test_a_draw_off_by_one_round_or_lane_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    key, expected = DrawKey(3, 4), philox.draw((3, 4), 9)
    assert draw_at(key, 9) == expected
    assert philox_block(key, (9 >> 2, 0, 0, 0))[(9 & 3) ^ 3] != expected
    monkeypatch.setattr(draws, "_ROUNDS", 9)
    assert draw_at(key, 9) != expected
    assert draw_range(key, 9, 1) != [expected]
