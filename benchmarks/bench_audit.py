"""Is replaying a response cheaper than generating it, and in how much memory?

    python benchmarks/bench_audit.py [--tokens N] [--rounds N] [--only tiny|125M]

A response of 1,000 tokens: generated token by token through transformers with its KV cache (greedy, eager, the same
thread count), and audited: verified, prefilled in batches by the NumPy engine, every row recomputed by the sampler and
compared. Both take turns in one process, each figure is the best of the rounds, and only the ratio is meant to be read.
Memory is that of a process of its own that does nothing but one audit: its peak above what importing left, less weights
and buffers. The receipts are those of the model's own sampler at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.engines import SIZES_125M  # noqa: E402 - the checkout, not an installed copy
from epochless_vllm.cli.tiny_model import TINY, make_model  # noqa: E402
from epochless_vllm.protocol.compact import encode_compact  # noqa: E402
from epochless_vllm.protocol.header import prompt_digest  # noqa: E402
from epochless_vllm.verify.findings import require_replayed  # noqa: E402
from epochless_vllm.verify.receipt import verify_receipt  # noqa: E402

BUILD = ROOT / "build" / "bench"
RESULT = ROOT / "benchmarks" / "results" / "audit.json"
PROMPT = list(range(32))
MODELS = {"tiny": TINY, "125M": SIZES_125M}
CONSTANT_BYTES = 128 << 20  # code, temporaries of the sampler, NumPy's and BLAS's own buffers
WANTED_RATIO = 8


def model_of(name: str) -> Path:
    directory = BUILD / ("llama-125m" if name == "125M" else "llama-tiny")
    if not (directory / "model.safetensors").exists():
        make_model(directory, seed=0, **MODELS[name])
    return directory


def make_receipt(name: str, tokens: int) -> Path:
    """Write, once, the receipt of a response sampled by the reference engine from its own batched logits."""
    path = BUILD / f"audit-{name}-{tokens}.receipt"
    if path.exists():
        return path
    import numpy as np

    from epochless_vllm.protocol.builder import ReceiptBuilder
    from epochless_vllm.protocol.draws import draw_range
    from epochless_vllm.protocol.header import reveal_key
    from epochless_vllm.protocol.receipts import LENGTH
    from epochless_vllm.reference.buffers import Limits
    from epochless_vllm.reference.forward import Engine
    from epochless_vllm.reference.model import load_model
    from epochless_vllm.reference.sampler import sample_rows
    from tests.protocol.receipt_factory import SIGNER, seed_of
    from tests.verify.replay_factory import PLAIN, Server, base_of

    directory = model_of(name)
    model = load_model(directory)
    server = Server(model, base_of(directory, BUILD))
    header = server.header(PROMPT, [server.base_entry()], tokens)
    header = replace(header, prompt=prompt_digest(PROMPT), prompt_length=len(PROMPT))
    key = reveal_key(header, seed_of(header))
    assert key is not None
    draws = draw_range(key, 0, tokens)
    engine, builder = Engine(model, Limits(len(PROMPT) + tokens, rank=0)), ReceiptBuilder(header)
    logits: Any = None
    for _, block in engine.prefill(PROMPT, logits_from=len(PROMPT) - 1):
        logits = block[-1]
    for position in range(tokens):
        row = sample_rows(logits[None], PLAIN, np.array([draws[position]]))
        builder.append([int(row.token[0])], [int(row.lo[0])], [int(row.w[0])])
        if position + 1 < tokens:
            logits = engine.step(int(row.token[0]))
    path.write_bytes(encode_compact(builder.seal(LENGTH, SIGNER, seed=seed_of(header))))
    return path


def open_auditor(name: str, receipt: Path) -> Any:
    from epochless_vllm.verify.replay import Auditor

    base = verify_receipt(receipt.read_bytes()).header.base
    return Auditor(model_of(name), base, None)


def audit_once(auditor: Any, receipt: Path) -> float:
    """Return the seconds of one audit, verification of the receipt included."""
    began = time.perf_counter()
    verified = verify_receipt(receipt.read_bytes(), keep_blocks=True)
    replayed = require_replayed(auditor.replay(verified, PROMPT))
    assert replayed.verdict.value == "REPLAYED", replayed.verdict
    return time.perf_counter() - began


def load_transformers(name: str) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_of(name), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def generate_once(model: Any, tokens: int) -> float:
    """Return the seconds of generating a response token by token."""
    import torch

    began = time.perf_counter()
    with torch.no_grad():
        out = model(torch.tensor([PROMPT]), use_cache=True)
        for _ in range(tokens - 1):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
    return time.perf_counter() - began


def measure_memory(name: str, receipt: Path) -> dict[str, int]:
    """Return the peak of a process that does one audit, in bytes, beside what it is allowed."""
    command = [sys.executable, __file__, "--memory-of", name, "--receipt", str(receipt)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def peak_bytes() -> int:
    """Return the most memory this program had resident; getrusage's figure begins at that of the parent process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def report_memory(name: str, receipt: Path) -> None:
    import numpy  # noqa: F401  # part of what importing leaves

    import epochless_vllm.verify.replay  # noqa: F401  # as above
    from epochless_vllm.reference.buffers import Limits, allocate

    before = peak_bytes()
    auditor = open_auditor(name, receipt)
    audit_once(auditor, receipt)
    peak = peak_bytes() - before
    tokens = verify_receipt(receipt.read_bytes()).tokens
    buffers = allocate(auditor.model.config, Limits(len(PROMPT) + tokens - 1, rank=0)).byte_size
    print(json.dumps({"peak": peak, "weights": auditor.model.byte_size, "buffers": buffers}))


def measure(name: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one model."""
    receipt = make_receipt(name, tokens)
    memory = measure_memory(name, receipt)
    auditor, model = open_auditor(name, receipt), load_transformers(name)
    audits, generations = [], []
    for _ in range(rounds):
        audits.append(audit_once(auditor, receipt))
        generations.append(generate_once(model, tokens))
    over = memory["peak"] - memory["weights"] - memory["buffers"]
    return {
        "tokens": tokens,
        "audit_seconds": min(audits),
        "generate_seconds": min(generations),
        "ratio": min(generations) / min(audits),
        "ratios": [b / a for a, b in zip(audits, generations, strict=True)],
        "memory": memory | {"above_weights_and_buffers": over, "constant": CONSTANT_BYTES},
        "met": min(generations) / min(audits) >= WANTED_RATIO and over <= CONSTANT_BYTES,
    }


def main() -> int:
    """Measure both models and write the result; 1 if a figure is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=MODELS, help="measure one model; the other's last result stays")
    parser.add_argument("--memory-of", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--receipt", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    if arguments.memory_of:
        report_memory(arguments.memory_of, arguments.receipt)
        return 0
    result: dict[str, Any] = {"threads": int(os.environ["OMP_NUM_THREADS"]), "wanted_ratio": WANTED_RATIO}
    if arguments.only:
        result |= {name: old for name, old in json.loads(RESULT.read_text()).items() if name in MODELS}
    for name in [arguments.only] if arguments.only else MODELS:
        result[name] = measure(name, arguments.tokens, arguments.rounds)
        print(name, json.dumps(result[name]), flush=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return int(not all(each["met"] for name, each in result.items() if name in MODELS))


if __name__ == "__main__":
    # Both sides get the same threads; before NumPy or torch starts its pool.
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    os.environ["OPENBLAS_NUM_THREADS"] = threads
    sys.exit(main())
