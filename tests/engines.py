"""In-process engines for tests: how to build one, and how to drive it step by step with actions between steps."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_request_numbers = itertools.count()


def make_engine(model: Path, store: Path | None, **arguments: Any) -> Any:
    """Return a ``vllm.LLM`` in this process, float32 and eager, with Epochless on when ``store`` is given.

    Args:
        arguments: of ``vllm.LLM``; ``epochless`` is merged into the options.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # One thread: a tiny model gains nothing from two, and loses much where they wait for each other on a busy machine.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM

    options = {"store": str(store), **arguments.pop("epochless", {})}
    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "seed": 0,
        "disable_log_stats": True,
        **arguments,
    }
    if store is not None:
        settings["additional_config"] = {"epochless": options}
    return LLM(**settings)


def sampling(tokens: int, **parameters: Any) -> Any:
    """Return greedy parameters that emit exactly ``tokens`` tokens, with the sampled token's logprob."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1, **parameters)


def start(llm: Any, prompt: str, lora: Any, tokens: int, *, salt: str | None = None) -> str:
    """Add a request without stepping; return its id."""
    request_id = f"test-{next(_request_numbers)}"
    text: Any = {"prompt": prompt}
    if salt is not None:
        text["cache_salt"] = salt
    llm.llm_engine.add_request(request_id, text, sampling(tokens), lora_request=lora)
    return request_id


def finish(llm: Any, actions: Mapping[int, Callable[[], None]] | None = None) -> dict[str, Any]:
    """Step until all requests end; run ``actions[n]`` before step ``n``; return outputs by request id."""
    outputs: dict[str, Any] = {}
    step = 0
    while llm.llm_engine.has_unfinished_requests():
        if actions and step in actions:
            actions[step]()
        step += 1
        for output in llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = output
    return outputs


def generate(llm: Any, prompt: str, lora: Any, tokens: int = 16, *, salt: str | None = None) -> Any:
    """Run one request alone; return its RequestOutput."""
    request_id = start(llm, prompt, lora, tokens, salt=salt)
    return finish(llm)[request_id]


def tokens_of(output: Any) -> list[int]:
    """Return the first completion's token ids."""
    return list(output.outputs[0].token_ids)


def logprob_of(output: Any) -> float:
    """Return the sum of the sampled tokens' log-probabilities."""
    return float(output.outputs[0].cumulative_logprob)
