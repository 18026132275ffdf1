"""``vllm`` with a gate before the engine, a brake and a poison in it, for tests of races and of failing steps.

While the file named by EPOCHLESS_TEST_GATE exists, requests wait after they are bound to a revision and before the
engine hears of them. While the one named by EPOCHLESS_TEST_BRAKE exists, a step takes BRAKED_STEP_S longer; while the
one named by EPOCHLESS_TEST_POISON does, no logit is finite. All are set on import: the processes vLLM spawns import
this module again. Everything else is the command line of vLLM.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore

BRAKED_STEP_S = 0.05
_GATE = Path(os.environ["EPOCHLESS_TEST_GATE"])
_BRAKE = Path(os.environ["EPOCHLESS_TEST_BRAKE"])
_POISON = Path(os.environ["EPOCHLESS_TEST_POISON"])
_add_request = AsyncLLM.add_request
_step = EngineCore.step


async def _add_request_behind_the_gate(self: Any, *arguments: Any, **keywords: Any) -> Any:
    while _GATE.exists():
        await asyncio.sleep(0.01)
    return await _add_request(self, *arguments, **keywords)


def _step_under_the_brake(self: Any) -> Any:
    if _BRAKE.exists():
        time.sleep(BRAKED_STEP_S)
    if _POISON.exists():
        return _step_with_poison(self)
    return _step(self)


def _step_with_poison(core: Any) -> Any:
    runner = core.model_executor.driver_worker.worker.model_runner
    sample = runner._sample
    runner._sample = lambda logits, metadata: sample(logits.fill_(float("nan")), metadata)
    try:
        return _step(core)
    finally:
        del runner._sample


AsyncLLM.add_request = _add_request_behind_the_gate  # type: ignore[method-assign]
EngineCore.step = _step_under_the_brake  # type: ignore[method-assign]

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
