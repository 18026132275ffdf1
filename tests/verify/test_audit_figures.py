"""The README's audit figures are those of the results in the repository, and they meet what is asked of them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.audit_detection import DTYPES, render_table
from epochless_vllm.verify.replay import TOLERANCES
from epochless_vllm.verify.series import LIMIT

ROOT = Path(__file__).parents[2]
DETECTION = json.loads((ROOT / "benchmarks" / "results" / "audit_detection.json").read_text())
SPEED = json.loads((ROOT / "benchmarks" / "results" / "audit.json").read_text())
README = (ROOT / "README.md").read_text()


def test_table_is_that_of_the_measured_results() -> None:
    assert render_table(DETECTION) in README


def test_no_honest_response_was_refused_under_the_default_tolerances() -> None:
    assert DETECTION["response_tokens"] > 0
    for dtype in DTYPES:
        servers, tolerance = [DETECTION[dtype][name] for name in ("honest", "compiled")], TOLERANCES[dtype]
        assert sum(each["tokens"] for each in servers) >= 50_000
        assert [(each["refused"], each["refused_together"]) for each in servers] == [(0, None)] * 2
        assert DETECTION[dtype]["score_limit"] == LIMIT
        assert DETECTION[dtype]["tolerance"] == {
            "absolute": tolerance.absolute, "relative": tolerance.relative, "drift": tolerance.drift,
        }  # fmt: skip


def test_scores_said_of_honest_servers_are_the_measured_ones() -> None:
    servers = [DETECTION[dtype][name] for dtype in DTYPES for name in ("honest", "compiled")]
    tokens, worst = sum(each["tokens"] for each in servers), max(each["worst_score"] for each in servers)
    said = f"over {tokens:,} honest tokens the highest score of a response was {worst:.1f}, and {LIMIT:.2f} refuses"
    assert said in " ".join(README.split())


def test_every_cheat_was_detected_in_bfloat16_by_successive_responses() -> None:
    for found in DETECTION["bfloat16"]["cheats"].values():
        assert found["tokens_together"] is not None


def test_every_cheat_was_detected_in_float32_by_each_response() -> None:
    for found in DETECTION["float32"]["cheats"].values():
        assert found["refused"] == found["responses"]


def test_replay_was_fast_enough_and_small_enough() -> None:
    for name in SPEED.keys() & {"tiny", "125M"}:
        assert SPEED[name]["ratio"] >= SPEED["wanted_ratio"] == 8
        assert SPEED[name]["memory"]["above_weights_and_buffers"] <= SPEED[name]["memory"]["constant"]
        assert f"{SPEED[name]['ratio']:.0f} x" in README
