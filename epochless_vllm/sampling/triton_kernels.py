"""The exact sampler as Triton kernels, equal bit for bit to the CPU path.

A row is read twice: for the peaks of its blocks, and for their masses. The draw then reads the masses and one block.
Top-k and top-p each find their cut by three passes of an integer histogram over the row, most significant key bits
first; integer atomics commute, so no order of threads can show. No noise per token of the vocabulary anywhere.

Integers only after the one rounding of a logit, which Triton has no portable instruction for: see ``_quantised``.
Checked in Triton's interpreter; not yet run on a GPU. See triton_path.py for the launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epochless_vllm.sampling import rows

BETA = tl.constexpr(rows.BETA)
SHIFT = tl.constexpr(rows.SHIFT)
DISTANCE_CAP = tl.constexpr(rows.DISTANCE_CAP)
MIN_WEIGHT = tl.constexpr(rows.MIN_WEIGHT)
GREEDY = tl.constexpr(rows.GREEDY)
PARAMETERS = tl.constexpr(rows.PARAMETERS)
RECORD = tl.constexpr(rows.RECORD)
OK = tl.constexpr(rows.OK)
NON_FINITE = tl.constexpr(rows.NON_FINITE)
ALL_MASKED = tl.constexpr(rows.ALL_MASKED)

LOWEST_KEY = tl.constexpr(-(1 << 31))
NEGATIVE_INFINITY_KEY = tl.constexpr(-0x7F800001)
LARGEST_FINITE_KEY = tl.constexpr(0x7F7FFFFF)
NON_FINITE_KEY = tl.constexpr(0x7FFFFFFF)

# Columns of a selection's state.
NEED, REACHED, PREFIX, CUT, TIES, TIE_WEIGHT = (tl.constexpr(column) for column in range(6))
STATE = tl.constexpr(6)


@triton.jit
def _order_key(logits):
    """Map float32 to int32 monotonically, with -0.0 on +0.0."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _quantised(logits):
    """Round logit * 2**16 half to even: truncate, then settle by the remainder, which is exact."""
    scaled = tl.minimum(tl.maximum(logits, -8192.0), 8192.0) * 65536.0
    whole = scaled.to(tl.int32)
    rest = scaled - whole.to(tl.float32)
    odd = (whole & 1) != 0
    up = (rest > 0.5) | ((rest == 0.5) & odd)
    down = (rest < -0.5) | ((rest == -0.5) & odd)
    return whole + up.to(tl.int32) - down.to(tl.int32)


@triton.jit
def _weight(logits, peak, parameters, tables):
    """Return int64 weights; a masked token, which may sit at any distance of a saturated peak, has none."""
    cap = tl.load(parameters + DISTANCE_CAP)
    distance = tl.where(logits == float("-inf"), cap, tl.minimum((peak - _quantised(logits)).to(tl.int64), cap))
    shift = tl.load(parameters + SHIFT)
    exponent = (distance * tl.load(parameters + BETA) + ((shift * 0 + 1) << (shift - 1))) >> shift
    product = tl.load(tables + ((exponent >> 8) & 255)) * tl.load(tables + 256 + (exponent & 255))
    return product >> (22 + (exponent >> 16))


@triton.jit
def _row_peak(peaks, row, blocks, BLOCKS_P2: tl.constexpr):
    offsets = tl.arange(0, BLOCKS_P2)
    return tl.max(tl.load(peaks + row * blocks + offsets, mask=offsets < blocks, other=LOWEST_KEY))


@triton.jit
def _normalised(parts, totals):
    """Return floor(part * 2**32 / total) lane by lane, for 0 <= part <= total < 2**62."""
    whole = parts == totals
    quotients = parts * 0
    for _ in range(32):
        parts = parts << 1
        fits = parts >= totals
        parts = tl.where(fits, parts - totals, parts)
        quotients = (quotients << 1) + fits.to(tl.int64)
    return tl.where(whole, 1 << 32, quotients)


@triton.jit
def _target(draw, total):
    """Return ceil((draw + 1) * total / 2**32) - 1."""
    low = total & 0xFFFFFFFF
    lowest = (draw + 1) * (low & 0xFFFF)
    middle = (draw + 1) * (low >> 16) + (lowest >> 16)
    exact = ((lowest & 0xFFFF) | (middle & 0xFFFF)) == 0
    return (draw + 1) * (total >> 32) + (middle >> 16) - exact.to(tl.int64)


@triton.jit
def peaks_kernel(logits, stride, vocabulary, peaks, blocks, BLOCK: tl.constexpr):
    """Store the greatest order key of each block, or a key above infinity's if any logit is NaN."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + offsets, mask=offsets < vocabulary, other=float("-inf"))
    broken = tl.max((values != values).to(tl.int32)) != 0
    highest = tl.max(_order_key(values))
    tl.store(peaks + row * blocks + block, tl.where(broken, NON_FINITE_KEY, highest))


@triton.jit
def masses_kernel(
    logits, stride, vocabulary, parameters, tables, peaks, blocks, state, whole_sums, above_sums, tie_counts,
    BLOCK: tl.constexpr, BLOCKS_P2: tl.constexpr,
):  # fmt: skip
    """Store, for each block, its mass, its mass above the cut, and how many tokens are tied at the cut."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parameters += row * PARAMETERS
    peak_key = _row_peak(peaks, row, blocks, BLOCKS_P2)
    refused = (peak_key > LARGEST_FINITE_KEY) | (peak_key == NEGATIVE_INFINITY_KEY)
    if refused | (tl.load(parameters + GREEDY) != 0):
        return
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + offsets, mask=offsets < vocabulary, other=float("-inf"))
    weights = _weight(values, _quantised(_logit(peak_key)), parameters, tables)
    kept = weights >= tl.maximum(tl.load(parameters + MIN_WEIGHT), 1)
    keys, cut = _order_key(values).to(tl.int64), tl.load(state + row * STATE + CUT)
    place = row * blocks + block
    tl.store(whole_sums + place, tl.sum(weights))
    tl.store(above_sums + place, tl.sum(tl.where(kept & (keys > cut), weights, 0)))
    tl.store(tie_counts + place, tl.sum((kept & (keys == cut)).to(tl.int64)))


@triton.jit
def histogram_kernel(
    logits, stride, vocabulary, parameters, tables, peaks, blocks, state, histogram,
    ABOVE: tl.constexpr, BELOW: tl.constexpr, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_P2: tl.constexpr,
    BUCKETS: tl.constexpr,
):  # fmt: skip
    """Add the tokens that match the selection's prefix, by their next key bits in descending order.

    A prefix is the key's bits from ``ABOVE`` up; the next are those from ``BELOW`` up.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parameters += row * PARAMETERS
    peak_key = _row_peak(peaks, row, blocks, BLOCKS_P2)
    refused = (peak_key > LARGEST_FINITE_KEY) | (peak_key == NEGATIVE_INFINITY_KEY)
    if refused | (tl.load(state + row * STATE + NEED) == 0):
        return
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + offsets, mask=offsets < vocabulary, other=float("-inf"))
    weights = _weight(values, _quantised(_logit(peak_key)), parameters, tables)
    kept = weights >= tl.maximum(tl.load(parameters + MIN_WEIGHT), 1)
    bits = _order_key(values).to(tl.int64) + (1 << 31)
    kept = kept & ((bits >> ABOVE) == tl.load(state + row * STATE + PREFIX))
    bucket = BUCKETS - 1 - ((bits >> BELOW) & ((1 << (ABOVE - BELOW)) - 1))
    tl.atomic_add(histogram + row * BUCKETS + bucket, weights if BY_MASS else weights * 0 + 1, mask=kept)


@triton.jit
def narrow_kernel(
    state, histogram, parameters, tables, peaks, blocks,
    BITS: tl.constexpr, LAST: tl.constexpr, BY_MASS: tl.constexpr, BLOCKS_P2: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Extend a selection's prefix by the bucket in which it reaches its need, and clear the histogram.

    The last step turns the prefix into the cut and counts the ties that are kept. A selection that never reaches its
    need keeps everything: its cut stays where it was.
    """
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    need = tl.load(state + NEED)
    if need == 0:
        return
    offsets = tl.arange(0, BUCKETS)
    cumulative = tl.cumsum(tl.load(histogram + row * BUCKETS + offsets), 0) + tl.load(state + REACHED)
    tl.store(histogram + row * BUCKETS + offsets, tl.zeros([BUCKETS], dtype=tl.int64))
    short = (cumulative < need).to(tl.int64)
    bucket = tl.sum(short)
    if bucket == BUCKETS:
        tl.store(state + NEED, 0)
        return
    reached = tl.max(tl.where(short != 0, cumulative, tl.load(state + REACHED)))
    prefix = (tl.load(state + PREFIX) << BITS) | (BUCKETS - 1 - bucket)
    if LAST:
        cut = prefix - (1 << 31)
        peak = _quantised(_logit(_row_peak(peaks, row, blocks, BLOCKS_P2)))
        weight = _weight(_logit(cut.to(tl.int32)), peak, parameters + row * PARAMETERS, tables)
        share = weight if BY_MASS else weight * 0 + 1
        tl.store(state + CUT, cut)
        tl.store(state + TIES, (need - reached + share - 1) // share)
        tl.store(state + TIE_WEIGHT, weight)
    else:
        tl.store(state + REACHED, reached)
        tl.store(state + PREFIX, prefix)


@triton.jit
def draw_kernel(
    logits, stride, vocabulary, parameters, tables, keys, positions, purpose, peaks, blocks, state,
    whole_sums, above_sums, tie_counts, tokens, records,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_P2: tl.constexpr,
):  # fmt: skip
    """Draw one token: find its block among the sums, weigh that block again, and write the record."""
    row = tl.program_id(0).to(tl.int64)
    parameters += row * PARAMETERS
    records += row * RECORD
    places = tl.arange(0, BLOCKS_P2)
    stored = places < blocks
    peaks_N = tl.load(peaks + row * blocks + places, mask=stored, other=LOWEST_KEY)
    peak_key = tl.max(peaks_N)
    broken, masked = peak_key > LARGEST_FINITE_KEY, peak_key == NEGATIVE_INFINITY_KEY
    status = tl.where(broken, NON_FINITE, tl.where(masked, ALL_MASKED, OK))
    if status != OK:
        tl.store(tokens + row, 0)
        for column in tl.static_range(RECORD - 1):
            tl.store(records + column, 0)
        tl.store(records + RECORD - 1, status.to(tl.int64))
        return
    lanes = tl.arange(0, BLOCK)
    if tl.load(parameters + GREEDY) != 0:
        block = tl.min(tl.where(peaks_N == peak_key, places, BLOCKS_P2))
        offsets = block * BLOCK + lanes
        values = tl.load(logits + row * stride + offsets, mask=offsets < vocabulary, other=float("-inf"))
        first = tl.min(tl.where(_order_key(values) == peak_key, lanes, BLOCK))
        tl.store(tokens + row, (block * BLOCK + first).to(tl.int64))
        tl.store(records + 0, 0)
        tl.store(records + 1, 1 << 32)
        tl.store(records + 2, 0)
        tl.store(records + 3, 1 << 32)
        tl.store(records + 4, 0)
        return
    peak = _quantised(_logit(peak_key))
    whole = tl.sum(tl.load(whole_sums + row * blocks + places, mask=stored, other=0))
    sums_N = tl.load(above_sums + row * blocks + places, mask=stored, other=0)
    cut = tl.load(state + row * STATE + CUT)
    ties = tl.load(state + row * STATE + TIES)
    ties_before_N = sums_N * 0
    if FILTERED:
        ties_N = tl.load(tie_counts + row * blocks + places, mask=stored, other=0)
        ties_before_N = tl.cumsum(ties_N, 0) - ties_N
        kept_ties_N = tl.minimum(tl.maximum(ties - ties_before_N, 0), ties_N)
        sums_N += kept_ties_N * tl.load(state + row * STATE + TIE_WEIGHT)
    total = tl.sum(sums_N)

    index = tl.load(positions + row)
    word_0, word_1, word_2, word_3 = tl.philox(
        tl.load(keys + row), (index >> 2).to(tl.uint32), (index >> 34).to(tl.uint32),
        (index * 0 + purpose).to(tl.uint32), (index * 0).to(tl.uint32),
    )  # fmt: skip
    lane = index & 3
    word = tl.where(lane == 0, word_0, tl.where(lane == 1, word_1, tl.where(lane == 2, word_2, word_3)))
    draw = word.to(tl.uint32, bitcast=True).to(tl.int64)

    target = _target(draw, total)
    cumulative_N = tl.cumsum(sums_N, 0)
    block = tl.sum((stored & (cumulative_N <= target)).to(tl.int32))
    below = tl.sum(tl.where(places < block, sums_N, 0))
    offsets = block * BLOCK + lanes
    values = tl.load(logits + row * stride + offsets, mask=offsets < vocabulary, other=float("-inf"))
    weights = _weight(values, peak, parameters, tables)
    if FILTERED:
        kept = weights >= tl.maximum(tl.load(parameters + MIN_WEIGHT), 1)
        order = _order_key(values).to(tl.int64)
        tied = (kept & (order == cut)).to(tl.int64)
        rank = tl.sum(tl.where(places == block, ties_before_N, 0)) + tl.cumsum(tied, 0) - tied
        weights = tl.where(kept & ((order > cut) | ((tied != 0) & (rank < ties))), weights, 0)
    cumulative = below + tl.cumsum(weights, 0)
    inside = tl.sum((cumulative <= target).to(tl.int32))
    above = tl.sum(tl.where(lanes == inside, cumulative, 0))
    below = above - tl.sum(tl.where(lanes == inside, weights, 0))
    # Three shares in the lanes of one long division: below and above of what is kept, and what is kept of the whole.
    trio = tl.arange(0, 4)
    parts = tl.where(trio == 0, below, tl.where(trio == 1, above, total))
    shares = _normalised(parts, tl.where(trio < 2, total, whole))
    lo = tl.sum(tl.where(trio == 0, shares, 0))
    tl.store(tokens + row, (block * BLOCK + inside).to(tl.int64))
    tl.store(records + 0, lo)
    tl.store(records + 1, tl.sum(tl.where(trio == 1, shares, 0)) - lo)
    tl.store(records + 2, draw)
    tl.store(records + 3, tl.sum(tl.where(trio == 2, shares, 0)))
    tl.store(records + 4, 0)
