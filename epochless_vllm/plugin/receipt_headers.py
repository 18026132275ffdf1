"""The header of a choice's receipt, from what the engine was actually asked.

Promises that limits and stop tokens are the effective ones, with vLLM's generation config and context length worked
in, so that the receipt's finish reason can be checked against them. Knows no rows.
"""

from __future__ import annotations

import secrets
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from epochless_vllm.errors import InvalidRequestError, ReceiptError
from epochless_vllm.plugin.draw_keys import set_material
from epochless_vllm.plugin.engine_identity import EngineIdentity
from epochless_vllm.plugin.request_sampler import attested_sampler
from epochless_vllm.protocol.draws import REQUEST_SEED_BYTES
from epochless_vllm.protocol.header import NO_DRAWS, SEEDED, UNSEEDED, Header, prompt_digest
from epochless_vllm.protocol.sampler_config import SamplerConfig
from epochless_vllm.protocol.shapes import read_text
from epochless_vllm.protocol.spans import BASE_PREFIX, PIN, RevisionEntry


@dataclass(frozen=True)
class KeyMaterial:
    """What a request's draws come from, besides the choice index; ``seed`` is an int where the client named it."""

    seed: int | bytes
    nonce: str | None
    request_id: str
    prompt_index: int


def take_material(params: Any, *, nonce: str | None, request_id: str, prompt_index: int) -> tuple[Any, KeyMaterial]:
    """Return (a copy of SamplingParams that carries the key material of its draws, the material).

    Raises:
        InvalidRequestError: the client put something of its own where the material goes.
    """
    seed = secrets.token_bytes(REQUEST_SEED_BYTES) if params.seed is None else params.seed
    owned = copy(params)  # the caller may use one object for many requests
    set_material(
        owned,
        seed=seed.hex() if isinstance(seed, bytes) else seed,
        nonce=nonce or "",
        request=request_id,
        prompt=prompt_index,
        choice=0,
    )
    return owned, KeyMaterial(seed, nonce, request_id, prompt_index)


def effective_params(engine: Any, params: Any) -> Any:
    """Return SamplingParams as vLLM completes them on their way to the engine; ``params`` stays as it is.

    Args:
        engine: an AsyncLLM or LLMEngine.
    """
    completed = copy(params)
    completed._all_stop_token_ids = set(params._all_stop_token_ids)
    completed.update_from_generation_config(
        engine.input_processor.generation_config_fields, engine.renderer.get_eos_token_id()
    )
    if (tokenizer := engine.input_processor.tokenizer) is not None:
        completed.update_from_tokenizer(tokenizer)
    return completed


def revision_entry(publication: Any, base: str) -> RevisionEntry:
    """Return the table row of a publication, or of the base model for None."""
    if publication is None:
        return RevisionEntry(BASE_PREFIX + base, None, None)
    return RevisionEntry(publication.revision_id, publication.policy, publication.step)


@dataclass(frozen=True)
class PromptTerms:
    """What the headers of one prompt's choices have in common.

    Attributes:
        params: SamplingParams, completed.
        entry, lora_int_id: the revision the request is bound to.
    """

    identity: EngineIdentity
    params: Any
    material: KeyMaterial
    entry: RevisionEntry
    lora_int_id: int

    @cached_property
    def sampler(self) -> SamplerConfig:
        """The sampler. Raises InvalidRequestError where a parameter is out of its range."""
        return attested_sampler(self.params, self.identity.logits_processors)

    @property
    def seed(self) -> int | bytes | None:
        """What the final record reveals."""
        return None if self.sampler.greedy else self.material.seed

    def check(self) -> None:
        """Refuse what no header can state.

        Raises:
            InvalidRequestError: the sampler or the request id is out of range.
        """
        _ = self.sampler
        try:
            read_text(self.material.request_id, "X-Request-Id")
        except ReceiptError as error:
            raise InvalidRequestError(
                f"{error.message}, prefix included, because receipts name it", field="X-Request-Id"
            ) from error

    def header(self, prompt_token_ids: list[int]) -> Header:
        """Return the header of choice 0; see ``for_choice``."""
        params, identity = self.params, self.identity
        room = identity.max_model_len - len(prompt_token_ids)
        stops = {*(params.stop_token_ids or ()), *(() if params.eos_token_id is None else (params.eos_token_id,))}
        return Header(
            engine_name=identity.name,
            engine_digest=identity.digest,
            base=identity.base,
            tokenizer=identity.tokenizer,
            vocab_size=identity.vocab_size,
            prompt=prompt_digest(prompt_token_ids),
            prompt_length=len(prompt_token_ids),
            prompt_index=self.material.prompt_index,
            choice_index=0,
            request_id=self.material.request_id,
            nonce=self.material.nonce,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            # An id beyond the vocabulary cannot be sampled, so it stops nothing.
            stop_token_ids=tuple(sorted(token for token in stops if 0 <= token < identity.vocab_size)),
            on_publish=PIN,
            revisions=(self.entry,),
            samplers=(self.sampler,),
            draw_kind=NO_DRAWS if self.sampler.greedy else SEEDED if isinstance(self.seed, int) else UNSEEDED,
        )


def for_choice(header: Header, choice_index: int) -> Header:
    """Return the header of another choice of the same prompt."""
    return replace(header, choice_index=choice_index) if choice_index else header
