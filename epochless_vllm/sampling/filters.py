"""Exact top-k, top-p and min-p of one row, in linear time and without sorting, compiled for the CPU.

All three keep a prefix of the tokens in order of (float32 value descending, token id ascending), because weights
never rise along it. So each is a cut: a key, and how many of the tokens tied at it are kept.
"""

from __future__ import annotations

import numpy as np

from epochless_vllm.sampling.arithmetic import LIMIT, LOWEST_KEY, SCALE, jit, order_key, weight_at, weight_of
from epochless_vllm.sampling.rows import BETA, DISTANCE_CAP, SHIFT

BLOCK = 1024  # logits to a partial sum, and to a stored peak

_GROUP = 64  # logits to a maximum when bounding top-k
_BUCKETS_LOG2 = 12  # of a selection histogram


@jit
def select_cut(keys, masses, unit, need):
    """Return the key at which masses added in descending key order reach ``need``, and how many of its ties count.

    ``unit`` counts entries instead of their masses. Equal keys have equal masses.
    """
    low, high = np.int64(keys[0]), np.int64(keys[0])
    for i in range(keys.shape[0]):
        low, high = min(low, np.int64(keys[i])), max(high, np.int64(keys[i]))
    reached, tie = np.int64(0), np.int64(1)
    histogram = np.empty(1 << _BUCKETS_LOG2, np.int64)
    while True:
        shift = np.int64(0)
        while (high - low) >> (shift + _BUCKETS_LOG2):
            shift += 1
        histogram[:] = 0
        for i in range(keys.shape[0]):
            key = np.int64(keys[i])
            if low <= key <= high:
                tie = np.int64(1) if unit else masses[i]
                histogram[(high - key) >> shift] += tie
        bucket = 0
        while reached + histogram[bucket] < need:
            reached += histogram[bucket]
            bucket += 1
        high -= bucket << shift
        low = max(low, high - (np.int64(1) << shift) + 1)
        if shift == 0:
            break
    for i in range(keys.shape[0]):
        if keys[i] == high:
            tie = np.int64(1) if unit else masses[i]
            break
    return np.int32(high), (need - reached + tie - 1) // tie


@jit
def keep_above(ids, keys, masses, count, cut, ties):
    """Move the entries above ``cut`` and its first ``ties`` ties to the front, in order; return how many they are."""
    kept = 0
    for i in range(count):
        tied = keys[i] == cut
        if keys[i] > cut or (tied and ties > 0):
            ties -= 1 if tied else 0
            ids[kept], keys[kept], masses[kept] = ids[i], keys[i], masses[i]
            kept += 1
    return kept


@jit
def _heaviest_distance(least_weight, parameters, tables):
    """Return the greatest distance at which a weight is at least ``least_weight``, for one in 1 .. 2**40."""
    near, far = np.int64(0), parameters[DISTANCE_CAP]
    while far - near > 1:
        middle = (near + far) >> 1
        if weight_at(middle, parameters[BETA], parameters[SHIFT], tables) >= least_weight:
            near = middle
        else:
            far = middle
    return near


@jit
def top_k_floor(logits_V, top_k):
    """Return a key that at least ``top_k`` logits reach: the top_k-th greatest of the maxima of short groups."""
    groups = (logits_V.shape[0] + _GROUP - 1) // _GROUP
    if groups < top_k:
        return LOWEST_KEY
    maxima = np.empty(groups, np.int32)
    for group in range(groups):
        highest = LOWEST_KEY
        for j in range(group * _GROUP, min((group + 1) * _GROUP, logits_V.shape[0])):
            highest = max(highest, order_key(logits_V[j]))
        maxima[group] = highest
    return select_cut(maxima, np.empty(0, np.int64), True, top_k)[0]


@jit
def gather_candidates(logits_V, peaks_N, peak, parameters, tables, floor, least_weight):
    """Return ids, keys and weights, in id order, of the tokens whose key and weight reach the two bounds."""
    # No float32 lies strictly between this bound and the least logit of the least weight.
    bound = np.float32(peak - _heaviest_distance(least_weight, parameters, tables) - 1) / SCALE
    floor = max(floor, order_key(bound)) if bound > -LIMIT else floor
    count = 0
    for block in range(peaks_N.shape[0]):
        if peaks_N[block] >= floor:
            for j in range(block * BLOCK, min((block + 1) * BLOCK, logits_V.shape[0])):
                count += order_key(logits_V[j]) >= floor
    ids, keys, weights = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int64)
    count = 0
    for block in range(peaks_N.shape[0]):
        if peaks_N[block] >= floor:
            for j in range(block * BLOCK, min((block + 1) * BLOCK, logits_V.shape[0])):
                key = order_key(logits_V[j])
                if key >= floor:
                    weight = weight_of(logits_V[j], peak, parameters, tables)
                    if weight >= least_weight:
                        ids[count], keys[count], weights[count] = j, key, weight
                        count += 1
    return ids[:count], keys[:count], weights[:count]
