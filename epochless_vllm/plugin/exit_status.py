"""Seam: the exit status of a server whose engine died.

vLLM's front end notices a dead engine, answers 503 and ends as if it had been asked to: with status 0, and a supervisor
that restarts what failed leaves it down. Here such an end has status 1 and says why; an end that was asked for is left
alone. Dies when upstream's server fails with its engine. Knows nothing of revisions: a restart recovers them.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin.logs import logger

STATUS = 1


def install() -> None:
    """Wrap ``build_and_serve`` of vLLM's API server, which returns when it serves no more.

    Raises:
        SeamError: the target is missing.
    """
    api_server: Any = sys.modules.get("vllm.entrypoints.openai.api_server")
    if api_server is None:  # an engine core, a worker, or a program that serves nothing
        return
    original = getattr(api_server, "build_and_serve", None)
    if original is None:
        raise SeamError("vllm.entrypoints.openai.api_server has no build_and_serve", target="build_and_serve")
    if getattr(original, "_epochless", False):
        return

    async def build_and_serve(engine_client: Any, *arguments: Any, **keywords: Any) -> Any:
        asked = watch_shutdown(engine_client)
        ending = await original(engine_client, *arguments, **keywords)
        if asked or not engine_client.errored:
            return ending
        return fail_after(ending, dead_engine(engine_client))

    build_and_serve._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    api_server.build_and_serve = build_and_serve


def watch_shutdown(engine_client: Any) -> list[bool]:
    """Return a list that is empty until somebody asks this client to shut its engine down: an orderly end."""
    asked: list[bool] = []
    shutdown = engine_client.shutdown

    def noted(*arguments: Any, **keywords: Any) -> Any:
        asked.append(True)
        return shutdown(*arguments, **keywords)

    engine_client.shutdown = noted
    return asked


def dead_engine(engine_client: Any) -> str:
    """Return the name of the engine process that failed, as far as this front end knows it."""
    resources = getattr(getattr(engine_client, "engine_core", None), "resources", None)
    manager = getattr(resources, "engine_manager", None)
    return getattr(manager, "failed_proc_name", None) or "the engine core"


async def fail_after(ending: Coroutine[Any, Any, None], engine: str) -> None:
    """Await the end of the server, then end the process with ``STATUS``.

    Raises:
        SystemExit: always.
    """
    await ending
    logger.error(
        "%s died; why, it said above if it could. This server ends with status %d: restart it, and it comes back with "
        "every committed revision",
        engine,
        STATUS,
    )
    raise SystemExit(STATUS)
