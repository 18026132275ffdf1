"""Seam: how often the KV of a request was discarded and computed again, told to the front end that attests it.

The scheduler reports preemptions as events, and only while statistics are logged; a receipt states their number in any
case. Promises that nothing is remembered of a request that is not watched. Dies when upstream reports preemptions with
a request's outputs.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from epochless_vllm.errors import SeamError

# Engine's id of a choice -> (counter by choice index, the choice's index). Touched by the front end's thread only.
_watched: dict[str, tuple[Counter[int], int]] = {}


def watch(request_id: str, choices: int) -> Counter[int]:
    """Return a counter, by choice index, of a request's preemptions from now on; ``forget`` must follow."""
    counter: Counter[int] = Counter()
    for name, index in _names(request_id, choices):
        _watched[name] = (counter, index)
    return counter


def forget(request_id: str, choices: int) -> None:
    """Stop watching a request."""
    for name, _ in _names(request_id, choices):
        _watched.pop(name, None)


def _names(request_id: str, choices: int) -> list[tuple[str, int]]:
    # As ParentRequest names its children.
    return [(request_id if choices == 1 else f"{index}_{request_id}", index) for index in range(choices)]


def install() -> None:
    """Wrap the scheduler's preemption and what takes in the engine's outputs.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import OutputProcessor

    for owner, name in ((Scheduler, "_preempt_request"), (OutputProcessor, "process_outputs")):
        if name not in vars(owner):
            raise SeamError(f"{owner.__name__} has no {name}", target=name)
    if getattr(Scheduler._preempt_request, "_epochless", False):
        return
    Scheduler._preempt_request = _wrap_preemption(Scheduler._preempt_request)  # type: ignore[method-assign]
    OutputProcessor.process_outputs = _wrap_outputs(OutputProcessor.process_outputs)  # type: ignore[method-assign]


def _wrap_preemption(original: Any) -> Any:
    from vllm.v1.engine import EngineCoreEventType

    def _preempt_request(self: Any, request: Any, timestamp: float) -> None:
        original(self, request, timestamp)
        if not self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, timestamp)

    _preempt_request._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    return _preempt_request


def _wrap_outputs(original: Any) -> Any:
    from vllm.v1.engine import EngineCoreEventType

    @functools.wraps(original)  # keeps the marks of other seams on the same method
    def process_outputs(self: Any, engine_core_outputs: Any, *arguments: Any, **keywords: Any) -> Any:
        if _watched:
            for output in engine_core_outputs:
                if output.events and (watched := _watched.get(output.request_id)) is not None:
                    counter, index = watched
                    counter[index] += sum(event.type is EngineCoreEventType.PREEMPTED for event in output.events)
        return original(self, engine_core_outputs, *arguments, **keywords)

    return process_outputs
