"""The trainer's side of publication over HTTP, blocking and asynchronous.

    with EpochlessClient("http://127.0.0.1:8000") as client:
        client.publish("policy", "/adapters/step-7", step=7)

Promises the server's own errors by class, and that a publish may be repeated: the same content under the same step is
the same publication. Knows nothing of trainers: see peft.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar
from urllib.parse import quote

import httpx

from epochless_vllm.client.replies import decode_json, decode_reply
from epochless_vllm.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    ServerUnreachableError,
    WeightVersionNotReadyError,
)
from epochless_vllm.wire import PublishReply, Reply, RetireReply, WeightInfo

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
CONNECT_TIMEOUT_S = 10.0
# A publish answers when every rank holds the adapter; the server gives its ranks 60 s.
PUBLISH_TIMEOUT_S = 300.0
POLL_S = 0.2

ReplyType = TypeVar("ReplyType", bound=Reply)


@dataclass(frozen=True)
class Call:
    """One HTTP request and the model of its reply."""

    method: str
    path: str
    reply: type[Any]
    json: Any = None
    params: dict[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Return it as httpx's keyword arguments."""
        return {"method": self.method, "url": self.path, "json": self.json, "params": self.params}


def publish_call(policy: str, path: Path | str, step: int | None) -> Call:
    """Return the request that publishes a directory of the server's host."""
    body = {"path": str(path)} if step is None else {"path": str(path), "step": step}
    return Call("POST", _revisions(policy), PublishReply, json=body)


def retire_call(model: str) -> Call:
    """Return the request that retires a policy, or the revision a pinned model string names."""
    return Call("POST", "/v1/unload_lora_adapter", RetireReply, json={"lora_name": model})


def policies_call(policy: str | None) -> Call:
    """Return the request that describes all policies or one."""
    return Call("GET", "/v1/policies" if policy is None else _policy_path(policy), dict)


def receipt_call(receipt_id: str, form: str) -> Call:
    """Return the request for a kept receipt, or for the key with the id ``key``."""
    return Call("GET", f"/v1/receipts/{quote(receipt_id, safe=':')}", bytes, params={"format": form})


def receipts_call(request_id: str) -> Call:
    """Return the request that lists the kept receipts of a generation request."""
    return Call("GET", "/v1/receipts", dict, params={"request_id": request_id})


def weight_info_call(policy: str | None) -> Call:
    """Return the request for the head of a policy."""
    return Call("GET", "/weight_info", WeightInfo, params={} if policy is None else {"policy": policy})


def _revisions(policy: str) -> str:
    return f"{_policy_path(policy)}/revisions"


def _policy_path(policy: str) -> str:
    # A dotted part would be resolved on the way and another route called; written so, the server sees and refuses it.
    return f"/v1/policies/{quote(policy).replace('.', '%2E')}"


@contextmanager
def open_adapter(directory: Path | str) -> Iterator[dict[str, tuple[str, IO[bytes]]]]:
    """Open the two files of an adapter directory for an upload.

    Raises:
        AdapterNotFoundError: one is missing here.
    """
    opened: dict[str, tuple[str, IO[bytes]]] = {}
    try:
        for name in (CONFIG_NAME, TENSORS_NAME):
            try:
                opened[name] = (name, (Path(directory) / name).open("rb"))
            except OSError as error:
                raise AdapterNotFoundError(
                    f"{Path(directory) / name}: {error.strerror}; save the adapter there with safetensors first",
                    path=str(directory),
                ) from error
        yield opened
    finally:
        for _, file in opened.values():
            file.close()


def client_options(url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    """Return httpx's options; without a key, ``VLLM_API_KEY`` of the environment is used.

    Raises:
        InvalidRequestError: the URL is none of a server, or the key cannot stand in a header.
    """
    key = api_key or os.environ.get("VLLM_API_KEY")
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        # Not repeated: it may be a key but for its line end.
        raise InvalidRequestError(
            "api_key: no header can carry it as it is; give the key alone, without spaces and line ends around it",
            field="api_key",
        )
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise _not_a_url(url, str(error)) from error
    if base.scheme not in ("http", "https") or not base.host or base.query or base.fragment:
        raise _not_a_url(url, "a scheme and a host are needed, and no query")
    return {
        "base_url": base,
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
    }


def _not_a_url(url: str, detail: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"url: {url[:200]!a} is not that of a server ({detail}); give one such as http://127.0.0.1:8000", field="url"
    )


def decode(call_reply: type[Any], response: httpx.Response) -> Any:
    """Return the reply of an HTTP response.

    Raises:
        EpochlessError: of the server's class.
        UnexpectedReplyError: the server is not one of ours.
    """
    url = str(response.request.url)
    if call_reply is bytes and response.status_code < 400:
        return response.content
    if call_reply in (bytes, dict):  # of a refusal of bytes, decode_json raises what it says
        return decode_json(response.status_code, response.content, url=url)
    return decode_reply(call_reply, response.status_code, response.content, url=url)


def unreachable(url: Any, error: httpx.HTTPError) -> ServerUnreachableError:
    """Return the error for a server that did not answer."""
    return ServerUnreachableError(
        f"{url}: {type(error).__name__}: {error or 'no answer'}; is the server up, and the URL right?", url=str(url)
    )


def late(policy: str, step: int, info: WeightInfo | None, timeout_s: float) -> WeightVersionNotReadyError:
    """Return the error for a step that was not published in time."""
    applied = None if info is None else info.step
    return WeightVersionNotReadyError(
        f"policy {policy}: is at step {applied} after {timeout_s:g} s, not at {step}; is the trainer publishing?",
        retryable=True,
        applied=applied,
        target_version=step,
    )


class EpochlessClient:
    """A blocking client of one server."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = PUBLISH_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(transport=transport, **client_options(url, api_key, timeout_s))

    def __enter__(self) -> EpochlessClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def publish(self, policy: str, path: Path | str, *, step: int | None = None) -> PublishReply:
        """Publish the PEFT adapter in a directory of the server's host; without a step it gets the next one.

        Raises:
            EpochlessError: nothing changed on the server.
        """
        reply: PublishReply = self._send(publish_call(policy, path, step))
        return reply

    def upload(self, policy: str, directory: Path | str, *, step: int | None = None) -> PublishReply:
        """Publish the PEFT adapter in a directory of this host; no shared filesystem is needed.

        Raises:
            EpochlessError: nothing changed on the server.
        """
        fields = {} if step is None else {"step": str(step)}
        with open_adapter(directory) as files:
            response = self._request(method="POST", url=_revisions(policy), files=files, data=fields)
            reply: PublishReply = decode(PublishReply, response)
            return reply

    def retire(self, model: str) -> RetireReply:
        """Retire a policy, or the one revision a pinned model string names; requests on it finish.

        Raises:
            EpochlessError: nothing was retired.
        """
        reply: RetireReply = self._send(retire_call(model))
        return reply

    def policies(self, policy: str | None = None) -> dict[str, Any]:
        """Return the server's description of all policies, or of one.

        Raises:
            UnknownRevisionError: no such policy.
        """
        described: dict[str, Any] = self._send(policies_call(policy))
        return described

    def receipt(self, receipt_id: str, *, form: str = "compact") -> bytes:
        """Return a kept receipt: ``compact``, ``verbose`` or ``stream``.

        Raises:
            UnknownReceiptError: it is not kept, or not any more.
        """
        payload: bytes = self._send(receipt_call(receipt_id, form))
        return payload

    def receipts(self, request_id: str) -> list[dict[str, Any]]:
        """Return what is kept of a request, its abandoned choices included, without the receipts themselves.

        Raises:
            UnknownReceiptError: nothing is.
        """
        listed: list[dict[str, Any]] = self._send(receipts_call(request_id))["receipts"]
        return listed

    def receipt_key(self) -> bytes:
        """Return the public key that signs receipts, in PEM."""
        pem: bytes = self._send(receipt_call("key", "verbose"))
        return pem

    def weight_info(self, policy: str | None = None) -> WeightInfo:
        """Return the head of a policy, or of the only one.

        Raises:
            InvalidRequestError: there are several and none was named.
            UnknownRevisionError: no such policy.
        """
        info: WeightInfo = self._send(weight_info_call(policy))
        return info

    def wait_for_step(self, policy: str, step: int, *, timeout_s: float = 60.0) -> WeightInfo:
        """Wait until a policy's head is at ``step`` or later; return its head.

        Raises:
            WeightVersionNotReadyError: it was not in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            info = self._head(policy)
            if info is not None and info.step is not None and info.step >= step:
                return info
            if time.monotonic() >= deadline:
                raise late(policy, step, info, timeout_s)
            time.sleep(POLL_S)

    def _head(self, policy: str) -> WeightInfo | None:
        from epochless_vllm.errors import UnknownRevisionError

        try:
            return self.weight_info(policy)
        except UnknownRevisionError:  # the first publication has not come yet
            return None

    def _send(self, call: Call) -> Any:
        return decode(call.reply, self._request(**call.arguments()))

    def _request(self, **arguments: Any) -> httpx.Response:
        try:
            return self._http.request(**arguments)
        except httpx.HTTPError as error:
            raise unreachable(self._http.base_url, error) from error
