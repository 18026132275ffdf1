"""How long requests wait when more revisions are asked for than a step has slots, and what bounding it costs.

Sixty-four clients, each with one request at a time on a revision drawn at random, on vLLM's scheduler without a model:
the unit is a step. ``stock`` admits as vLLM does. Then a real engine of a tiny model with one slot: one revision is
asked for without end, a second now and then. Run: ``python benchmarks/bench_fairness.py``; writes
benchmarks/results/fairness.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from engines import ROOT, quantile, run_variant

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from epochless_vllm.cli.tiny_model import make_adapter, make_model
from tests.engines import make_engine, start

CLIENTS, STEPS = 64, 1500
TOKENS = (8, 24, 64)
SHAPES = ((1, 2), (3, 4), (3, 5), (4, 5), (2, 8))  # slots, revisions
FLOOD, FLOOD_TOKENS = 4, 24  # requests of the flooding revision at any time
ASKED = range(20, 420, 80)  # the steps before which the other revision is asked for
ENGINE_STEPS = 500  # then the flood ends


def measure(config: Any, slots: int, revisions: int) -> dict[str, float]:
    from tests.plugin.schedulers import Arrival, Simulation

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


def measure_engine(root: Path, *, stock: bool) -> dict[str, Any]:
    """Return how many steps each request of the second revision waited, and what the rule allows it to wait."""
    llm = make_engine(root / "model", None if stock else root / "store", max_loras=1, max_cpu_loras=4)
    flooding, asked = _revisions(llm, root, stock=stock)
    chance = random.Random(0)
    begun: dict[str, int] = {}
    ended: dict[str, int] = {}
    arrived: dict[str, tuple[int, list[str]]] = {}  # the step, and what ran then
    flood: list[str] = []
    step = 0
    while step < ENGINE_STEPS or len(ended) < len(flood) + len(arrived):
        while step < ENGINE_STEPS and sum(name not in ended for name in flood) < FLOOD:
            flood.append(start(llm, "Always more of the same. ", flooding, chance.randint(1, FLOOD_TOKENS)))
        if step in ASKED:
            running = [name for name in begun if name not in ended]
            arrived[start(llm, "Now and then another. ", asked, 4)] = step, running
        for output in llm.llm_engine.step():
            begun.setdefault(output.request_id, step)
            if output.finished:
                ended[output.request_id] = step
        step += 1
    waits = [begun[name] - at for name, (at, _) in arrived.items()]
    allowed = [max((ended[other] + 1 for other in running), default=at) - at for at, running in arrived.values()]
    tokens = {"flood": len(flood), "asked": len(arrived)}
    return {"steps_waited": waits, "steps_allowed": allowed, "requests": tokens}


def _revisions(llm: Any, root: Path, *, stock: bool) -> tuple[Any, Any]:
    if stock:
        from vllm.lora.request import LoRARequest

        return LoRARequest("r1", 1, str(root / "r1")), LoRARequest("r2", 2, str(root / "r2"))
    from epochless_vllm.plugin.engine import publish, resolve

    for name in ("r1", "r2"):
        publish(llm, root / name, policy=name)
    return resolve(llm, "r1"), resolve(llm, "r2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=("stock", "epochless"), help="the real engine only, one of the two")
    parser.add_argument("--root", type=Path, help="of --variant: a model and two adapters")
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure_engine(options.root, stock=options.variant == "stock")))
        return
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_model(root / "model")
        for seed in (1, 2):
            make_adapter(root / f"r{seed}", seed=seed)
        report = {"clients": CLIENTS, "steps": STEPS, "shapes": simulate(root / "model"), "engine": {}}
        for variant in ("stock", "epochless"):
            arguments = ["--root", str(root)]
            result = run_variant(Path(__file__), variant, arguments, stock=variant == "stock", cores="nobind")
            report["engine"][variant] = result
            print(f"one slot, two revisions, real engine, {variant}: {result}")
    path = ROOT / "benchmarks" / "results" / "fairness.json"
    path.write_text(json.dumps(report, indent=2) + "\n")


def simulate(model: Path) -> list[dict[str, Any]]:
    """Return the waits of every shape, stock and ours."""
    from epochless_vllm.plugin import fairness
    from tests.plugin.schedulers import make_config

    fairness.install()
    choose = fairness.choose_held
    results = []
    config = make_config(model)
    for slots, revisions in SHAPES:
        row: dict[str, Any] = {"slots": slots, "revisions": revisions}
        for name, rule in (("stock", lambda *arguments: ([], [])), ("epochless", choose)):
            fairness.choose_held = rule
            row[name] = measure(config, slots, revisions)
            print(f"{slots} slots, {revisions} revisions, {name}: {row[name]}")
        results.append(row)
    return results


if __name__ == "__main__":
    main()
