"""What is refused at start, each with its reason."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.errors import ConfigurationError
from epochless_vllm.plugin.refusals import KEYED_CONNECTORS, refuse_front_ends, refuse_unsupported


def parallel(**changes: Any) -> Any:
    return SimpleNamespace(
        **{"pipeline_parallel_size": 1, "nnodes": 1, "distributed_executor_backend": "mp", **changes}
    )


def configuration(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "lora_config": SimpleNamespace(
            fully_sharded_loras=False, enable_tower_connector_lora=False, enable_mixed_moe_lora_format=False
        ),
        "parallel_config": parallel(),
        "speculative_config": None,
        "scheduler_config": SimpleNamespace(async_scheduling=False),
        "model_config": SimpleNamespace(hf_text_config=SimpleNamespace()),
        "kv_transfer_config": None,
    }
    return SimpleNamespace(**{**parts, **changes})


def transfer(name: str, role: str = "kv_both", children: list[str] | None = None) -> Any:
    extra = {"connectors": [{"kv_connector": child} for child in children]} if children else {}
    return SimpleNamespace(kv_connector=name, kv_role=role, kv_connector_extra_config=extra)


def test_a_plain_configuration_is_accepted() -> None:
    refuse_unsupported(configuration())


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"lora_config": None}, "--enable-lora"),
        ({"parallel_config": parallel(pipeline_parallel_size=2)}, "--pipeline-parallel-size"),
        ({"parallel_config": parallel(nnodes=2)}, "ranks on other hosts"),
        ({"parallel_config": parallel(distributed_executor_backend="ray")}, "ranks on other hosts"),
        ({"speculative_config": object()}, "--speculative-config"),
        ({"scheduler_config": SimpleNamespace(async_scheduling=True)}, "--async-scheduling"),
        ({"model_config": SimpleNamespace(hf_text_config=SimpleNamespace(num_local_experts=8))}, "MoE"),
        ({"kv_transfer_config": transfer("ExampleConnector")}, "ExampleConnector"),
        ({"kv_transfer_config": transfer("LMCacheConnectorV1")}, "LMCacheConnectorV1"),
        ({"kv_transfer_config": transfer("NixlConnector")}, "NixlConnector"),
        ({"kv_transfer_config": transfer("OffloadingConnector", role="kv_producer")}, "kv_producer"),
        (
            {"kv_transfer_config": transfer("MultiConnector", children=["OffloadingConnector", "HF3FSKVConnector"])},
            "HF3FSKVConnector",
        ),
        ({"kv_transfer_config": transfer("MultiConnector")}, "MultiConnector"),
    ],
)
def test_what_breaks_a_promise_is_refused_by_name(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigurationError, match=flag):
        refuse_unsupported(configuration(**changes))


@pytest.mark.parametrize("name", ["fully_sharded_loras", "enable_tower_connector_lora", "enable_mixed_moe_lora_format"])
def test_adapter_layouts_not_covered_are_refused(name: str) -> None:
    config = configuration()
    setattr(config.lora_config, name, True)
    with pytest.raises(ConfigurationError, match="--" + name.replace("_", "-").replace("enable-", "enable-")):
        refuse_unsupported(config)


@pytest.mark.parametrize("name", sorted(KEYED_CONNECTORS))
def test_connectors_keyed_by_block_hash_are_accepted(name: str) -> None:
    refuse_unsupported(configuration(kv_transfer_config=transfer(name)))
    refuse_unsupported(configuration(kv_transfer_config=transfer("MultiConnector", children=[name])))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("grpc", True),
        ("data_parallel_external_lb", True),
        ("data_parallel_hybrid_lb", True),
        ("data_parallel_multi_port_external_lb", True),
        ("data_parallel_rank", 0),
        ("headless", True),
    ],
)
def test_front_ends_without_our_admission_are_refused(flag: str, value: object) -> None:
    arguments = argparse.Namespace(additional_config={"epochless": {"store": "s"}}, **{flag: value})
    with pytest.raises(ConfigurationError, match="--" + flag.replace("_", "-")):
        refuse_front_ends(arguments)
    arguments.additional_config = {}
    refuse_front_ends(arguments)


def test_rust_front_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    monkeypatch.setenv("VLLM_RUST_FRONTEND_PATH", "/opt/frontend")
    with pytest.raises(ConfigurationError, match="VLLM_RUST_FRONTEND_PATH"):
        refuse_front_ends(argparse.Namespace(additional_config={"epochless": {"store": "s"}}))
