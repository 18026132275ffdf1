"""vLLM's own scheduler without a model behind it, fed by arrivals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epochless_vllm.plugin import fairness

BLOCKS = 4096


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before a step, for an adapter (0: the base model), and runs for so many steps."""

    step: int
    adapter: int
    tokens: int


@dataclass
class Life:
    """What became of one arrival: what ran and what waited when it came, and the steps of its first and last token."""

    arrival: Arrival
    running: list[int]
    waiting: list[int]
    begun: int | None = None
    ended: int | None = None


class Simulation:
    """A scheduler fed by arrivals; every scheduled request emits one token a step."""

    def __init__(self, config: Any, *, slots: int, seats: int, policy: str = "fcfs") -> None:
        import torch
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config.lora_config.max_loras = slots
        config.scheduler_config.max_num_seqs = seats
        config.scheduler_config.policy = policy
        config.cache_config.num_gpu_blocks = BLOCKS
        config.cache_config.enable_prefix_caching = False
        spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        caches = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.scheduler = Scheduler(config, caches, StructuredOutputManager(config), block_size=16)
        self.lives: dict[str, Life] = {}

    def run(self, arrivals: Sequence[Arrival]) -> list[Life]:
        """Step until everything that arrived has ended."""
        coming = sorted(arrivals, key=lambda arrival: arrival.step)
        for step in itertools.count():
            while coming and coming[0].step <= step:
                self.add(coming.pop(0))
            if not coming and not self.scheduler.has_unfinished_requests():
                return list(self.lives.values())
            assert step < 3000, "a request never ended"
            self.step(step)
        raise AssertionError

    def add(self, arrival: Arrival) -> None:
        """Let a request arrive now."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.request import Request

        number = len(self.lives)
        lora = LoRARequest(f"a{arrival.adapter}", arrival.adapter, "none") if arrival.adapter else None
        parameters = SamplingParams(max_tokens=arrival.tokens, ignore_eos=True)
        request = Request(str(number), [number % 250, 7, 8], parameters, None, lora_request=lora)
        running = [int(other.request_id) for other in self.scheduler.running]
        waiting = [int(other.request_id) for other in fairness.waiting_requests(self.scheduler)]
        self.lives[str(number)] = Life(arrival, running, waiting)
        self.scheduler.add_request(request)

    def step(self, step: int) -> None:
        """Run one step, which is number ``step``."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduled = self.scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        for request_id in ids:
            life = self.lives[request_id]
            life.begun = step if life.begun is None else life.begun
        tokens = [[1] for _ in ids]
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,  # type: ignore[arg-type]  # the type changed between releases, the shape did not
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(scheduled, output)
        for request_id in ids:
            if request_id not in self.scheduler.requests:
                self.lives[request_id].ended = step


def make_config(model: Path) -> Any:
    """Return the configuration of a tiny model with adapters; ``Simulation`` sets what it varies."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(model), dtype="float32", enable_lora=True, max_lora_rank=8, max_model_len=1024, async_scheduling=False
    )
    return arguments.create_engine_config()
