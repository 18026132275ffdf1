"""``vllm`` with a gate between admission and the engine, so that a test can hold requests there.

While the file named by EPOCHLESS_TEST_GATE exists, requests wait after they are bound to a revision and before the
engine hears of them. The gate is set on import: the processes vLLM spawns import this module again. Everything else is
the command line of vLLM.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

_GATE = Path(os.environ["EPOCHLESS_TEST_GATE"])
_add_request = AsyncLLM.add_request


async def _add_request_behind_the_gate(self: Any, *arguments: Any, **keywords: Any) -> Any:
    while _GATE.exists():
        await asyncio.sleep(0.01)
    return await _add_request(self, *arguments, **keywords)


AsyncLLM.add_request = _add_request_behind_the_gate  # type: ignore[method-assign]

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
