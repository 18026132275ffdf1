"""A real engine in process with adapters resident, and the same model in float64 with the weights merged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epochless_vllm.cli.tiny_model import TINY, make_model
from tests.adapters import LlamaShape, make_adapter, module_name

SHAPE = LlamaShape(hidden=256, intermediate=512, layers=4, heads=8, kv_heads=4, head_dim=32, vocab=258)
SCALE = 0.06  # an adapter's delta is then about half of what it is added to: plainly visible, and stable

Row = tuple[Any, tuple[int, ...]]  # a LoRARequest or None, and prompt token ids


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Return token ids below the special ones."""
    return tuple(np.random.default_rng([seed, length]).integers(0, 256, length).tolist())


def write_model(root: Path) -> Path:
    """Write the tiny model of these tests."""
    assert {"hidden_size": SHAPE.hidden, "num_hidden_layers": SHAPE.layers}.items() <= TINY.items()
    return make_model(root / "model")


def write_adapter(root: Path, name: str, **fields: Any) -> Path:
    """Write an adapter that fits the tiny model."""
    return make_adapter(root / name, shape=SHAPE, **{"scale": SCALE, **fields})


@contextmanager
def running(model: Path, adapters: Sequence[Path], *, mixed_rows: str = "grouped", **fields: Any) -> Iterator[Engine]:
    """Yield an engine with the seam installed and as many of the adapters loaded as there are slots."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    from epochless_vllm.plugin import punica
    from epochless_vllm.plugin.options import Options

    punica.install(Options(store="unused", mixed_rows=mixed_rows))
    llm = LLM(
        model=str(model),
        **{
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_lora": True,
            "max_loras": len(adapters),
            "max_cpu_loras": len(adapters),
            "max_lora_rank": 16,
            "max_model_len": 256,
            "max_num_seqs": 16,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            **fields,
        },
    )
    requests = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(adapters, 1)]
    for request in requests[: fields.get("max_loras", len(adapters))]:
        llm.llm_engine.add_lora(request)
    try:
        yield Engine(llm, requests)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


@dataclass(frozen=True)
class Answer:
    """Tokens of a row, their logprobs, and the logprobs of the prompt's tokens from the second on."""

    tokens: tuple[int, ...]
    logprobs: np.ndarray
    prompt_logprobs: np.ndarray


class Engine:
    """Greedy generation of rows in one call."""

    def __init__(self, llm: Any, adapters: list[Any]) -> None:
        self.llm = llm
        self.adapters = adapters

    def answer(self, rows: Sequence[Row], *, tokens: int = 8, prompt: bool = False) -> list[Answer]:
        """Return the answer to each row, all rows sharing batches."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if prompt else None,
            detokenize=False,
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for _, ids in rows],
            parameters,
            lora_request=[adapter for adapter, _ in rows],
            use_tqdm=False,
        )
        return [_answer(output) for output in outputs]

    def use_stock_operations(self) -> None:
        """Hand all layers of this engine to vLLM's own CPU operations."""
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        core = self.llm.llm_engine.engine_core.engine_core
        manager = core.model_executor.driver_worker.worker.model_runner.lora_manager._adapter_manager
        stock = PunicaWrapperCPU(8192, 256, "cpu")
        manager.punica_wrapper_mapping["language_model"] = stock
        for module in manager.modules.values():
            module.punica_wrapper = stock
        manager._last_mapping = None


def _answer(output: Any) -> Answer:
    chosen = output.outputs[0]
    logprobs = [step[token].logprob for step, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]
    ids = output.prompt_token_ids
    known = zip(ids[1:], (output.prompt_logprobs or [None])[1:], strict=False)
    return Answer(
        tokens=tuple(chosen.token_ids),
        logprobs=np.array(logprobs),
        prompt_logprobs=np.array([entry[token].logprob for token, entry in known]),
    )


class MergedModel:
    """transformers' Llama in float64 with an adapter's ``alpha / r * B * A`` added to the weights."""

    def __init__(self, model: Path, adapter: Path | None, *, rounded_to: torch.dtype = torch.float64) -> None:
        from safetensors.torch import load_file
        from transformers import LlamaForCausalLM

        self._model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(parameter.to(rounded_to))
            if adapter is None:
                return
            config = json.loads((adapter / "adapter_config.json").read_text())
            scaling = config["lora_alpha"] / config["r"]
            tensors = load_file(adapter / "adapter_model.safetensors")
            for name, factor_a in tensors.items():
                if not name.endswith("lora_A.weight"):
                    continue
                factor_b = tensors[name.replace("lora_A", "lora_B")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                delta = factor_b.to(rounded_to).double() @ factor_a.to(rounded_to).double()
                self._model.get_submodule(module).weight += scaling * delta

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the logprob of each token from the second on."""
        with torch.no_grad():
            logits_TV = self._model(torch.tensor([tokens])).logits[0, :-1]
        return logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


__all__ = ["SCALE", "SHAPE", "Answer", "Engine", "MergedModel", "Row", "module_name", "prompt_of"]
