"""Seam: an EpochlessError in the words of the HTTP API.

Promises one body for a refusal, whether a handler returns it, a stream carries it or the application catches it: vLLM's
``{"error": {message, type, param, code}}`` with the stable ``error_code`` and the facts of the error beside them. Dies
when upstream maps an exception's own status and fields.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from epochless_vllm.errors import EpochlessError, SeamError

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    410: "GoneError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    503: "ServiceUnavailableError",
    507: "InsufficientStorageError",
}
RETRY_AFTER_S = 1
MAX_TEXT = 1000  # of a message or a fact; a request may name a model of megabytes, and need not hear it all again
_OWN_FIELDS = frozenset({"message", "type", "param", "code", "error_code"})


def describe_error(error: EpochlessError) -> dict[str, Any]:
    """Return the ``error`` object of a refusal."""
    fields = {key: _clip(value) for key, value in error.fields.items() if key not in _OWN_FIELDS and key != "field"}
    return {
        "message": _clip(error.message),
        "type": error.fields.get("type") or TYPES.get(error.status, "InternalServerError"),
        "param": _clip(error.fields.get("field")) or ("model" if "model" in error.fields else None),
        "code": error.status,
        "error_code": error.code,
        **fields,
    }


def _clip(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    clipped = value[:MAX_TEXT] + "…" if len(value) > MAX_TEXT else value
    return clipped.encode("utf-8", "backslashreplace").decode()  # JSON may spell halves of characters, UTF-8 cannot


def error_response(error: EpochlessError) -> Any:
    """Return vLLM's ErrorResponse for an error."""
    from vllm.entrypoints.openai.engine.protocol import ErrorInfo, ErrorResponse

    return ErrorResponse(error=ErrorInfo(**describe_error(error)))


def json_response(error: EpochlessError) -> JSONResponse:
    """Return the HTTP answer for an error; one that passes by itself says when to try again."""
    passing = error.fields.get("retryable", error.status == HTTPStatus.SERVICE_UNAVAILABLE)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if passing else None
    return JSONResponse({"error": describe_error(error)}, status_code=error.status, headers=headers)


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    """Answer a request whose handler ended in an EpochlessError."""
    assert isinstance(error, EpochlessError)
    return json_response(error)


def add_handler(app: FastAPI) -> None:
    """Let an application answer for every EpochlessError."""
    app.add_exception_handler(EpochlessError, handle_error)


def install() -> None:
    """Wrap ``BaseServing.create_error_response``, which streams and collectors turn exceptions into bodies with.

    Raises:
        SeamError: the target is missing.
    """
    from vllm.entrypoints.serve.engine.serving import BaseServing

    original = getattr(BaseServing, "create_error_response", None)
    if original is None:
        raise SeamError("BaseServing has no create_error_response", target="create_error_response")
    if getattr(original, "_epochless", False):
        return

    def create_error_response(message: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(message, EpochlessError):
            return error_response(message)
        return original(message, *arguments, **keywords)

    create_error_response._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    BaseServing.create_error_response = staticmethod(create_error_response)
