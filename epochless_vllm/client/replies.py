"""What a server's answer means to a client: the reply's model, or the server's own error raised again here.

Promises that a refusal surfaces as the class the server raised, with its fields, and that an answer in other words
surfaces as UnexpectedReplyError. Knows no transport.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from epochless_vllm.errors import EpochlessError, UnexpectedReplyError
from epochless_vllm.wire import Reply

ReplyType = TypeVar("ReplyType", bound=Reply)


def decode_reply(reply_type: type[ReplyType], status: int, body: bytes, *, url: str) -> ReplyType:
    """Return the reply a body spells.

    Raises:
        EpochlessError: of the server's class, for an error body.
        UnexpectedReplyError: the body is neither.
    """
    value = decode_json(status, body, url=url)
    try:
        return reply_type.model_validate(value)
    except ValidationError as error:
        raise unexpected(status, body, url=url) from error


def decode_json(status: int, body: bytes, *, url: str) -> Any:
    """Return the JSON value of a successful answer.

    Raises:
        EpochlessError, UnexpectedReplyError: as ``decode_reply``.
    """
    try:
        value = json.loads(body)
    except ValueError as error:
        raise unexpected(status, body, url=url) from error
    if status >= 400:
        raise error_from_body(status, value) or unexpected(status, body, url=url)
    return value


def error_from_body(status: int, value: Any) -> EpochlessError | None:
    """Return the error a body spells, of the class with its ``error_code``; None when it spells none."""
    described = value.get("error") if isinstance(value, dict) else None
    if isinstance(described, str):  # vLLM's own refusal of a missing API key
        described = {"message": described, "error_code": "unauthorized" if status == 401 else "epochless_error"}
    if not isinstance(described, dict) or not isinstance(described.get("message"), str):
        return None
    fields = {key: item for key, item in described.items() if key not in ("message", "error_code", "code", "param")}
    if described.get("param") is not None:
        fields["field"] = described["param"]
    kind = _class_of(str(described.get("error_code", "")))
    error = kind.__new__(kind)
    EpochlessError.__init__(error, described["message"], **fields)
    # The status of the answer, which an error without a class of its own here would lose.
    error.status = status
    return error


def unexpected(status: int, body: bytes, *, url: str) -> UnexpectedReplyError:
    """Return the error for an answer that no Epochless server of this release gives."""
    start = body[:200].decode("utf-8", "replace")
    return UnexpectedReplyError(
        f"{url}: HTTP {status} {start!r} is not an answer of an Epochless server; is it vLLM with --enable-epochless?",
        url=url,
        http_status=status,
    )


def _class_of(code: str) -> type[EpochlessError]:
    pending: list[type[EpochlessError]] = [EpochlessError]
    while pending:
        kind = pending.pop()
        if kind.code == code:
            return kind
        pending.extend(kind.__subclasses__())
    return EpochlessError
