"""Bits equal across implementations; ``tests/sampling/equality.py`` runs the same comparison at any size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from epochless_vllm.protocol.sampler_config import sampler_from_value
from epochless_vllm.reference import sampler_plain
from epochless_vllm.sampling import tables
from tests.sampling.cases import Batch, batches
from tests.sampling.equality import FIELDS, compare_batches, engine_columns, reference_columns

ROOT = Path(__file__).parent.parent.parent
VECTORS = ROOT / "tests" / "vectors" / "sampler" / "rows.json"


def test_numba_and_torch_equal_numpy_on_many_short_rows() -> None:
    assert compare_batches(batches(seed=101, rows=6_000, rows_per_batch=200)) == (6_000, [])


def test_all_equal_pure_python_on_some() -> None:
    assert compare_batches(batches(seed=102, rows=150, rows_per_batch=5), plain_rows=5) == (150, [])


def test_rows_of_several_blocks_and_a_ragged_end_are_equal() -> None:
    made = batches(seed=103, rows=200, rows_per_batch=4, vocabularies=(1023, 1024, 1025, 4097, 20_001))
    assert compare_batches(made) == (200, [])


def test_rows_of_a_whole_vocabulary_are_equal() -> None:
    assert compare_batches(batches(seed=104, rows=10, rows_per_batch=1, vocabularies=(151_936,))) == (10, [])


def test_tritons_interpreter_equals_numpy() -> None:
    # A process of its own, because Triton decides at import; several blocks a row, so that block sums matter.
    command = [sys.executable, "-m", "tests.sampling.equality", "--triton", "--triton-block", "64"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "--rows", "16", "--rows-per-batch", "2", "--seed", "105"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "triton interpreted: 0 differences" in run.stdout


def test_the_tables_are_the_independently_computed_ones() -> None:
    built = tables.build_tables()
    for table, bits in ((0, 8), (1, 16)):
        assert built[table].tolist() == [sampler_plain._power(i, bits) for i in range(256)]


def test_other_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = tables._powers
    monkeypatch.setattr(tables, "_powers", lambda bits: [*honest(bits)[:-1], honest(bits)[-1] + 1])
    with pytest.raises(Exception, match="differ from the recipe"):
        tables.build_tables()


def load_vectors() -> list[tuple[Batch, list[int]]]:
    vectors = []
    for case in json.loads(VECTORS.read_text()):
        bits = np.array([int(word, 16) for word in case["logits"]], dtype=np.uint32)
        batch = Batch(
            config=sampler_from_value(case["sampler"]),
            logits=bits.view(np.float32)[None],
            keys=np.array([case["key"]], dtype=np.uint32),
            positions=np.array([case["position"]], dtype=np.int64),
        )
        vectors.append((batch, [case["expected"][field] for field in FIELDS]))
    return vectors


def test_the_shared_vectors_hold_for_every_implementation() -> None:
    vectors = load_vectors()
    assert len(vectors) >= 100
    for batch, expected in vectors:
        columns = {"numpy": reference_columns(batch), **engine_columns(batch)}
        for name, found in columns.items():
            assert found[:, 0].tolist() == expected, name
