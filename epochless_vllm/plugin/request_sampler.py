"""A request's sampling parameters as the sampler they name, for the header of its receipts.

Promises that everything in vLLM's SamplingParams that moves a probability is in the sampler's identity. Does not know
logits: see sampling/.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from epochless_vllm.plugin.options import KEY
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.digests import Digest, digest
from epochless_vllm.protocol.sampler_config import SamplerConfig, processor_entries, sampler_from_parameters

_GRAMMARS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def attested_sampler(params: Any, installed: Sequence[str] = ()) -> SamplerConfig:
    """Return the sampler of a SamplingParams as the engine got it.

    Args:
        installed: names of the logits processors the operator installed; they read ``extra_args``.

    Raises:
        InvalidRequestError: a parameter is out of the exact sampler's range.
    """
    return sampler_from_parameters(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        processors=processor_entries(
            grammar=grammar_digest(params.structured_outputs),
            allowed_token_ids=params.allowed_token_ids,
            bad_words_token_ids=params.bad_words_token_ids,
            min_tokens=params.min_tokens,
            min_tokens_stop_ids=sorted(params.all_stop_token_ids),
            logit_bias=params.logit_bias,
            custom=_custom(params, installed),
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
        ),
    )


def grammar_digest(structured: Any) -> Digest | None:
    """Return the digest of what a response must conform to; None where it is free."""
    if structured is None:
        return None
    for kind in _GRAMMARS:
        value = getattr(structured, kind, None)
        if value is not None and value is not False:
            text = value if isinstance(value, (str, list)) else json.dumps(value, sort_keys=True)
            options = [
                bool(structured.disable_any_whitespace),
                bool(structured.disable_additional_properties),
                structured.whitespace_pattern,
            ]
            return digest("epochless/v1/grammar", encode_canonical([kind, text, options]))
    return None


def _custom(params: Any, installed: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    entries: list[tuple[str, Any]] = []
    if params.thinking_token_budget is not None:
        entries.append(("thinking_token_budget", [params.thinking_token_budget]))
    if installed:
        read = sorted((name, repr(value)) for name, value in (params.extra_args or {}).items() if name != KEY)
        arguments = digest("epochless/v1/processor-arguments", encode_canonical([list(item) for item in read]))
        entries += [(name, arguments) for name in installed]
    return tuple(entries)
