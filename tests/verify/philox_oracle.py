"""Philox4x32, draw keys and counters written again from their definition, with the faults a server could have."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 10) -> tuple[int, ...]:
    c = list(counter)
    k = list(key)
    for _ in range(rounds):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & WORD, first >> 32 ^ c[3] ^ k[1], first & WORD]
        k = [k[0] + 0x9E3779B9 & WORD, k[1] + 0xBB67AE85 & WORD]
    return tuple(c)


def key_of(header: dict[str, Any], seed: str, *, choice_index: int | None = None) -> tuple[int, int]:
    """The key of a header (JSON) and a seed as the final record spells it."""
    choice = header["choice_index"] if choice_index is None else choice_index
    indices = [str(header["prompt_index"]).encode(), str(choice).encode()]
    if header["draws"]["kind"] == "seeded":
        context, fields = b"epochless/v1/draw-key/seeded", [seed.encode(), *indices]
    else:
        context = b"epochless/v1/draw-key/unseeded"
        fields = [bytes.fromhex(seed), (header["nonce"] or "").encode(), header["request_id"].encode(), *indices]
    text = context + b"\0" + b"".join(struct.pack(">Q", len(field)) + field for field in fields)
    first, second = struct.unpack("<II", hashlib.sha256(text).digest()[:8])
    return first, second


def draw(
    key: tuple[int, int], index: int, *, rounds: int = 10, purpose: int = 0, mirror: bool = False, wrap: bool = False
) -> int:
    block = index >> 2
    if wrap:
        block &= WORD
    lane = 3 - (index & 3) if mirror else index & 3
    return philox((block & WORD, block >> 32, purpose, 0), key, rounds)[lane]
