"""How long requests wait when more revisions are asked for than a step has slots, and what bounding it costs.

Sixty-four clients, each with one request at a time on a revision drawn at random, on vLLM's scheduler without a model:
the unit is a step. ``stock`` admits as vLLM does. Run: ``python benchmarks/bench_fairness.py``; writes
benchmarks/results/fairness.json.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from engines import ROOT, quantile

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from epochless_vllm.cli.tiny_model import make_model
from epochless_vllm.plugin import fairness
from tests.plugin.schedulers import Arrival, Simulation, make_config

CLIENTS, STEPS = 64, 1500
TOKENS = (8, 24, 64)
SHAPES = ((1, 2), (3, 4), (3, 5), (4, 5), (2, 8))  # slots, revisions


def measure(config: Any, slots: int, revisions: int) -> dict[str, float]:
    simulation = Simulation(config, slots=slots, seats=CLIENTS)
    chance = random.Random(0)
    for step in range(STEPS):
        for _ in range(CLIENTS - len(simulation.scheduler.requests)):
            simulation.add(Arrival(step, chance.randint(1, revisions), chance.choice(TOKENS)))
        simulation.step(step)
    lives = simulation.lives.values()
    waits = [(STEPS if life.begun is None else life.begun) - life.arrival.step for life in lives]
    tokens = sum(min(life.arrival.tokens, STEPS - life.begun) for life in lives if life.begun is not None)
    return {
        "tokens_per_step": round(tokens / STEPS, 1),
        "wait_p50": quantile(waits, 0.5),
        "wait_p99": quantile(waits, 0.99),
        "wait_max": max(waits),
    }


def main() -> None:
    fairness.install()
    choose = fairness.choose_held
    results = []
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        config = make_config(Path(directory))
        for slots, revisions in SHAPES:
            row: dict[str, Any] = {"slots": slots, "revisions": revisions}
            for name, rule in (("stock", lambda *arguments: ([], [])), ("epochless", choose)):
                fairness.choose_held = rule
                row[name] = measure(config, slots, revisions)
                print(f"{slots} slots, {revisions} revisions, {name}: {row[name]}")
            results.append(row)
    path = ROOT / "benchmarks" / "results" / "fairness.json"
    path.write_text(json.dumps({"clients": CLIENTS, "steps": STEPS, "shapes": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
