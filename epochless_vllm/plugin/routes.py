"""Seam: the HTTP routes of publication.

Takes the place of vLLM's adapter routes, which need an environment variable, guard one server and know no revision; the
same routes with the same requests publish and retire here, for every API server of the deployment. Every route checks
the API key itself. Dies when upstream has routes for immutable revisions.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from epochless_vllm.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    PathRefusedError,
    SeamError,
    UnknownRevisionError,
    UploadTooLargeError,
)
from epochless_vllm.plugin.authentication import ApiKeys, keys_of
from epochless_vllm.plugin.error_responses import add_handler
from epochless_vllm.plugin.options import options_of
from epochless_vllm.plugin.pace import paced, upload_place
from epochless_vllm.plugin.receipt_routes import list_receipts, read_key, read_receipt
from epochless_vllm.plugin.served_models import ServedRevisions, revisions_of
from epochless_vllm.plugin.uploads import receive_upload
from epochless_vllm.protocol.names import parse_policy, parse_step
from epochless_vllm.publication.coordinator import Draining, Published
from epochless_vllm.wire import (
    Body,
    DrainingRevision,
    LoadAdapterRequest,
    PublishReply,
    PublishRequest,
    RetireReply,
    UnloadAdapterRequest,
    WeightInfo,
    decode_body,
)

MAX_JSON_BYTES = 64 << 10
# Below /v1/policies/. A policy may itself end in "/revisions": the last one that fits is ours.
_REVISION = re.compile(r"(?P<policy>.+)/revisions/(?P<revision>sha256:[0-9a-f]{12,64}|0|[1-9][0-9]{0,15})")
_REVISIONS = re.compile(r"(?P<policy>.+)/revisions/?")


async def load_adapter(request: Request) -> JSONResponse:
    """Publish the adapter in a directory of the server's host, under a policy or ``policy-v<step>``."""
    body = await read_json(request, LoadAdapterRequest)
    with _named("lora_path"):
        published = await _served(request).publisher.publish_directory(body.lora_path, body.lora_name, body.step)
    return JSONResponse(publish_reply(published).model_dump())


async def unload_adapter(request: Request) -> JSONResponse:
    """Retire a policy or one of its revisions; requests on it finish."""
    body = await read_json(request, UnloadAdapterRequest)
    return await _retire(request, body.lora_name)


async def publish_revision(request: Request, rest: str) -> JSONResponse:
    """Publish a revision of a policy, by path (JSON) or by its files (multipart)."""
    match = _REVISIONS.fullmatch(rest)
    if match is None:
        raise InvalidRequestError("path: POST to /v1/policies/{policy}/revisions", field="path")
    policy = parse_policy(match["policy"])
    served = _served(request)
    if _media_type(request) == "multipart/form-data":
        directory = Path(served.service.options.store) / "incoming"
        with upload_place():
            upload = await receive_upload(request.headers["content-type"], paced(request.stream()), directory)
            try:
                published = await served.publisher.publish_files(upload.files, policy, _step_of(upload.fields))
            finally:
                upload.close()
    else:
        body = await read_json(request, PublishRequest)
        with _named("path"):
            published = await served.publisher.publish_directory(body.path, policy, body.step)
    return JSONResponse(publish_reply(published).model_dump())


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Let what is said against a path of the block name the field that it came in."""
    try:
        yield
    except (AdapterNotFoundError, PathRefusedError) as error:
        error.fields.setdefault("field", field)
        raise


async def list_policies(request: Request) -> JSONResponse:
    """Describe every policy."""
    return JSONResponse(_served(request).service.describe())


async def describe_policy(request: Request, rest: str) -> JSONResponse:
    """Describe a policy, or one of its revisions by digest, digest prefix or step."""
    service = _served(request).service
    if match := _REVISION.fullmatch(rest):
        return JSONResponse(service.describe_revision(match["policy"], match["revision"]))
    policy_name = match["policy"] if (match := _REVISIONS.fullmatch(rest)) else rest
    policy, slash, revision = policy_name.rpartition("/revisions/")
    if slash and not service.state().publications.knows(policy_name):
        raise InvalidRequestError(
            f"revision: {revision[:80]!a} of {policy} is neither a step nor sha256: and 12 or more lowercase "
            "hexadecimal digits",
            field="revision",
        )
    (described,) = service.describe(policy_name)["policies"]
    return JSONResponse(described)


async def retire_revision(request: Request, rest: str) -> JSONResponse:
    """Retire one revision of a policy."""
    match = _REVISION.fullmatch(rest)
    if match is None:
        raise InvalidRequestError(
            "path: DELETE /v1/policies/{policy}/revisions/{sha256:<hex> or step}; POST /v1/unload_lora_adapter retires "
            "a whole policy",
            field="path",
        )
    return await _retire(request, f"{match['policy']}@{match['revision']}")


async def weight_info(request: Request) -> JSONResponse:
    """Return the head of a policy; without ``policy`` the only one there is."""
    service = _served(request).service
    heads = service.state().heads
    policy = request.query_params.get("policy")
    if not policy and len(heads) > 1:
        raise InvalidRequestError(
            f"policy: this server has {len(heads)} policies; name one, as in /weight_info?policy={min(heads)}",
            field="policy",
            candidates=sorted(heads),
        )
    if not policy and not heads:
        return JSONResponse(WeightInfo(weight_version=f"base:{service.base_digest}").model_dump())
    policy = policy or next(iter(heads))
    head = heads.get(policy)
    if head is None:
        raise UnknownRevisionError(f"policy {policy}: has no revision; GET /v1/policies lists them", policy=policy)
    reply = WeightInfo(weight_version=head.revision_id, policy=policy, step=head.step, sequence=head.sequence)
    return JSONResponse(reply.model_dump())


def publish_reply(published: Published) -> PublishReply:
    """Return the body of a committed publication."""
    publication = published.publication
    return PublishReply(
        policy=publication.policy,
        lora_name=publication.lora_name,
        lora_int_id=publication.lora_int_id,
        weight_version=publication.revision_id,
        step=publication.step,
        sequence=publication.sequence,
        repeated=published.repeated,
        receipts=published.receipts,
    )


def retire_reply(draining: list[Draining]) -> RetireReply:
    """Return the body of a retirement that has begun."""
    revisions = [
        DrainingRevision(
            policy=item.publication.policy,
            step=item.publication.step,
            weight_version=item.publication.revision_id,
            in_flight=item.in_flight,
        )
        for item in draining
    ]
    return RetireReply(in_flight=sum(item.in_flight for item in draining), revisions=revisions)


async def read_json(request: Request, body_type: type[Body]) -> Body:
    """Return the checked JSON body of a request.

    Raises:
        InvalidRequestError: another content type, not JSON, or a field at fault, which it names.
        UploadTooLargeError: longer than any request of ours.
    """
    if _media_type(request) != "application/json":
        raise InvalidRequestError("content-type: must be application/json", field="content-type")
    payload = b"".join([chunk async for chunk in _bounded(paced(request.stream()))])
    return decode_body(body_type, payload)


async def _bounded(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    length = 0
    async for chunk in stream:
        length += len(chunk)
        if length > MAX_JSON_BYTES:
            raise UploadTooLargeError(f"body: longer than {MAX_JSON_BYTES} bytes", field="body", limit=MAX_JSON_BYTES)
        yield chunk


async def _retire(request: Request, model: str) -> JSONResponse:
    return JSONResponse(retire_reply(await _served(request).publisher.retire(model)).model_dump())


def _served(request: Request) -> ServedRevisions:
    served = revisions_of(request.app.state.openai_serving_models)
    assert served is not None  # these routes are attached with Epochless only
    return served


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _step_of(fields: dict[str, str]) -> int | None:
    text = fields.get("step")
    if text is None:
        return None
    return parse_step(int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else text)


def make_router(keys: ApiKeys) -> APIRouter:
    """Return the routes, each behind the keys."""
    from fastapi import Depends

    def authorize(request: Request) -> None:
        keys.check(request.headers.get("authorization"))

    router = APIRouter(dependencies=[Depends(authorize)], tags=["Epochless"])
    for prefix in ("/v1", ""):
        router.post(f"{prefix}/load_lora_adapter")(load_adapter)
        router.post(f"{prefix}/unload_lora_adapter")(unload_adapter)
    router.get("/v1/policies")(list_policies)
    router.post("/v1/policies/{rest:path}")(publish_revision)
    router.get("/v1/policies/{rest:path}")(describe_policy)
    router.delete("/v1/policies/{rest:path}")(retire_revision)
    for path in ("/weight_info", "/get_weight_version"):
        router.get(path)(weight_info)
    router.get("/v1/receipts")(list_receipts)
    router.get("/v1/receipts/key")(read_key)
    router.get("/v1/receipts/{receipt_id}")(read_receipt)
    return router


def install() -> None:
    """Attach our routes where vLLM would attach its adapter routes.

    Raises:
        SeamError: the target is missing.
    """
    from vllm.entrypoints.serve.lora import api_router

    original = getattr(api_router, "attach_router", None)
    if original is None:
        raise SeamError("vllm.entrypoints.serve.lora.api_router has no attach_router", target="attach_router")
    if getattr(original, "_epochless", False):
        return

    def attach_router(app: FastAPI) -> None:
        args: Any = app.state.args
        if options_of(getattr(args, "additional_config", None)) is None:
            original(app)
            return
        add_handler(app)
        app.include_router(make_router(keys_of(args)))

    attach_router._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    api_router.attach_router = attach_router
