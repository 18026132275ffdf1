"""``vllm`` with a gate between admission and the engine, so that a test can hold requests there.

While the file named by EPOCHLESS_TEST_GATE exists, requests wait after they are bound to a revision and before the
engine hears of them. Everything else is the command line of vLLM.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm.entrypoints.cli.main import main as run
    from vllm.v1.engine.async_llm import AsyncLLM

    gate, original = Path(os.environ["EPOCHLESS_TEST_GATE"]), AsyncLLM.add_request

    async def add_request(self: Any, *arguments: Any, **keywords: Any) -> Any:
        while gate.exists():
            await asyncio.sleep(0.01)
        return await original(self, *arguments, **keywords)

    AsyncLLM.add_request = add_request
    sys.argv[0] = "vllm"
    run()


if __name__ == "__main__":
    main()
