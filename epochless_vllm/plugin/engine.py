"""The in-process API: publish, resolve, retire and read receipts with a ``vllm.LLM`` and no server.

llm = LLM(model, enable_lora=True, additional_config={"epochless": {"store": "store"}})
publish(llm, "adapters/step-1", policy="policy", step=1)
llm.generate(prompts, lora_request=resolve(llm, "policy"))
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from epochless_vllm.errors import ConfigurationError, InvalidRequestError
from epochless_vllm.plugin.background import short_turns, step_aside
from epochless_vllm.plugin.engine_identity import EngineIdentity, identify_engine
from epochless_vllm.plugin.local_requests import ASKED, LocalRequest
from epochless_vllm.plugin.options import options_of
from epochless_vllm.plugin.ranks import CoreTransport, SyncTransport, Transport
from epochless_vllm.plugin.receipt_headers import PromptTerms, effective_params, for_choice, revision_entry
from epochless_vllm.plugin.receipts import ChoiceRecorder
from epochless_vllm.plugin.service import PublicationService, start_service
from epochless_vllm.plugin.signer import Ed25519Signer, load_signer
from epochless_vllm.protocol.header import Header
from epochless_vllm.protocol.names import split_lora_name
from epochless_vllm.protocol.receipts import Receipt
from epochless_vllm.publication.coordinator import Draining, Published

_services: weakref.WeakKeyDictionary[Any, PublicationService] = weakref.WeakKeyDictionary()
_signers: weakref.WeakKeyDictionary[Any, tuple[Ed25519Signer, EngineIdentity]] = weakref.WeakKeyDictionary()


def service_of(llm: Any) -> PublicationService:
    """Return the publication service of an LLM.

    Raises:
        ConfigurationError: the LLM was built without Epochless.
    """
    return _service_of_engine(llm.llm_engine)


def _service_of_engine(engine: Any) -> PublicationService:
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


def receipts(output: Any) -> list[Receipt]:
    """Return a sealed receipt for each CompletionOutput of a finished RequestOutput, in its order.

    Raises:
        InvalidRequestError: the output is not finished, is not of an LLM with Epochless, or was asked for in deltas.
        TokenRowsError, ReceiptError: its rows cannot be attested.
    """
    return _sealing_of(output)()


def seal(output: Any) -> Future[list[Receipt]]:
    """Return the future of ``receipts(output)``, made by a thread beside the step loop.

    For a caller that steps the engine itself: many responses that end in one step are then sealed while the next steps
    run. What was handed over is sealed before the interpreter exits; whoever waits longer asks the future.

    Raises:
        InvalidRequestError: as ``receipts``; what else can go wrong, the future raises.
    """
    return _sealer().submit(_sealing_of(output))


@cache
def _sealer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="epochless-seal", initializer=step_aside)


def _sealing_of(output: Any) -> Callable[[], list[Receipt]]:
    """Return what makes the receipts of an output; everything that only the owning thread may read is read here."""
    asked: LocalRequest | None = getattr(output, ASKED, None)
    if asked is None or not output.finished:
        raise InvalidRequestError(
            "output: must be a finished RequestOutput of an LLM with Epochless, its output_kind not DELTA and no "
            "'epochless' in its extra_args",
            field="output",
        )
    engine = asked.engine
    service = _service_of_engine(engine)
    if engine not in _signers:
        identity = identify_engine(engine.vllm_config, service.base_digest)
        _signers[engine] = (load_signer(service.options), identity)
    signer, identity = _signers[engine]
    publication, lora_int_id = None, 0
    if asked.lora_request is not None:
        lora_int_id = asked.lora_request.lora_int_id
        publication = service.publication_of(lora_int_id, split_lora_name(asked.lora_request.lora_name)[0])
    params = effective_params(engine, asked.params)
    terms = PromptTerms(identity, params, asked.material, revision_entry(publication, service.base_digest), lora_int_id)

    def make() -> list[Receipt]:
        with short_turns():
            terms.check()
            header = terms.header(output.prompt_token_ids)
            return [_seal_choice(header, choice, terms, signer, asked) for choice in output.outputs]

    return make


def _seal_choice(
    header: Header, choice: Any, terms: PromptTerms, signer: Ed25519Signer, asked: LocalRequest
) -> Receipt:
    recorder = ChoiceRecorder(
        for_choice(header, choice.index), lora_int_id=terms.lora_int_id, seed=terms.seed, framed=False
    )
    recorder.add(choice.token_ids, choice.token_attest)
    return recorder.seal(choice.finish_reason, choice.stop_reason, signer, rebuilds=asked.rebuilds[choice.index])
