"""A small Llama and a LoRA adapter trained on the spot, so that logits are those of a model that learnt something.

Trained by transformers and peft on the text of this package, byte by byte, for some tens of seconds of one core; the
adapter on the same text in capitals. A random model's logits are nearly flat and forgive much. Trained as wide as tests
and benchmarks go: beyond the positions it has seen, rounding moves a model's logits far. Imports torch late.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from epochless_vllm.cli.tiny_model import byte_tokenizer

ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 2048,
}
RANK = 8


def corpus() -> bytes:
    """Return the text of the package, prose first."""
    files = [*sorted(ROOT.rglob("epochless_vllm/**/*.md")), *sorted((ROOT / "epochless_vllm").rglob("*.py"))]
    return b"\n".join(path.read_bytes() for path in files)[: 1 << 20]


def train(directory: Path, *, steps: int = 200, adapter_steps: int = 60) -> tuple[Path, Path]:
    """Write ``model``, ``adapter`` and ``next``, the adapter some steps later, once; return the first two.

    The steps are those of a trainer that publishes often: ``next`` is one publication away.
    """
    model_path, adapter_path = directory / "model", directory / "adapter"
    if (directory / "next" / "adapter_model.safetensors").exists():
        return model_path, adapter_path
    import peft
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, rms_norm_eps=1e-5, bos_token_id=256, eos_token_id=257, tie_word_embeddings=False
    )
    model = transformers.LlamaForCausalLM(config)
    text = corpus()
    _fit(model, text, steps, 4e-3)
    model.save_pretrained(model_path, safe_serialization=True)
    (model_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    (model_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets))
    _fit(wrapped, text.upper(), adapter_steps, 4e-3)
    wrapped.save_pretrained(adapter_path, safe_serialization=True)
    _fit(wrapped, text.upper(), 5, 1e-3)
    wrapped.save_pretrained(directory / "next", safe_serialization=True)
    return model_path, adapter_path


def train_further(directory: Path, *, steps: int = 5) -> Path:
    """Write ``later``, the model of ``train`` some training steps on, once; return its directory."""
    target = directory / "later"
    if not (target / "model.safetensors").exists():
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
        _fit(model, corpus(), steps, 1e-3)
        model.save_pretrained(target, safe_serialization=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (target / name).write_bytes((directory / "model" / name).read_bytes())
    return target


def prompts(count: int, length: int = 24) -> list[list[int]]:
    """Return token lists cut from the corpus, away from each other."""
    text = corpus()
    stride = len(text) // (count + 1)
    return [list(text[at * stride : at * stride + length]) for at in range(1, count + 1)]


def _fit(model: Any, text: bytes, steps: int, rate: float, *, rows: int = 3, width: int = 448) -> None:
    import torch

    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - width, (rows,), generator=generator)
        batch = torch.stack([tokens[start : start + width] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
