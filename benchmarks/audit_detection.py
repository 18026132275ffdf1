"""How many tokens does an audit need to see that a server computed something else?

    python benchmarks/audit_detection.py [--quick] [--reuse]

A trained byte-level Llama with a trained adapter, served by vLLM on the CPU with Epochless's operations over rows of
adapters, in float32 and in bfloat16. The engine's own logits make honest receipts and dishonest ones: each cheat is
really computed, and the receipt claims the honest setting. Every receipt is audited with the defaults; a cheat's figure
is the shortest opening of a response at which the audit refuses it. ``together`` is for what single responses do not
give away: how many tokens of successive responses it takes, audited at once. Honest responses come from an eager and
from a compiled engine; none may be refused, alone or after any number of successive tokens. Engines run in processes of
their own; the whole takes some fifteen minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epochless_vllm.cli.tiny_model import write_safetensors  # noqa: E402 - the checkout, not an installed copy
from epochless_vllm.reference.rows import RowResult  # noqa: E402
from epochless_vllm.reference.weights import locate_tensors, read_tensor  # noqa: E402
from epochless_vllm.store.revisions import RevisionStore  # noqa: E402
from epochless_vllm.verify.findings import WINDOW, summarise  # noqa: E402
from epochless_vllm.verify.receipt import verify_receipt  # noqa: E402
from epochless_vllm.verify.replay import Auditor  # noqa: E402
from epochless_vllm.verify.series import LIMIT, Series, add_up  # noqa: E402
from tests.reference.engine_child import make_plan, start  # noqa: E402
from tests.reference.trained import prompts, train, train_further  # noqa: E402
from tests.verify.replay_factory import base_of  # noqa: E402

BUILD = ROOT / "build" / "bench"
RESULT = ROOT / "benchmarks" / "results" / "audit_detection.json"
PLAIN = {"temperature": 1.0}
HONEST_SAMPLERS: tuple[dict[str, Any], ...] = (
    PLAIN,
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 0.0},
    {"temperature": 0.6, "min_p": 0.05},
)
MISSING = "model.layers.1.self_attn.q_proj"
HONEST, COMPILED = "honest", "honest, compiled"
DTYPES = ("float32", "bfloat16")
LENGTH = 400  # tokens of a response


def change_adapter(source: Path, target: Path, *, alpha: float = 1.0, without: str | None = None) -> Path:
    """Write a copy of an adapter with another scale, or with one module's delta zeroed; return its directory."""
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "adapter_config.json").read_text())
    config["lora_alpha"] *= alpha
    (target / "adapter_config.json").write_text(json.dumps(config))
    located = locate_tensors(source)
    tensors = {name: read_tensor(tensor) for name, tensor in located.items()}
    for name in tensors:
        if without is not None and f"{without}.lora_B" in name:
            tensors[name] = np.zeros_like(tensors[name])
    write_safetensors(target / "adapter_model.safetensors", tensors)
    return target


def quantise_model(source: Path, target: Path) -> Path:
    """Write a copy of a model with every matrix rounded to 8 bits a row, as a cheaper server would hold it."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = {name: read_tensor(tensor) for name, tensor in locate_tensors(source).items()}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            step = np.abs(tensor).max(axis=1, keepdims=True) / 127
            tensors[name] = (np.rint(tensor / step) * step).astype(np.float32)
    write_safetensors(target / "model.safetensors", tensors)
    return target


def make_plans(dtype: str, quick: bool) -> tuple[list[dict[str, Any]], str]:
    """Return the engines to run in a dtype and the base digest that all receipts claim."""
    model, adapter = train(BUILD / "trained")
    folder = BUILD / "audit"
    store = RevisionStore(folder / "store")
    revision = store.ingest_directory(adapter).revision_id
    base = base_of(model, folder, dtype)
    honest_count, cheat_count = (6, 2) if quick else (64, 8)
    texts = prompts(honest_count)

    def request(at: int, **fields: Any) -> dict[str, Any]:
        adapted = {"revision": revision, "adapter": str(adapter)}
        return {"prompt": texts[at], "sampler": PLAIN, "tokens": LENGTH, **adapted, **fields}

    def cheat(name: str, **fields: Any) -> list[dict[str, Any]]:
        return [request(at, kind=name, **fields) for at in range(cheat_count)]

    honest = []
    for at in range(honest_count):
        fields: dict[str, Any] = {"sampler": HONEST_SAMPLERS[at % 5], "kind": HONEST}
        if at // 5 % 2:
            fields |= {"revision": None, "adapter": None}
        honest.append(request(at, **fields))
    scaled = change_adapter(adapter, folder / "scaled", alpha=1.01)
    without = change_adapter(adapter, folder / "without", without=MISSING)
    compiled = [each | {"kind": COMPILED} for each in honest]
    requests = [
        *honest,
        *cheat("another revision", adapter=str(BUILD / "trained" / "next")),
        *cheat("the base instead of the revision", adapter=None),
        *cheat("temperature 1.05 for 1", used={"temperature": 1.05}),
        *[each | {"computed": each["prompt"][1:]} for each in cheat("positions off by one")],
        *cheat("one LoRA module missing", adapter=str(without)),
        *cheat("adapter scaled by 1.01", adapter=str(scaled)),
    ]
    common = {"dtype": dtype, "base": base, "grouped": True}
    quantised = quantise_model(model, folder / "quantised")
    later = train_further(BUILD / "trained")
    return [
        make_plan(f"{dtype}-main", model, adapter, recorded=requests, **common),
        make_plan(f"{dtype}-compiled", model, adapter, recorded=compiled, compiled=True, **common),
        make_plan(f"{dtype}-later", later, adapter, recorded=cheat("another base"), **common),
        make_plan(f"{dtype}-base", quantised, adapter, recorded=cheat("base quantised to 8 bits"), **common),
        make_plan(f"{dtype}-kv", model, adapter, recorded=cheat("KV quantised to fp8"), kv_cache_dtype="fp8", **common),
    ], base


def tokens_to_refusal(receipt: Any, auditor: Auditor, results: dict[int, RowResult]) -> int | None:
    """Return the shortest opening of a response that the audit refuses, None if it accepts the whole."""
    refused_at = None
    order = sorted(results)
    for count in range(len(order), 0, -1):
        found = summarise(receipt, auditor.tolerance, {at: results[at] for at in order[:count]}, {})
        if found.faults:
            refused_at = count
        elif refused_at is not None or count == len(order):
            # A drift may be there and pass again; an opening that passes after longer ones failed ends the search.
            break
    return refused_at


def tokens_together(auditor: Auditor, responses: list[dict[int, RowResult]]) -> int | None:
    """Return how many tokens of successive responses, audited at once, it takes to refuse them."""
    total, rows, tokens, series = 0.0, 0, 0, Series()
    for results in responses:
        for at in sorted(results):
            tokens, row = tokens + 1, results[at]
            if row.error is not None:
                total, rows = total + row.error**2, rows + 1
            if row.contrast is not None:
                series = series.plus(add_up([row.contrast]))
            drifts = rows >= WINDOW and (total / rows) ** 0.5 > auditor.tolerance.drift_of(rows)
            if row.fault is not None or drifts or series.lie is not None:
                return tokens
    return None


def root_mean_square(responses: list[dict[int, RowResult]]) -> float:
    errors = [row.error for results in responses for row in results.values() if row.error is not None]
    return float(np.sqrt(np.mean(np.square(errors))))


def scores_of(responses: list[dict[int, RowResult]]) -> dict[str, float]:
    return add_up(row.contrast for results in responses for row in results.values() if row.contrast).scores


def honest_figures(auditor: Auditor, responses: list[tuple[Any, dict[int, RowResult]]]) -> dict[str, Any]:
    """Return what the audit makes of honest responses."""
    replays = [summarise(receipt, auditor.tolerance, results, {}) for receipt, results in responses]
    rows = [results for _, results in responses]
    return {
        "tokens": sum(each.compared for each in replays),
        "responses": len(replays),
        "refused": sum(bool(each.faults) for each in replays),
        "exact": sum(each.exact for each in replays),
        "membership_flips": sum(each.flips for each in replays),
        "worst_ratio": max(each.worst_ratio[0] for each in replays),
        "worst_nats": max(each.worst_nats[0] for each in replays),
        "worst_score": max(max(each.series.scores.values()) for each in replays if each.drift_rows),
        "drift": root_mean_square(rows),
        "scores": scores_of(rows),
        "refused_together": tokens_together(auditor, rows),
    }


def measure(dtype: str, quick: bool, reuse: bool) -> dict[str, Any]:
    """Return the figures of one dtype."""
    folder = BUILD / "audit"
    plans, base = make_plans(dtype, quick)
    auditor = Auditor(BUILD / "trained" / "model", base, RevisionStore(folder / "store"))
    by_kind: dict[str, list[tuple[Any, dict[int, RowResult]]]] = {}
    for plan in plans:
        saved = folder / f"{plan['name']}-result.json"
        result = json.loads(saved.read_text()) if reuse and saved.exists() else start(plan, folder)
        for each in result["recorded"]:
            receipt = verify_receipt(Path(each["receipt"]).read_bytes(), keep_blocks=True)
            results, _ = auditor.compare(receipt, each["prompt"])
            by_kind.setdefault(each["kind"], []).append((receipt, results))
    figures: dict[str, Any] = {
        "tolerance": asdict(auditor.tolerance),
        "score_limit": LIMIT,
        "honest": honest_figures(auditor, by_kind.pop(HONEST)),
        "compiled": honest_figures(auditor, by_kind.pop(COMPILED)),
        "cheats": {},
    }
    for kind, responses in by_kind.items():
        needed = [tokens_to_refusal(receipt, auditor, results) for receipt, results in responses]
        found = sorted(count for count in needed if count is not None)
        figures["cheats"][kind] = {
            "responses": len(needed),
            "refused": len(found),
            "median_tokens": statistics.median(found) if found else None,
            "most_tokens": found[-1] if found else None,
            "drift": root_mean_square([results for _, results in responses]),
            "scores": scores_of([results for _, results in responses]),
            "tokens_together": tokens_together(auditor, [results for _, results in responses]),
        }
    return figures


def render_table(result: dict[str, Any]) -> str:
    """Return the README's table of a result."""

    def cell(dtype: str, kind: str) -> str:
        found = result[dtype]["cheats"][kind]
        if found["refused"] == found["responses"]:
            return f"{found['median_tokens']:g} ({found['most_tokens']})"
        if found["tokens_together"] is not None:
            return f"{found['tokens_together']} together"
        return f"not in {found['responses'] * result['response_tokens']}"

    kinds = list(result[DTYPES[0]]["cheats"])
    lines = ["| tokens until the audit refuses: median (most) | float32 | bfloat16 |", "|---|---|---|"]
    lines += [f"| {kind} | {cell('float32', kind)} | {cell('bfloat16', kind)} |" for kind in kinds]
    for server, words in (("honest", "eager"), ("compiled", "compiled")):
        found = [result[dtype][server] for dtype in DTYPES]
        cells = " | ".join(f"{each['refused']} of {each['responses']} ({each['tokens']} tokens)" for each in found)
        lines.append(f"| honest responses refused, {words} server | {cells} |")
    return "\n".join(lines)


def main() -> int:
    """Measure both dtypes and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few responses; writes no result")
    parser.add_argument("--reuse", action="store_true", help="judge the receipts of the last run again")
    parser.add_argument("--table", action="store_true", help="print the table of the last result and stop")
    arguments = parser.parse_args()
    if arguments.table:
        print(render_table(json.loads(RESULT.read_text())))
        return 0
    (BUILD / "audit").mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "response_tokens": LENGTH}
    for dtype in DTYPES:
        result[dtype] = measure(dtype, arguments.quick, arguments.reuse)
        print(dtype, json.dumps(result[dtype], indent=1))
    if not arguments.quick:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(result[dtype][server]["refused"] for dtype in DTYPES for server in ("honest", "compiled")))


if __name__ == "__main__":
    sys.exit(main())
