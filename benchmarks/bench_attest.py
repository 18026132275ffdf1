"""What exact sampling and receipts cost a serving engine, against attestation off and against stock vLLM.

    python benchmarks/bench_attest.py [--quick | --rounds N --tokens N] [--output benchmarks/results/attest.json]

A random 125M-parameter Llama in two engines, one stock, one with Epochless, each in a process of its own on the same
core; they take turns within every round, and so do attestation off and full receipts within Epochless. Streams are
sampled at temperature 1 without a seed. A round gives one ratio per pair; reported are the geometric mean over rounds
and the lower (throughput) or upper (gap) bound of its one-sided 95 % bootstrap interval. Receipts are made by
``epochless_vllm.plugin.engine.receipts`` as each response ends, within the measured time; where that does not exist,
their part of the result is null.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_mixed_rows import busy_seconds
from engines import RANK, ROOT, adapter, model_125m, quantile, variant_environment

LOADS = ("base", "adapter")
STREAMS = (16, 64)
PROMPT_TOKENS = 16
VOCABULARY = 32000


class Engine:
    """One variant's engine, in this process."""

    def __init__(self, variant: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        settings: dict[str, Any] = {}
        if variant == "epochless":
            self._store = tempfile.TemporaryDirectory(prefix="epochless-bench-")
            settings["additional_config"] = {"epochless": {"store": self._store.name, "base_digest_mode": "fast"}}
        self.llm = LLM(
            model=str(model_125m()),
            dtype="float32",
            enforce_eager=True,
            enable_lora=True,
            max_loras=2,
            max_cpu_loras=4,
            max_lora_rank=RANK,
            max_model_len=512,
            max_num_seqs=max(STREAMS),
            max_num_batched_tokens=max(STREAMS) * PROMPT_TOKENS,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **settings,
        )
        self._requests = 0
        self._receipts = None
        if variant == "epochless":
            from epochless_vllm.plugin import engine

            engine.publish(self.llm, adapter(1), policy="policy")
            self._adapter = engine.resolve(self.llm, "policy")
            self._receipts = getattr(engine, "receipts", None)
        else:
            from vllm.lora.request import LoRARequest

            self._adapter = LoRARequest("policy", 1, str(adapter(1)))

    @property
    def has_receipts(self) -> bool:
        return self._receipts is not None

    def run(self, *, load: str, streams: int, tokens: int, attest: bool) -> dict[str, Any]:
        """Return tokens per second over a whole run, and the gaps between tokens in seconds."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        lora = self._adapter if load == "adapter" else None
        params = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            temperature=1.0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,  # as LLM.generate asks
        )
        for row in range(streams):
            self._requests += 1
            ids = [(7 * row + 13 * place + self._requests) % VOCABULARY for place in range(PROMPT_TOKENS)]
            engine.add_request(str(self._requests), {"prompt_token_ids": ids}, params, lora_request=lora)
        ends = []
        busy, own, began = busy_seconds(), time.process_time(), time.perf_counter()
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if attest:
                assert self._receipts is not None
                for output in outputs:
                    if output.finished:
                        self._receipts(output)
            ends.append(time.perf_counter())
        elapsed = ends[-1] - began
        foreign = max(0.0, busy_seconds() - busy - (time.process_time() - own)) / (elapsed * (os.cpu_count() or 1))
        gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]
        return {"tokens_per_second": streams * tokens / elapsed, "p99_gap_s": quantile(gaps, 0.99), "foreign": foreign}


def serve(variant: str) -> None:
    """Run what the parent asks, a JSON object a line, until its end closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    engine = Engine(variant)
    print(json.dumps({"receipts": engine.has_receipts}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(**json.loads(line))), file=answers, flush=True)


class Variant:
    """A variant's process."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--variant", name],
            env=variant_environment(stock=name == "stock"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.has_receipts: bool = self._answer()["receipts"]

    def run(self, **case: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the variant ended with status {self._process.wait()}")
        return dict(json.loads(line))


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ratios of paired runs, each with its one-sided 95 % bound."""
    result = {}
    for field, side in (("tokens_per_second", "lower"), ("p99_gap_s", "upper")):
        logs = [math.log(a[field] / b[field]) for a, b in zip(ours, theirs, strict=True)]
        rng = random.Random(0)
        means = [statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(10000)]
        name = {"tokens_per_second": "throughput", "p99_gap_s": "p99_gap"}[field]
        result[name] = math.exp(statistics.fmean(logs))
        result[f"{name}_{side}_95"] = math.exp(quantile(means, 0.05 if side == "lower" else 0.95))
    return result


def measure(rounds: int, tokens: int) -> dict[str, Any]:
    stock, epochless = Variant("stock"), Variant("epochless")
    result: dict[str, Any] = {}
    try:
        for load in LOADS:
            for streams in STREAMS:
                case = {"load": load, "streams": streams, "tokens": tokens}
                modes = {"stock": (stock, False), "none": (epochless, False)}
                if epochless.has_receipts:
                    modes["receipts"] = (epochless, True)
                runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
                for variant in (stock, epochless):  # warm
                    variant.run(**{**case, "tokens": 4}, attest=False)
                for number in range(rounds):
                    order = list(modes) if number % 2 == 0 else list(reversed(modes))
                    for mode in order:
                        variant, attest = modes[mode]
                        runs[mode].append(variant.run(**case, attest=attest))
                result[f"{load}-{streams}"] = {
                    "tokens_per_second": {
                        mode: statistics.median(run["tokens_per_second"] for run in done) for mode, done in runs.items()
                    },
                    "none_vs_stock": compare(runs["none"], runs["stock"]),
                    "receipts_vs_none": compare(runs["receipts"], runs["none"]) if "receipts" in runs else None,
                    "largest_disturbance": max(run["foreign"] for done in runs.values() for run in done),
                }
                print(f"{load}-{streams}", json.dumps(result[f"{load}-{streams}"]), file=sys.stderr, flush=True)
    finally:
        stock.close()
        epochless.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds of 12 tokens a stream")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48, help="per stream and round (default 48)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "attest.json")
    parser.add_argument("--variant", choices=["stock", "epochless"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        serve(arguments.variant)
        return
    rounds, tokens = (3, 12) if arguments.quick else (arguments.rounds, arguments.tokens)
    result = {"rounds": rounds, "tokens": tokens, "cpus": os.cpu_count(), **measure(rounds, tokens)}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
