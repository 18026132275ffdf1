"""NumPy finds the infinities and NaNs that the store finds without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.plugin import finite, service
from epochless_vllm.store.finite import find_non_finite
from tests.adapters import make_adapter
from tests.plugin.front_end import FrontEnd, run_front_end

WIDTH = {"F32": 4, "F16": 2, "BF16": 2}


def check(dtype: str, raw: bytes) -> None:
    found = finite.find_non_finite(dtype, memoryview(raw))
    assert found == find_non_finite(dtype, memoryview(raw))
    assert found is None or type(found) is int


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_each_of_the_65536_half_precision_values_is_judged_alike(dtype: str) -> None:
    for bits in range(1 << 16):
        check(dtype, b"\0\0" + bits.to_bytes(2, "little"))


edges = st.sampled_from([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800001, 0x7FC00000, 0x7F000000, 1 << 31])


@given(values=st.lists(st.integers(0, 0xFFFFFFFF) | edges, max_size=20), dtype=st.sampled_from(sorted(WIDTH)))
def test_the_first_of_several_is_found(values: list[int], dtype: str) -> None:
    check(dtype, np.array(values, dtype="<u4").tobytes())


def test_a_service_gives_it_to_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def find(dtype: str, raw: memoryview) -> int | None:
        asked.append(dtype)
        return finite.find_non_finite(dtype, raw)

    async def publish(front: FrontEnd) -> None:
        adapter = make_adapter(tmp_path / "adapter", seed=1)
        await front.served.publisher.publish_directory(str(adapter), "policy", 1)

    monkeypatch.setattr(service, "find_non_finite", find)
    run_front_end(tmp_path / "store", publish)
    assert set(asked) == {"F32"}


def test_elements_of_any_shape_are_counted_in_order() -> None:
    values = np.zeros((3, 4), dtype="<f4")
    values[1, 2] = np.inf
    assert finite.find_non_finite("F32", memoryview(values.view("<u4"))) == 6


@pytest.mark.parametrize("dtype", sorted(WIDTH))
def test_an_unaligned_view_is_read(dtype: str) -> None:
    bits: Any = {"F32": 0xFF800000, "F16": 0xFC00, "BF16": 0xFF80}[dtype]
    raw = memoryview(b"x" + bytes(3 * WIDTH[dtype]) + bits.to_bytes(WIDTH[dtype], "little"))[1:]
    assert finite.find_non_finite(dtype, raw) == 3
