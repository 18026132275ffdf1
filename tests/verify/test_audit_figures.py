"""The README's audit figures are those of the results in the repository, and they meet what is asked of them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.audit_detection import DTYPES, render_table
from epochless_vllm.verify.replay import TOLERANCES

ROOT = Path(__file__).parents[2]
DETECTION = json.loads((ROOT / "benchmarks" / "results" / "audit_detection.json").read_text())
SPEED = json.loads((ROOT / "benchmarks" / "results" / "audit.json").read_text())
README = (ROOT / "README.md").read_text()


def test_table_is_that_of_the_measured_results() -> None:
    assert render_table(DETECTION) in README


def test_no_honest_response_was_refused_under_the_default_tolerances() -> None:
    assert DETECTION["response_tokens"] > 0
    for dtype in DTYPES:
        honest, tolerance = DETECTION[dtype]["honest"], TOLERANCES[dtype]
        assert honest["tokens"] >= 10_000
        assert (honest["refused"], honest["refused_together"]) == (0, None)
        assert DETECTION[dtype]["tolerance"] == {
            "absolute": tolerance.absolute, "relative": tolerance.relative, "drift": tolerance.drift,
        }  # fmt: skip


def test_every_cheat_was_detected_in_float32_by_each_response() -> None:
    for found in DETECTION["float32"]["cheats"].values():
        assert found["refused"] == found["responses"]


def test_replay_was_fast_enough_and_small_enough() -> None:
    for name in SPEED.keys() & {"tiny", "125M"}:
        assert SPEED[name]["ratio"] >= SPEED["wanted_ratio"] == 8
        assert SPEED[name]["memory"]["above_weights_and_buffers"] <= SPEED[name]["memory"]["constant"]
        assert f"{SPEED[name]['ratio']:.0f} x" in README
