"""Logits from transformers and peft in float32, the oracle of the reference engine. Imports torch: load it late."""

from __future__ import annotations

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
