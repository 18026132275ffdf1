"""The exact sampler in plain torch operations, on any device: the fallback where numba and Triton are missing.

Equal bit for bit to the compiled paths and several times slower: it keeps whole rows of weights, and sorts a batch
that has filters. Signed 64-bit integers throughout; where a product passes 63 bits it is split.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epochless_vllm.protocol.sampler_config import FRACTION_BITS, SATURATION
from epochless_vllm.sampling.rows import (
    ALL_MASKED,
    BETA,
    DISTANCE_CAP,
    GREEDY,
    MIN_WEIGHT,
    NON_FINITE,
    OK,
    SHIFT,
    TOP_K,
    TOP_P,
    TOP_P_SHIFT,
)
from epochless_vllm.sampling.tables import PRODUCT_SHIFT, build_tables

_WORD = 0xFFFFFFFF


def sample_rows_torch(
    logits_BV: Tensor,
    parameters_BP: NDArray[np.int64],
    keys_B2: NDArray[np.uint32],
    positions_B: NDArray[np.int64],
    purpose: int,
) -> tuple[Tensor, Tensor]:
    """Return (tokens ``[B]``, records ``[B, 5]``), as ``sample_rows`` does."""
    device = logits_BV.device
    columns_PB = torch.as_tensor(np.ascontiguousarray(parameters_BP.T), device=device)
    key_words_2B = torch.as_tensor(keys_B2.astype(np.int64).T.copy(), device=device)
    draws_B = draw_words(key_words_2B, torch.as_tensor(positions_B, dtype=torch.int64, device=device), purpose)
    status_B = row_statuses(logits_BV)
    usable_B, greedy_B = status_B == OK, columns_PB[GREEDY] != 0

    weights_BV = row_weights(torch.where(usable_B[:, None], logits_BV, 0.0), columns_PB)
    whole_B = weights_BV.sum(dim=1)
    if bool(((columns_PB[TOP_K] > 0) | (columns_PB[TOP_P_SHIFT] > 0) | (columns_PB[MIN_WEIGHT] > 0)).any()):
        kept_BV = weights_BV.where(_kept_tokens(logits_BV, weights_BV, columns_PB), 0)
    else:
        kept_BV = weights_BV
    cumulative_BV = kept_BV.cumsum(dim=1)
    total_B = cumulative_BV[:, -1]
    token_B = (cumulative_BV > _target(draws_B, total_B)[:, None]).to(torch.int8).argmax(dim=1)
    above_B = cumulative_BV.gather(1, token_B[:, None])[:, 0]
    lo_B = _normalised(above_B - kept_BV.gather(1, token_B[:, None])[:, 0], total_B)
    w_B = _normalised(above_B, total_B) - lo_B
    share_B = _normalised(total_B, whole_B)

    # The least index of the greatest value: argmax promises no order among equals.
    peak_B1 = logits_BV.amax(dim=1, keepdim=True)
    first_B = (logits_BV == peak_B1).to(torch.int8).argmax(dim=1)
    one = torch.full_like(w_B, 1 << 32)
    token_B = torch.where(greedy_B, first_B, token_B)
    fields = [
        lo_B.where(~greedy_B, 0), w_B.where(~greedy_B, one), draws_B.where(~greedy_B, 0), share_B.where(~greedy_B, one)
    ]  # fmt: skip
    record_RB = [field.where(usable_B, 0) for field in fields]
    return token_B.where(usable_B, 0), torch.stack([*record_RB, status_B], dim=1)


def kept_tokens(logits_BV: Tensor, parameters_BP: NDArray[np.int64]) -> Tensor:
    """Return which tokens the sampler of each row may draw, ``[B, V]`` bool, for rows that are not greedy."""
    columns_PB = torch.as_tensor(np.ascontiguousarray(parameters_BP.T), device=logits_BV.device)
    usable_B1 = (row_statuses(logits_BV) == OK)[:, None]
    logits_BV = torch.where(usable_B1, logits_BV, 0.0)
    return _kept_tokens(logits_BV, row_weights(logits_BV, columns_PB), columns_PB)


def row_statuses(logits_BV: Tensor) -> Tensor:
    """Return OK, NON_FINITE or ALL_MASKED for each row, ``[B]`` int64."""
    peak_B = logits_BV.amax(dim=1)  # a NaN is the greatest
    refused_B = torch.where(peak_B == float("-inf"), ALL_MASKED, NON_FINITE)
    return torch.where(peak_B.isfinite(), OK, refused_B)


def row_weights(logits_BV: Tensor, columns_PB: Tensor) -> Tensor:
    """Return the unfiltered integer weights of usable rows, ``[B, V]`` int64."""
    tables = torch.as_tensor(build_tables(), device=logits_BV.device)
    quanta_BV = (logits_BV.clamp(-SATURATION, SATURATION) * (1 << FRACTION_BITS)).round().to(torch.int64)
    masked_BV = logits_BV == float("-inf")
    peak_B1 = quanta_BV.masked_fill(masked_BV, -(1 << 40)).amax(dim=1, keepdim=True)
    cap_B1 = columns_PB[DISTANCE_CAP][:, None]
    distance_BV = torch.minimum(peak_B1 - quanta_BV, cap_B1).where(~masked_BV, cap_B1)
    shift_B1 = columns_PB[SHIFT][:, None]
    exponent_BV = (distance_BV * columns_PB[BETA][:, None] + ((1 << shift_B1) >> 1)) >> shift_B1
    product_BV = tables[0][(exponent_BV >> 8) & 255] * tables[1][exponent_BV & 255]
    return product_BV >> (PRODUCT_SHIFT + (exponent_BV >> FRACTION_BITS))


def draw_words(key_words_2B: Tensor, positions_B: Tensor, purpose: int) -> Tensor:
    """Return each row's 32-bit draw as ``[B]`` int64: products wrap, and their high words are masked back."""
    key_0, key_1 = key_words_2B[0], key_words_2B[1]
    block_B = positions_B >> 2
    c0, c1 = block_B & _WORD, (block_B >> 32) & _WORD
    c2, c3 = torch.full_like(c0, purpose), torch.zeros_like(c0)
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ key_0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ key_1, p0 & _WORD
        key_0, key_1 = (key_0 + 0x9E3779B9) & _WORD, (key_1 + 0xBB67AE85) & _WORD
    return torch.stack([c0, c1, c2, c3]).gather(0, (positions_B & 3)[None])[0]


def _kept_tokens(logits_BV: Tensor, weights_BV: Tensor, columns_PB: Tensor) -> Tensor:
    # One sort key a token, unique: value descending, then id ascending. Adding zero puts -0.0 on +0.0.
    bits_BV = (logits_BV + 0.0).view(torch.int32).to(torch.int64)
    key_BV = bits_BV ^ ((bits_BV >> 31) & 0x7FFFFFFF)
    ids_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    order_BV = (key_BV * -(1 << 22) + ids_V).argsort(dim=1)
    sorted_BV = weights_BV.gather(1, order_BV)
    kept_BV = sorted_BV >= columns_PB[MIN_WEIGHT].clamp(min=1)[:, None]
    top_k_B1 = columns_PB[TOP_K][:, None]
    kept_BV &= (ids_V < top_k_B1) | (top_k_B1 == 0)
    sums_BV = sorted_BV.where(kept_BV, 0).cumsum(dim=1)
    need_B = share_of(columns_PB[TOP_P], columns_PB[TOP_P_SHIFT], sums_BV[:, -1])
    kept_BV &= sums_BV - sorted_BV < need_B[:, None]
    return torch.zeros_like(kept_BV).scatter_(1, order_BV, kept_BV)


def _normalised(part_B: Tensor, total_B: Tensor) -> Tensor:
    """Return floor(part * 2**32 / total) for 0 <= part <= total < 2**62, by long division."""
    whole_B = part_B == total_B
    quotient_B = torch.zeros_like(part_B)
    for _ in range(32):
        part_B = part_B << 1
        fits_B = part_B >= total_B
        part_B = torch.where(fits_B, part_B - total_B, part_B)
        quotient_B = (quotient_B << 1) + fits_B
    return torch.where(whole_B, 1 << 32, quotient_B)


def _target(draw_B: Tensor, total_B: Tensor) -> Tensor:
    """Return ceil((draw + 1) * total / 2**32) - 1, the product split at 16 and 32 bits of the total."""
    count_B, low_B = draw_B + 1, total_B & _WORD
    middle_B = count_B * (low_B >> 16) + ((count_B * (low_B & 0xFFFF)) >> 16)
    dropped_B = ((count_B * (low_B & 0xFFFF)) & 0xFFFF) | (middle_B & 0xFFFF)
    return count_B * (total_B >> 32) + (middle_B >> 16) - (dropped_B == 0).to(torch.int64)


def share_of(numerator_B: Tensor, shift_B: Tensor, total_B: Tensor) -> Tensor:
    """Return ceil(numerator * total / 2**shift), the product as two limbs of 62 bits."""
    half = (1 << 31) - 1
    n0, n1, t0, t1 = numerator_B & half, numerator_B >> 31, total_B & half, total_B >> 31
    middle = n0 * t1 + n1 * t0
    low = n0 * t0 + ((middle & half) << 31)
    high, low = n1 * t1 + (middle >> 31) + (low >> 62), low & ((1 << 62) - 1)
    near, far = shift_B.clamp(max=62), (shift_B - 62).clamp(min=0, max=62)
    # Beyond 124 bits nothing of the product is left but its being positive.
    kept = ((high >> far) << (62 - near)) + torch.where(shift_B < 62, low >> near, 0)
    dropped = (low & ((1 << near) - 1)) | (high & ((1 << far) - 1))
    return kept + (dropped != 0)
