"""Our fields of a generation request and of its response, for use with the openai package or plain JSON.

    response = openai.chat.completions.create(model="policy", messages=messages, **request_fields(min_version=7))
    steps = steps_of_tokens(response.choices[0])

Knows no transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epochless_vllm.errors import InvalidRequestError, UnexpectedReplyError
from epochless_vllm.wire import VersionSpan


def request_fields(
    *,
    min_version: int | None = None,
    exact_version: int | None = None,
    attest: str | None = None,
    nonce: str | None = None,
) -> dict[str, Any]:
    """Return keyword arguments for the openai package: ``extra_body`` with the fields given.

    Args:
        min_version: answer only from that step or a later one, else 409 WeightVersionNotReady.
        exact_version: answer only from that step.
        attest: ``none``, ``summary`` or ``receipt``.
        nonce: bound into the receipt.

    Raises:
        InvalidRequestError: both versions were given.
    """
    if min_version is not None and exact_version is not None:
        raise InvalidRequestError("weight_version: give min_version or exact_version, not both", field="weight_version")
    body: dict[str, Any] = {}
    if min_version is not None:
        body["weight_version"] = {"min_version": min_version}
    if exact_version is not None:
        body["weight_version"] = {"exact_version": exact_version}
    options = {key: value for key, value in (("attest", attest), ("nonce", nonce)) if value is not None}
    if options:
        body["epochless"] = options
    return {"extra_body": body}


def spans_of(choice: Any) -> list[VersionSpan]:
    """Return the spans of a finished choice, an openai object or a dictionary.

    Raises:
        UnexpectedReplyError: it carries none: not a final chunk, or not an Epochless server.
    """
    spans = choice.get("weight_versions") if isinstance(choice, Mapping) else getattr(choice, "weight_versions", None)
    if spans is None:
        raise UnexpectedReplyError(
            "the choice has no weight_versions: a server without --enable-epochless, or not the last chunk of a stream"
        )
    return [VersionSpan.model_validate(span) for span in spans]


def steps_of_tokens(choice: Any) -> list[int | None]:
    """Return the step of each output token of a finished choice; None where the base model wrote it.

    Raises:
        UnexpectedReplyError: as ``spans_of``.
    """
    return [span.step for span in spans_of(choice) for _ in range(span.start, span.end)]
