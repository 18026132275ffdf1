"""``vllm`` with a gate before the engine, and a brake, a poison and cuts in it, for tests that race, fail and crash.

While the file named by EPOCHLESS_TEST_GATE exists, requests wait after they are bound to a revision and before the
engine hears of them. While the one named by EPOCHLESS_TEST_BRAKE exists, a step takes BRAKED_STEP_S longer, and longer
the older that file is; while the one named by EPOCHLESS_TEST_POISON does, no logit is finite. When the one named by
EPOCHLESS_TEST_CUT exists, its text becomes EPOCHLESS_CRASH_AT of each process that goes on publishing or retiring. All
are set on import: the processes vLLM spawns import this module again. Everything else is the command line of vLLM.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from epochless_vllm.durable import CRASH_VARIABLE
from epochless_vllm.plugin.service import PublicationService
from epochless_vllm.publication.participant import Participant

BRAKED_STEP_S = 0.05
BRAKED_SHARE = 8  # of the brake's age a step takes: a stream of 100 tokens outlasts a machine that stalls for hours
_GATE = Path(os.environ["EPOCHLESS_TEST_GATE"])
_BRAKE = Path(os.environ["EPOCHLESS_TEST_BRAKE"])
_POISON = Path(os.environ["EPOCHLESS_TEST_POISON"])
_CUT = Path(os.environ["EPOCHLESS_TEST_CUT"])
_add_request = AsyncLLM.add_request
_step = EngineCore.step
_sample = GPUModelRunner._sample


async def _add_request_behind_the_gate(self: Any, *arguments: Any, **keywords: Any) -> Any:
    while _GATE.exists():
        await asyncio.sleep(0.01)
    return await _add_request(self, *arguments, **keywords)


def _step_under_the_brake(self: Any) -> Any:
    began = time.time()
    with suppress(FileNotFoundError):  # the brake is released
        while (now := time.time()) - began < max(BRAKED_STEP_S, (now - _BRAKE.stat().st_mtime) / BRAKED_SHARE):
            time.sleep(0.01)
    return _step(self)


def _sample_under_poison(self: Any, logits: Any, metadata: Any) -> Any:
    if _POISON.exists():
        logits.fill_(float("nan"))
    return _sample(self, logits, metadata)


def _armed(original: Any) -> Any:
    """Read the cut before each operation, so that a running server can be told where to stop."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if _CUT.exists():
            os.environ[CRASH_VARIABLE] = _CUT.read_text()
        return original(self, *arguments, **keywords)

    return call


for _target, _names in (
    (PublicationService, ("publish_directory", "publish_files", "retire", "pump")),
    (Participant, ("handle",)),
):
    for _name in _names:
        setattr(_target, _name, _armed(getattr(_target, _name)))
AsyncLLM.add_request = _add_request_behind_the_gate  # type: ignore[method-assign]
EngineCore.step = _step_under_the_brake  # type: ignore[method-assign]
GPUModelRunner._sample = _sample_under_poison  # type: ignore[method-assign]

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
