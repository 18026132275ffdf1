"""A front end without an engine: the real service, store, journal and participants; only the engine's side is played.

``RankTransport`` stands where the connection to an engine core stands. Its ranks hold adapters in a dictionary.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

from epochless_vllm.errors import RefusedAdapterError
from epochless_vllm.plugin.authentication import ApiKeys
from epochless_vllm.plugin.channel import Listener
from epochless_vllm.plugin.error_responses import add_handler
from epochless_vllm.plugin.expectations import expect_registered
from epochless_vllm.plugin.routes import make_router
from epochless_vllm.plugin.served_models import ServedRevisions
from epochless_vllm.plugin.service import PublicationService
from epochless_vllm.publication.journal import Journal
from epochless_vllm.publication.participant import Participant, PrepareOrder
from epochless_vllm.store.revisions import RevisionStore

BASE = "base-model"
BASE_DIGEST = "sha256:" + "b" * 64
Result = TypeVar("Result")


@dataclass
class Loaded:
    order: PrepareOrder
    receipt: dict[str, Any]


class Registry:
    """An Installer that holds adapters in a dictionary, and refuses what a test tells it to."""

    def __init__(self, rank: str, store: RevisionStore) -> None:
        self.rank, self.store = rank, store
        self.adapters: dict[int, str] = {}
        self.refuse: str | None = None

    def load(self, order: PrepareOrder) -> Loaded:
        if self.refuse is not None:
            raise RefusedAdapterError(self.refuse)
        digest = expect_registered(self.store.read(order.revision_id), "F32")
        receipt = {"rank": self.rank, "source_digest": order.revision_id, "registered_digest": digest}
        return Loaded(order, receipt)

    def register(self, loaded: Loaded) -> None:
        self.adapters[loaded.order.lora_int_id] = loaded.order.revision_id

    def remove(self, lora_int_id: int) -> dict[str, Any]:
        del self.adapters[lora_int_id]
        return {"rank": self.rank}

    def held(self) -> dict[int, str]:
        return dict(self.adapters)


class RankTransport:
    """One engine of two ranks; ``holding`` is what its scheduler would say."""

    def __init__(self, store: RevisionStore) -> None:
        self.registries = [Registry(f"engine0/rank{rank}", store) for rank in range(2)]
        self.participants = [Participant(registry.rank, registry) for registry in self.registries]
        self.holding: Counter[int] = Counter()
        self.listeners = [Listener(participant.handle) for participant in self.participants]
        for listener in self.listeners:
            weakref.finalize(self, listener.close)

    def call(self, method: str, *arguments: Any) -> dict[int, Any]:
        if method == "epochless_address":
            named = zip(self.registries, self.listeners, strict=True)
            return {0: [{"ok": True, "rank": each.rank, "address": listener.address} for each, listener in named]}
        if method == "epochless_holders":
            return {0: [self.holding[lora_int_id] for lora_int_id in arguments[0]]}
        (message,) = arguments
        return {0: [participant.handle(message) for participant in self.participants]}


@dataclass
class FrontEnd:
    """One API server: its service, its view for the serving classes and an HTTP client of its routes."""

    service: PublicationService
    served: ServedRevisions
    transport: RankTransport
    http: httpx.AsyncClient

    @property
    def models(self) -> Any:
        return SimpleNamespace(lora_requests=self.served)


def make_service(store: Path, transport: RankTransport | None = None, **options: Any) -> PublicationService:
    """Return a service on a store, in a new epoch."""
    config = SimpleNamespace(
        additional_config={"epochless": {"store": str(store), "base_digest": BASE_DIGEST, **options}},
        parallel_config=SimpleNamespace(world_size=2, data_parallel_index=0, data_parallel_size=1),
        lora_config=SimpleNamespace(max_cpu_loras=options.get("keep", 4) + 2, lora_dtype="torch.float32"),
        model_config=SimpleNamespace(model=str(store / "no-model-here")),
    )
    store.mkdir(parents=True, exist_ok=True)
    Journal(store / "journal.sqlite").begin_epoch()
    transport = transport or RankTransport(RevisionStore(store))
    return PublicationService(config, transport, frozenset({BASE}))


def make_app(served: ServedRevisions, keys: ApiKeys) -> FastAPI:
    """Return an application with our routes only."""
    app = FastAPI()
    add_handler(app)
    app.include_router(make_router(keys))
    app.state.openai_serving_models = SimpleNamespace(lora_requests=served)
    return app


def run_front_end(
    store: Path,
    scenario: Callable[[FrontEnd], Awaitable[Result]],
    *,
    keys: tuple[str, ...] = (),
    modalities: frozenset[str] = frozenset(),
    **options: Any,
) -> Result:
    """Run a scenario on an event loop of its own, and return what it returns."""

    async def body() -> Result:
        transport = RankTransport(RevisionStore(store))
        service = make_service(store, transport, **options)
        served = ServedRevisions(service, modalities)
        application = httpx.ASGITransport(app=make_app(served, ApiKeys(keys)))
        async with httpx.AsyncClient(transport=application, base_url="http://server") as http:
            return await scenario(FrontEnd(service, served, transport, http))

    return asyncio.run(body())
