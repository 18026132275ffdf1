"""Seam: receipts beside the answers of the HTTP API.

Every engine stream of an admitted request gets the key material of its draws here; one that is to be attested is
watched as it passes, so that routes, parsers and merged chunks lose no row. A stream's chunks carry the frames of
completed blocks and its last one the seal; a whole answer is sealed in the sink's thread while its handler waits. What
the client leaves behind is sealed as ``abort`` for the sink. Dies when upstream has a hook for engine streams.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import functools
import json
from collections import Counter
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from epochless_vllm.errors import InvalidRequestError, SeamError
from epochless_vllm.plugin import preemptions
from epochless_vllm.plugin.engine_identity import EngineIdentity, identify_engine
from epochless_vllm.plugin.late_arrivals import current_admission
from epochless_vllm.plugin.options import Options
from epochless_vllm.plugin.receipt_headers import PromptTerms, effective_params, for_choice, take_material
from epochless_vllm.plugin.receipts import ChoiceRecorder
from epochless_vllm.plugin.signer import Ed25519Signer, load_signer
from epochless_vllm.plugin.sink import Entry, Outcome, ReceiptSink
from epochless_vllm.protocol.compact import encode_compact
from epochless_vllm.protocol.header import Header
from epochless_vllm.protocol.receipts import Receipt
from epochless_vllm.protocol.spans import RevisionEntry

# The stream whose request is being added to the engine: set around that only.
_opening: ContextVar[Any] = ContextVar("epochless_opening", default=None)

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Attestor:
    """What a front end makes receipts with."""

    signer: Ed25519Signer
    sink: ReceiptSink
    identity: EngineIdentity


def make_attestor(vllm_config: Any, options: Options, base_digest: str) -> Attestor:
    """Return what this front end makes receipts with; they are kept until the process ends in an orderly way.

    Raises:
        ConfigurationError: the signing key is not usable.
    """
    sink = ReceiptSink(options.store, max_bytes=options.receipts_bytes, max_age_s=options.receipts_age)
    atexit.register(sink.close)
    return Attestor(load_signer(options), sink, identify_engine(vllm_config, base_digest))


@dataclass
class Sealed:
    """A choice that has ended; ``receipt`` is set once the future is done."""

    future: Future[Outcome]
    receipt: Receipt | None = None


@dataclass
class RequestReceipts:
    """The receipts of one HTTP request.

    Attributes:
        level: ``summary`` or ``receipt``.
        streamed: whether its choices are sent in chunks.
        prompts: the engine's streams by their request id.
        bodies: what was put beside choices of a whole answer, to be filled in when they are sealed.
        offered: receipts whose keeping was announced in a stream.
    """

    attestor: Attestor
    level: str
    streamed: bool
    entry: RevisionEntry
    lora_int_id: int
    prompts: dict[str, PromptReceipts] = field(default_factory=dict)
    bodies: list[tuple[dict[str, Any], Sealed]] = field(default_factory=list)
    offered: list[Sealed] = field(default_factory=list)


class PromptReceipts:
    """The receipts of one engine stream: of all choices of one prompt."""

    def __init__(self, request: RequestReceipts, terms: PromptTerms, *, deltas: bool) -> None:
        self.recorders: dict[int, ChoiceRecorder] = {}
        self.sealed: dict[int, Sealed | None] = {}
        self.rebuilds: Counter[int] = Counter()
        self._queue: Any = None
        self._request, self._terms, self._deltas = request, terms, deltas
        self._header: Header | None = None

    def take(self, output: Any) -> None:
        """Record a RequestOutput on its way to the route.

        Raises:
            TokenRowsError, ReceiptError: a row cannot be attested; the request must fail.
        """
        for choice in output.outputs:
            if choice.finish_reason == "error":
                self.sealed[choice.index] = None
            if choice.index in self.sealed or (choice.finish_reason is None and not self._deltas):
                continue
            recorder = self.recorders.get(choice.index)
            if recorder is None:
                recorder = self._begin(choice.index, output.prompt_token_ids)
            recorder.add(choice.token_ids, choice.token_attest)
            if choice.finish_reason is not None:
                self._seal(choice.index, choice.finish_reason, choice.stop_reason, at_once=self._request.streamed)
            elif self._request.streamed:
                recorder.advance()

    def entered(self, queue: Any) -> None:
        """Remember the queue that the engine's outputs come through: the request is on its way to the scheduler."""
        self._queue = queue
        self.rebuilds = preemptions.watch(queue.request_id, self._terms.params.n)

    def close(self) -> None:
        """Seal as aborted what has not ended; the engine's last words are still in its queue."""
        if self._queue is not None:
            preemptions.forget(self._queue.request_id, self._terms.params.n)
            if (rest := self._queue.get_nowait()) is not None:
                self.take(rest)
        for index in self.recorders.keys() - self.sealed.keys():
            self._seal(index, "abort", None, at_once=False)

    def _begin(self, index: int, prompt_token_ids: list[int]) -> ChoiceRecorder:
        if self._header is None:
            self._header = self._terms.header(prompt_token_ids)
        framed = self._request.streamed and self._request.level == "receipt"
        self.recorders[index] = recorder = ChoiceRecorder(
            for_choice(self._header, index),
            lora_int_id=self._terms.lora_int_id,
            seed=self._terms.seed,
            framed=framed,
        )
        return recorder

    def _seal(self, index: int, finish_reason: str, stop_reason: Any, *, at_once: bool) -> None:
        recorder, signer, rebuilds = self.recorders[index], self._request.attestor.signer, self.rebuilds[index]
        sealed = Sealed(Future())

        def make() -> Entry:
            if sealed.receipt is None:
                sealed.receipt = recorder.seal(finish_reason, stop_reason, signer, rebuilds=rebuilds)
            return entry_of(sealed.receipt)

        if at_once:  # the chunk about to be sent carries the seal
            sealed.receipt = recorder.seal(finish_reason, stop_reason, signer, rebuilds=rebuilds)
        sealed.future = self._request.attestor.sink.submit(make)
        self.sealed[index] = sealed


def entry_of(receipt: Receipt) -> Entry:
    """Return a receipt as the sink keeps it."""
    header, final = receipt.header, receipt.final
    return Entry(
        receipt_id=final.receipt_id,
        request_id=header.request_id,
        prompt_index=header.prompt_index,
        choice_index=header.choice_index,
        finish_reason=final.finish_reason,
        tokens=final.tokens,
        body=encode_compact(receipt),
    )


def open_stream(
    engine: Any, admission: Any, prompt: Any, params: Any, request_id: str
) -> tuple[Any, PromptReceipts | None]:
    """Return (SamplingParams with the key material, what records the stream's receipts) of an engine stream.

    Raises:
        InvalidRequestError: what was asked cannot be attested; names the field.
    """
    index = admission.prompts
    admission.prompts += 1
    owned, material = take_material(
        params,
        nonce=None if admission.options is None else admission.options.nonce,
        request_id=request_id.removesuffix(admission.id_suffix.format(index)),
        prompt_index=index,
    )
    request: RequestReceipts | None = admission.receipts
    if request is None:
        return owned, None
    if isinstance(prompt, dict) and prompt.get("type") == "embeds":
        raise InvalidRequestError(
            "prompt_embeds: a prompt without token ids cannot be attested; send epochless.attest 'none'",
            field="prompt_embeds",
        )
    completed = effective_params(engine, params)
    terms = PromptTerms(request.attestor.identity, completed, material, request.entry, request.lora_int_id)
    terms.check()
    deltas = params.output_kind.name == "DELTA"
    request.prompts[request_id] = receipts = PromptReceipts(request, terms, deltas=deltas)
    return owned, receipts


async def observe(stream: AsyncGenerator[Any, None], receipts: PromptReceipts) -> AsyncGenerator[Any, None]:
    """Yield an engine's outputs and record them."""
    try:
        async with aclosing(stream):
            _opening.set(receipts)
            try:
                output = await anext(stream, None)
            finally:
                _opening.set(None)  # not reset: a stream may be closed in another context than it was opened in
            while output is not None:
                receipts.take(output)
                yield output
                output = await anext(stream, None)
    finally:
        receipts.close()


def annotate(request: RequestReceipts, choice: Any, output: Any, request_output: Any) -> None:
    """Put beside a choice or chunk what is ready of its receipt."""
    prompt = request.prompts[request_output.request_id]
    sealed = prompt.sealed.get(output.index)
    if not request.streamed:
        if sealed is not None:
            body: dict[str, Any] = {}
            choice.epochless = body
            request.bodies.append((body, sealed))
        return
    body = {}
    if sealed is not None and sealed.receipt is not None and output.finish_reason is not None:
        reason = request.attestor.sink.refusal
        body = _describe(sealed.receipt, reason)
        request.offered.append(sealed)
    recorder = prompt.recorders.get(output.index)
    if recorder is not None and (frames := recorder.take_frames()):
        body["frames"] = base64.b64encode(frames).decode("ascii")
    if body:
        choice.epochless = body


def _describe(receipt: Receipt, reason: str | None) -> dict[str, Any]:
    body = {
        "id": receipt.receipt_id,
        "root": receipt.final.root.hex(),
        "tokens": receipt.final.tokens,
        "prompt_index": receipt.header.prompt_index,
        "choice_index": receipt.header.choice_index,
        "kept": reason is None,
    }
    if reason is not None:
        body["reason"] = reason
    return body


async def settle(request: RequestReceipts) -> None:
    """Wait until the receipts of a whole answer are sealed and kept, and complete its choices.

    Raises:
        TokenRowsError, ReceiptError: a row cannot be attested.
    """
    for body, sealed in request.bodies:
        outcome = await asyncio.wrap_future(sealed.future)
        assert sealed.receipt is not None  # the future is done and did not raise
        body.update(_describe(sealed.receipt, outcome.reason))
        if request.level == "receipt":
            body["receipt"] = base64.b64encode(outcome.entry.body).decode("ascii")
    request.bodies.clear()


async def conclude(stream: AsyncGenerator[Any, None], request: RequestReceipts) -> AsyncGenerator[Any, None]:
    """Yield a route's chunks; before its end, a chunk without choices names the receipts the disk refused after all."""
    earlier = ""
    async with aclosing(stream):
        async for item in stream:
            if item == DONE and (refused := await _refused(request)):
                last = json.loads(earlier.removeprefix("data:")) if earlier else {}
                described = {
                    name: last[name] for name in ("id", "request_id", "object", "created", "model") if name in last
                }
                yield f"data: {json.dumps({**described, 'choices': [], 'epochless': {'receipts': refused}})}\n\n"
            yield item
            earlier = item


async def _refused(request: RequestReceipts) -> list[dict[str, Any]]:
    refused = []
    for sealed in request.offered:
        outcome = await asyncio.wrap_future(sealed.future)
        if outcome.reason is not None and sealed.receipt is not None:
            refused.append(_describe(sealed.receipt, outcome.reason))
    return refused


def install() -> None:
    """Wrap the engine's stream and the call that adds its request.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    for name in ("generate", "add_request"):
        if name not in vars(AsyncLLM):
            raise SeamError(f"AsyncLLM has no {name}", target=name)
    if getattr(AsyncLLM.generate, "_epochless_receipts", False):
        return
    generate, add_request = AsyncLLM.generate, AsyncLLM.add_request

    @functools.wraps(generate)
    def open_attested(self: Any, prompt: Any, sampling_params: Any, request_id: str, **keywords: Any) -> Any:
        admission = current_admission.get()
        # The streams of one admission carry its very LoRARequest; another caller's do not.
        if admission is None or admission.lora_request is not keywords.get("lora_request"):
            return generate(self, prompt, sampling_params, request_id, **keywords)
        owned, receipts = open_stream(self, admission, prompt, sampling_params, request_id)
        stream = generate(self, prompt, owned, request_id, **keywords)
        return stream if receipts is None else observe(stream, receipts)

    @functools.wraps(add_request)
    async def remember_queue(self: Any, *arguments: Any, **keywords: Any) -> Any:
        queue = await add_request(self, *arguments, **keywords)
        if (receipts := _opening.get()) is not None:
            receipts.entered(queue)
        return queue

    open_attested._epochless_receipts = True  # type: ignore[attr-defined]  # the mark of an installed seam
    AsyncLLM.generate = open_attested  # type: ignore[method-assign]
    AsyncLLM.add_request = remember_queue  # type: ignore[method-assign]
