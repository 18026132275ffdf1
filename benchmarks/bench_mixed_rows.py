"""How fast are rows of different revisions in one batch, against vLLM's own CPU operations and the base model?

    python benchmarks/bench_mixed_rows.py [--quick] [--dtype bfloat16] [--output benchmarks/results/mixed_rows.json]

A random 134M-parameter Llama (hidden 768, 12 layers, 12 heads, intermediate 2048, vocabulary 32,000) in a real engine,
in process. Both wrappers serve the same slots of the same engine and take turns within every round; a sample during
which other processes used more than 5 % of the machine is taken again; each figure is the median over rounds. Needs
vLLM on CPU; takes about six minutes on two quiet cores. Prints the tables of benchmarks/mixed_rows.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
}
STREAMS = 16
PROMPT_TOKENS = 128
REVISIONS = (1, 2, 4, 8, 16)
RANKS = (4, 8, 16, 32, 64)
STREAM_COUNTS = (1, 4, 16, 64)

DISTURBANCE: list[float] = []  # share of the machine that others used, per accepted sample


class Engine:
    """A real engine with adapters of ids 1.. resident, and a switch between the two wrappers."""

    def __init__(self, model: Path, adapters: list[Path], *, max_rank: int, dtype: str) -> None:
        from vllm import LLM
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
        from vllm.lora.request import LoRARequest

        from epochless_vllm.plugin import punica
        from epochless_vllm.plugin.options import Options

        punica.install(Options(store="unused"))
        self.llm = LLM(
            model=str(model),
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_lora=True,
            max_loras=len(adapters),
            max_lora_rank=max_rank,
            max_model_len=512,
            max_num_seqs=max(STREAM_COUNTS),
            max_num_batched_tokens=STREAMS * PROMPT_TOKENS,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.adapters = [LoRARequest(f"revision-{i}", i, str(path)) for i, path in enumerate(adapters, 1)]
        core = self.llm.llm_engine.engine_core.engine_core
        self._manager = core.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
        ours = self._manager.punica_wrapper_mapping["language_model"]
        stock = PunicaWrapperCPU(STREAMS * PROMPT_TOKENS, max(STREAM_COUNTS), "cpu")
        self._wrappers = {"grouped": ours, "stock": stock}
        self._requests = 0
        for adapter in self.adapters:
            self.llm.llm_engine.add_lora(adapter)

    def use(self, wrapper: str) -> None:
        """Serve later steps through the wrapper named ``grouped`` or ``stock``."""
        chosen = self._wrappers[wrapper]
        self._manager.punica_wrapper_mapping["language_model"] = chosen
        for module in self._manager.modules.values():
            module.punica_wrapper = chosen
        self._manager._last_mapping = None

    def decode(self, revisions: int, *, streams: int = STREAMS, steps: int = 12) -> float:
        """Return output tokens per second of ``streams`` rows on ``revisions`` adapters (0: the base model)."""
        seconds = undisturbed(lambda: self._run(revisions, streams=streams, prompt_tokens=8, steps=steps))[1:]
        return streams * len(seconds) / sum(seconds)

    def prefill(self, revisions: int) -> float:
        """Return the seconds of the one step that reads STREAMS prompts of PROMPT_TOKENS tokens."""
        return undisturbed(lambda: self._run(revisions, streams=STREAMS, prompt_tokens=PROMPT_TOKENS, steps=1))[0]

    def _run(self, revisions: int, *, streams: int, prompt_tokens: int, steps: int) -> list[float]:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        parameters = SamplingParams(max_tokens=steps + 1, ignore_eos=True, temperature=0.0, detokenize=False)
        for row in range(streams):
            self._requests += 1
            tokens = [(7 * row + 13 * place + self._requests) % SIZES["vocab_size"] for place in range(prompt_tokens)]
            adapter = self.adapters[row % revisions] if revisions else None
            engine.add_request(str(self._requests), {"prompt_token_ids": tokens}, parameters, lora_request=adapter)
        seconds = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
        return seconds[: steps + 1]


def undisturbed(sample: Callable[[], list[float]], *, attempts: int = 30, most_foreign: float = 0.05) -> list[float]:
    """Return the sample taken while other processes used least CPU: the first below ``most_foreign`` of the machine."""
    best: tuple[float, list[float]] | None = None
    for _ in range(attempts):
        busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        seconds = sample()
        capacity = (time.perf_counter() - start) * (os.cpu_count() or 1)
        foreign = max(0.0, (busy_seconds() - busy) - (time.process_time() - own)) / capacity
        if best is None or foreign < best[0]:
            best = (foreign, seconds)
        if foreign <= most_foreign:
            break
        time.sleep(1)
    assert best is not None
    DISTURBANCE.append(best[0])
    return best[1]


def busy_seconds() -> float:
    """Return the CPU seconds this machine has spent on anything but idling and waiting for disks."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def head_to_head(engine: Engine, rounds: int) -> dict[str, Any]:
    """Both wrappers and the base model in turn: decode at 1 and 4 revisions, and the 16-prompt prefill."""
    decode: dict[str, list[float]] = {}
    prefill: dict[str, list[float]] = {}
    modes = [("base", "grouped", 0)] + [(f"{w}-{r}", w, r) for r in (1, 4) for w in ("grouped", "stock")]
    for _ in range(rounds):
        for name, wrapper, revisions in modes:
            engine.use(wrapper)
            decode.setdefault(name, []).append(engine.decode(revisions))
    for _ in range(max(1, rounds // 2)):
        for name, wrapper, revisions in modes:
            engine.use(wrapper)
            prefill.setdefault(name, []).append(engine.prefill(revisions))
    engine.use("grouped")
    speed = {name: statistics.median(values) for name, values in decode.items()}
    stall = {name: statistics.median(values) for name, values in prefill.items()}
    ratios = {
        f"decode_{r}_vs_stock": statistics.median(
            ours / stock for ours, stock in zip(decode[f"grouped-{r}"], decode[f"stock-{r}"], strict=True)
        )
        for r in (1, 4)
    }
    ratios |= {
        f"decode_{r}_vs_base": statistics.median(
            ours / base for ours, base in zip(decode[f"grouped-{r}"], decode["base"], strict=True)
        )
        for r in (1, 4)
    }
    ratios |= {f"prefill_{r}_vs_stock": stall[f"stock-{r}"] / stall[f"grouped-{r}"] for r in (1, 4)}
    return {"decode_tokens_per_second": speed, "prefill_seconds": stall, "ratios": ratios}


def interleaved(engine: Engine, cases: dict[str, dict[str, int]], rounds: int) -> dict[str, dict[str, float]]:
    """Decode speed of each case beside the base model at the same number of streams, in turn."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, case in cases.items():
            streams = case.get("streams", STREAMS)
            pair = engine.decode(case["revisions"], streams=streams), engine.decode(0, streams=streams)
            seen.setdefault(name, []).append(pair)
    return {
        name: {
            "tokens_per_second": statistics.median(ours for ours, _ in pairs),
            "base_tokens_per_second": statistics.median(base for _, base in pairs),
            "vs_base": statistics.median(ours / base for ours, base in pairs),
        }
        for name, pairs in seen.items()
    }


def measure(part: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Run one part in this process: ``rows`` (rank 16) or ``ranks`` (adapters of ranks 4 to 64)."""
    sys.path.insert(0, str(ROOT))
    from epochless_vllm.cli.tiny_model import make_adapter, make_model

    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory) / "model", max_position_embeddings=2048, **SIZES)
        ranks = [16] * max(REVISIONS) if part == "rows" else list(RANKS)
        adapters = [
            make_adapter(Path(directory) / f"{i}", seed=i, rank=rank, **SIZES) for i, rank in enumerate(ranks, 1)
        ]
        engine = Engine(model, adapters, max_rank=max(ranks), dtype=dtype)
        if part == "rows":
            return {
                "head_to_head": head_to_head(engine, rounds),
                "revisions": interleaved(engine, {str(r): {"revisions": r} for r in REVISIONS}, rounds),
                "streams": interleaved(
                    engine, {str(n): {"revisions": min(4, n), "streams": n} for n in STREAM_COUNTS}, rounds
                ),
            }
        every = engine.adapters
        results = {}
        for adapter, rank in zip(every, ranks, strict=True):
            engine.adapters = [adapter]
            results |= interleaved(engine, {str(rank): {"revisions": 1}}, rounds)
        engine.adapters = every
        results |= interleaved(engine, {"4 to 64 mixed": {"revisions": len(ranks)}}, rounds)
        return {"ranks": results}


def render(results: dict[str, Any]) -> str:
    """Return the results as Markdown tables; a bar is the speed as a share of the base model's, 20 characters long."""
    faceoff = results["head_to_head"]
    lines = [
        f"{results['dtype']}, {results['cpus']} CPUs, {STREAMS} streams:",
        "",
        "| revisions | decode tok/s | stock | base | x stock | x base | prefill s | stock | x stock |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    speed, stall, ratios = faceoff["decode_tokens_per_second"], faceoff["prefill_seconds"], faceoff["ratios"]
    for r in (1, 4):
        lines.append(
            f"| {r} | {speed[f'grouped-{r}']:.0f} | {speed[f'stock-{r}']:.0f} | {speed['base']:.0f} "
            f"| **{ratios[f'decode_{r}_vs_stock']:.2f}** | **{ratios[f'decode_{r}_vs_base']:.2f}** "
            f"| {stall[f'grouped-{r}']:.2f} | {stall[f'stock-{r}']:.1f} | **{ratios[f'prefill_{r}_vs_stock']:.1f}** |"
        )
    headings = {
        "revisions": f"live revisions (rank 16, {STREAMS} streams)",
        "ranks": f"rank (1 revision; mixed: {len(RANKS)}; {STREAMS} streams)",
        "streams": "streams (rank 16, 4 revisions or as many as streams)",
    }
    for key, heading in headings.items():
        lines += ["", f"| {heading} | tok/s | base tok/s | x base | |", "|---|---|---|---|---|"]
        for name, case in results[key].items():
            bar = "#" * round(20 * case["vs_base"])
            lines.append(
                f"| {name} | {case['tokens_per_second']:.0f} | {case['base_tokens_per_second']:.0f} "
                f"| {case['vs_base']:.2f} | `{bar:<20}` |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds instead of five")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="default: as vLLM's auto")
    parser.add_argument("--output", type=Path, help="JSON file; results of other dtypes in it are kept")
    parser.add_argument("--part", choices=["rows", "ranks"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        result = measure(arguments.part, arguments.dtype, 2 if arguments.quick else 5)
        result[f"largest_disturbance_{arguments.part}"] = max(DISTURBANCE)
        arguments.output.write_text(json.dumps(result))
        return
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    merged: dict[str, Any] = {"dtype": arguments.dtype, "cpus": os.cpu_count(), "model": SIZES}
    with tempfile.TemporaryDirectory() as directory:
        for part in ("rows", "ranks"):
            output = Path(directory) / part
            command = [sys.executable, __file__, "--part", part, "--dtype", arguments.dtype, "--output", str(output)]
            subprocess.run(command + ["--quick"] * arguments.quick, check=True, env=environment)
            merged |= json.loads(output.read_text())
    print(render(merged))
    if arguments.output:
        kept = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        arguments.output.write_text(json.dumps(kept | {arguments.dtype: merged}, indent=1) + "\n")


if __name__ == "__main__":
    main()
