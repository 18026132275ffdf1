"""What an engine may not be configured with while Epochless is on, each with its reason.

Promises that a refusal names the option and the remedy, before any weight is loaded. Knows no engine state.
"""

from __future__ import annotations

import argparse
from typing import Any

from epochless_vllm.errors import ConfigurationError
from epochless_vllm.plugin.options import options_of

# Connectors that key every block by vLLM's own block hash, which carries the revision. The others key by tokens,
# adapter name or request, and would hand one revision's KV to another.
KEYED_CONNECTORS = frozenset(
    {"OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector", "LMCacheMPConnector"}
)

LOCAL_EXECUTORS = frozenset({None, "mp", "uni"})  # their ranks run on this host


def refuse_front_ends(args: argparse.Namespace) -> None:
    """Refuse servers whose admission Epochless does not see.

    Raises:
        ConfigurationError: naming the flag.
    """
    import vllm.envs as envs

    if options_of(args.additional_config) is None:
        return
    if getattr(args, "grpc", False):
        raise _refusal("--grpc", "its admission does not pin revisions; use the HTTP server")
    if envs.VLLM_RUST_FRONTEND_PATH:
        raise _refusal("VLLM_RUST_FRONTEND_PATH", "the Rust front end loads no plugins; unset it")
    for flag in ("data_parallel_external_lb", "data_parallel_hybrid_lb", "data_parallel_multi_port_external_lb"):
        if getattr(args, flag, False):
            raise _refusal("--" + flag.replace("_", "-"), "each target would publish alone; use the internal balancer")
    if getattr(args, "data_parallel_rank", None) is not None or getattr(args, "data_parallel_start_rank", None):
        raise _refusal("--data-parallel-rank", "external balancing publishes to one engine only; drop it")
    if getattr(args, "headless", False):
        raise _refusal("--headless", "off-host engines need the store mounted and are not covered yet")


def refuse_unsupported(config: Any) -> None:
    """Refuse a VllmConfig that Epochless cannot keep its promises under.

    Raises:
        ConfigurationError: naming the option and the remedy.
    """
    lora = config.lora_config
    if lora is None:
        raise _refusal("--enable-lora", "is required: revisions are LoRA adapters")
    if lora.fully_sharded_loras:
        raise _refusal("--fully-sharded-loras", "its slots are not read back yet; drop it")
    if lora.enable_tower_connector_lora:
        raise _refusal("--enable-tower-connector-lora", "tower adapters are not covered yet; drop it")
    if lora.enable_mixed_moe_lora_format:
        raise _refusal("--enable-mixed-moe-lora-format", "MoE adapters are not covered; drop it")
    if config.parallel_config.pipeline_parallel_size > 1:
        raise _refusal("--pipeline-parallel-size", "no stage holds a whole adapter to check; use tensor parallelism")
    if config.parallel_config.nnodes > 1 or config.parallel_config.distributed_executor_backend not in LOCAL_EXECUTORS:
        raise _refusal(
            "--distributed-executor-backend", "ranks on other hosts cannot be published to; use mp on one host"
        )
    if config.speculative_config is not None:
        raise _refusal("--speculative-config", "draft tokens are not bound to a revision yet; drop it")
    if config.scheduler_config.async_scheduling:
        raise _refusal("--async-scheduling", "was not run with Epochless on a GPU yet; pass --no-async-scheduling")
    if config.model_config is not None and _is_moe(config.model_config):
        raise _refusal("model", "MoE models: their adapters are not covered; serve a dense model")
    if config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector:
        _refuse_connector(config.kv_transfer_config)


def _refuse_connector(transfer: Any) -> None:
    names = [transfer.kv_connector]
    if transfer.kv_connector == "MultiConnector":
        children = (transfer.kv_connector_extra_config or {}).get("connectors", [])
        names = [child.get("kv_connector") for child in children] or names
    for name in names:
        if name not in KEYED_CONNECTORS:
            raise _refusal(
                "--kv-transfer-config",
                f"connector {name} does not key blocks by revision and would serve one revision's KV to another; "
                f"use one of {', '.join(sorted(KEYED_CONNECTORS))}",
            )
    if transfer.kv_role not in (None, "kv_both"):
        raise _refusal("--kv-transfer-config", f"role {transfer.kv_role}: prefill/decode transfer is not covered")


def _is_moe(model_config: Any) -> bool:
    text = getattr(model_config, "hf_text_config", None)
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, 0) or 0) > 1 for name in counts)


def _refusal(flag: str, detail: str) -> ConfigurationError:
    return ConfigurationError(f"{flag}: refused while Epochless is on: {detail}", flag=flag)
