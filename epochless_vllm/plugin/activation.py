"""Seam: the first step of an adapter.

vLLM copies an adapter into its slot inside the step, and an exception there ends the engine. Here every rank copies
and reads back before the step in which the adapter is first used; if one rank fails, the revision is quarantined on
all, its requests end with an error, the blocks they touched leave the prefix cache, and every other row goes on. Dies
when upstream confines a failed activation to the requests that need it.
"""

from __future__ import annotations

from typing import Any

from epochless_vllm.plugin.logs import logger

VERIFIED = "_epochless_verified"
FAILED = "_epochless_failed"


def guard_activation(engine_core: Any) -> None:
    """Wrap ``EngineCore.step`` so that failed requests are answered; ``guard_executor`` does the rest per engine."""
    step = engine_core.step

    def step_with_failures(self: Any) -> Any:
        outputs, executed = step(self)
        failed = getattr(self, FAILED, None)
        if failed:
            outputs = _add_failures(outputs or {}, failed)
            failed.clear()
        return outputs, executed

    engine_core.step = step_with_failures


def guard_executor(core: Any) -> None:
    """Make an engine core activate and read back new adapters before it executes a step."""
    execute = core.model_executor.execute_model
    setattr(core, VERIFIED, set())
    setattr(core, FAILED, [])

    def execute_model(scheduler_output: Any, non_block: bool = False) -> Any:
        verified = getattr(core, VERIFIED)
        fresh = {
            new.lora_request.lora_int_id
            for new in scheduler_output.scheduled_new_reqs
            if new.lora_request is not None and new.lora_request.lora_int_id not in verified
        }
        if fresh:
            _activate(core, scheduler_output, fresh)
        return execute(scheduler_output, non_block=non_block)

    core.model_executor.execute_model = execute_model


def forget_verified(core: Any, lora_int_id: int) -> None:
    """Require a new read-back: the adapter left the registry."""
    getattr(core, VERIFIED).discard(lora_int_id)


def _activate(core: Any, scheduler_output: Any, fresh: set[int]) -> None:
    requests = core.scheduler.requests
    in_step = sorted(
        {
            requests[request_id].lora_request.lora_int_id
            for request_id in scheduler_output.num_scheduled_tokens
            if request_id in requests and requests[request_id].lora_request is not None
        }
    )
    replies = core.collective_rpc("epochless_activate", args=(sorted(fresh), in_step))
    for lora_int_id in sorted(fresh):
        reason = _first_failure(replies, lora_int_id)
        if reason is None:
            getattr(core, VERIFIED).add(lora_int_id)
        else:
            _quarantine(core, scheduler_output, lora_int_id, *reason)


def _first_failure(replies: list[dict[str, Any]], lora_int_id: int) -> tuple[str, str] | None:
    for reply in replies:
        result = reply.get("results", {}).get(str(lora_int_id), reply)
        if not result["ok"]:
            return reply.get("rank", "unknown rank"), result.get("reason", "no reason given")
    return None


def _quarantine(core: Any, scheduler_output: Any, lora_int_id: int, rank: str, reason: str) -> None:
    from vllm.v1.request import RequestStatus

    from epochless_vllm.plugin.recovery import quarantine_revision

    logger.error("adapter %d is quarantined by %s: %s", lora_int_id, rank, reason)
    quarantine_revision(core, lora_int_id, rank, reason)
    scheduler = core.scheduler
    lost = [
        request
        for request in scheduler.requests.values()
        if request.lora_request is not None and request.lora_request.lora_int_id == lora_int_id
    ]
    for new in scheduler_output.scheduled_new_reqs:
        if new.lora_request is not None and new.lora_request.lora_int_id == lora_int_id:
            new.lora_request = None  # the rows run as base rows this once, and are thrown away below
    for request in lost:
        blocks = {block for group in scheduler.kv_cache_manager.get_block_ids(request.request_id) for block in group}
        scheduler.kv_cache_manager.evict_blocks(blocks)
    getattr(core, FAILED).extend((request.request_id, request.client_index, None) for request in lost)
    scheduler.finish_requests([request.request_id for request in lost], RequestStatus.FINISHED_ERROR)


def _add_failures(outputs: dict[int, Any], failed: list[tuple[str, int, str | None]]) -> dict[int, Any]:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for request_id, client_index, reason in failed:
        group = outputs.setdefault(client_index, EngineCoreOutputs())
        group.outputs.append(EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason))
    return outputs
