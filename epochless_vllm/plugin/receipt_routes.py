"""The HTTP routes that read receipts: one by its id, those of a request, and the key they are signed with.

A receipt is answered as its very bytes, so that what is saved can be verified. Any API server of the deployment answers
for all of them. Knows no admission.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from epochless_vllm.errors import InvalidRequestError, UnknownReceiptError
from epochless_vllm.plugin.served_models import revisions_of
from epochless_vllm.protocol.compact import decode_compact
from epochless_vllm.protocol.stream import encode_stream
from epochless_vllm.protocol.verbose import encode_verbose

FORMATS = ("verbose", "compact", "stream")
_BINARY = "application/octet-stream"


async def read_receipt(request: Request, receipt_id: str) -> Response:
    """Answer with a kept receipt: canonical JSON, or ``?format=compact`` or ``stream``."""
    wanted = request.query_params.get("format", "verbose")
    if wanted not in FORMATS:
        raise InvalidRequestError(f"format: must be one of {', '.join(FORMATS)}", field="format")
    body = await asyncio.to_thread(_attestor(request).sink.read, receipt_id)
    if body is None:
        raise UnknownReceiptError(
            f"receipt {receipt_id[:80]}: is not kept here: it never was, or --epochless-receipts-bytes or -age let it "
            "go; take the receipt from the response itself",
            receipt=receipt_id[:80],
        )
    return await asyncio.to_thread(_render, body, wanted)


async def list_receipts(request: Request) -> JSONResponse:
    """Describe the kept receipts of one request, its abandoned choices included."""
    request_id = request.query_params.get("request_id")
    if not request_id:
        raise InvalidRequestError("request_id: name the request, as in ?request_id=cmpl-...", field="request_id")
    found = await asyncio.to_thread(_attestor(request).sink.find, request_id)
    if not found:
        raise UnknownReceiptError(
            f"request {request_id[:256]}: no receipt of it is kept here; was it sent with epochless.attest?",
            request_id=request_id[:256],
        )
    return JSONResponse({"receipts": found})


async def read_key(request: Request) -> Response:
    """Answer with the public key in PEM, as ``epochless verify --key`` reads it."""
    return Response(_attestor(request).signer.public_pem, media_type="application/x-pem-file")


def _render(body: bytes, wanted: str) -> Response:
    if wanted == "compact":
        return Response(body, media_type=_BINARY)
    receipt = decode_compact(body)
    if wanted == "stream":
        return Response(encode_stream(receipt), media_type=_BINARY)
    return Response(encode_verbose(receipt), media_type="application/json")


def _attestor(request: Request) -> Any:
    served = revisions_of(request.app.state.openai_serving_models)
    if served is None or served.attestor is None:
        raise UnknownReceiptError("this server makes no receipts; start it with --enable-epochless")
    return served.attestor
