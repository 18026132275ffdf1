"""Seam: restart recovery, and the journal inside an engine core.

After the engine's weights are loaded and before it reports ready, every committed, unretired revision is prepared again
on this engine's ranks: the first request a restarted server answers can already pin any of them. A head that cannot be
brought back stops the start; an older revision is quarantined and the status says why. Dies with vLLM's own durable
adapters.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin.activation import guard_executor
from epochless_vllm.plugin.block_keys import set_base_digest
from epochless_vllm.plugin.core import GATE, RevisionGate
from epochless_vllm.plugin.failed_rows import guard_sampling
from epochless_vllm.plugin.logs import logger
from epochless_vllm.plugin.options import Options, options_of
from epochless_vllm.plugin.ranks import CoreTransport, EngineRanks
from epochless_vllm.publication.coordinator import Coordinator
from epochless_vllm.publication.journal import Journal, JournalView
from epochless_vllm.store.revisions import RevisionStore

COORDINATOR = "_epochless_coordinator"
JOURNAL = "_epochless_journal"


def install() -> None:
    """Wrap ``EngineCore._initialize_kv_caches``, the last step before an engine core reports ready.

    Raises:
        SeamError: the target is missing.
    """
    from vllm.v1.engine.core import EngineCore

    original = getattr(EngineCore, "_initialize_kv_caches", None)
    if original is None:
        raise SeamError("EngineCore has no _initialize_kv_caches", target="_initialize_kv_caches")
    if getattr(original, "_epochless", False):
        return

    def initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        result = original(self, vllm_config)
        options = options_of(vllm_config.additional_config)
        if options is not None:
            prepare_core(self, vllm_config, options)
        return result

    initialize_kv_caches._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    EngineCore._initialize_kv_caches = initialize_kv_caches


def prepare_core(core: Any, vllm_config: Any, options: Options) -> None:
    """Give an engine core its gate, its guard and its committed revisions.

    Raises:
        EpochlessError: a head cannot be brought back; the engine must not start.
    """
    assert options.base_digest is not None, "the front end computes the base digest before it starts an engine"
    set_base_digest(options.base_digest)
    guard_executor(core)
    guard_sampling(core)
    store = RevisionStore(Path(options.store))
    journal = Journal(Path(options.store) / "journal.sqlite")
    setattr(core, GATE, RevisionGate(JournalView(journal.path, after=journal).current))
    ranks = EngineRanks(CoreTransport(core), vllm_config, store)
    capacity = vllm_config.lora_config.max_cpu_loras
    coordinator = Coordinator(store, journal, ranks, keep=options.keep, capacity=capacity)
    setattr(core, COORDINATOR, coordinator)
    setattr(core, JOURNAL, journal)
    began = time.monotonic()
    recovered = coordinator.recover()
    for revision_id, (rank, reason) in recovered.quarantined.items():
        logger.error("%s is quarantined by %s: %s", revision_id, rank, reason)
    if recovered.prepared:
        logger.info("brought back %d revisions in %.2f s", len(recovered.prepared), time.monotonic() - began)


def quarantine_revision(core: Any, lora_int_id: int, rank: str, reason: str) -> None:
    """Journal that a rank failed to activate an adapter, so that every front end answers 503 for it."""
    for revision_id, held in getattr(core, JOURNAL).refresh().adapters.items():
        if held == lora_int_id:
            getattr(core, COORDINATOR).quarantine(revision_id, rank, reason)
            return
