"""The three phases of sampling one row, compiled for the CPU: block peaks, block sums, and the draw.

Only the peaks and the sums of blocks are stored; the block that holds the drawn token is weighed again. See tasks.py
for how rows and blocks reach threads.
"""

from __future__ import annotations

import numpy as np

from epochless_vllm.sampling.arithmetic import (
    LARGEST_FINITE_KEY,
    LOWEST_KEY,
    NEGATIVE_INFINITY_KEY,
    NON_FINITE_KEY,
    draw_of,
    jit,
    logit_of,
    normalised,
    order_key,
    quantised,
    share_of,
    target_of,
    weight_at,
    weight_of,
)
from epochless_vllm.sampling.filters import BLOCK, gather_candidates, keep_above, select_cut, top_k_floor
from epochless_vllm.sampling.rows import (
    ALL_MASKED,
    BETA,
    DISTANCE_CAP,
    DRAW,
    GREEDY,
    KEPT,
    LO,
    MIN_WEIGHT,
    NON_FINITE,
    OK,
    SHIFT,
    STATUS,
    TOP_K,
    TOP_P,
    TOP_P_SHIFT,
    W,
)

_WHOLE = np.int64(1) << 32  # a share of one in the record


@jit
def store_peaks(logits_V, first, last, peaks_N):
    """Store the greatest order key of each block, or a key above infinity's if any logit is NaN."""
    for block in range(first, last):
        highest, lowest = LOWEST_KEY, NON_FINITE_KEY
        block_V = logits_V[block * BLOCK : (block + 1) * BLOCK]
        for j in range(block_V.shape[0]):
            key = order_key(block_V[j])
            highest, lowest = max(highest, key), min(lowest, key)
        peaks_N[block] = highest if lowest >= NEGATIVE_INFINITY_KEY else NON_FINITE_KEY  # a NaN may sort below -inf


@jit
def row_peak(peaks_N):
    highest = LOWEST_KEY
    for block in range(peaks_N.shape[0]):
        highest = max(highest, peaks_N[block])
    return highest


@jit
def store_sums(logits_V, first, last, parameters, tables, peak_key, sums_N):
    """Store the sum of the weights of each block."""
    if peak_key > LARGEST_FINITE_KEY or peak_key == NEGATIVE_INFINITY_KEY or parameters[GREEDY]:
        return
    peak, cap = quantised(logit_of(peak_key)), np.int32(parameters[DISTANCE_CAP])
    beta, shift = parameters[BETA], parameters[SHIFT]
    for block in range(first, last):
        total = np.int64(0)
        block_V = logits_V[block * BLOCK : (block + 1) * BLOCK]
        for j in range(block_V.shape[0]):
            distance = min(peak - quantised(block_V[j]), cap)
            # Explicit, because the mask of a row whose peak saturates below would be at distance zero.
            distance = cap if block_V[j] == -np.inf else distance
            total += weight_at(distance, beta, shift, tables)
        sums_N[block] = total


@jit
def _draw_candidate(ids, weights, kept, draw, record):
    total = np.int64(0)
    for i in range(kept):
        total += weights[i]
    target, below, i = target_of(draw, total), np.int64(0), 0
    while below + weights[i] <= target:
        below += weights[i]
        i += 1
    record[LO] = normalised(below, total)
    record[W] = normalised(below + weights[i], total) - record[LO]
    return np.int64(ids[i]), total


@jit
def _finish_filtered(logits_V, peaks_N, peak, parameters, tables, whole, draw, record):
    top_k, least_weight = parameters[TOP_K], max(parameters[MIN_WEIGHT], 1)
    floor, bound = LOWEST_KEY, least_weight
    if 0 < top_k < logits_V.shape[0]:
        floor = top_k_floor(logits_V, top_k)
    elif parameters[MIN_WEIGHT] == 0:
        # What follows the nucleus holds at most whole - need, so its last token outweighs their mean.
        need = share_of(parameters[TOP_P], parameters[TOP_P_SHIFT], whole)
        bound = max(bound, (whole - need) // logits_V.shape[0] + 1)
    ids, keys, weights = gather_candidates(logits_V, peaks_N, peak, parameters, tables, floor, bound)
    kept = ids.shape[0]
    if 0 < top_k < kept:
        cut, ties = select_cut(keys, weights, True, top_k)
        kept = keep_above(ids, keys, weights, kept, cut, ties)
    if parameters[TOP_P_SHIFT] > 0:
        considered = whole
        if least_weight > 1 or 0 < top_k < logits_V.shape[0]:
            considered = np.int64(0)
            for i in range(kept):
                considered += weights[i]
        need = share_of(parameters[TOP_P], parameters[TOP_P_SHIFT], considered)
        cut, ties = select_cut(keys[:kept], weights[:kept], False, need)
        kept = keep_above(ids, keys, weights, kept, cut, ties)
    token, total = _draw_candidate(ids, weights, kept, draw, record)
    record[KEPT] = normalised(total, whole)
    return token


@jit
def _finish_unfiltered(logits_V, sums_N, peak, parameters, tables, whole, draw, record):
    target, below, block = target_of(draw, whole), np.int64(0), 0
    while below + sums_N[block] <= target:
        below += sums_N[block]
        block += 1
    j, weight = block * BLOCK, weight_of(logits_V[block * BLOCK], peak, parameters, tables)
    while below + weight <= target:
        below += weight
        j += 1
        weight = weight_of(logits_V[j], peak, parameters, tables)
    record[LO] = normalised(below, whole)
    record[W] = normalised(below + weight, whole) - record[LO]
    record[KEPT] = _WHOLE
    return np.int64(j)


@jit
def _first_peak(logits_V, peaks_N, peak_key):
    block = 0
    while peaks_N[block] != peak_key:
        block += 1
    j = block * BLOCK
    while order_key(logits_V[j]) != peak_key:
        j += 1
    return np.int64(j)


@jit
def finish_row(logits_V, peaks_N, sums_N, parameters, tables, words, index, purpose, record):
    """Fill the record of a row and return its token; a refused row has token 0 and weight 0."""
    record[:] = 0
    peak_key = row_peak(peaks_N)
    if peak_key > LARGEST_FINITE_KEY:
        record[STATUS] = NON_FINITE
        return np.int64(0)
    if peak_key == NEGATIVE_INFINITY_KEY:
        record[STATUS] = ALL_MASKED
        return np.int64(0)
    record[STATUS] = OK
    if parameters[GREEDY]:
        record[W] = record[KEPT] = _WHOLE
        return _first_peak(logits_V, peaks_N, peak_key)
    peak, whole = quantised(logit_of(peak_key)), np.int64(0)
    for block in range(sums_N.shape[0]):
        whole += sums_N[block]
    draw = draw_of(words[0], words[1], index, purpose)
    record[DRAW] = draw
    if parameters[TOP_K] > 0 or parameters[TOP_P_SHIFT] > 0 or parameters[MIN_WEIGHT] > 0:
        return _finish_filtered(logits_V, peaks_N, peak, parameters, tables, whole, draw, record)
    return _finish_unfiltered(logits_V, sums_N, peak, parameters, tables, whole, draw, record)
