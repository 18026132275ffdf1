"""Seam: which waiting requests a step admits when more revisions are asked for than a step has slots for.

vLLM skips a waiting request whose adapter has no slot, and goes on admitting requests of adapters that have one: while
those keep arriving, no slot is ever given up. Here a waiting request that finds no slot sets one adapter to draining:
requests of that adapter which stand behind it wait, those running and those before it go on. So it is scheduled no
later than the step after the requests running at its arrival finish, or those that stood before it. A slot that
was just given up takes everything that waits for its new adapter at once, so that interleaved arrivals still run in
batches. Nothing is held back while the adapters in use fit into the slots. Dies when upstream bounds how long a request
waits for a slot.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from epochless_vllm.errors import SeamError

IN_USE = "_epochless_in_use"
DRAINED = "_epochless_drained"
HELD = "_epochless_held"


def choose_held(
    running: Iterable[Any], waiting: Iterable[Any], slots: int, drained: Collection[int]
) -> tuple[list[Any], list[int]]:
    """Return the waiting requests to hold back in this step, and the adapters that drain.

    Args:
        running: requests that run; each knows its ``lora_request`` and ``max_tokens``.
        waiting: requests in the order in which they would be admitted, without those that could not be.
        slots: adapters that fit into a step.
        drained: what the step before returned: an adapter drains until its slot is given up or nobody waits for it.
    """
    remaining: dict[int, int] = {}  # by adapter that has a slot: tokens until its last request ends, at most
    for request in running:
        if request.lora_request is not None:
            adapter = request.lora_request.lora_int_id
            left = request.max_tokens - request.num_output_tokens
            remaining[adapter] = max(remaining.get(adapter, 0), left)
    ordered = list(waiting)
    admitted = set(remaining)
    first: dict[int, int] = {}  # by adapter that finds no slot: where its first request stands
    for position, request in enumerate(ordered):
        if request.lora_request is None or request.lora_request.lora_int_id in admitted:
            continue
        if len(admitted) < slots:
            admitted.add(request.lora_request.lora_int_id)
        else:
            first.setdefault(request.lora_request.lora_int_id, position)
    # Who has waited longest gets the adapter that drains longest. Adapters admitted in this very step are spared:
    # everything that waits for them comes along.
    chosen = [adapter for adapter in drained if adapter in remaining]
    spared = sorted(remaining.keys() - set(chosen), key=lambda adapter: (remaining[adapter], adapter))
    chosen = [*chosen, *spared][: len(first)]
    behind = dict(zip(chosen, first.values(), strict=False))
    held = [
        request
        for position, request in enumerate(ordered)
        if request.lora_request is not None and behind.get(request.lora_request.lora_int_id, position) < position
    ]
    return held, chosen


def waiting_requests(scheduler: Any) -> Iterable[Any]:
    """Return the requests a scheduler could admit, in the order in which it tries to."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    queues = (scheduler.skipped_waiting, scheduler.waiting)
    ordered = heapq.merge(*queues) if scheduler.policy == SchedulingPolicy.PRIORITY else (r for q in queues for r in q)
    return (request for request in ordered if not scheduler._is_blocked_waiting_status(request.status))


def install() -> None:
    """Wrap the scheduler's step, and count which adapters its requests use.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    names = ("schedule", "add_request", "_free_blocks", "_is_blocked_waiting_status")
    for name in (*names, "_try_promote_blocked_waiting_request"):
        if not hasattr(Scheduler, name):
            raise SeamError(f"Scheduler has no {name}", target=name)
    if getattr(Scheduler.schedule, "_epochless", False):
        return
    schedule, promote = Scheduler.schedule, Scheduler._try_promote_blocked_waiting_request

    def schedule_fairly(self: Any, *arguments: Any, **keywords: Any) -> Any:
        held: list[Any] = []
        if self.lora_config is not None and len(in_use(self)) > self.lora_config.max_loras:
            slots, drained = self.lora_config.max_loras, getattr(self, DRAINED, ())
            held, drained = choose_held(self.running, waiting_requests(self), slots, drained)
            setattr(self, DRAINED, drained)
        if not held:
            return schedule(self, *arguments, **keywords)
        # A status the scheduler steps over without losing the request's place.
        statuses = [request.status for request in held]
        setattr(self, HELD, {request.request_id for request in held})
        for request in held:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        try:
            return schedule(self, *arguments, **keywords)
        finally:
            setattr(self, HELD, frozenset())
            for request, status in zip(held, statuses, strict=True):
                request.status = status

    def try_promote(self: Any, request: Any) -> bool:
        return request.request_id not in getattr(self, HELD, ()) and promote(self, request)

    schedule_fairly._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    Scheduler.schedule = schedule_fairly
    Scheduler._try_promote_blocked_waiting_request = try_promote
    _count_adapters(Scheduler)


def in_use(scheduler: Any) -> Counter[int]:
    """Return the unfinished requests by adapter."""
    counter: Counter[int] | None = getattr(scheduler, IN_USE, None)
    if counter is None:
        counter = Counter()
        setattr(scheduler, IN_USE, counter)
    return counter


def _count_adapters(scheduler_class: Any) -> None:
    add, free = scheduler_class.add_request, scheduler_class._free_blocks

    def add_request(self: Any, request: Any) -> None:
        known = request.request_id in self.requests  # a further piece of a streamed prompt
        add(self, request)
        if not known and request.lora_request is not None:
            in_use(self)[request.lora_request.lora_int_id] += 1

    def free_blocks(self: Any, request: Any) -> None:
        free(self, request)
        if request.lora_request is not None:
            counter, adapter = in_use(self), request.lora_request.lora_int_id
            counter[adapter] -= 1
            if counter[adapter] <= 0:
                del counter[adapter]

    scheduler_class.add_request = add_request
    scheduler_class._free_blocks = free_blocks
