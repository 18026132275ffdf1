"""What a receipt's header says about the engine: which build served, with which tokenizer and limits.

The engine digest covers what decides how a token is sampled: vLLM's version, the patch, the sources of this package,
torch and the device. Equal digests mean equal code; files outside these are the operator's. Knows no requests.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import epochless_vllm
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.digests import Digest, digest
from epochless_vllm.store.tokenizer_files import compute_tokenizer_digest


@dataclass(frozen=True)
class EngineIdentity:
    """The engine's part of every header.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: positions of a sequence, prompt included.
        logits_processors: processors the operator installed, by name.
    """

    name: str
    digest: Digest
    base: Digest
    tokenizer: Digest
    vocab_size: int
    max_model_len: int
    logits_processors: tuple[str, ...] = ()


def identify_engine(vllm_config: Any, base_digest: str) -> EngineIdentity:
    """Return the identity of the engine with a configuration."""
    import torch
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    build = {
        "device": str(current_platform.device_type),
        "epochless": epochless_vllm.__version__,
        "sources": sources_digest(),
        "torch": torch.__version__,
        "vllm": version("vllm"),
    }
    return EngineIdentity(
        name=f"vllm-{build['vllm']}/epochless-{build['epochless']}",
        digest=digest("epochless/v1/engine", encode_canonical(build)),
        base=Digest(base_digest),
        tokenizer=compute_tokenizer_digest(str(model.tokenizer or model.model)),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        logits_processors=_installed_processors(model),
    )


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Return the digest of this package's files, the patch included."""
    root = Path(epochless_vllm.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".patch", ".json") and path.is_file())
    listing = [[path.relative_to(root).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
    return digest("epochless/v1/sources", encode_canonical(listing))


def _installed_processors(model_config: Any) -> tuple[str, ...]:
    from importlib.metadata import entry_points

    configured = [
        item if isinstance(item, str) else f"{item.__module__}:{item.__qualname__}"
        for item in model_config.logits_processors or ()
    ]
    return tuple([entry.value for entry in entry_points(group="vllm.logits_processors")] + configured)
