"""Draw keys, draw counters, and Philox4x32-10 in the standard library, for whoever checks a draw.

A draw is a 32-bit word that depends on a key, a purpose and an index, and on nothing else. The index is the position
of the token among the generated tokens of its choice, so batching, preemption, chunking and restarts cannot move it.
One Philox block serves four consecutive indices: the counter is ``(index >> 2, purpose, 0)`` with the block number in
two little-endian words, and the lane is ``index & 3``.

Promises that two purposes or two keys never share a block. Does not promise unpredictability: Philox is not a cipher,
and a server that chooses its seed after seeing the prompt can grind. Knows no logits: see sampling/ for those.
"""

from __future__ import annotations

import enum
import struct
from functools import lru_cache
from typing import NamedTuple

from epochless_vllm.errors import EncodingError
from epochless_vllm.protocol.digests import bytes_from_digest, digest

SEEDED_CONTEXT = "epochless/v1/draw-key/seeded"
UNSEEDED_CONTEXT = "epochless/v1/draw-key/unseeded"
REQUEST_SEED_BYTES = 32
LANES = 4  # words of a Philox block
MAX_INDEX = (1 << 64) - 1  # block numbers then stay far inside their two words

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_BATCH_BLOCKS = 512  # wide enough that the big-integer loop overhead vanishes, small enough to stay in cache


class Purpose(enum.IntEnum):
    """What a draw decides; each has its own counter word, so that no two purposes share noise."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2


class DrawKey(NamedTuple):
    """The two 32-bit key words of a choice's stream."""

    word_0: int
    word_1: int


def seeded_key(*, seed: int, prompt_index: int, choice_index: int) -> DrawKey:
    """Return the key of a request that names its seed: the same on every server.

    ``seed`` is the request's own, before any offset for its choices.
    """
    return _derive_key(SEEDED_CONTEXT, _encode_integer(seed), prompt_index, choice_index)


def unseeded_key(
    *, request_seed: bytes, client_nonce: bytes, external_request_id: str, prompt_index: int, choice_index: int
) -> DrawKey:
    """Return the key of a request without a seed.

    Args:
        request_seed: 32 bytes drawn once by the front end and revealed at the end.
        client_nonce: the client's contribution; empty if it sent none.
        external_request_id: the request id the client sees.

    Raises:
        EncodingError: the seed is not 32 bytes, or the id is not encodable text.
    """
    if len(request_seed) != REQUEST_SEED_BYTES:
        raise EncodingError(f"a request seed has {REQUEST_SEED_BYTES} bytes, not {len(request_seed)}", reason="seed")
    try:
        identifier = external_request_id.encode("utf-8")
    except UnicodeEncodeError as error:
        raise EncodingError("a request id with a lone surrogate", reason="lone_surrogate") from error
    return _derive_key(UNSEEDED_CONTEXT, request_seed, prompt_index, choice_index, client_nonce, identifier)


def philox_block(key: DrawKey, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of Philox4x32-10 for one counter."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIER_0 * word_0, _MULTIPLIER_1 * word_2
        word_0, word_1 = (product_1 >> 32) ^ word_1 ^ key_0, product_1 & _WORD
        word_2, word_3 = (product_0 >> 32) ^ word_3 ^ key_1, product_0 & _WORD
        key_0, key_1 = (key_0 + _WEYL_0) & _WORD, (key_1 + _WEYL_1) & _WORD
    return word_0, word_1, word_2, word_3


def draw_at(key: DrawKey, index: int, purpose: Purpose = Purpose.SAMPLE) -> int:
    """Return the 32-bit draw of one index."""
    _check_range(index, 1)
    block = index >> 2
    return philox_block(key, (block & _WORD, block >> 32, purpose, 0))[index & 3]


def draw_range(key: DrawKey, start: int, count: int, purpose: Purpose = Purpose.SAMPLE) -> list[int]:
    """Return the draws of indices ``start .. start + count``, many blocks per arithmetic operation.

    Each Python integer holds one 32-bit word of up to 512 blocks, 64 bits apart, so that a product of every word
    with a 32-bit constant fits its own lane: one bigint operation steps all the blocks.
    """
    _check_range(start, count)
    first, last = start >> 2, (start + count + 3) >> 2
    words: list[int] = []
    for block in range(first, last, _BATCH_BLOCKS):
        words += _philox_blocks(key, block, min(_BATCH_BLOCKS, last - block), purpose)
    offset = start & 3
    return words[offset : offset + count]


def _check_range(start: int, count: int) -> None:
    if start < 0 or count < 0 or start + count > MAX_INDEX:
        raise EncodingError(f"draw indices {start} + {count} are outside 0 .. 2**64 - 1", reason="draw_index")


def _derive_key(context: str, secret: bytes, prompt_index: int, choice_index: int, *more: bytes) -> DrawKey:
    fields = (secret, *more, _encode_integer(prompt_index), _encode_integer(choice_index))
    return DrawKey(*struct.unpack("<II", bytes_from_digest(digest(context, *fields))[:8]))


def _encode_integer(value: int) -> bytes:
    return str(int(value)).encode("ascii")


@lru_cache(maxsize=64)  # one entry a batch length: 512 for long streams, the receipts' block length, and tails
def _lane_constants(blocks: int) -> tuple[int, int, int]:
    ones = int.from_bytes(b"\1\0\0\0\0\0\0\0" * blocks, "little")
    ramp = int.from_bytes(struct.pack(f"<{blocks}Q", *range(blocks)), "little")
    return ones, ramp, ones * _WORD


def _philox_blocks(key: DrawKey, block: int, blocks: int, purpose: int) -> list[int]:
    ones, ramp, mask = _lane_constants(blocks)
    numbers = ones * block + ramp
    word_0, word_1, word_2, word_3 = numbers & mask, (numbers >> 32) & mask, ones * purpose, 0
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = word_0 * _MULTIPLIER_0, word_2 * _MULTIPLIER_1
        word_0, word_1 = ((product_1 >> 32) & mask) ^ word_1 ^ (ones * key_0), product_1 & mask
        word_2, word_3 = ((product_0 >> 32) & mask) ^ word_3 ^ (ones * key_1), product_0 & mask
        key_0, key_1 = (key_0 + _WEYL_0) & _WORD, (key_1 + _WEYL_1) & _WORD
    layout = f"<{2 * blocks}I"
    words = [0] * (LANES * blocks)
    for lane, pair in ((0, word_0 | word_1 << 32), (2, word_2 | word_3 << 32)):
        halves = struct.unpack(layout, pair.to_bytes(8 * blocks, "little"))
        words[lane::LANES], words[lane + 1 :: LANES] = halves[0::2], halves[1::2]
    return words
