"""The series of /metrics: bounded labels, and one truth over several servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from epochless_vllm import errors
from epochless_vllm.plugin import metrics
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.publication import (
    Committed,
    Intended,
    Intent,
    Quarantined,
    RetireBegan,
    Retired,
    State,
    apply,
)
from tests.adapters import make_adapter
from tests.plugin.front_end import FrontEnd, run_front_end


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_labels_come_from_this_packages_words_only() -> None:
    assert metrics.bounded("unknown_revision") == "unknown_revision"
    assert metrics.bounded("WeightVersionNotReady") == "WeightVersionNotReady"
    assert metrics.bounded("policy@sha256:abc") == "other"
    assert metrics.bounded(errors.UploadTooLargeError.code) == "upload_too_large"


def test_publishing_and_retiring_move_the_series(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)

    async def scenario(front: FrontEnd) -> None:
        before = {
            name: value("epochless:publications_total", outcome=name)
            for name in ("committed", "repeated", "adapter_not_found")
        }
        for path in (adapter, adapter, tmp_path / "none"):
            await front.http.post("/v1/load_lora_adapter", json={"lora_name": "p", "lora_path": str(path)})
        for name, count in before.items():
            assert value("epochless:publications_total", outcome=name) == count + 1
        assert value("epochless:revisions", status="live") == 1
        assert (value("epochless:policies"), value("epochless:sequence")) == (1, 1)
        front.transport.holding[1] = 2
        await front.http.post("/v1/unload_lora_adapter", json={"lora_name": "p"})
        assert value("epochless:revisions", status="draining") == 1
        front.transport.holding.clear()
        task = front.served.publisher._draining
        assert task is not None
        await task
        assert value("epochless:revisions", status="draining") == 0

    run_front_end(tmp_path / "store", scenario)


def test_a_thousand_policies_make_no_more_series() -> None:
    registry = CollectorRegistry()
    series = metrics.Series(registry)
    for number in range(1000):
        series.admissions.labels(metrics.bounded(f"policy-{number}")).inc()
        series.publications.labels(metrics.bounded(f"sha256:{number:064x}")).inc()
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    assert len(lines) < 60
    assert 'epochless:admissions_total{outcome="other"} 1000.0' in lines


def cycles(numbers: range) -> Iterator[State]:
    """Yield a state after each step of so many publications and retirements, each of its own policy and content."""
    state = State()
    for number in numbers:
        policy, revision_id = f"policy-{number}", RevisionId(f"sha256:{number:064x}")
        intent = Intent(state.last_transaction_id + 1, policy, number, revision_id, state.last_lora_int_id + 1)
        for event in (
            Intended(intent),
            Committed(intent.transaction_id, state.sequence + 1),
            Quarantined(revision_id, f"engine0/rank{number}", f"reason {number}"),
            RetireBegan(policy, revision_id),
            Retired(policy, revision_id),
        ):
            state = apply(state, event)
            yield state


def observe_cycles(registry: CollectorRegistry, numbers: range) -> set[tuple[str, ...]]:
    """Show the cycles in a registry's series; return what identifies each of them afterwards."""
    for state in cycles(numbers):
        metrics.observe_state(state)
        metrics.count_publication(f"sha256:{state.sequence:064x}", 0.1)
        metrics.count_publication("committed", 0.1)
        metrics.count_retirements(1)
    return {
        (sample.name, *sorted(sample.labels.values())) for metric in registry.collect() for sample in metric.samples
    }


def test_five_hundred_publications_and_retirements_make_no_more_series_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = CollectorRegistry()
    series = metrics.Series(registry)
    monkeypatch.setattr(metrics, "series", lambda: series)
    first = observe_cycles(registry, range(1, 2))
    assert observe_cycles(registry, range(1, 501)) == first
    assert len(first) < 60


def test_a_series_named_after_a_revision_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    series = metrics.Series(registry)
    monkeypatch.setattr(metrics, "series", lambda: series)
    monkeypatch.setattr(metrics, "bounded", lambda outcome: outcome)
    first = observe_cycles(registry, range(1, 2))
    assert len(observe_cycles(registry, range(1, 11)) - first) >= 9


WORKER = """
import sys
from epochless_vllm.plugin import metrics
metrics.count_admission("revision")
metrics.series().sequence.set(int(sys.argv[1]))
"""
READER = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_servers_add_counters_up(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def run(source: str, *arguments: str) -> str:
        command = [sys.executable, "-c", source, *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    for number in (1, 2):
        run(WORKER, str(number))
    assert 'epochless:admissions_total{outcome="revision"} 2.0' in run(READER).splitlines()


@pytest.mark.parametrize("name", ["admissions", "publications", "late"])
def test_every_labelled_counter_counts_by_outcome(name: str) -> None:
    series = getattr(metrics.Series(CollectorRegistry()), name)
    assert series._labelnames == ("outcome",)
