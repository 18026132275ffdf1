"""What exact sampling and receipts cost a serving engine, against attestation off and against stock vLLM.

    python benchmarks/bench_attest.py [--quick] [--rounds N] [--tokens N] [--load base|adapter]
                                      [--shape together|spread] [--streams 16|64] [--way receipts|in_step]
                                      [--without-stock] [--output FILE]

A random 125M-parameter Llama in two engines, one stock, one with Epochless, each in a process of its own on the same
core; they take turns within every round, and so do attestation off and full receipts within Epochless. Streams are
sampled at temperature 1 without a seed. The shapes: ``together``, every stream has the same length, so that all
receipts fall due in one step, the worst case for a gap; ``spread``, lengths run evenly from half to one and a half
times ``--tokens`` and the next request takes an ended stream's place, as rollouts do.

Receipts are made within the measured time, in two ways: ``receipts``, by ``epochless_vllm.plugin.engine.seal`` as each
response ends, a thread beside the step loop making them on another core, and waited for before the clock stops;
``in_step``, by ``epochless_vllm.plugin.engine.receipts``, on the step loop's own thread, which does nothing else
meanwhile. Where there is one core only, the first has no advantage.

A round gives one ratio of throughput and of CPU time per pair; reported are the geometric mean over rounds and the
lower (throughput) or upper (CPU time) bound of its one-sided 95 % bootstrap interval. The p99 gap is that of the gaps
of all rounds together (a round alone has too few for a 99th percentile), its bound by bootstrap over rounds. CPU time
is that of the whole process, all threads. A round during which other processes worked is run again.

Two figures are no difference of two runs and stand where a machine is noisy: ``loop_share``, the part of a run that the
step loop's own thread spends on receipts, the last wait for them included, and ``p99_stretch``, over all gaps together,
a gap divided by the gap without what that thread spent on receipts in it. They do not tell what the loop waits for a
thread beside it.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from bench_mixed_rows import busy_seconds
from engines import RANK, ROOT, adapter, model_125m, quantile, variant_environment

LOADS = ("base", "adapter")
STREAMS = (16, 64)
SHAPES = ("together", "spread")
WAYS = ("receipts", "in_step")
PROMPT_TOKENS = 16
DISTURBED = 0.02  # of the machine's time, taken by others: such a round is run again, at most as many as are asked for
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
        if variant == "epochless":
            from epochless_vllm.plugin import engine

            engine.publish(self.llm, adapter(1), policy="policy")
            self._adapter = engine.resolve(self.llm, "policy")
        else:
            from vllm.lora.request import LoRARequest

            self._adapter = LoRARequest("policy", 1, str(adapter(1)))

    def run(self, *, load: str, shape: str, streams: int, tokens: int, attest: str) -> dict[str, Any]:
        """Return tokens and CPU seconds per second over a whole run, and the gaps between its steps in seconds.

        Args:
            attest: ``none``, ``receipts`` or ``in_step``.
        """
        engine = self.llm.llm_engine
        lora = self._adapter if load == "adapter" else None
        lengths = lengths_of(shape, streams, tokens)
        waiting = iter(lengths)
        for length in itertools.islice(waiting, streams):
            self._add(length, lora)
        take = taker(attest)
        ends, pending, spent = [], [], []
        busy, own, began = busy_seconds(), time.process_time(), time.perf_counter()
        while engine.has_unfinished_requests():
            spent.append(0.0)
            for output in engine.step():
                if output.finished:
                    spent[-1] -= time.perf_counter()
                    pending.append(take(output))
                    spent[-1] += time.perf_counter()
                    for length in itertools.islice(waiting, 1):
                        self._add(length, lora)
            ends.append(time.perf_counter())
        for each in pending:
            if isinstance(each, Future):
                each.result()
        elapsed, used = time.perf_counter() - began, time.process_time() - own
        share = (sum(spent) + elapsed - (ends[-1] - began)) / elapsed
        foreign = max(0.0, busy_seconds() - busy - used) / (elapsed * (os.cpu_count() or 1))
        gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]
        return {
            "tokens_per_second": sum(lengths) / elapsed,
            "cpu_s": used,
            "gaps_s": gaps,
            "stretches": [gap / (gap - own_s) for gap, own_s in zip(gaps, spent[1:], strict=True)],
            "share": share,
            "foreign": foreign,
        }

    def _add(self, tokens: int, lora: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            temperature=1.0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,  # as LLM.generate asks
        )
        self._requests += 1
        ids = [(7 * self._requests + 13 * place) % VOCABULARY for place in range(PROMPT_TOKENS)]
        self.llm.llm_engine.add_request(str(self._requests), {"prompt_token_ids": ids}, params, lora_request=lora)


def lengths_of(shape: str, streams: int, tokens: int) -> list[int]:
    """Return the lengths of a run's responses, in order of arrival; twice as many where they are spread."""
    if shape == "together":
        return [tokens] * streams
    ramp = [tokens // 2 + tokens * place // (2 * streams) for place in range(2 * streams)]
    random.Random(streams).shuffle(ramp)
    return ramp


def taker(attest: str) -> Callable[[Any], Any]:
    """Return what is done with a finished output."""
    if attest == "none":
        return lambda output: None
    from epochless_vllm.plugin import engine

    return engine.seal if attest == "receipts" else engine.receipts


def serve(variant: str) -> None:
    """Run what the parent asks, a JSON object a line, until its end closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    engine = Engine(variant)
    print(json.dumps({"ready": variant}), file=answers, flush=True)
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
        self._answer()

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
    for field, name, side in (("tokens_per_second", "throughput", "lower"), ("cpu_s", "cpu_time", "upper")):
        logs = [math.log(a[field] / b[field]) for a, b in zip(ours, theirs, strict=True)]
        rng = random.Random(0)
        means = [statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(10000)]
        result[name] = math.exp(statistics.fmean(logs))
        result[f"{name}_{side}_95"] = math.exp(quantile(means, 0.05 if side == "lower" else 0.95))

    def gap_ratio(rounds: Sequence[int]) -> float:
        ours_s, theirs_s = ([gap for number in rounds for gap in runs[number]["gaps_s"]] for runs in (ours, theirs))
        return quantile(ours_s, 0.99) / quantile(theirs_s, 0.99)

    rng, rounds = random.Random(0), range(len(ours))
    result["p99_gap"] = gap_ratio(rounds)
    result["p99_gap_upper_95"] = quantile([gap_ratio(rng.choices(rounds, k=len(ours))) for _ in range(1000)], 0.95)
    return result


def measure(
    rounds: int,
    tokens: int,
    loads: Sequence[str],
    shapes: Sequence[str],
    counts: Sequence[int],
    ways: Sequence[str],
    *,
    stock: bool,
) -> dict[str, Any]:
    variants = {name: Variant(name) for name in (["stock"] if stock else []) + ["epochless"]}
    result: dict[str, Any] = {}
    try:
        for load, shape, streams in itertools.product(loads, shapes, counts):
            modes = [("stock", "none")] * stock + [("epochless", attest) for attest in ("none", *ways)]
            case = {"load": load, "shape": shape, "streams": streams, "tokens": tokens}
            runs: dict[str, list[dict[str, Any]]] = {name_of(*mode): [] for mode in modes}
            for variant, attest in modes:  # warm
                variants[variant].run(**{**case, "shape": "together", "tokens": 4}, attest=attest)
            left, disturbed = rounds, 0
            while left:
                done = {
                    name_of(variant, attest): variants[variant].run(**case, attest=attest)
                    for variant, attest in modes[:: 1 if left % 2 == 0 else -1]
                }
                if max(run["foreign"] for run in done.values()) > DISTURBED and disturbed < rounds:
                    disturbed += 1
                    continue
                left -= 1
                for name, run in done.items():
                    runs[name].append(run)
            pairs = [("none", "stock")] * stock + [(way, "none") for way in ways]
            result[f"{load}-{shape}-{streams}"] = {
                "tokens_per_second": {
                    mode: statistics.median(run["tokens_per_second"] for run in done) for mode, done in runs.items()
                },
                "p99_stretch": {
                    mode: quantile([each for run in done for each in run["stretches"]], 0.99)
                    for mode, done in runs.items()
                },
                "loop_share": {mode: statistics.fmean(run["share"] for run in done) for mode, done in runs.items()},
                **{f"{ours}_vs_{theirs}": compare(runs[ours], runs[theirs]) for ours, theirs in pairs},
                "rounds_repeated": disturbed,
                "largest_disturbance": max(run["foreign"] for done in runs.values() for run in done),
            }
            print(load, shape, streams, json.dumps(list(result.values())[-1]), file=sys.stderr, flush=True)
    finally:
        for variant in variants.values():
            variant.close()
    return result


def name_of(variant: str, attest: str) -> str:
    """Return the name of a mode in the results."""
    return "stock" if variant == "stock" else attest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds of 12 tokens a stream")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48, help="per stream and round (default 48)")
    parser.add_argument("--load", choices=LOADS, action="append", help="repeatable; default all")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="repeatable; default all")
    parser.add_argument("--streams", type=int, choices=STREAMS, action="append", help="repeatable; default all")
    parser.add_argument("--way", choices=WAYS, action="append", help="of making receipts; repeatable; default all")
    parser.add_argument("--without-stock", action="store_true", help="receipts against none only")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "attest.json")
    parser.add_argument("--variant", choices=["stock", "epochless"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        serve(arguments.variant)
        return
    rounds, tokens = (3, 12) if arguments.quick else (arguments.rounds, arguments.tokens)
    cases = (arguments.load or LOADS, arguments.shape or SHAPES, arguments.streams or STREAMS, arguments.way or WAYS)
    measured = measure(rounds, tokens, *cases, stock=not arguments.without_stock)
    result = {"rounds": rounds, "tokens": tokens, "cpus": os.cpu_count(), **measured}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
