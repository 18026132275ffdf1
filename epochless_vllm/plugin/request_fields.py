"""Our two fields of a request body, ``weight_version`` and ``epochless``, whether its class keeps or drops them.

vLLM's OpenAI request classes keep unknown fields; tokens-in, Cohere and Anthropic ones drop them, and a dropped
constraint would be served on whatever is newest. Those are read from the body itself. Knows no meanings.
"""

from __future__ import annotations

from typing import Any

from epochless_vllm.plugin.weak_identity import WeakIdentityMap

FIELDS = ("weight_version", "epochless")

_from_body: WeakIdentityMap[dict[str, Any]] = WeakIdentityMap()


async def keep_fields(request: Any, raw_request: Any) -> None:
    """Remember our fields of an HTTP request's body for ``field_of``; without an HTTP request do nothing."""
    if raw_request is None:
        return
    body = await raw_request.json()  # decoded by the framework already, and cached
    if isinstance(body, dict) and (kept := {name: body[name] for name in FIELDS if body.get(name) is not None}):
        _from_body.set(request, kept)


def field_of(request: Any, name: str) -> Any:
    """Return one of our fields of a request; None when it is absent."""
    # Read where pydantic keeps unknown fields: asking for an absent attribute costs it microseconds.
    extra = getattr(request, "__pydantic_extra__", None)
    value = extra.get(name) if extra else None
    if value is None and (kept := _from_body.get(request)) is not None:
        value = kept.get(name)
    return value
