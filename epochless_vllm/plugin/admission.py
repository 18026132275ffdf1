"""Seam: the line where a request is bound to a revision.

Every serving class checks the model, prepares the prompt (which may await), then asks for the adapter. Here the check
only validates; the second line binds: the model string and its constraint are resolved against the committed state in
one event-loop turn, once per HTTP request, and whatever changed in between is answered with its own status. Unknown
names never fall back to the base model, also where ``VLLM_SKIP_MODEL_NAME_VALIDATION`` would let them. Dies when
upstream pins adapters by identity at admission.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epochless_vllm.errors import EpochlessError, InvalidRequestError, RevisionRequiredError, SeamError
from epochless_vllm.plugin import (
    error_responses,
    invocations,
    late_arrivals,
    metrics,
    readmission,
    response_receipts,
    served_models,
    tokens_in,
)
from epochless_vllm.plugin.receipt_headers import revision_entry
from epochless_vllm.plugin.request_fields import field_of
from epochless_vllm.plugin.response_receipts import RequestReceipts
from epochless_vllm.plugin.served_models import ServedRevisions, revisions_of
from epochless_vllm.plugin.weak_identity import WeakIdentityMap
from epochless_vllm.protocol.publication import Publication
from epochless_vllm.wire import RequestOptions, parse_request_options


@dataclass
class Admission:
    """What one HTTP request was bound to.

    Attributes:
        publication: the revision it runs on; None for the base model.
        lora_request: the engine's form of it.
        served: the view it was resolved in.
        options: its body field ``epochless``.
        started: whether any output of it has left the engine.
        restartable: whether the whole request may be admitted again while nothing was sent.
        receipts: where its receipts are made; None unless it is to be attested.
        prompts: engine streams opened for it so far.
        id_suffix: what its route appends to the request id for each prompt, as a format of the prompt's index.
        progress: spans of streamed choices so far, by (prompt's request id, choice index).
    """

    publication: Publication | None
    lora_request: Any
    served: ServedRevisions
    options: RequestOptions | None = None
    started: bool = False
    restartable: bool = False
    receipts: RequestReceipts | None = None
    prompts: int = 0
    id_suffix: str = ""
    progress: dict[tuple[str, int], list[Any]] = field(default_factory=dict)


_admissions: WeakIdentityMap[Admission] = WeakIdentityMap()

# How each route that can carry receipts names its prompts to the engine.
ID_SUFFIXES = {
    "OpenAIServingChat": "",
    "OpenAIServingChatBatch": "_{}",
    "OpenAIServingCompletion": "-{}",
    "ServingTokens": "",
}
# Routes that sample tokens and whose answers have no place for a receipt: the sink has it, by request id.
SINK_ONLY = {"OpenAIServingResponses": "_{}", "AnthropicServingMessages": ""}


def admission_of(request: Any) -> Admission | None:
    """Return what a request of the API was bound to; None before admission or without Epochless."""
    return _admissions.get(request)


def validate_request(served: ServedRevisions, serving: Any, request: Any) -> None:
    """Check a request's model, constraint and options without binding it.

    Raises:
        EpochlessError: as ``PublicationService.resolve``; InvalidRequestError names the field.
    """
    attest_level(served, serving, request, check_options(request))
    resolve_request(served, serving, request)


def check_options(request: Any) -> RequestOptions | None:
    """Return a request's body field ``epochless``.

    Raises:
        InvalidRequestError: malformed, or asks for what this release does not serve; names the field.
    """
    return parse_request_options(field_of(request, "epochless"))


def attest_level(served: ServedRevisions, serving: Any, request: Any, options: RequestOptions | None) -> str:
    """Return what a request's answer is to carry: ``none``, ``summary`` or ``receipt``.

    Raises:
        InvalidRequestError: it asks for what its route or its parameters cannot be attested with.
    """
    asked = None if options is None else options.attest
    level = asked or served.service.options.attest
    route = type(serving).__name__
    if level == "none" or (asked is None and route not in ID_SUFFIXES and route not in SINK_ONLY):
        return "none"
    if served.attestor is None or served.service.options.mixed_rows == "stock":
        raise _unattestable("this server runs with --epochless-mixed-rows stock, which may sample by another adapter")
    if route in SINK_ONLY and asked == "receipt":
        raise _unattestable(
            "answers of this route carry no receipt; use 'summary' and GET /v1/receipts?request_id=<id of the answer>"
        )
    if route not in ID_SUFFIXES and route not in SINK_ONLY:
        raise _unattestable("this route does not attest")
    if getattr(request, "use_beam_search", False):
        raise _unattestable("beam search keeps tokens by score and draws none")
    if getattr(request, "echo", False) and getattr(request, "max_tokens", None) == 0:
        raise _unattestable("a request with echo and max_tokens 0 emits no token")
    return level


def _unattestable(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"epochless.attest: {reason}; or send 'none'", field="epochless.attest")


def resolve_request(served: ServedRevisions, serving: Any, request: Any) -> Publication | None:
    """Return the publication a request means now; None for the base model.

    Raises:
        EpochlessError: as ``PublicationService.resolve``.
    """
    model = request.model
    if served.modalities and (not model or model in served.service.base_names):
        matched = served.modalities & serving._get_message_types(request)
        if len(matched) == 1:  # several: vLLM takes none, too
            model = next(iter(matched))
    try:
        return served.service.resolve(model, field_of(request, "weight_version"))
    except RevisionRequiredError:
        if type(serving).__name__ == "ServingTokenization":  # it runs no model, so no token lacks its revision
            return None
        raise


def admit(served: ServedRevisions, serving: Any, request: Any) -> Any:
    """Bind a request; return its LoRARequest, or None for the base model.

    Raises:
        EpochlessError: as ``validate_request``: the state may have moved since.
    """
    try:
        publication = resolve_request(served, serving, request)
        options = check_options(request)
        level = attest_level(served, serving, request, options)
    except EpochlessError as error:
        metrics.count_admission(error.code)
        raise
    lora_request = None if publication is None else served.service.lora_request(publication)
    admission = Admission(publication, lora_request, served, options, restartable=late_arrivals.may_restart())
    route = type(serving).__name__
    admission.id_suffix = ID_SUFFIXES.get(route, SINK_ONLY.get(route, ""))
    if level != "none":
        assert served.attestor is not None  # attest_level refused otherwise
        admission.receipts = RequestReceipts(
            attestor=served.attestor,
            level=level,
            streamed=bool(getattr(request, "stream", False)),
            entry=revision_entry(publication, served.service.base_digest),
            lora_int_id=0 if publication is None else publication.lora_int_id,
        )
    _admissions.set(request, admission)
    late_arrivals.current_admission.set(admission)
    metrics.count_admission("base" if publication is None else "revision")
    return lora_request


def install() -> None:
    """Wrap the check and the binding line of every serving class, and install the seams they lean on.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.entrypoints.serve.engine.serving import BaseServing

    for name in ("_check_model", "_maybe_get_adapters", "_get_message_types"):
        if not hasattr(BaseServing, name):
            raise SeamError(f"BaseServing has no {name}", target=name)
    if "_check_model" not in vars(PoolingBaseServing):
        raise SeamError("PoolingBaseServing has no _check_model of its own", target="PoolingBaseServing._check_model")
    error_responses.install()
    served_models.install()
    response_receipts.install()  # inside the watch for late arrivals: a request that never ran has no receipt
    late_arrivals.install()
    readmission.install()
    tokens_in.install()
    invocations.install()
    if getattr(BaseServing._check_model, "_epochless", False):
        return
    BaseServing._check_model = _wrap_check(BaseServing._check_model, answers=True)
    # Pooling drops the answer of its check, so there a refusal must be raised.
    PoolingBaseServing._check_model = _wrap_check(PoolingBaseServing._check_model, answers=False)
    BaseServing._maybe_get_adapters = _wrap_binding(BaseServing._maybe_get_adapters)


def _wrap_check(original: Any, *, answers: bool) -> Any:
    async def _check_model(self: Any, request: Any) -> Any:
        served = revisions_of(self.models)
        if served is None:
            return await original(self, request)
        try:
            validate_request(served, self, request)
        except EpochlessError as error:
            metrics.count_admission(error.code)
            if answers:
                return error_responses.error_response(error)
            raise
        return None

    _check_model._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    return _check_model


def _wrap_binding(original: Any) -> Any:
    def _maybe_get_adapters(self: Any, request: Any, supports_default_mm_loras: bool = False) -> Any:
        served = revisions_of(self.models)
        if served is None:
            return original(self, request, supports_default_mm_loras)
        return admit(served, self, request)

    return _maybe_get_adapters
