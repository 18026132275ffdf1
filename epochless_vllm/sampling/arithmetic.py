"""Scalar integer arithmetic of the sampler, compiled for the CPU.

All arithmetic is signed 64-bit unless cast. Every function here is compiled into the tasks of kernels.py.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from epochless_vllm.protocol.sampler_config import FRACTION_BITS, SATURATION
from epochless_vllm.sampling.rows import BETA, DISTANCE_CAP, SHIFT
from epochless_vllm.sampling.tables import PRODUCT_SHIFT

SCALE = np.float32(1 << FRACTION_BITS)
LIMIT = np.float32(SATURATION)
LOWEST_KEY = np.int32(-(1 << 31))
NEGATIVE_INFINITY_KEY = np.int32(np.float32("-inf").view(np.int32) ^ 0x7FFFFFFF)
LARGEST_FINITE_KEY = np.int32(0x7F7FFFFF)
NON_FINITE_KEY = np.int32(0x7FFFFFFF)

jit = njit(error_model="numpy", nogil=True)  # no exceptions: a task has no interpreter to raise them in


@jit
def order_key(logit):
    """Map float32 to int32 monotonically, with -0.0 on +0.0."""
    bits = np.float32(logit + np.float32(0)).view(np.int32)
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@jit
def logit_of(key):
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@jit
def quantised(logit):
    return np.int32(np.rint(min(max(logit, -LIMIT), LIMIT) * SCALE))


@jit
def weight_at(distance, beta, shift, tables):
    exponent = (np.int64(distance) * (beta & 0x7FFFFFFF) + ((1 << shift) >> 1)) >> shift
    product = tables[0, (exponent >> 8) & 255] * tables[1, exponent & 255]
    return product >> (PRODUCT_SHIFT + (exponent >> 16))


@jit
def weight_of(logit, peak, parameters, tables):
    if logit == -np.inf:
        return np.int64(0)
    distance = min(peak - quantised(logit), np.int32(parameters[DISTANCE_CAP]))
    return weight_at(distance, parameters[BETA], parameters[SHIFT], tables)


@jit
def normalised(part, total):
    """Return floor(part * 2**32 / total) for 0 <= part <= total < 2**62."""
    quotient = np.int64(0)
    if part == total:
        return np.int64(1) << 32
    for _ in range(32):
        part <<= 1
        quotient <<= 1
        if part >= total:
            part -= total
            quotient |= 1
    return quotient


@jit
def draw_of(word_0, word_1, index, purpose):
    """Return the 32-bit draw of a key, an index and a purpose: a word of one Philox4x32-10 block."""
    mask, wide = np.uint64(0xFFFFFFFF), np.uint64(32)
    key_0, key_1 = np.uint64(word_0), np.uint64(word_1)
    block = np.uint64(index >> 2)
    c0, c1, c2, c3 = block & mask, block >> wide, np.uint64(purpose), np.uint64(0)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> wide) ^ c1 ^ key_0, p1 & mask, (p0 >> wide) ^ c3 ^ key_1, p0 & mask
        key_0, key_1 = (key_0 + np.uint64(0x9E3779B9)) & mask, (key_1 + np.uint64(0xBB67AE85)) & mask
    lane = index & 3
    word = c0 if lane == 0 else c1 if lane == 1 else c2 if lane == 2 else c3
    return np.int64(word)


@jit
def target_of(draw, total):
    """Return ceil((draw + 1) * total / 2**32) - 1: the drawn token is the first whose cumulative exceeds it."""
    high = (draw + 1) * (total >> 32)
    low = np.uint64(draw + 1) * np.uint64(total & 0xFFFFFFFF)
    if low == 0:
        return high - 1
    return high + np.int64((low - np.uint64(1)) >> np.uint64(32))


@jit
def share_of(numerator, shift, total):
    """Return ceil(numerator * total / 2**shift) for a numerator under 2**53 and a shift under 128."""
    mask = np.uint64(0xFFFFFFFF)
    n0, n1 = np.uint64(numerator) & mask, np.uint64(numerator) >> np.uint64(32)
    t0, t1 = np.uint64(total) & mask, np.uint64(total) >> np.uint64(32)
    low, middle = n0 * t0, n0 * t1 + ((n0 * t0) >> np.uint64(32))  # n0 * t1 is under 2**62
    middle_low = n1 * t0 + (middle & mask)
    high = n1 * t1 + (middle >> np.uint64(32)) + (middle_low >> np.uint64(32))
    low = (low & mask) | ((middle_low & mask) << np.uint64(32))
    if shift == 0:
        return np.int64(low)
    if shift >= 64:
        rest = np.uint64(shift - 64)
        dropped = low | (high & ((np.uint64(1) << rest) - np.uint64(1)))
        return np.int64(high >> rest) + (1 if dropped else 0)
    down = np.uint64(shift)
    kept = (high << (np.uint64(64) - down)) | (low >> down)
    return np.int64(kept) + (1 if low & ((np.uint64(1) << down) - np.uint64(1)) else 0)
