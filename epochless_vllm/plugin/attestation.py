"""Seam: every sampled row by the exact sampler, and a row beside every token.

vLLM's CPU sampler ignores a request's seed where a neighbour has none, and its seeded stream moves with preemption; a
draw there depends on the batch around it and leaves no record. Here each rank's runner draws by key and position (every
tensor-parallel rank samples, from equal logits with equal keys), and says which adapter the step ran each row with.
Dies when upstream draws by counter and carries what a sampler records.

Refused with Epochless on, and so unknown here: speculative decoding, pipeline stages, the V2 runner.
"""

from __future__ import annotations

from typing import Any

from epochless_vllm.errors import SeamError
from epochless_vllm.plugin.options import options_of
from epochless_vllm.sampling import warm_up


def install() -> None:
    """Wrap the V1 runner's construction and sampling.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for name in ("__init__", "_sample"):
        if name not in vars(GPUModelRunner):
            raise SeamError(f"GPUModelRunner has no {name}", target=f"GPUModelRunner.{name}")
    if not hasattr(SamplerOutput, "token_attest"):
        raise SeamError("SamplerOutput has no token_attest: run epochless patch apply", target="token_attest")
    if getattr(GPUModelRunner._sample, "_epochless", False):
        return
    _wrap_construction(GPUModelRunner)
    _wrap_sampling(GPUModelRunner)


def _wrap_construction(runner: Any) -> None:
    original = runner.__init__

    def __init__(self: Any, vllm_config: Any, *arguments: Any, **keywords: Any) -> None:  # noqa: N807  # is wrapped
        original(self, vllm_config, *arguments, **keywords)
        if options_of(vllm_config.additional_config) is not None and not self.is_pooling_model:
            replace_sampler(self)

    runner.__init__ = __init__


def replace_sampler(runner: Any) -> None:
    """Give a runner the exact sampler, compiled and checked.

    Raises:
        ConfigurationError: the compiled sampler does not draw what the recipe says.
    """
    from epochless_vllm.plugin.draw_batch import DrawBatch
    from epochless_vllm.plugin.exact_sampler import ExactSampler, has_custom_processors

    warm_up(runner.device)
    draws = DrawBatch(runner.device, restricted=has_custom_processors(runner.input_batch.logitsprocs))
    runner.sampler = ExactSampler(runner.sampler, draws)


def _wrap_sampling(runner: Any) -> None:
    original = runner._sample

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        from epochless_vllm.plugin.exact_sampler import ExactSampler

        sampler = self.sampler
        if not isinstance(sampler, ExactSampler):
            return original(self, logits, spec_decode_metadata)
        sampler.draws.refresh(self.input_batch, self.requests)
        sampler.stepping = True
        try:
            return original(self, logits, spec_decode_metadata)
        finally:
            sampler.stepping = False

    _sample._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    runner._sample = _sample
