"""How long a server takes to its first healthy answer: stock, with an empty store, and with revisions to bring back.

    python benchmarks/bench_startup.py [--rounds 3] [--revisions 32]

``vllm serve`` on the 125M-parameter model, from the start of the process to the first 200 of /health; the three take
turns within every round and each figure is a median. Wanted: with 32 revisions no more than 5 s above stock. Writes
benchmarks/results/startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from engines import BUILD, ROOT, adapter, model_125m, stock_tree

TIMEOUT_S = 600


@contextmanager
def server(*flags: str, stock: bool) -> Iterator[tuple[str, float]]:
    """Start a server; yield its URL and the seconds it took to become healthy; stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([*([str(stock_tree())] if stock else []), str(ROOT)]),
        **({"VLLM_PLUGINS": ""} if stock else {}),
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model_125m()), "--host", "127.0.0.1"),
        *("--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
        *("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "40", *flags),
    ]
    log = (BUILD / "startup.log").open("ab")
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_healthy(url):
            assert process.poll() is None, f"the server ended; see {log.name}"
            assert time.perf_counter() - began < TIMEOUT_S, f"no answer in {TIMEOUT_S} s; see {log.name}"
            time.sleep(0.05)
        yield url, time.perf_counter() - began
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        log.close()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:  # not listening yet
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--revisions", type=int, default=32)
    options = parser.parse_args()
    empty, filled = BUILD / "startup-empty", BUILD / "startup-filled"
    shutil.rmtree(filled, ignore_errors=True)
    flags = ("--enable-epochless", "--epochless-keep", str(options.revisions), "--epochless-store")
    for seed in range(1, options.revisions + 1):
        adapter(seed)
    with server(*flags, str(filled), stock=False) as (url, _):
        for seed in range(1, options.revisions + 1):
            body = {"lora_name": "policy", "lora_path": str(adapter(seed))}
            httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()
    seconds: dict[str, list[float]] = {"stock": [], "empty": [], "filled": []}
    for _ in range(options.rounds):
        shutil.rmtree(empty, ignore_errors=True)
        for name, arguments in (("stock", ()), ("empty", (*flags, str(empty))), ("filled", (*flags, str(filled)))):
            with server(*arguments, stock=name == "stock") as (_, taken):
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    report = {
        "revisions": options.revisions,
        "seconds": seconds,
        "empty_over_stock": round(medians["empty"] / medians["stock"], 3),
        "empty_minus_stock_s": round(medians["empty"] - medians["stock"], 2),
        "filled_minus_stock_s": round(medians["filled"] - medians["stock"], 2),
        "filled_minus_empty_s": round(medians["filled"] - medians["empty"], 2),
    }
    (Path(__file__).parent / "results" / "startup.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
