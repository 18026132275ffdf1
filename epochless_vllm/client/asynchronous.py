"""The client for code that runs on an event loop; the same calls and errors as the blocking one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from epochless_vllm.client.client import (
    POLL_S,
    PUBLISH_TIMEOUT_S,
    Call,
    client_options,
    decode,
    late,
    open_adapter,
    policies_call,
    publish_call,
    receipt_call,
    receipts_call,
    retire_call,
    unreachable,
    weight_info_call,
)
from epochless_vllm.errors import UnknownRevisionError
from epochless_vllm.wire import PublishReply, RetireReply, WeightInfo


class AsyncEpochlessClient:
    """An asynchronous client of one server; see ``EpochlessClient`` for what each call does and raises."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = PUBLISH_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(transport=transport, **client_options(url, api_key, timeout_s))

    async def __aenter__(self) -> AsyncEpochlessClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def publish(self, policy: str, path: Path | str, *, step: int | None = None) -> PublishReply:
        """Publish the adapter in a directory of the server's host."""
        reply: PublishReply = await self._send(publish_call(policy, path, step))
        return reply

    async def upload(self, policy: str, directory: Path | str, *, step: int | None = None) -> PublishReply:
        """Publish the adapter in a directory of this host."""
        call = publish_call(policy, directory, step)
        fields = {} if step is None else {"step": str(step)}
        with open_adapter(directory) as files:
            response = await self._request(method="POST", url=call.path, files=files, data=fields)
            reply: PublishReply = decode(PublishReply, response)
            return reply

    async def retire(self, model: str) -> RetireReply:
        """Retire a policy or one revision."""
        reply: RetireReply = await self._send(retire_call(model))
        return reply

    async def policies(self, policy: str | None = None) -> dict[str, Any]:
        """Return the server's description of all policies, or of one."""
        described: dict[str, Any] = await self._send(policies_call(policy))
        return described

    async def receipt(self, receipt_id: str, *, form: str = "compact") -> bytes:
        """Return a kept receipt."""
        payload: bytes = await self._send(receipt_call(receipt_id, form))
        return payload

    async def receipts(self, request_id: str) -> list[dict[str, Any]]:
        """Return what is kept of a request."""
        listed: list[dict[str, Any]] = (await self._send(receipts_call(request_id)))["receipts"]
        return listed

    async def receipt_key(self) -> bytes:
        """Return the public key that signs receipts."""
        pem: bytes = await self._send(receipt_call("key", "verbose"))
        return pem

    async def weight_info(self, policy: str | None = None) -> WeightInfo:
        """Return the head of a policy."""
        info: WeightInfo = await self._send(weight_info_call(policy))
        return info

    async def wait_for_step(self, policy: str, step: int, *, timeout_s: float = 60.0) -> WeightInfo:
        """Wait until a policy's head is at ``step`` or later; return its head."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            info = None
            with suppress(UnknownRevisionError):  # the first publication has not come yet
                info = await self.weight_info(policy)
            if info is not None and info.step is not None and info.step >= step:
                return info
            if asyncio.get_running_loop().time() >= deadline:
                raise late(policy, step, info, timeout_s)
            await asyncio.sleep(POLL_S)

    async def _send(self, call: Call) -> Any:
        return decode(call.reply, await self._request(**call.arguments()))

    async def _request(self, **arguments: Any) -> httpx.Response:
        try:
            return await self._http.request(**arguments)
        except httpx.HTTPError as error:
            raise unreachable(self._http.base_url, error) from error
