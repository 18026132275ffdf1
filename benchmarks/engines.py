"""What the benchmarks share: the 125M-parameter model, adapters, and a stock engine beside the patched one.

A variant runs in a process of its own: ``stock`` imports a copy of the engine with the patch reverted and no plugins,
``epochless`` the installed one. Nothing here knows what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from epochless_vllm.cli.tiny_model import make_adapter, make_model  # noqa: E402  # needs the path above
from epochless_vllm.patch.installation import revert_patch  # noqa: E402  # as above
from epochless_vllm.patch.tree import find_installed_tree  # noqa: E402  # as above

BUILD = ROOT / "build" / "bench"
SIZES_125M = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
RANK = 16


def model_125m() -> Path:
    """Return the directory of the 125M-parameter random Llama, made once."""
    directory = BUILD / "llama-125m"
    if not (directory / "model.safetensors").exists():
        make_model(directory, seed=0, **SIZES_125M)
    return directory


def adapter(seed: int, *, rank: int = RANK) -> Path:
    """Return the directory of a rank-16 adapter of the 125M model, made once."""
    directory = BUILD / f"adapter-r{rank}-{seed}"
    if not (directory / "adapter_model.safetensors").exists():
        make_adapter(directory, seed=seed, rank=rank, strength=0.1, **SIZES_125M)
    return directory


def stock_tree() -> Path:
    """Return a directory holding the unpatched engine: links to the installed files, with the patch reverted."""
    installed = find_installed_tree()
    tree = BUILD / "stock"
    if not (tree / "vllm").exists():
        tree.mkdir(parents=True, exist_ok=True)
        shutil.copytree(installed / "vllm", tree / "vllm", copy_function=_link_or_copy)
        revert_patch(tree)
    return tree


def _link_or_copy(source: str, target: str) -> None:
    # Python files are copied, so that reverting edits the copy; binaries are linked.
    if source.endswith(".py"):
        shutil.copyfile(source, target)
    else:
        os.symlink(source, target)


def variant_environment(*, stock: bool, cores: str = "0") -> dict[str, str]:
    """Return the environment of a variant's process; see ``run_variant``."""
    return {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join([*([str(stock_tree())] if stock else []), str(ROOT)]),
        **({"VLLM_PLUGINS": ""} if stock else {}),
    }


def run_variant(script: Path, variant: str, arguments: list[str], *, stock: bool, cores: str = "0") -> dict[str, Any]:
    """Run ``script --variant`` in a fresh process and return the JSON object its last line holds.

    Args:
        stock: import the unpatched engine, without plugins.
        cores: the cores of the engine's threads.
    """
    environment = variant_environment(stock=stock, cores=cores)
    command = [sys.executable, str(script), "--variant", variant, *arguments]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(result.stdout.strip().splitlines()[-1]))


def quantile(values: list[float], share: float) -> float:
    """Return the nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]
