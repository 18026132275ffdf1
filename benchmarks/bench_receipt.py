"""How large are receipts, how fast are they verified, what do they cost beside serving?

    python benchmarks/bench_receipt.py [--quick] [--stream-tokens N]

Sizes are exact. Times are CPU time of one process: the verifier is single-threaded and does no I/O, so its CPU time on
a busy machine is its wall time on a free core; the latency of one response is given as wall time too. Formats take
turns within every round, and each figure is the median over rounds. Needs no engine; takes about five minutes, most
of them for the stream of 10,000,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epochless_vllm.protocol.builder import ReceiptBuilder, sign_final  # noqa: E402 - the checkout, not an installed copy
from epochless_vllm.protocol.columns import id_width  # noqa: E402
from epochless_vllm.protocol.compact import encode_compact  # noqa: E402
from epochless_vllm.protocol.disclosure import make_disclosure  # noqa: E402
from epochless_vllm.protocol.draw_window import DrawWindow  # noqa: E402
from epochless_vllm.protocol.header import Header, reveal_key  # noqa: E402
from epochless_vllm.protocol.receipts import LENGTH, Receipt  # noqa: E402
from epochless_vllm.protocol.records import ONE  # noqa: E402
from epochless_vllm.protocol.stream import (  # noqa: E402
    encode_block_frame,
    encode_final_frame,
    encode_header_frame,
    encode_stream,
)
from epochless_vllm.protocol.verbose import encode_verbose  # noqa: E402
from epochless_vllm.verify.ed25519 import verify_ed25519  # noqa: E402
from epochless_vllm.verify.expected import Expected  # noqa: E402
from epochless_vllm.verify.receipt import StreamVerifier, verify_receipt  # noqa: E402
from tests.protocol.receipt_factory import (  # noqa: E402
    GREEDY,
    NONCE,
    NUCLEUS,
    REQUEST_SEED,
    SAMPLED,
    SIGNER,
    make_header,
    make_receipt,
    make_rows,
    seed_of,
)

FORMATS: dict[str, Callable[[Receipt], bytes]] = {
    "compact": encode_compact,
    "stream": encode_stream,
    "verbose": encode_verbose,
}
KNOWN = {"public_key": SIGNER.public_key, "nonce": NONCE}
LENGTHS = (1, 2, 3, 7, 16, 63, 64, 65, 100, 256, 1000, 4096)


def fixed_bytes(receipt: Receipt) -> int:
    """Bytes of a compact receipt with one flag run that do not depend on its rows."""
    return 4 + 4 + len(receipt.header.encoded) + 4 + len(receipt.final.encoded) + 96 + 4 + 9


def receipt_of(header: Header, count: int, sharpness: float) -> Receipt:
    builder = ReceiptBuilder(header)
    builder.append(*make_rows(header, 0, count, random.Random(count), sharpness=sharpness))
    return builder.seal(LENGTH, SIGNER, seed=seed_of(header))


def measure_sizes() -> dict[str, Any]:
    """Proof bytes a token in the compact form, token ids excluded, over lengths and shapes of distribution.

    ``sharpness`` s gives widths 1 - u**s: 0.1 a flat distribution, 1 uniform probabilities, 10 a peaked one.
    """
    table = {}
    for sharpness in (0.1, 0.5, 1.0, 2.0, 10.0):
        sizes, tokens, worst = 0, 0, 0.0
        for count in LENGTHS:
            receipt = receipt_of(make_header(max_tokens=count), count, sharpness)
            ids = count * id_width(receipt.header.vocab_size)
            size = len(encode_compact(receipt)) - fixed_bytes(receipt) - ids
            sizes, tokens, worst = sizes + size, tokens + count, max(worst, size / count)
        table[str(sharpness)] = {"mean": round(sizes / tokens, 3), "max": round(worst, 3)}
    long_header = make_header(
        max_tokens=131_072, request_id="chatcmpl-" + "f" * 36, nonce="n" * 64, sampler=NUCLEUS, choice_index=127
    )
    whole = {
        name: {kind: len(encode(receipt)) / 1000 for kind, encode in FORMATS.items()}
        for name, receipt in (
            ("sampled", receipt_of(make_header(max_tokens=1000, sampler=SAMPLED), 1000, 2.0)),
            ("greedy", make_receipt(1000, header=make_header(max_tokens=1000, sampler=GREEDY))),
            ("filtered", make_receipt(1000, header=make_header(max_tokens=1000, sampler=NUCLEUS))),
        )
    }
    return {
        "proof_bytes_per_token": table,
        "proof_bytes_per_token_max": max(row["max"] for row in table.values()),
        "proof_bytes_per_token_mean": round(statistics.mean(row["mean"] for row in table.values()), 3),
        "fixed_bytes": fixed_bytes(make_receipt(1000)),
        "fixed_bytes_long_ids": fixed_bytes(make_receipt(1000, header=long_header, finish_reason="abort")),
        "all_bytes_per_token_of_1000": whole,
        "disclosure_bytes_of_100000": len(
            make_disclosure(receipt_of(make_header(max_tokens=100_000), 100_000, 2.0), 50_000).encode()
        ),
    }


def timed(task: Callable[[], object]) -> tuple[float, float]:
    """Return (CPU seconds, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    task()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure_verification(tokens: int, rounds: int) -> dict[str, Any]:
    large = receipt_of(make_header(max_tokens=tokens), tokens, 2.0)
    short = receipt_of(make_header(max_tokens=1000), 1000, 2.0)
    payloads = {kind: (encode(large), encode(short)) for kind, encode in FORMATS.items()}
    samples: dict[str, list[tuple[float, float]]] = {}
    message, signature = b"m" * 600, SIGNER.sign(b"m" * 600)
    for _ in range(rounds):
        for kind, (long_payload, short_payload) in payloads.items():
            samples.setdefault(kind, []).append(timed(lambda p=long_payload: verify_receipt(p, **KNOWN)))
            samples.setdefault(kind + " 1000", []).append(timed(lambda p=short_payload: verify_receipt(p, **KNOWN)))
        samples.setdefault("ed25519", []).append(timed(lambda: verify_ed25519(SIGNER.public_key, message, signature)))

    def median(name: str, which: int) -> float:
        return statistics.median(sample[which] for sample in samples[name])

    return {
        "tokens": tokens,
        "tokens_per_cpu_second": {kind: round(tokens / median(kind, 0)) for kind in FORMATS},
        "tokens_per_wall_second": {kind: round(tokens / median(kind, 1)) for kind in FORMATS},
        "tokens_per_cpu_second_best": {kind: round(tokens / min(s[0] for s in samples[kind])) for kind in FORMATS},
        "ms_1000_tokens_cpu": {kind: round(1e3 * median(kind + " 1000", 0), 2) for kind in FORMATS},
        "ms_1000_tokens_wall": {kind: round(1e3 * median(kind + " 1000", 1), 2) for kind in FORMATS},
        "ms_ed25519_cpu": round(1e3 * median("ed25519", 0), 2),
    }


def measure_building(tokens: int, rounds: int) -> dict[str, Any]:
    """CPU microseconds a token: rows appended one step at a time, and the receipt encoded."""
    header = make_header(max_tokens=tokens)
    ids, low, width = make_rows(header, 0, tokens, random.Random(1), sharpness=2.0)

    def one_by_one() -> None:
        builder = ReceiptBuilder(header)
        for i in range(tokens):
            builder.append(ids[i : i + 1], low[i : i + 1], width[i : i + 1])

    def by_sixteen() -> None:
        builder = ReceiptBuilder(header)
        for i in range(0, tokens, 16):
            builder.append(ids[i : i + 16], low[i : i + 16], width[i : i + 16])

    receipt = receipt_of(header, tokens, 2.0)
    tasks: dict[str, Callable[[], object]] = {
        "append_1": one_by_one,
        "append_16": by_sixteen,
        **{f"encode_{kind}": lambda encode=encode: encode(receipt) for kind, encode in FORMATS.items()},
    }
    samples: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            samples[name].append(timed(task)[0])
    return {name: round(1e6 * statistics.median(values) / tokens, 3) for name, values in samples.items()}


def run_stream(tokens: int) -> dict[str, Any]:
    """Make and verify one stream block by block in this process; report time and the peak of its memory."""
    blocks = -(-tokens // 64)
    header = make_header(max_tokens=64 * blocks)
    key = reveal_key(header, REQUEST_SEED)
    assert key is not None
    builder, window = ReceiptBuilder(header, keep_blocks=False), DrawWindow(key)
    verifier = StreamVerifier(Expected(**KNOWN))
    verifier.feed(encode_header_frame(header))
    spent = total_bytes = 0.0
    ids = list(range(3, 67))
    for number in range(blocks):
        draws = window.read(64 * number, 64)
        low = [value // 2 for value in draws]
        width = [ONE - value // 2 - (ONE - value) // 3 for value in draws]
        (block,) = builder.append(ids, low, width)
        frame = encode_block_frame(block, draws)
        total_bytes += len(frame)
        began = time.process_time()
        verifier.feed(frame)
        spent += time.process_time() - began
    _, final = builder.finish(LENGTH, seed=REQUEST_SEED)
    verifier.feed(encode_final_frame(final, sign_final(final, SIGNER)))
    began = time.process_time()
    verified = verifier.close()
    spent += time.process_time() - began
    return {
        "tokens": verified.tokens,
        "verdict": verified.verdict.value,
        "megabytes": round(total_bytes / 1e6, 1),
        "tokens_per_cpu_second": round(verified.tokens / spent),
        "peak_rss_mib": round(peak_kib() / 1024, 1),
    }


def peak_kib() -> int:
    """Peak resident memory of this program; getrusage would report the parent's, kept across exec."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def measure_streams(longest: int) -> list[dict[str, Any]]:
    """Run each length in a process of its own, so that peaks compare."""
    return [
        json.loads(subprocess.check_output([sys.executable, __file__, "--run-stream", str(tokens)]))
        for tokens in (longest // 100, longest)
    ]


REPORT = """# Receipts: size, verification, cost

Written by `python benchmarks/bench_receipt.py --output benchmarks/results/receipt.json --report benchmarks/receipt.md`;
every figure is from that one run. Times are CPU time of one core, medians over rounds in which the formats take turns;
wall time stands beside it where a person waits for it. {machine}

| what | figure | wanted |
|---|---|---|
| proof, compact, bytes a token, token ids excluded: most | {proof_max:.2f} | ≤ 8.00 |
| … mean over flat to peaked distributions and lengths 1 to 4,096 | {proof_mean:.2f} | < 7.9 |
| bytes that do not depend on the tokens (long ids, filters: {fixed_long}) | {fixed} | ≤ 2,048 |
| verification, compact, tokens/s | {compact:,} | ≥ 400,000 |
| verification, stream, tokens/s | {stream:,} | |
| verification, verbose, tokens/s | {verbose:,} | |
| 1,000-token response, compact, with signature: CPU ms (wall {wall_ms} ms) | {cpu_ms} | ≤ 15 |
| of that, Ed25519 ms | {ed25519} | |
| stream of {long_tokens:,} tokens: peak memory of maker and verifier, MiB | {long_rss} | constant |
| stream of {short_tokens:,} tokens: the same | {short_rss} | |
| building, µs a token, one token a step | {append_1} | |
| building, µs a token, sixteen tokens a step | {append_16} | |
| encoding compact, µs a token | {encode_compact} | |

A filtered row (top-k, top-p, min-p) adds the 4 bytes of its kept mass, a greedy row adds nothing. All bytes of a
1,000-token response, fixed ones and token ids included, per token:
{whole}.
Disclosure of one token out of 100,000: {disclosure:,} bytes.

Proof bytes by shape of the distribution (widths are 1 - u^s of the mass, u uniform; the most is at the shortest
responses, where a byte's padding counts for most):

| s | mean | most |
|---|---|---|
{shapes}
"""


def render(result: dict[str, Any]) -> str:
    """Return the report's text."""
    sizes, times, building = result["sizes"], result["verification"], result["building_us_per_token"]
    short, long = result["streams"]
    machine = result["machine"]
    whole = "; ".join(
        f"{name} " + ", ".join(f"{kind} {value:.1f}" for kind, value in kinds.items())
        for name, kinds in sizes["all_bytes_per_token_of_1000"].items()
    )
    shapes = sizes["proof_bytes_per_token"].items()
    return REPORT.format(
        machine=f"Python {machine['python']}, {machine['processor']},\n{machine['cpus']} cores; load average "
        f"{machine['load_average'][0]} when it began: other work ran beside it if that is not near zero.",
        proof_max=sizes["proof_bytes_per_token_max"],
        proof_mean=sizes["proof_bytes_per_token_mean"],
        fixed=sizes["fixed_bytes"],
        fixed_long=sizes["fixed_bytes_long_ids"],
        **times["tokens_per_cpu_second"],
        wall_ms=times["ms_1000_tokens_wall"]["compact"],
        cpu_ms=times["ms_1000_tokens_cpu"]["compact"],
        ed25519=times["ms_ed25519_cpu"],
        long_tokens=long["tokens"],
        long_rss=long["peak_rss_mib"],
        short_tokens=short["tokens"],
        short_rss=short["peak_rss_mib"],
        append_1=building["append_1"],
        append_16=building["append_16"],
        encode_compact=building["encode_compact"],
        whole=whole,
        disclosure=sizes["disclosure_bytes_of_100000"],
        shapes="\n".join(f"| {name} | {row['mean']:.2f} | {row['max']:.2f} |" for name, row in shapes),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, a short stream")
    parser.add_argument("--stream-tokens", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--run-stream", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_stream:
        print(json.dumps(run_stream(options.run_stream)))
        return
    rounds = 5 if options.quick else 25
    result = {
        "machine": {
            "cpus": os.cpu_count(),
            "load_average": [round(value, 1) for value in os.getloadavg()],
            "processor": platform.machine(),
            "python": platform.python_version(),
        },
        "sizes": measure_sizes(),
        "verification": measure_verification(20_000 if options.quick else 64_000, rounds),
        "building_us_per_token": measure_building(6_400, rounds),
        "streams": measure_streams(options.stream_tokens or (200_000 if options.quick else 10_000_000)),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    if options.report:
        options.report.write_text(render(result))


if __name__ == "__main__":
    main()
