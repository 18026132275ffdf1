"""Five hundred publications and retirements in one engine leave nothing behind but their lines in the journal."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import generate, make_engine, tokens_of
from tests.tiny_model import make_adapter, make_model

pytestmark = pytest.mark.engine

CYCLES, WARM = 500, 100
CONTENTS = 5
MIB = 1 << 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("long")
    make_model(root / "model")
    for number in range(CONTENTS):
        make_adapter(root / f"r{number}", seed=number)
    return root


@pytest.fixture(scope="module")
def llm(root: Path) -> Iterator[Any]:
    engine = make_engine(root / "model", root / "store", epochless={"keep": 1}, max_loras=2, max_cpu_loras=4)
    yield engine
    engine.llm_engine.engine_core.shutdown()


def resident() -> int:
    """Return the memory this process has for itself, in bytes."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(rollup.partition("Private_Dirty:")[2].split()[0])


def stored(root: Path) -> tuple[int, int]:
    """Return the bytes of the store's blobs and of its journal."""
    blobs = sum(path.stat().st_size for path in (root / "store" / "revisions").rglob("*") if path.is_file())
    return blobs, sum(path.stat().st_size for path in (root / "store").glob("journal.sqlite*"))


def test_cycles_leave_no_adapter_no_memory_and_less_than_a_kilobyte_each(llm: Any, root: Path) -> None:
    from epochless_vllm.plugin.engine import publish, resolve, service_of

    service = service_of(llm)
    said: dict[int, list[int]] = {}
    before: tuple[int, int, int] | None = None
    for cycle in range(CYCLES):
        if cycle == WARM:
            before = (resident(), *stored(root))
        publish(llm, root / f"r{cycle % CONTENTS}", policy="p", step=cycle)
        service.pump()  # the one before it, beyond what is kept
        if cycle % 25 < CONTENTS:  # each content now and then, in slots that others had
            tokens = tokens_of(generate(llm, f"What revision {cycle % CONTENTS} says. ", resolve(llm, "p"), tokens=8))
            assert said.setdefault(cycle % CONTENTS, tokens) == tokens
        held = {publication.lora_int_id for publication in service.state().heads.values()}
        assert llm.llm_engine.list_loras() == held
    assert before is not None
    cycles = CYCLES - WARM
    ends = (resident(), *stored(root))
    memory, blobs, log = ((end - start) / cycles for end, start in zip(ends, before, strict=True))
    print(f"a cycle: {memory:.0f} B of memory, {blobs:.0f} B of blobs, {log:.0f} B of journal")
    assert len(said) == CONTENTS
    assert blobs == 0
    assert log <= 1024
    # One copy of an adapter has half a megabyte; what stays is the history's line of each publication.
    assert memory <= 4096


def test_a_status_answer_does_not_grow(llm: Any) -> None:
    from epochless_vllm.plugin.engine import service_of

    (policy,) = service_of(llm).describe("p")["policies"]
    assert len(policy["revisions"]) == 9
    assert policy["more"] == CYCLES - 9
