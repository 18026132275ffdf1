"""Publication off the event loop: one thread that publishes and retires, one that lets retirements drain.

Promises that a publish never blocks the requests being served, that publishes of this process run in the order they
came, and that a retirement goes on without being asked again. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar

from epochless_vllm.errors import EpochlessError
from epochless_vllm.plugin import metrics
from epochless_vllm.plugin.background import step_aside
from epochless_vllm.plugin.logs import logger
from epochless_vllm.publication.coordinator import Draining, Published

POLL_S = 0.1
SLOWEST_POLL_S = 1.0  # a long rollout drains for minutes; each poll is a message to every engine

Result = TypeVar("Result")


class Publisher:
    """Runs a service's blocking calls for one event loop."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="epochless-publish", initializer=step_aside)
        # Whoever asks the engines what still drains waits for a step of theirs; a publication does not wait for that.
        self._drainer = ThreadPoolExecutor(1, thread_name_prefix="epochless-drain", initializer=step_aside)
        self._draining: asyncio.Task[None] | None = None
        self._again = asyncio.Event()

    async def publish_directory(self, path: str, lora_name: str, step: int | None) -> Published:
        """Publish the adapter in a directory of this host.

        Raises:
            EpochlessError: nothing changed.
        """
        return await self._publish(lambda: self._service.publish_directory(path, lora_name, step))

    async def publish_files(self, files: Mapping[str, BinaryIO], policy: str, step: int | None) -> Published:
        """Publish uploaded files.

        Raises:
            EpochlessError: nothing changed.
        """
        return await self._publish(lambda: self._service.publish_files(files, policy, step))

    async def retire(self, model: str) -> list[Draining]:
        """Begin to retire a policy or one revision.

        Raises:
            EpochlessError: nothing was retired.
        """
        draining = await self._run(lambda: self._service.retire(model))
        metrics.count_retirements(len(draining))
        self._settle()
        return draining

    def drain(self) -> None:
        """Let what is retired leave the engines as its requests finish; return at once."""
        self._again.set()
        if self._draining is None or self._draining.done():
            self._draining = asyncio.get_running_loop().create_task(self._drain(), name="epochless-drain")

    async def _publish(self, publish: Callable[[], Published]) -> Published:
        began = time.monotonic()
        try:
            published = await self._run(publish)
        except EpochlessError as error:
            metrics.count_publication(error.code, time.monotonic() - began)
            raise
        finally:
            # Publishing may retire the policy's oldest revision, and did so even if it then failed.
            self._settle()
        metrics.count_publication("repeated" if published.repeated else "committed", time.monotonic() - began)
        return published

    async def _run(self, call: Callable[[], Result], thread: ThreadPoolExecutor | None = None) -> Result:
        # Shielded: a client that goes away does not stop what the journal may already have begun.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(thread or self._thread, call))

    def _settle(self) -> None:
        metrics.observe_state(self._service.state())
        self.drain()

    async def _drain(self) -> None:
        pause_s = POLL_S
        while True:
            self._again.clear()
            try:
                remaining = await self._run(self._service.pump, self._drainer)
            except EpochlessError as error:
                # The next poll tries again; what drains stays unadmitted meanwhile.
                logger.warning("retirement waits: %s", error)
                remaining = 1
            metrics.observe_state(self._service.state())
            if remaining == 0 and not self._again.is_set():
                return
            try:
                await asyncio.wait_for(self._again.wait(), pause_s)
                pause_s = POLL_S
            except asyncio.TimeoutError:
                pause_s = min(2 * pause_s, SLOWEST_POLL_S)
