"""Seam: ``weight_version`` and ``weight_versions`` on every choice of a response.

Each chunk and choice carries the revision that wrote its last token; the final chunk and the full choice carry spans
over all output tokens, half-open, in order. Counts ``token_ids``, so that stop strings, skipped deltas, merged chunks
and aborts leave no token without a label. Labels come from the rows beside the tokens, which say what the step that
sampled each one ran with; what a request was bound to only names it where it has no token yet. Dies when upstream
labels tokens by adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from fastapi.responses import JSONResponse

from epochless_vllm.errors import SeamError, TokenRowsError
from epochless_vllm.plugin import metrics
from epochless_vllm.plugin.admission import Admission, admission_of
from epochless_vllm.plugin.response_receipts import annotate
from epochless_vllm.plugin.token_rows import LORA


class Label(NamedTuple):
    """What wrote a token: a revision_id and the step it was admitted as, or ``base:<digest>`` and no step."""

    version: str
    step: int | None


def label_of(admission: Admission) -> Label:
    """Return the label of the revision a request was bound to."""
    publication = admission.publication
    if publication is None:
        return Label(f"base:{admission.served.service.base_digest}", None)
    return Label(publication.revision_id, publication.step)


def label_of_row(admission: Admission, lora_int_id: int) -> Label:
    """Return the label of a token that was sampled with an adapter; a step of the request's policy, if it has one.

    Raises:
        TokenRowsError: nothing was ever published here under that id.
    """
    publication, service = admission.publication, admission.served.service
    if lora_int_id == (0 if publication is None else publication.lora_int_id):
        return label_of(admission)
    if lora_int_id == 0:
        return Label(f"base:{service.base_digest}", None)
    found = service.publication_of(lora_int_id, None if publication is None else publication.policy)
    if found is None:
        raise TokenRowsError(
            f"a token was sampled with adapter {lora_int_id}, which the journal does not know; "
            "restart the server, and report this",
            lora_int_id=lora_int_id,
        )
    return Label(found.revision_id, found.step)


def label_tokens(admission: Admission, output: Any) -> list[tuple[Label, int]]:
    """Return runs of (label, tokens) over an output's ``token_ids``, in order.

    Raises:
        TokenRowsError: the output has not one row for each token, or a row names an adapter that nobody published.
    """
    rows, count = output.token_attest, len(output.token_ids)
    if (0 if rows is None else len(rows)) != count:
        raise TokenRowsError(
            f"{count} tokens came with {0 if rows is None else len(rows)} rows; report this", tokens=count
        )
    if count == 0:
        return []
    adapters = rows[:, LORA]
    if count == 1 or (adapters == adapters[0]).all():
        return [(label_of_row(admission, int(adapters[0])), count)]
    starts = [0, *(np.flatnonzero(np.diff(adapters)) + 1).tolist()]
    return [
        (label_of_row(admission, int(adapters[start])), end - start)
        for start, end in zip(starts, [*starts[1:], count], strict=True)
    ]


def annotate_choice(self: Any, choice: Any, output: Any, request_output: Any, request: Any) -> None:
    """Label a choice or chunk; see the patch's README for when the engine calls it.

    Args:
        choice: the choice to label; None for a chunk that is not sent, whose tokens count all the same.
        output: the CompletionOutput behind it; None for a chunk that opens a stream and holds no token.
        request_output: the RequestOutput it came with.
        request: the body of the request.
    """
    admission = admission_of(request)
    if admission is None:
        return
    if output is None:
        choice.weight_version = label_of(admission).version
        return
    if _is_echo_only(request):
        runs = []
    elif getattr(request, "use_beam_search", False):
        # A beam is chosen by log-probabilities over many short requests, all on the request's one adapter.
        runs = [(label_of(admission), len(output.token_ids))]
    else:
        runs = label_tokens(admission, output)
    streamed = choice is None or type(choice).__name__.endswith("StreamChoice")
    spans: list[dict[str, Any]] = []
    if streamed:
        spans = admission.progress.setdefault((request_output.request_id, output.index), spans)
    extend_spans(spans, runs)
    if choice is None:
        return
    if admission.receipts is not None:
        annotate(admission.receipts, choice, output, request_output)
    choice.weight_version = spans[-1]["version"] if spans else label_of(admission).version
    if not streamed or output.finish_reason is not None:
        choice.weight_versions = spans
        for span in spans:
            metrics.count_tokens("base" if span["step"] is None else "revision", span["end"] - span["start"])


def extend_spans(spans: list[dict[str, Any]], runs: Iterable[tuple[Label, int]]) -> None:
    """Append runs of labelled tokens to spans, merging a run into a last span of the same label."""
    for label, count in runs:
        if count == 0:
            continue
        last = spans[-1] if spans else None
        if last is not None and (last["version"], last["step"]) == label:
            last["end"] += count
            continue
        start = last["end"] if last is not None else 0
        spans.append({"version": label.version, "step": label.step, "start": start, "end": start + count})


def _is_echo_only(request: Any) -> bool:
    # vLLM generates one token to score the prompt, and leaves it out of the response.
    return bool(getattr(request, "echo", False)) and request.max_tokens == 0


def label_response(response: Any, request: Any) -> Any:
    """Label a body of the Responses API, which has no choices."""
    admission = admission_of(request)
    if admission is not None:
        response.weight_version = label_of(admission).version
    return response


def install() -> None:
    """Replace the patch's hook, and wrap what names the model of Responses and pooling bodies.

    Raises:
        SeamError: a target is missing; without the hook the engine is not patched.
    """
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.entrypoints.pooling.scoring.serving import ServingScores

    if not hasattr(GenerateBaseServing, "annotate_choice"):
        raise SeamError(
            "GenerateBaseServing has no annotate_choice: run epochless patch apply", target="annotate_choice"
        )
    if not hasattr(ResponsesResponse, "from_request"):
        raise SeamError("ResponsesResponse has no from_request", target="from_request")
    if not hasattr(PoolingBaseServing, "_init_ctx"):
        raise SeamError("PoolingBaseServing has no _init_ctx", target="_init_ctx")
    if not hasattr(ServingScores, "_build_response"):
        raise SeamError("ServingScores has no _build_response", target="_build_response")
    GenerateBaseServing.annotate_choice = annotate_choice
    original = ResponsesResponse.from_request.__func__
    if getattr(original, "_epochless", False):
        return

    def from_request(cls: Any, request: Any, *arguments: Any, **keywords: Any) -> Any:
        return label_response(original(cls, request, *arguments, **keywords), request)

    from_request._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    ResponsesResponse.from_request = classmethod(from_request)
    PoolingBaseServing._init_ctx = name_in_context(PoolingBaseServing._init_ctx)
    ServingScores._build_response = name_in_scores(ServingScores._build_response)


def name_in_context(original: Any) -> Any:
    """Return a pooling class's ``_init_ctx`` that names the revision as the model of the answer."""

    async def _init_ctx(self: Any, *arguments: Any, **keywords: Any) -> Any:
        context = await original(self, *arguments, **keywords)
        if context.lora_request is not None:
            context.model_name = context.lora_request.lora_name
        return context

    return _init_ctx


def name_in_scores(original: Any) -> Any:
    """Return the scoring class's ``_build_response``, which asks for the base name, naming the revision instead."""

    def _build_response(self: Any, ctx: Any) -> Any:
        response = original(self, ctx)
        if ctx.lora_request is None:
            return response
        return JSONResponse({**json.loads(response.body), "model": ctx.lora_request.lora_name})

    return _build_response
