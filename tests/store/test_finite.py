"""The search for infinities and NaNs against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epochless_vllm.store.finite import CHUNK_BYTES, find_non_finite

BITS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}


def first_non_finite(dtype: str, bits: np.ndarray) -> int | None:
    if dtype == "BF16":
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        values = bits.view({"F32": np.float32, "F16": np.float16}[dtype])
    found = np.flatnonzero(~np.isfinite(values))
    return int(found[0]) if found.size else None


def ours(dtype: str, bits: np.ndarray) -> int | None:
    return find_non_finite(dtype, memoryview(bits.tobytes()))


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_each_of_the_65536_half_precision_values_is_judged_as_numpy_judges_it(dtype: str) -> None:
    for bits in range(1 << 16):
        alone = np.array([0, bits], dtype=np.uint16)
        assert ours(dtype, alone) == first_non_finite(dtype, alone), hex(bits)


edges = st.sampled_from([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800001, 0x7FC00000, 0x7F000000, 1 << 31])


@given(st.lists(st.integers(0, 0xFFFFFFFF) | edges, max_size=20))
@example([])
@example([0x7F7FFFFF, 0x7F800000])
def test_single_precision_values_are_judged_as_numpy_judges_them(values: list[int]) -> None:
    bits = np.array(values, dtype=np.uint32)
    assert ours("F32", bits) == first_non_finite("F32", bits)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    "index", [0, 1, CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 4, CHUNK_BYTES // 2, 3 * CHUNK_BYTES // 4]
)
def test_one_bad_value_among_many_is_found_at_its_index(dtype: str, index: int) -> None:
    # Large finite values throughout: the quick search suspects each chunk and the exact one must clear it.
    largest = {"F32": 0x7F7FFFFF, "F16": 0x7BFF, "BF16": 0x7F7F}[dtype]
    bits = np.full(CHUNK_BYTES + 1, largest, dtype=BITS[dtype])
    assert ours(dtype, bits) is None
    bits[index] = {"F32": 0xFF800000, "F16": 0x7C00, "BF16": 0x7FC0}[dtype]
    assert ours(dtype, bits) == index
