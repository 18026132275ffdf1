"""Request and response bodies of the HTTP routes, shared by plugin, client and command line.

Requests are strict: a wrong type is refused with the field's name, and nothing is coerced. Replies allow further
fields, so that an older client reads a newer server. Knows no transport and no state.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epochless_vllm.errors import InvalidRequestError
from epochless_vllm.protocol.header import MAX_NONCE, MIN_NONCE
from epochless_vllm.protocol.names import MAX_STEP

ATTESTATIONS = ("none", "summary", "receipt")


class RequestBody(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Reply(BaseModel):
    """Base of replies."""

    model_config = ConfigDict(extra="allow")


class LoadAdapterRequest(RequestBody):
    """``POST /v1/load_lora_adapter``. Keys of other servers are ignored, as stock vLLM does."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    is_3d_lora_weight: Literal[False] = False
    step: int | None = Field(default=None, ge=0, le=MAX_STEP)


class UnloadAdapterRequest(RequestBody):
    """``POST /v1/unload_lora_adapter``: a policy retires all its revisions, ``policy-vN`` or ``policy@…`` one."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None


class PublishRequest(RequestBody):
    """``POST /v1/policies/{policy}/revisions`` with a path on the server's host."""

    path: str = Field(min_length=1)
    step: int | None = Field(default=None, ge=0, le=MAX_STEP)


class RequestOptions(RequestBody):
    """The body field ``epochless`` of a generation request."""

    attest: Literal["none", "summary", "receipt"] | None = None
    nonce: str | None = Field(default=None, pattern=rf"^[!-~]{{{MIN_NONCE},{MAX_NONCE}}}$")
    on_publish: str | None = None


class PublishReply(Reply):
    """A committed publication. ``weight_version`` is the revision_id; ``receipts`` is keyed by rank."""

    status: Literal["ok"] = "ok"
    policy: str
    lora_name: str
    lora_int_id: int
    weight_version: str
    step: int
    sequence: int
    repeated: bool = False
    receipts: dict[str, dict[str, Any]]


class DrainingRevision(Reply):
    """One revision that admits nobody any more; ``in_flight`` requests still run on it."""

    policy: str
    step: int
    weight_version: str
    in_flight: int


class RetireReply(Reply):
    """The answer to a retirement; ``in_flight`` is the sum over its revisions."""

    status: Literal["draining"] = "draining"
    in_flight: int
    revisions: list[DrainingRevision]


class WeightInfo(Reply):
    """The head of a policy; ``weight_version`` is ``base:<digest>`` while nothing is published."""

    weight_version: str
    policy: str | None = None
    step: int | None = None
    sequence: int | None = None


class VersionSpan(Reply):
    """Output tokens ``start`` to ``end``, half-open, that ``version`` sampled; ``step`` is null for the base model."""

    version: str
    step: int | None
    start: int
    end: int


class ErrorInfo(Reply):
    """The ``error`` object of a refusal: vLLM's four fields, ``error_code`` and the facts of the error."""

    message: str
    type: str
    code: int
    param: str | None = None
    error_code: str = "epochless_error"


class ErrorEvent(Reply):
    """The last event of a Responses stream that was refused after it had begun."""

    type: Literal["error"] = "error"
    code: str
    message: str
    param: str | None = None
    sequence_number: int = 0


Body = TypeVar("Body", bound=RequestBody)


def decode_body(body_type: type[Body], payload: bytes) -> Body:
    """Return the request that a JSON body spells.

    Raises:
        InvalidRequestError: not a JSON object, or a field is missing, unknown or of the wrong type; names the field.
    """
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"body: not JSON ({error}); send a JSON object", field="body") from error
    return check_body(body_type, value)


def check_body(body_type: type[Body], value: object, *, prefix: str = "") -> Body:
    """Return the request that a decoded JSON value spells; ``prefix`` opens the names of its fields.

    Raises:
        InvalidRequestError: names the first field at fault.
    """
    if not isinstance(value, dict):
        field = prefix.rstrip(".") or "body"
        raise InvalidRequestError(f"{field}: must be a JSON object", field=field)
    try:
        return body_type.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = prefix + ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"{field}: {_remedy(body_type, first)}", field=field) from error


def parse_request_options(value: object) -> RequestOptions | None:
    """Return the checked body field ``epochless``; None for an absent field.

    Raises:
        InvalidRequestError: unknown key, wrong type, or a value this release does not serve; names the field.
    """
    if value is None:
        return None
    options = check_body(RequestOptions, value, prefix="epochless.")
    if options.on_publish not in (None, "pin"):
        raise InvalidRequestError(
            f"epochless.on_publish: {options.on_publish[:40]!r} is not available in this release; "
            'use "pin" or leave it out',
            field="epochless.on_publish",
        )
    return options


def _remedy(body_type: type[RequestBody], fault: Any) -> str:
    name = str(fault["loc"][-1]) if fault["loc"] else ""
    known = ", ".join(body_type.model_fields)
    if fault["type"] == "missing":
        return "is required"
    if fault["type"] == "extra_forbidden":
        return f"is not a field of this request; known: {known}"
    if name == "step":
        return "must be an integer from 0 to 2**53 - 1"
    if name == "is_3d_lora_weight":
        return "adapters of mixture-of-experts layers are not served; leave it out"
    if name == "attest":
        return f"must be one of {', '.join(ATTESTATIONS)}"
    if name == "nonce":
        return f"must be {MIN_NONCE} to {MAX_NONCE} printable ASCII characters without spaces"
    return str(fault["msg"][:1].lower() + fault["msg"][1:])
