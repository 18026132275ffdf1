"""The in-process API: publish, resolve, retire and read receipts with a ``vllm.LLM`` and no server.

llm = LLM(model, enable_lora=True, additional_config={"epochless": {"store": "store"}})
publish(llm, "adapters/step-1", policy="policy", step=1)
llm.generate(prompts, lora_request=resolve(llm, "policy"))
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from epochless_vllm.errors import ConfigurationError
from epochless_vllm.plugin.options import options_of
from epochless_vllm.plugin.ranks import CoreTransport, SyncTransport, Transport
from epochless_vllm.plugin.service import PublicationService, start_service
from epochless_vllm.publication.coordinator import Draining, Published

_services: weakref.WeakKeyDictionary[Any, PublicationService] = weakref.WeakKeyDictionary()


def service_of(llm: Any) -> PublicationService:
    """Return the publication service of an LLM.

    Raises:
        ConfigurationError: the LLM was built without Epochless.
    """
    engine = llm.llm_engine
    service = _services.get(engine)
    if service is None:
        if options_of(engine.vllm_config.additional_config) is None:
            raise ConfigurationError(
                'this LLM runs without Epochless; build it with additional_config={"epochless": {"store": DIR}}',
                flag="additional_config",
            )
        client = engine.engine_core
        transport: Transport = (
            CoreTransport(client.engine_core) if hasattr(client, "engine_core") else SyncTransport(client)
        )
        names = frozenset({engine.vllm_config.model_config.model, engine.vllm_config.model_config.served_model_name})
        service = start_service(engine.vllm_config, transport, frozenset(n for n in names if isinstance(n, str)))
        _services[engine] = service
    return service


def publish(llm: Any, path: Path | str, *, policy: str, step: int | None = None) -> Published:
    """Publish the PEFT adapter in ``path``; on return every later ``resolve`` sees it.

    Raises:
        EpochlessError: nothing changed.
    """
    service = service_of(llm)
    service.pump()
    return service.publish_directory(str(path), policy, step)


def resolve(llm: Any, model: str, weight_version: object = None) -> Any:
    """Return the LoRARequest of a model string, or None for the base model.

    Raises:
        EpochlessError: see PublicationService.resolve.
    """
    service = service_of(llm)
    publication = service.resolve(model, weight_version)
    return None if publication is None else service.lora_request(publication)


def retire(llm: Any, model: str) -> list[Draining]:
    """Retire a policy or one revision; what no request holds is gone on return.

    Raises:
        EpochlessError: nothing was retired.
    """
    service = service_of(llm)
    draining = service.retire(model)
    service.pump()
    return draining
