"""What publishing costs the streams beside it, and how long until a publication is visible. One run, against stock.

Sixteen greedy streams decode on one revision of a 125M-parameter model, engine threads on one core, in windows with and
without one publication a second. Steps grow longer as contexts do, by tens of percent over a run: windows are ordered
idle, publishing, publishing, idle, and every figure is the mean of its windows', so that a steady growth cancels; the
throughput is that of the mean gap. ``stock`` does the same with vLLM's own ``add_lora`` under fresh names and ids, the
best it offers. Run: ``python benchmarks/bench_publish.py [--streams 64 --without-stock]`` (with 64 streams
a window may hold no gap of stock's); writes benchmarks/results/publish.json, or publish_<streams>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engines import BUILD, RANK, adapter, model_125m, quantile, run_variant

STREAMS = 16
WINDOW_S = 6.0
BLOCK = ("idle", "publishing", "publishing", "idle")  # what grows steadily weighs on both kinds alike
BLOCKS = 4
IDLE_PUBLICATIONS = 11  # of an idle engine, the first one under another policy
# One adapter a publication: publishing the same again would be no work.
SEEDS = range(1, 1 + IDLE_PUBLICATIONS + BLOCK.count("publishing") * BLOCKS * int(WINDOW_S))
LARGE_RANK = 96  # about 64 MB on the 125M model in float32


def engine_arguments(store: str | None, streams: int) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments: dict[str, Any] = {
        "model": str(model_125m()),
        "dtype": "float32",
        "enforce_eager": True,
        "enable_lora": True,
        "max_lora_rank": 128,
        "max_loras": 4,
        "max_cpu_loras": 16,
        "max_model_len": 4096,
        "max_num_seqs": 2 * streams,
        "async_scheduling": False,
        "disable_log_stats": True,
    }
    if store is not None:
        arguments["additional_config"] = {"epochless": {"store": store, "keep": 4}}
    return AsyncEngineArgs(**arguments)


class Publisher:
    """Publishes in the variant's own way; ``publish`` returns the seconds until the result is visible."""

    def __init__(self, engine: Any, store: str | None) -> None:
        self.engine = engine
        self.count = 0
        self.service: Any = None
        self.thread: Any = None
        if store is not None:
            from epochless_vllm.plugin.background import step_aside
            from epochless_vllm.plugin.ranks import AsyncTransport
            from epochless_vllm.plugin.service import start_service

            self.thread = ThreadPoolExecutor(1, initializer=step_aside)  # as the routes have
            transport = AsyncTransport(engine.engine_core, asyncio.get_running_loop())
            self.service = start_service(engine.vllm_config, transport, frozenset())

    async def publish(self, path: Path, policy: str = "policy") -> tuple[float, Any]:
        from vllm.lora.request import LoRARequest

        self.count += 1
        began = time.perf_counter()
        if self.service is None:
            request = LoRARequest(f"{policy}-{self.count}", self.count, str(path))
            await self.engine.add_lora(request)
            return time.perf_counter() - began, request
        await self.run(self.service.publish_directory, str(path), policy, None)
        publication = self.service.resolve(policy)
        taken = time.perf_counter() - began
        return taken, self.service.lora_request(publication)

    async def pump(self) -> None:
        if self.service is not None:
            await self.run(self.service.pump)

    async def run(self, action: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, action, *arguments)


async def stream(engine: Any, lora: Any, name: str, arrivals: list[float]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=0, max_tokens=3500, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    prompt = {"prompt_token_ids": [1 + (ord(c) % 250) for c in name * 8][:48]}
    async for _ in engine.generate(prompt, parameters, name, lora_request=lora):
        arrivals.append(time.perf_counter())


async def measure(store: str | None, streams: int) -> dict[str, Any]:
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(engine_arguments(store, streams))
    publisher = Publisher(engine, store)
    adapters = [adapter(seed) for seed in SEEDS]
    try:
        _, lora = await publisher.publish(adapters[0], "pinned")
        idle_publish = [(await publisher.publish(each))[0] for each in adapters[1:IDLE_PUBLICATIONS]]
        await publisher.pump()
        large = [(await publisher.publish(adapter(100 + i, rank=LARGE_RANK), "large"))[0] for i in range(5)]
        await publisher.pump()
        arrivals: list[list[float]] = [[] for _ in range(streams)]
        tasks = [asyncio.create_task(stream(engine, lora, f"s{i}", arrivals[i])) for i in range(streams)]
        while min(len(a) for a in arrivals) < 8:
            await asyncio.sleep(0.05)
        windows: dict[str, list[tuple[float, float]]] = {"idle": [], "publishing": []}
        busy_publish: list[float] = []
        following = iter(adapters[IDLE_PUBLICATIONS:])
        for kind in BLOCK * BLOCKS:
            began = time.perf_counter()
            while time.perf_counter() - began < WINDOW_S:
                tick = time.perf_counter()
                if kind == "publishing":
                    busy_publish.append((await publisher.publish(next(following)))[0])
                    await publisher.pump()
                await asyncio.sleep(max(0.0, 1.0 - (time.perf_counter() - tick)))
            windows[kind].append((began, time.perf_counter()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        result = {kind: summarise(arrivals, spans) for kind, spans in windows.items()}
        result["publish_ms"] = {
            "idle": milliseconds(idle_publish),
            "under_load": milliseconds(busy_publish),
            "large": milliseconds(large),
        }
        if publisher.service is not None:
            result["micro"] = microseconds(publisher.service)
            result["parts_ms"] = {"small": parts(adapters[2]), "large": parts(adapter(100, rank=LARGE_RANK))}
        return result
    finally:
        engine.shutdown()


def summarise(arrivals: list[list[float]], spans: list[tuple[float, float]]) -> dict[str, float]:
    """Return the means over windows of their quantiles of gaps between tokens, and the throughput of the mean gap."""
    windows = [
        [b - a for times in arrivals for a, b in itertools.pairwise(times) if begin <= a and b <= end]
        for begin, end in spans
    ]

    def mean_ms(figure: Any) -> float:
        return 1000 * statistics.mean(figure(gaps) for gaps in windows)

    return {
        "gaps": sum(map(len, windows)),
        "p50_ms": mean_ms(lambda gaps: quantile(gaps, 0.5)),
        "p99_ms": mean_ms(lambda gaps: quantile(gaps, 0.99)),
        "max_ms": 1000 * max(map(max, windows)),
        "tokens_per_s": 1000 * len(arrivals) / mean_ms(statistics.mean),
    }


def milliseconds(values: list[float]) -> dict[str, float]:
    named = {"median": statistics.median(values), "p99": quantile(values, 0.99), "min": min(values), "max": max(values)}
    return {name: 1000 * value for name, value in named.items()}


def microseconds(service: Any) -> dict[str, float]:
    from types import SimpleNamespace

    from epochless_vllm.plugin import block_keys

    def timed(action: Any, count: int = 20000) -> float:
        rounds = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(count):
                action()
            rounds.append((time.perf_counter() - began) / count)
        return 1e6 * min(rounds)

    block_keys.set_base_digest(service.base_digest)
    publication = service.resolve("policy")
    request = SimpleNamespace(lora_request=service.lora_request(publication))
    return {
        "admission_us": timed(lambda: service.lora_request(service.resolve("policy"))),
        "admission_constrained_us": timed(lambda: service.resolve("policy", {"min_version": 1})),
        "block_key_us": timed(lambda: block_keys.generate_revision_extra_keys(request)),
    }


def parts(path: Path) -> dict[str, float]:
    """Time what any durable publication must do with these bytes: one copy, two hashes, the fsyncs.

    Seven fsyncs: the weights, their description, the directory they are renamed from, into, and its parent, and the two
    journal records that intend and commit.
    """
    source = path / "adapter_model.safetensors"
    target = BUILD / "parts.tmp"
    small = [BUILD / f"parts-{i}.tmp" for i in range(3)]
    results: dict[str, list[float]] = {"copy": [], "two_hashes": [], "fsyncs": []}
    for _ in range(5):
        began = time.perf_counter()
        shutil.copyfile(source, target)
        copied = time.perf_counter()
        for file in (target, *small):
            if file in small:
                file.write_bytes(b"x" * 4096)
            sync(file, os.O_RDWR)
        for _ in range(3):
            sync(BUILD, os.O_RDONLY)
        synced = time.perf_counter()
        data = source.read_bytes()
        read = time.perf_counter()
        hashlib.sha256(data).digest()
        hashlib.sha256(data).digest()
        results["two_hashes"].append(time.perf_counter() - read)
        results["copy"].append(copied - began)
        results["fsyncs"].append(synced - copied)
    for file in (target, *small):
        file.unlink()
    return {name: 1000 * statistics.median(values) for name, values in results.items()}


def sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    os.fsync(descriptor)
    os.close(descriptor)


def compare(ours: dict[str, Any]) -> dict[str, float]:
    """Return what publishing changes for the streams beside it, and the streams for publishing."""
    idle, publishing, publish = ours["idle"], ours["publishing"], ours["publish_ms"]
    return {
        "p99_publishing_over_idle": publishing["p99_ms"] / idle["p99_ms"],
        "p50_publishing_over_idle": publishing["p50_ms"] / idle["p50_ms"],
        "throughput_publishing_over_idle": publishing["tokens_per_s"] / idle["tokens_per_s"],
        "p99_publish_under_load_over_idle": publish["under_load"]["p99"] / publish["idle"]["median"],
    }


def compare_with_stock(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """Return the ratios that need both; the bound of a publication is 1.5 times stock's load and ``parts``."""

    def bound(kind: str, size: str) -> float:
        return float(1.5 * (stock["publish_ms"][kind]["median"] + sum(ours["parts_ms"][size].values())))

    of_stock = compare(stock)
    return {
        "stock_p99_publishing_over_idle": of_stock["p99_publishing_over_idle"],
        "stock_throughput_publishing_over_idle": of_stock["throughput_publishing_over_idle"],
        "throughput_over_stock_idle": ours["idle"]["tokens_per_s"] / stock["idle"]["tokens_per_s"],
        "visible_over_bound": ours["publish_ms"]["idle"]["median"] / bound("idle", "small"),
        "visible_large_over_bound": ours["publish_ms"]["large"]["median"] / bound("large", "large"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=("stock", "epochless"))
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--without-stock", action="store_true")
    arguments = parser.parse_args()
    if arguments.variant:
        store = None
        if arguments.variant == "epochless":
            store = str(BUILD / "store")
            shutil.rmtree(store, ignore_errors=True)
        print(json.dumps(asyncio.run(measure(store, arguments.streams))))
        return
    for seed in SEEDS:
        adapter(seed)
    for seed in range(100, 105):
        adapter(seed, rank=LARGE_RANK)
    passed = ["--streams", str(arguments.streams)]
    stock = None if arguments.without_stock else run_variant(Path(__file__), "stock", passed, stock=True)
    ours = run_variant(Path(__file__), "epochless", passed, stock=False)
    ratios = compare(ours) | ({} if stock is None else compare_with_stock(stock, ours))
    report = {
        "rank": RANK,
        "streams": arguments.streams,
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        **({} if stock is None else {"stock": stock}),
        "epochless": ours,
    }
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    name = "publish.json" if arguments.streams == STREAMS else f"publish_{arguments.streams}.json"
    (results / name).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
