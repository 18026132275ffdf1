"""Exact top-k, top-p and min-p of one row, in linear time and without sorting, compiled for the CPU.

All three keep a prefix of the tokens in order of (float32 value descending, token id ascending), because weights
never rise along it. So each is a cut: a key, and how many of the tokens tied at it are kept.
"""

from __future__ import annotations

import numpy as np

from epochless_vllm.sampling.arithmetic import LIMIT, LOWEST_KEY, SCALE, jit, logit_of, order_key, weight_at, weight_of
from epochless_vllm.sampling.rows import BETA, DISTANCE_CAP, SHIFT

BLOCK = 1024  # logits to a partial sum, and to a stored peak

_GROUP = 64  # logits to a maximum when bounding top-k
_BUCKETS_LOG2 = 12  # of a selection histogram


@jit
def select_cut(keys, masses, unit, need):
    """Return the key at which masses added in descending key order reach ``need``, and how many of its ties count.

    ``unit`` counts entries instead of their masses; ``need`` is in 1 .. their sum. Equal keys have equal masses.
    """
    lowest, highest = keys[0], keys[0]
    for i in range(keys.shape[0]):
        lowest, highest = min(lowest, keys[i]), max(highest, keys[i])
    low, high, reached = np.int64(lowest), np.int64(highest), np.int64(0)
    histogram = np.empty(1 << _BUCKETS_LOG2, np.int64)
    while True:
        shift = np.int64(0)
        while (high - low) >> (shift + _BUCKETS_LOG2):
            shift += 1
        histogram[:] = 0
        for i in range(keys.shape[0]):
            if low <= keys[i] <= high:
                histogram[(high - keys[i]) >> shift] += 1 if unit else masses[i]
        bucket = 0
        while reached + histogram[bucket] < need:
            reached += histogram[bucket]
            bucket += 1
        high -= bucket << shift
        low = max(low, high - (np.int64(1) << shift) + 1)
        if shift == 0:
            break
    tie = np.int64(1)
    if not unit:
        i = 0
        while keys[i] != high:
            i += 1
        tie = masses[i]
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
def _furthest_distance(least_weight, parameters, tables):
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
        highest, group_V = LOWEST_KEY, logits_V[group * _GROUP : (group + 1) * _GROUP]
        for j in range(group_V.shape[0]):
            highest = max(highest, order_key(group_V[j]))
        maxima[group] = highest
    return select_cut(maxima, np.empty(0, np.int64), True, top_k)[0]


@jit
def gather_candidates(logits_V, peaks_N, peak, parameters, tables, floor, least_weight):
    """Return ids, keys and weights, in id order, of the tokens whose key and weight reach the two bounds."""
    # At or below the least logit of enough weight, though not always that logit: weights are compared below too.
    bound = np.float32(peak - _furthest_distance(least_weight, parameters, tables) - 1) / SCALE
    floor = max(floor, order_key(bound)) if bound > -LIMIT else floor
    count = 0
    for block in range(peaks_N.shape[0]):
        if peaks_N[block] >= floor:
            block_V = logits_V[block * BLOCK : (block + 1) * BLOCK]
            for j in range(block_V.shape[0]):
                count += order_key(block_V[j]) >= floor
    # One entry to spare: the next place is written before it is known to be taken, which spares a branch.
    ids, keys, weights = np.empty(count + 1, np.int32), np.empty(count + 1, np.int32), np.empty(count + 1, np.int64)
    count = 0
    for block in range(peaks_N.shape[0]):
        if peaks_N[block] >= floor:
            block_V = logits_V[block * BLOCK : (block + 1) * BLOCK]
            for j in range(block_V.shape[0]):
                key = order_key(block_V[j])
                ids[count], keys[count] = block * BLOCK + j, key
                count += key >= floor
    for i in range(count):
        weights[i] = weight_of(logit_of(keys[i]), peak, parameters, tables)
    taken = 0
    for i in range(count):
        if weights[i] >= least_weight:
            ids[taken], keys[taken], weights[taken] = ids[i], keys[i], weights[i]
            taken += 1
    return ids[:taken], keys[:taken], weights[:taken]
