"""Expected digests: the NumPy conversions against torch's, and shards against slices cut by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from epochless_vllm.plugin.expectations import (
    ExpectedPair,
    RegisteredExpectation,
    convert_bits,
    expect_registered,
    expect_slots,
    registered_digest,
    sha256_of,
)
from epochless_vllm.plugin.module_plan import ModulePlan, SlicePlan
from epochless_vllm.store.blobs import CHUNK_BYTES
from epochless_vllm.store.revisions import RevisionStore
from tests.adapters import make_adapter, make_tensors

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SIGNED = {"F32": torch.int32, "BF16": torch.int16, "F16": torch.int16}
UNSIGNED = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16}


def bits(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    return tensor.contiguous().view(SIGNED[dtype]).numpy().view(UNSIGNED[dtype])


def awkward(dtype: str) -> torch.Tensor:
    random = torch.Generator().manual_seed(7)
    plain = torch.randn(4000, generator=random)
    halves = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 2**-15, 2**-24, 2**-25, 2**-130, 0.0, -0.0, 60000.0])
    return torch.cat([plain, halves, -halves, plain * 2**-14, plain * 2**-120]).to(TORCH[dtype])


@pytest.mark.parametrize(("source", "target"), list(itertools.product(TORCH, TORCH)))
@pytest.mark.parametrize("scaling", [1.0, 2.0, 0.5, 16 / 12, 0.3, 32 / 11**0.5])
def test_conversion_and_scaling_round_as_the_engine_does(source: str, target: str, scaling: float) -> None:
    values = awkward(source)
    converted = values.to(TORCH[target], copy=True)
    if scaling != 1.0:
        converted *= scaling
    ours = convert_bits(bits(values, source), source, target, scaling)
    finite = torch.isfinite(converted).numpy()
    assert np.array_equal(ours[finite], bits(converted, target)[finite])


def test_one_changed_bit_changes_the_registered_digest() -> None:
    value = np.arange(32, dtype=np.uint32)
    changed = value.copy()
    changed[17] ^= 1
    entries = [("m.lora_A.weight", (4, 8), sha256_of(value))]
    other = [("m.lora_A.weight", (4, 8), sha256_of(changed))]
    assert registered_digest(entries, "F32") != registered_digest(other, "F32")
    assert registered_digest(entries, "F32") != registered_digest(entries, "BF16")


def test_shards_are_the_columns_and_rows_of_this_rank() -> None:
    random = np.random.default_rng(3)
    a = random.integers(0, 1 << 32, (4, 16), dtype=np.uint32)
    b = random.integers(0, 1 << 32, (24, 4), dtype=np.uint32)
    made: list[str] = []

    def make(name: str, bits: np.ndarray) -> Callable[[], np.ndarray]:
        return lambda: (made.append(name), bits)[1]

    pair = ExpectedPair(sha256_of(a), sha256_of(b), make("a", a), make("b", b))
    whole = SlicePlan("m", 16, 24, (0, 16), ((0, 24),))
    row = SlicePlan("m", 16, 24, (8, 16), ((0, 24),))
    fused = SlicePlan("m", 16, 24, (0, 16), ((4, 8), (12, 16), (20, 24)))
    plans = tuple(
        ModulePlan(name, (item, SlicePlan("absent", 16, 8, (0, 16), ((0, 8),))))
        for name, item in (("whole", whole), ("row", row), ("fused", fused))
    )
    expected = expect_slots(plans, {"m": pair})
    assert sorted(made) == ["a", "b"]  # a rank that keeps a whole tensor needs its hash alone
    assert expected["whole"] == [(sha256_of(a), sha256_of(b)), None]
    assert expected["row"] == [(sha256_of(a[:, 8:].copy()), sha256_of(b)), None]
    assert expected["fused"][0] == (sha256_of(a), sha256_of(np.vstack([b[4:8], b[12:16], b[20:24]])))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("alpha", [2, 4])
def test_what_is_expected_on_the_way_in_is_what_the_stored_bytes_give(tmp_path: Path, dtype: str, alpha: int) -> None:
    random = np.random.default_rng(5)
    name_a, name_b = make_tensors(layers=[0], targets=["q_proj"])
    long = CHUNK_BYTES // 8 + 1234  # more than one piece of A, and of B
    tensors = {name_a: random.random((2, 2 * long), np.float32), name_b: random.random((2 * long, 2), np.float32)}
    directory = make_adapter(tmp_path / "adapter", rank=2, tensors=tensors, alpha=alpha)
    expectation = RegisteredExpectation(dtype)
    store = RevisionStore(tmp_path / "store")
    for _ in range(2):  # the second time over content that is there already
        ingested = store.ingest_directory(directory, watch=expectation)
        stored = store.read(ingested.revision_id)
        assert expectation.digest_of(ingested.manifest) == expect_registered(stored, dtype)
