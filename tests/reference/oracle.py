"""Logits from transformers and peft in float32, the oracle of the reference engine. Imports torch: load it late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


def load_oracle(model: Path, adapter: Path | None) -> torch.nn.Module:
    """Return a model in evaluation mode with its adapter unmerged."""
    torch.set_num_threads(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    if adapter is None:
        return base.eval()
    import peft

    return peft.PeftModel.from_pretrained(base, str(adapter)).eval()


@torch.no_grad()
def oracle_logits(model: Path, adapter: Path | None, tokens: list[int]) -> np.ndarray:
    """Return float32 logits (positions, vocab) of a sequence."""
    logits: np.ndarray = load_oracle(model, adapter)(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


@torch.no_grad()
def mixture_logits(
    model: Path,
    adapters: Sequence[Path],
    tokens: list[int],
    cached: Sequence[int | None],
    sampled: Sequence[int | None],
) -> np.ndarray:
    """Return logits of a sequence whose positions are cached and sampled under adapters by index, None for the base.

    One token at a time over one cache: what a server does that keeps its cache while adapters change.
    """
    import peft

    torch.set_num_threads(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    wrapped = peft.PeftModel.from_pretrained(base, str(adapters[0]), adapter_name="0").eval()
    for index, adapter in enumerate(adapters[1:], start=1):
        wrapped.load_adapter(str(adapter), adapter_name=str(index))
    cache = transformers.DynamicCache()

    def feed(token: int, adapter: int | None) -> np.ndarray:
        ids = torch.tensor([[token]])
        if adapter is None:
            with wrapped.disable_adapter():
                logits = wrapped(ids, past_key_values=cache, use_cache=True).logits
        else:
            wrapped.set_adapter(str(adapter))
            logits = wrapped(ids, past_key_values=cache, use_cache=True).logits
        row: np.ndarray = logits[0, 0].numpy()
        return row

    rows = []
    for position, token in enumerate(tokens):
        rows.append(feed(token, sampled[position]))
        if cached[position] != sampled[position]:
            cache.crop(-1)
            feed(token, cached[position])
    return np.stack(rows)
