"""vLLM's V1 sampler with its draw replaced by the exact one.

What comes before the draw is vLLM's own: raw logprobs, float32, allowed tokens, bad words, processors, penalties. Then
nothing is scaled or masked in floating point: temperature, min-p, top-k and top-p are the exact sampler's. A custom
processor that says it keeps the argmax sees logits after temperature, as in vLLM, but before min-p. Where
``processed_*`` logprobs are asked for, a copy of the logits is scaled and masked for them, over exactly the tokens that
the draw could pick.

Promises to leave returned logprobs what their mode says, and one row beside each token. Knows no requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import MinPLogitsProcessor
from vllm.v1.sample.logits_processor import builtin as builtin_processors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler

from epochless_vllm.plugin.draw_batch import DrawBatch
from epochless_vllm.plugin.token_rows import FILTERED
from epochless_vllm.sampling import kept_tokens, sample_rows


def has_custom_processors(logitsprocs: Any) -> bool:
    """Whether an operator installed logits processors of their own."""
    return any(type(processor).__module__ != builtin_processors.__name__ for processor in logitsprocs.all)


class ExactSampler(Sampler):
    """Draws by key and position, and returns a row beside each token.

    ``draws`` is the step to sample; the seam refreshes it and sets ``stepping`` while its step runs. Any other call is
    vLLM measuring or warming up.
    """

    def __init__(self, stock: Sampler, draws: DrawBatch) -> None:
        super().__init__(stock.logprobs_mode, stock.use_fp64_gumbel)
        self.draws = draws
        self.stepping = False
        self._rows: torch.Tensor | None = None

    def forward(self, *arguments: Any, **keywords: Any) -> SamplerOutput:
        output = super().forward(*arguments, **keywords)
        output.token_attest, self._rows = self._rows, None
        return output

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return each row's token, and the processed logprobs where their mode and a request ask for them."""
        logits = self._process_scaled(logits, sampling_metadata)
        draws = self.draws
        if not self.stepping:
            draws.fill(len(logits))
        sampled = sample_rows(logits, draws.parameters, draws.keys, draws.positions)
        self._rows = draws.rows_of(sampled)
        mode = logprobs_mode_override or self.logprobs_mode
        asked = sampling_metadata.max_num_logprobs is not None or sampling_metadata.logprob_token_ids
        if not asked or not mode.startswith("processed"):
            return sampled.tokens, None
        processed = self._processed(logits, sampling_metadata)
        return sampled.tokens, self.compute_logprobs(processed) if mode == "processed_logprobs" else processed

    @staticmethod
    def _process_scaled(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Return the logits after the operator's argmax-invariant processors.

        vLLM shows these what temperature left, and no greedy row; a temperature is scaled in for them and out again.
        Logits that they leave alone stay what they were, bit for bit.
        """
        processors = [
            processor
            for processor in metadata.logitsprocs.argmax_invariant
            if not isinstance(processor, MinPLogitsProcessor)
        ]
        if not processors or metadata.all_greedy or metadata.temperature is None:
            return logits
        random = (metadata.temperature >= _SAMPLING_EPS).unsqueeze(dim=1)
        scale = torch.where(random, metadata.temperature.unsqueeze(dim=1), 1.0)
        shown = logits / scale
        processed = shown.clone()  # a processor may write to what it is given
        for processor in processors:
            processed = processor.apply(processed)
        return torch.where(random & (processed != shown), processed * scale, logits)

    def _processed(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Return a copy of the logits, divided by temperature and masked by the exact filters."""
        draws, logits = self.draws, logits.clone()
        filtered = np.flatnonzero(draws.flags & FILTERED)
        if filtered.size:
            rows = torch.as_tensor(filtered, device=logits.device)
            kept = kept_tokens(logits[rows], draws.parameters[filtered])
            logits[rows] = logits[rows].masked_fill(~kept, float("-inf"))
        if metadata.temperature is not None:
            logits = self.apply_temperature(logits, metadata.temperature, metadata.all_random)
        return logits
