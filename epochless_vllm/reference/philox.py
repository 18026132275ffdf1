"""Philox4x32, written out from its definition: one block in plain integers, and many at once in NumPy.

An oracle for the draws of protocol/ and sampling/; shares no code with either. ``rounds`` is a parameter so that a
test can show what 7 rounds would give. NumPy's own Philox is the 4x64 one and is no oracle for this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = tuple[int, int, int, int]


def block_of(counter: Words, key: tuple[int, int], rounds: int = 10) -> Words:
    """Return the four output words of one counter."""
    x = list(counter)
    for number in range(rounds):
        left = (key[0] + number * 0x9E3779B9) % 2**32
        right = (key[1] + number * 0xBB67AE85) % 2**32
        high_0, low_0 = divmod(0xD2511F53 * x[0], 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * x[2], 2**32)
        x = [high_1 ^ x[1] ^ left, low_1, high_0 ^ x[3] ^ right, low_0]
    return x[0], x[1], x[2], x[3]


def draw(key: tuple[int, int], index: int, purpose: int = 0) -> int:
    """Return the 32-bit draw of an index: lane ``index % 4`` of block ``index // 4`` of its purpose."""
    high, low = divmod(index // 4, 2**32)
    return block_of((low, high, purpose, 0), key)[index % 4]


def draws(keys_B2: NDArray[np.uint32], indices_B: NDArray[np.int64], purpose: int = 0) -> NDArray[np.int64]:
    """Return the draws of many (key, index) pairs as ``[B]``."""
    word = np.uint64(0xFFFFFFFF)
    left, right = keys_B2[:, 0].astype(np.uint64), keys_B2[:, 1].astype(np.uint64)
    blocks = indices_B.astype(np.uint64) // np.uint64(4)
    x0, x1 = blocks & word, blocks >> np.uint64(32)
    x2, x3 = np.full_like(x0, purpose), np.zeros_like(x0)
    for _ in range(10):
        product_0, product_1 = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        x0, x1 = (product_1 >> np.uint64(32)) ^ x1 ^ left, product_1 & word
        x2, x3 = (product_0 >> np.uint64(32)) ^ x3 ^ right, product_0 & word
        left, right = (left + np.uint64(0x9E3779B9)) & word, (right + np.uint64(0xBB67AE85)) & word
    lanes = np.stack([x0, x1, x2, x3])
    words_B: NDArray[np.int64] = lanes[indices_B % 4, np.arange(len(indices_B))].astype(np.int64)
    return words_B
