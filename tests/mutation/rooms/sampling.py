"""The exact sampler: the compiled path, run uncompiled with small blocks, and torch's path."""

# ruff: noqa: E501 - one mutant a line reads as the table it is
from __future__ import annotations

from functools import partial

from tests.mutation.mutants import Mutant, Room

_ARITHMETIC = partial(Mutant, "sampling/arithmetic")
_ROWS = partial(Mutant, "sampling/rows")
_KERNELS = partial(Mutant, "sampling/kernels")
_FILTERS = partial(Mutant, "sampling/filters")
_TORCH = partial(Mutant, "sampling/torch_path")

COMPILED = (
    # The identity: rounding, temperature, tables, weights.
    _ARITHMETIC("logits truncated", "np.rint(min(max(logit", "np.trunc(min(max(logit"),
    _ARITHMETIC("no saturation above", "min(max(logit, -LIMIT), LIMIT)", "max(logit, -LIMIT)"),
    _ARITHMETIC("exponent rounded down", "+ ((1 << shift) >> 1)) >> shift", ") >> shift"),
    _ARITHMETIC("coarse entry for the fine", "tables[1, exponent & 255]", "tables[1, (exponent >> 8) & 255]"),
    _ARITHMETIC("octaves halved", "(PRODUCT_SHIFT + (exponent >> 16))", "(PRODUCT_SHIFT + (exponent >> 17))"),
    _ARITHMETIC("mask weighs", "if logit == -np.inf:", "if logit == np.inf:"),
    _ARITHMETIC("two zeros", "np.float32(logit + np.float32(0)).view", "np.float32(logit).view"),
    _ROWS("weights cut two octaves early", "_ZERO_OCTAVES = WEIGHT_BITS + 1", "_ZERO_OCTAVES = WEIGHT_BITS - 1"),
    # Draws.
    _ARITHMETIC("seven rounds", "for _ in range(10):", "for _ in range(7):"),
    _ARITHMETIC("words in reverse order", "lane = index & 3", "lane = 3 - (index & 3)"),
    _ARITHMETIC("counter of 32 bits", "np.uint64(index >> 2)", "np.uint64(index & 0xFFFFFFFF) >> np.uint64(2)"),
    _ARITHMETIC("key words exchanged", "np.uint64(word_0), np.uint64(word_1)", "np.uint64(word_1), np.uint64(word_0)"),
    _ARITHMETIC("purpose in another word", "np.uint64(purpose), np.uint64(0)\n", "np.uint64(0), np.uint64(purpose + 1)\n"),
    # Mapping and record.
    _ARITHMETIC("target of the draw before", "high = (draw + 1) * (total >> 32)", "high = draw * (total >> 32)"),
    _ARITHMETIC("target one too far", "        return high - 1\n", "        return high\n"),
    _ARITHMETIC("the whole is not the whole", "if part == total:", "if part < 0:"),
    _ARITHMETIC("a share of all is cut", "if part >= total:", "if part > total:"),
    _KERNELS("edge to the token before, filtered", "while below + weights[i] <= target:", "while below + weights[i] < target:"),
    _KERNELS("edge to the token before", "while below + weight <= target:", "while below + weight < target:"),
    _KERNELS("block opens with the row's first", "weight_of(logits_V[block * BLOCK]", "weight_of(logits_V[0]"),
    _KERNELS("kept mass always whole", "record[KEPT] = normalised(total, whole)", "record[KEPT] = _WHOLE"),
    _KERNELS("place for the token id", "return np.int64(ids[i]), total", "return np.int64(i), total"),
    # Refusals and greedy.
    _KERNELS("NaN below all goes unseen", "highest if lowest >= NEGATIVE_INFINITY_KEY else NON_FINITE_KEY", "highest"),
    _KERNELS("infinity sampled", "if peak_key > LARGEST_FINITE_KEY:\n        record", "if False:\n        record"),
    _KERNELS("mask of a low row weighs", "distance = cap if block_V[j] == -np.inf else distance", "distance = distance"),
    _KERNELS("greedy draws", "    if parameters[GREEDY]:\n        record", "    if False:\n        record"),
    _KERNELS("every second block searched", "!= peak_key:\n        block += 1", "!= peak_key:\n        block += 2"),
    # Filters.
    _FILTERS("all ties kept", "keys[i] > cut or (tied and ties > 0)", "keys[i] >= cut"),
    _FILTERS("no tie kept", "keys[i] > cut or (tied and ties > 0)", "keys[i] > cut"),
    _FILTERS("one bucket too far", "while reached + histogram[bucket] < need:", "while reached + histogram[bucket] <= need:"),
    _FILTERS("ties rounded down", "(need - reached + tie - 1) // tie", "(need - reached) // tie"),
    _FILTERS("least weight left out", "if weights[i] >= least_weight:", "if weights[i] > least_weight:"),
    _FILTERS("bound too high", "least_weight, parameters, tables) - 1)", "least_weight, parameters, tables) + 1)"),
    _FILTERS("few groups trusted", "    if groups < top_k:\n        return LOWEST_KEY\n", ""),
    _KERNELS("nucleus bound by half", "(whole - need) // logits_V.shape[0] + 1", "(whole - need) // 2 + 1"),
    _KERNELS("one more than top_k", "if 0 < top_k < kept:", "if 0 < top_k < kept - 1:"),
    _KERNELS("top-p of the unfiltered", "if least_weight > 1 or 0 < top_k < logits_V.shape[0]:", "if False:"),
    _ARITHMETIC("share rounded down", "np.int64(kept) + (1 if low", "np.int64(kept) + (0 if low"),
    _ARITHMETIC("share of a small part rounded down", "np.int64(high >> rest) + (1 if dropped else 0)", "np.int64(high >> rest)"),
    _ROWS("min-p rounded down", "-((-config.min_p.numerator << WEIGHT_BITS)", "((config.min_p.numerator << WEIGHT_BITS)"),
)  # fmt: skip

TORCH = (
    _TORCH("logits truncated, torch", ".round().to(torch.int64)", ".trunc().to(torch.int64)"),
    _TORCH("mask of a low row weighs, torch", ".where(~masked_BV, cap_B1)", ""),
    _TORCH("exponent rounded down, torch", "+ ((1 << shift_B1) >> 1)) >> shift_B1", ") >> shift_B1"),
    _TORCH("nine rounds, torch", "for _ in range(10):", "for _ in range(9):"),
    _TORCH("two zeros, torch", "(logits_BV + 0.0).view(torch.int32)", "logits_BV.view(torch.int32)"),
    _TORCH("ties by descending id, torch", "key_BV * -(1 << 22) + ids_V", "key_BV * -(1 << 22) - ids_V"),
    _TORCH("nucleus without its last, torch", "sums_BV - sorted_BV < need_B[:, None]", "sums_BV < need_B[:, None]"),
    _TORCH("one more than top_k, torch", "ids_V < top_k_B1", "ids_V <= top_k_B1"),
    _TORCH("target one too far, torch", "- (dropped_B == 0).to(torch.int64)", ""),
    _TORCH("share rounded down, torch", "kept + (dropped != 0)", "kept"),
    _TORCH("the whole is not the whole, torch", "torch.where(whole_B, 1 << 32, quotient_B)", "quotient_B"),
    _TORCH("kept mass always whole, torch", "share_B = _normalised(total_B, whole_B)", "share_B = torch.full_like(w_B, 1 << 32)"),
    _TORCH("edge to the token before, torch", "cumulative_BV > _target", "cumulative_BV >= _target"),
)  # fmt: skip

_FILE = "tests/sampling/uncompiled.py"
_TESTS = (
    "test_rows_are_the_references",
    "test_the_first_and_last_draw_of_every_token_pick_it",
    "test_scalars_are_exact_at_their_edges",
)


def _room(name: str, path: str, mutants: tuple[Mutant, ...], *more: str) -> Room:
    tests = (*(f"{_FILE}::{test}[{path}]" for test in _TESTS), *more)
    environment = (("NUMBA_DISABLE_JIT", "1"),)
    return Room(name, tests, mutants, preload=("numpy", "torch", "numba"), environment=environment)


ROOMS = (
    _room("sampler, compiled path", "compiled", COMPILED, f"{_FILE}::test_the_least_weight_of_min_p_is_rounded_up"),
    _room("sampler, torch's path", "torch", TORCH),
)
