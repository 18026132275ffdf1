"""Seam: ``OpenAIServingModels``, the front end's idea of which models it serves.

vLLM keeps a dictionary of adapters per API server, filled by whoever loaded last there. Here the dictionary is a view
of the committed state, the same in every server at once; ``--lora-modules`` and ``--default-mm-loras`` are published
like any other revision, and adapter resolvers, which would bring in unpublished ones, are refused. Dies when upstream
keeps adapters outside its servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from epochless_vllm.errors import ConfigurationError, EpochlessError, SeamError
from epochless_vllm.plugin import metrics
from epochless_vllm.plugin.logs import logger
from epochless_vllm.plugin.options import options_of
from epochless_vllm.plugin.publisher import Publisher
from epochless_vllm.plugin.ranks import AsyncTransport
from epochless_vllm.plugin.response_receipts import Attestor, make_attestor
from epochless_vllm.plugin.service import PublicationService, start_service
from epochless_vllm.protocol.names import split_versioned
from epochless_vllm.protocol.publication import State, Status

# Where a module given at start is published: before any step a trainer counts, so that a restart with the same
# command line finds it there and moves no head.
STATIC_STEP = 0


class ServedRevisions(Mapping[str, Any]):
    """Live revisions as LoRARequests: any model string looks up, iteration gives each live revision once.

    Attributes:
        service: what resolves.
        modalities: policies that serve base-model chats with content of that type.
        attestor: what makes receipts; None where rows cannot be attested.
    """

    def __init__(
        self,
        service: PublicationService,
        modalities: frozenset[str] = frozenset(),
        attestor: Attestor | None = None,
    ) -> None:
        self.service = service
        self.attestor = attestor
        self.modalities = modalities
        self.publisher = Publisher(service)

    def __getitem__(self, model: str) -> Any:
        try:
            publication = self.service.resolve(model)
        except EpochlessError as error:
            raise KeyError(model) from error
        if publication is None:
            raise KeyError(model)
        return self.service.lora_request(publication)

    def __iter__(self) -> Iterator[str]:
        state = self.service.state()
        for policy, revision_id in state.holdings:
            if state.status(policy, revision_id) is Status.LIVE:
                yield f"{policy}@{revision_id}"

    def __len__(self) -> int:
        return sum(1 for _ in self)


def revisions_of(models: Any) -> ServedRevisions | None:
    """Return the view behind a models object, or None when it serves without Epochless."""
    served = models.lora_requests
    return served if isinstance(served, ServedRevisions) else None


def begin_serving(models: Any) -> None:
    """Start this front end's service and put its view in place of vLLM's dictionary.

    Raises:
        ConfigurationError: an adapter resolver is registered.
    """
    from vllm.lora.resolver import LoRAResolverRegistry

    client = models.engine_client
    if resolvers := sorted(LoRAResolverRegistry.get_supported_resolvers()):
        raise ConfigurationError(
            f"LoRA resolvers ({', '.join(resolvers)}): refused while Epochless is on: they load unpublished adapters; "
            "remove them from the environment and publish instead",
            flag="lora_resolvers",
        )
    transport = AsyncTransport(client.engine_core, asyncio.get_running_loop())
    names = frozenset(path.name for path in models.base_model_paths)
    service = start_service(client.vllm_config, transport, names)
    modalities = frozenset(client.vllm_config.lora_config.default_mm_loras or ())
    attestor = make_attestor(client.vllm_config, service.options, service.base_digest)
    models.lora_requests = ServedRevisions(service, modalities, attestor)
    metrics.observe_state(service.state())


async def publish_static_modules(models: Any, served: ServedRevisions) -> None:
    """Publish the adapters named on the command line, then let recovered retirements drain.

    Raises:
        EpochlessError: an adapter is refused, or its policy exists with other content; the server must not start.
    """
    for module in models.static_lora_modules or ():
        policy, step = split_versioned(module.name) or (module.name, STATIC_STEP)
        if _has_moved_on(served.service.state(), policy, step):
            logger.info("policy %s has moved on from %s; its head is left where it is", policy, module.path)
            continue
        published = await served.publisher.publish_directory(module.path, policy, step)
        logger.info("published %s from %s", published.publication.lora_name, module.path)
    served.publisher.drain()


def _has_moved_on(state: State, policy: str, step: int) -> bool:
    """Whether a module was published at an earlier start and retired since: publishing it again would be a rollback.

    Raises:
        ConfigurationError: the policy was published by other means.
    """
    if not state.publications.knows(policy):
        return False
    known = state.publication_at(policy, step)
    if known is None:
        raise ConfigurationError(
            f"--lora-modules {policy}: the store already holds that policy, published by other means; drop the module "
            "or give it another name",
            flag="lora_modules",
        )
    return state.status(policy, known.revision_id) is Status.RETIRED


def list_model_cards(served: ServedRevisions, base: str) -> list[Any]:
    """Return a card per policy (``root``: its head) and per live revision, each with the base model as ``parent``."""
    from vllm.entrypoints.openai.engine.protocol import ModelCard, ModelPermission

    def card(name: str, publication: Any) -> Any:
        return ModelCard(
            id=name,
            root=publication.lora_name,
            parent=base,
            permission=[ModelPermission()],
            weight_version=publication.revision_id,
            step=publication.step,
            sequence=publication.sequence,
        )

    state = served.service.state()
    cards = [card(policy, state.heads[policy]) for policy in sorted(state.heads) if _is_live(state, policy)]
    for policy, revision_id in sorted(state.holdings):
        if state.status(policy, revision_id) is Status.LIVE:
            publication = state.publications[state.holdings[(policy, revision_id)].last]
            cards.append(card(publication.lora_name, publication))
    return cards


def _is_live(state: State, policy: str) -> bool:
    return state.status(policy, state.heads[policy].revision_id) is Status.LIVE


def install() -> None:
    """Wrap the constructor and the methods of ``OpenAIServingModels`` that read or change its adapters.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels as Models

    names = ("init_static_loras", "show_available_models", "load_lora_adapter", "unload_lora_adapter", "resolve_lora")
    for name in names:
        if not hasattr(Models, name):
            raise SeamError(f"OpenAIServingModels has no {name}", target=name)
    construct, init_static, show = Models.__init__, Models.init_static_loras, Models.show_available_models
    if getattr(construct, "_epochless", False):
        return

    def __init__(self: Any, engine_client: Any, *arguments: Any, **keywords: Any) -> None:  # noqa: N807  # its name
        construct(self, engine_client, *arguments, **keywords)
        if options_of(engine_client.vllm_config.additional_config) is not None:
            begin_serving(self)

    async def init_static_loras(self: Any) -> None:
        served = revisions_of(self)
        if served is None:
            await init_static(self)
        else:
            await publish_static_modules(self, served)

    async def show_available_models(self: Any) -> Any:
        served = revisions_of(self)
        if served is None:
            return await show(self)
        listing = await self.registry.show_available_models()
        listing.data.extend(list_model_cards(served, self.base_model_paths[0].name))
        return listing

    __init__._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    Models.__init__ = __init__
    Models.init_static_loras = init_static_loras
    Models.show_available_models = show_available_models
    for name in ("load_lora_adapter", "unload_lora_adapter", "resolve_lora"):
        setattr(Models, name, _refuse_when_served(name, getattr(Models, name)))


def _refuse_when_served(name: str, original: Any) -> Any:
    async def refuse(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if revisions_of(self) is None:
            return await original(self, *arguments, **keywords)
        raise EpochlessError(f"{name}: adapters enter and leave by publish and retire only while Epochless is on")

    return refuse
