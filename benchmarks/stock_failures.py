"""What stock vLLM 0.25.1 does to live revisions, and what Epochless does instead, on a tiny model in one run.

Run: ``python benchmarks/stock_failures.py``; writes benchmarks/results/stock_failures.json. Each line is one experiment
with the engine in process, greedy, float32. Knows nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines import make_adapter, make_model, run_variant

from tests.engines import finish, generate, logprob_of, make_engine, start, tokens_of

PROMPT = "The trainer publishes a revision while this prompt is being answered, again and again. " * 3


class Stock:
    """Publishes the way stock vLLM offers: ``add_lora``, in place under one name or under fresh names."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.count = 0

    def publish(self, path: Path, name: str) -> Any:
        from vllm.lora.request import LoRARequest

        self.count += 1
        request = LoRARequest(name, self.count, str(path))
        self.llm.llm_engine.add_lora(request)
        return request

    def replace(self, path: Path, request: Any) -> Any:
        from vllm.lora.request import LoRARequest

        loading = LoRARequest(request.lora_name, request.lora_int_id, str(path), load_inplace=True)
        self.llm.llm_engine.add_lora(loading)
        return LoRARequest(request.lora_name, request.lora_int_id, str(path))


class Epochless:
    """Publishes revisions of a policy."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def publish(self, path: Path, name: str) -> Any:
        from epochless_vllm.plugin.engine import publish, resolve

        publish(self.llm, path, policy=name)
        return resolve(self.llm, name)

    def replace(self, path: Path, request: Any) -> Any:
        return self.publish(path, request.lora_name.partition("@")[0])


def experiment(publisher: Any, adapters: list[Path], wide: Path) -> dict[str, Any]:
    """Return what was observed."""
    llm = publisher.llm
    return {
        "stale_prefix": stale_prefix(publisher, llm, adapters),
        "salt_collision": salt_collision(publisher, llm, adapters),
        "failed_publish": failed_publish(publisher, llm, adapters, wide),
        "base_row_beside_adapter": base_row(publisher, llm, adapters),
        "running_streams": running_streams(publisher, llm, adapters),
    }


def stale_prefix(publisher: Any, llm: Any, adapters: list[Path]) -> dict[str, Any]:
    """Publish new weights under the same name; ask the same prompt."""
    first = publisher.publish(adapters[0], "stale")
    generate(llm, PROMPT, first)
    second = publisher.replace(adapters[1], first)
    output = generate(llm, PROMPT, second)
    oracle = generate(llm, PROMPT, publisher.publish(adapters[1], "stale-oracle"), salt="stale-oracle")
    return {
        "cached_tokens_of_the_old_revision": output.num_cached_tokens,
        "logprob_error_nats": round(abs(logprob_of(output) - logprob_of(oracle)), 4),
        "tokens_right": tokens_of(output) == tokens_of(oracle),
    }


def salt_collision(publisher: Any, llm: Any, adapters: list[Path]) -> dict[str, Any]:
    """Send a base request whose cache salt equals the adapter's name."""
    prompt = "collide: " + PROMPT
    lora = publisher.publish(adapters[2], "COLLIDE")
    generate(llm, prompt, lora)
    output = generate(llm, prompt, None, salt=lora.lora_name)
    return {"adapter_tokens_served_to_a_base_request": output.num_cached_tokens}


def failed_publish(publisher: Any, llm: Any, adapters: list[Path], wide: Path) -> dict[str, Any]:
    """Publish an adapter with one wrong shape over a good one."""
    good = publisher.publish(adapters[0], "failing")
    before = generate(llm, PROMPT, good, salt="failing-before")
    error = ""
    try:
        publisher.replace(wide, good)
    except Exception as caught:  # noqa: BLE001  # stock raises whatever it met
        error = type(caught).__name__
    try:
        after = generate(llm, PROMPT, good, salt="failing-after")
        drift = round(abs(logprob_of(after) - logprob_of(before)), 4)
    except Exception as caught:  # noqa: BLE001  # as above
        drift = f"the next request failed: {type(caught).__name__}"
    return {"publish_answered": error, "old_revision_logprob_drift_nats": drift}


def base_row(publisher: Any, llm: Any, adapters: list[Path]) -> dict[str, Any]:
    """Run one base request and one adapter request in one batch."""
    lora = publisher.publish(adapters[1], "mixed")
    alone = tokens_of(generate(llm, PROMPT, None, salt="mixed-alone"))
    ids = [start(llm, PROMPT, who, 16, salt="mixed-both") for who in (None, lora)]
    outputs = finish(llm)
    base, adapted = (tokens_of(outputs[i]) for i in ids)
    return {"base_row_right": base == alone, "base_row_is_the_adapters": base == adapted}


def running_streams(publisher: Any, llm: Any, adapters: list[Path]) -> dict[str, Any]:
    """Publish a third adapter while two streams decode in two slots."""
    loras = [publisher.publish(path, f"running-{i}") for i, path in enumerate(adapters[:2])]

    def run(actions: dict[int, Callable[[], Any]]) -> list[list[int]]:
        ids = [start(llm, PROMPT, lora, 40, salt="running") for lora in loras]
        outputs = finish(llm, actions)
        return [tokens_of(outputs[i]) for i in ids]

    run({})
    quiet = run({})
    busy = run({8: lambda: publisher.publish(adapters[2], "running-new")})
    broken = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), None)
        for x, y in zip(quiet, busy, strict=True)
    ]
    return {"streams_that_changed": sum(b is not None for b in broken), "first_wrong_token": broken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=("stock", "epochless"))
    arguments = parser.parse_args()
    if arguments.variant:
        work = Path(tempfile.mkdtemp())
        try:
            model = make_model(work / "model")
            adapters = [make_adapter(work / f"a{seed}", seed=seed) for seed in (1, 2, 3)]
            wide = make_adapter(work / "wide", seed=4, intermediate_size=640)
            ours = arguments.variant == "epochless"
            llm = make_engine(
                model, work / "store" if ours else None, max_loras=2, max_cpu_loras=16, epochless={"keep": None}
            )
            print(json.dumps(experiment((Epochless if ours else Stock)(llm), adapters, wide)), flush=True)
            os._exit(0)  # a stock engine that met a bad adapter may not shut down
        finally:
            shutil.rmtree(work, ignore_errors=True)
    report = {
        "stock": run_variant(Path(__file__), "stock", [], stock=True),
        "epochless": run_variant(Path(__file__), "epochless", [], stock=False),
    }
    (Path(__file__).parent / "results" / "stock_failures.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
