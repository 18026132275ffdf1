"""The figures of the README are those of the results in the repository: a run that was not copied there fails here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks import bench_mixed_rows, bench_receipt

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def mixed_rows() -> list[str]:
    ratios = results("mixed_rows")["bfloat16"]["head_to_head"]["ratios"]
    return [
        f"| {n} | {ratios[f'decode_{n}_vs_stock']:.2f} | {ratios[f'decode_{n}_vs_base']:.2f} | "
        f"{ratios[f'prefill_{n}_vs_stock']:.1f} |"
        for n in (1, 4)
    ]


def publishing() -> list[str]:
    result = results("publish")
    ratios, ours, stock = result["ratios"], result["epochless"], result["stock"]
    published, published_stock = ours["publish_ms"], stock["publish_ms"]
    return [
        f"not publishing | {ours['idle']['tokens_per_s']:.0f} | {stock['idle']['tokens_per_s']:.0f} |",
        f"| p99 gap, publishing / not | {ratios['p99_publishing_over_idle']:.2f} | "
        f"{ratios['stock_p99_publishing_over_idle']:.2f} |",
        f"| p50 gap, publishing / not | {ratios['p50_publishing_over_idle']:.2f} | "
        f"{stock['publishing']['p50_ms'] / stock['idle']['p50_ms']:.2f} |",
        f"| tokens/s, publishing / not | {ratios['throughput_publishing_over_idle']:.2f} | "
        f"{ratios['stock_throughput_publishing_over_idle']:.2f} |",
        f"idle engine | {published['idle']['median']:.0f} ms | {published_stock['idle']['median']:.0f} ms",
        f"**{ratios['visible_over_bound']:.2f} of it**",
        f"64 MB adapter | {published['large']['median']:.0f} ms | {published_stock['large']['median']:.0f} ms | "
        f"**{ratios['visible_large_over_bound']:.2f} of it**",
        f"16 streams | {published['under_load']['median']:.0f} ms | {published_stock['under_load']['median']:.0f} ms |",
        f"64 streams, p99 / idle | {results('publish_64')['ratios']['p99_publish_under_load_over_idle']:.2f} |",
        f"per request | {ours['micro']['admission_us']:.1f} us |",
        f"per block | {ours['micro']['block_key_us']:.2f} us |",
    ]


def startup() -> list[str]:
    seconds = {name: mean(values) for name, values in results("startup")["seconds"].items()}
    return [f"{seconds['empty']:.1f} s to the first", f"stock {seconds['stock']:.1f} s; {seconds['filled']:.1f} s with"]


def sampler() -> list[str]:
    def span(*cases: str) -> str:
        found = [cell["ratio_of_medians"] for cell in results("sampler")["cells"] if cell["case"].startswith(cases)]
        return f"{min(found):.2f} to {max(found):.2f}"

    return [f"{span('unseeded')} of stock's time unseeded, {span('seeded')} seeded, {span('top-')} with top-k or top-p"]


def with_bound(ratios: dict[str, float]) -> str:
    return f"{ratios['throughput']:.2f} ({ratios['throughput_lower_95']:.2f})"


def attesting() -> list[str]:
    rows = []
    shorter = results("attest")
    for policy, label in (("base", "base model"), ("adapter", "adapter")):
        for streams in (16, 64):
            rows.append(f"| {streams}, {label} | {with_bound(shorter[f'{policy}-{streams}']['none_vs_stock'])} |")
    for streams, tokens, shape, file, label in (
        (16, 128, "together", "attest_128_16", "all ending in one step"),
        (64, 128, "together", "attest_128_64", "all ending in one step"),
        (16, 24, "spread", "attest_24_spread", "one after another"),
        (64, 24, "spread", "attest_24_spread", "one after another"),
    ):
        assert results(file)["tokens"] == tokens
        found = results(file)[f"base-{shape}-{streams}"]
        ratios = found["receipts_vs_none"]
        rows.append(
            f"| {streams} x {tokens}, {label} | {100 * found['loop_share']['receipts']:.2f} % | "
            f"{ratios['throughput']:.3f} ({ratios['throughput_lower_95']:.3f}) | {ratios['p99_gap']:.2f} |"
        )
    return rows


def failures() -> list[str]:
    stock = results("stock_failures")["stock"]
    stale = stock["stale_prefix"]
    return [
        f"from {stale['cached_tokens_of_the_old_revision']} tokens of the old policy's KV, "
        f"{stale['logprob_error_nats']:.2f} nats off",
        f"| {stock['salt_collision']['adapter_tokens_served_to_a_base_request']} tokens of the adapter's KV",
        f"the old policy now answers {stock['failed_publish']['old_revision_logprob_drift_nats']:.2f} nats off",
    ]


def fairness() -> list[str]:
    result = results("fairness")
    (shape,) = [each for each in result["shapes"] if (each["slots"], each["revisions"]) == (3, 4)]
    ours, stock = shape["epochless"]["wait_p99"], shape["stock"]["wait_p99"]
    return [f"3 slots, 4 revisions, {result['clients']} clients: p99 wait {ours} steps, stock {stock};"]


def soaking() -> list[str]:
    result = results("soak")
    assert result["tokens_wrong"] == 0
    return [
        f"and {result['tokens_compared']:,} tokens with their oracle",
        f"and {result['tokens_per_s']['ratio']:.2f} (wanted 0.97",
        f"and +{100 * result['memory_mb']['growth']:.2f} % (wanted",
    ]


FIGURES = {
    text: source.__name__
    for source in (mixed_rows, publishing, startup, sampler, attesting, failures, fairness, soaking)
    for text in source()
}


@pytest.mark.parametrize("text", FIGURES)
def test_figure_of_the_readme_is_that_of_the_results(text: str) -> None:
    assert text in README


def test_reports_are_those_of_their_results() -> None:
    folder = ROOT / "benchmarks"
    assert bench_receipt.render(results("receipt")) == (folder / "receipt.md").read_text()
    for by_dtype in results("mixed_rows").values():
        assert bench_mixed_rows.render(by_dtype) in (folder / "mixed_rows.md").read_text()


def test_table_of_the_sampler_is_that_of_its_results() -> None:
    page = (ROOT / "benchmarks" / "sampler.md").read_text()
    for cell in results("sampler")["cells"]:
        label = f"| {cell['vocabulary']:,} \u00d7 {cell['rows']} |"
        (row,) = [line for line in page.splitlines() if line.startswith(label)]
        stock, exact = cell["stock_us"]["median"], cell["exact_us"]["median"]
        assert f"| {stock:,.0f} → {exact:,.0f} **{cell['ratio_of_medians']:.3f}** |" in row


def test_the_readme_says_not_met_where_the_results_say_so() -> None:
    ratios = results("publish")["ratios"]
    missed = [ratios["p50_publishing_over_idle"] > 1.02, ratios["throughput_publishing_over_idle"] < 0.97]
    assert sum(missed) == len(re.findall(r"\| 1\.02, \*\*not met\*\* \||\| 0\.97, \*\*not met\*\* \|", README))


def test_a_stated_blindness_of_the_audit_is_the_measured_one() -> None:
    claims = " ".join((ROOT / "spec" / "CLAIMS.md").read_text().split())
    measured = results("audit_detection")["bfloat16"]
    for cheat in ("base quantised to 8 bits", "adapter scaled by 1.01"):
        assert measured["cheats"][cheat]["refused"] < measured["cheats"][cheat]["responses"]
    length = results("audit_detection")["response_tokens"]
    lies = "an adapter scaled by 1 % nor 8-bit base weights"
    blindness = f"neither {lies} are refused in each response of {length} tokens"
    assert blindness in claims
