"""The Punica seam on vLLM's own layer classes, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from epochless_vllm.errors import ConfigurationError, EpochlessError, RefusedAdapterError, SeamError
from epochless_vllm.plugin.options import Options

pytest.importorskip("vllm")

from vllm.lora.layers import (
    BaseLayerWithLoRA,
    LogitsProcessorWithLoRA,
    LoRAMapping,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.platforms.cpu import CpuPlatform

from epochless_vllm.plugin import punica
from epochless_vllm.plugin.punica import PunicaWrapperRows

STOCK_WRAPPER = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
GROUPED, STOCK = Options(store="unused"), Options(store="unused", mixed_rows="stock")
SLOTS, MAX_RANK, INPUTS = 3, 8, 32


@pytest.fixture(autouse=True)
def _seam() -> Iterator[None]:
    punica.install(GROUPED)
    yield
    punica.install(STOCK)


@pytest.fixture
def wrapper() -> PunicaWrapperRows:
    return PunicaWrapperRows(64, 64, torch.device("cpu"), lora_config=SimpleNamespace(fully_sharded_loras=False))


def make_linear(kind: type, outputs: tuple[int, ...], *, tp_rank: int = 0, tp_size: int = 1) -> Any:
    """Return a layer of vLLM's class with the attributes its slots need, and no base layer."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.n_slices, layer.output_slices, layer.tp_rank, layer.tp_size = len(outputs), outputs, tp_rank, tp_size
    layer.output_ids, layer.input_size = (tp_rank,) * len(outputs), INPUTS
    layer.lora_a_stacked = tuple(torch.zeros(SLOTS, 1, MAX_RANK, INPUTS) for _ in outputs)
    layer.lora_b_stacked = tuple(torch.zeros(SLOTS, 1, size, MAX_RANK) for size in outputs)
    return layer


def step(
    wrapper: PunicaWrapperRows, ids: list[int], resident: list[int | None], sampled: list[int] | None = None
) -> None:
    mapping = LoRAMapping(tuple(ids), tuple(ids if sampled is None else sampled), is_prefill=True)
    wrapper.update_metadata(mapping, resident, SLOTS + 1, 100)


def deltas(wrapper: PunicaWrapperRows, layer: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(len(x), sum(layer.output_slices))
    wrapper.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, layer.output_slices)
    return y


def test_install_twice_is_install_once_and_stock_restores() -> None:
    chosen = vars(CpuPlatform)["get_punica_wrapper"]
    adopting = BaseLayerWithLoRA.set_mapping
    punica.install(GROUPED)
    assert vars(CpuPlatform)["get_punica_wrapper"] is chosen
    assert BaseLayerWithLoRA.set_mapping is adopting
    assert CpuPlatform.get_punica_wrapper() == "epochless_vllm.plugin.punica.PunicaWrapperRows"
    punica.install(STOCK)
    assert CpuPlatform.get_punica_wrapper() == STOCK_WRAPPER
    punica.install(STOCK)
    assert CpuPlatform.get_punica_wrapper() == STOCK_WRAPPER


def test_install_fails_without_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CpuPlatform, "get_punica_wrapper")
    with pytest.raises(SeamError, match="get_punica_wrapper is missing"):
        punica.install(GROUPED)


def test_packed_slices_are_served_at_their_own_ranks(wrapper: PunicaWrapperRows) -> None:
    layer = make_linear(MergedQKVParallelLinearWithLoRA, (24, 8, 8))
    layer.set_mapping(wrapper)
    a_q, b_q, a_v, b_v = torch.randn(5, INPUTS), torch.randn(24, 5), torch.randn(2, INPUTS), torch.randn(8, 2)
    layer.set_lora(1, [a_q, None, a_v], [b_q, None, b_v])
    step(wrapper, [0, 9, 9], [None, 9, None])
    x = torch.randn(3, INPUTS)
    y = deltas(wrapper, layer, x)
    assert not y[0].any()
    np.testing.assert_allclose(y[1:, :24], x[1:] @ a_q.T @ b_q.T, atol=1e-4)
    assert not y[:, 24:32].any()
    np.testing.assert_allclose(y[1:, 32:], x[1:] @ a_v.T @ b_v.T, atol=1e-4)
    assert layer.epochless.weights.offsets_SP[1].tolist() == [0, 8, 8, 12]


def test_each_tensor_parallel_rank_packs_its_own_shard(wrapper: PunicaWrapperRows) -> None:
    factor_a, factor_b = torch.randn(4, 2 * INPUTS), torch.randn(24, 4)
    x = torch.randn(2, 2 * INPUTS)
    total = torch.zeros(2, 24)
    for rank in (0, 1):
        layer = make_linear(RowParallelLinearWithLoRA, (24,), tp_rank=rank, tp_size=2)
        layer.set_mapping(wrapper)
        layer.set_lora(0, factor_a, factor_b)
        step(wrapper, [5, 5], [5, None, None])
        total += deltas(wrapper, layer, x[:, rank * INPUTS : (rank + 1) * INPUTS])
    np.testing.assert_allclose(total, x @ factor_a.T @ factor_b.T, atol=1e-4)


def test_moved_slots_are_followed_even_if_the_mapping_is_not_refreshed(wrapper: PunicaWrapperRows) -> None:
    layer = make_linear(RowParallelLinearWithLoRA, (16,))
    layer.set_mapping(wrapper)
    factors = {held: (torch.randn(4, INPUTS), torch.randn(16, 4)) for held in (7, 8)}
    resident: list[int | None] = [7, 8, None]
    layer.set_lora(0, *factors[7])
    layer.set_lora(1, *factors[8])
    step(wrapper, [7, 8, 0], resident)
    x = torch.randn(3, INPUTS)
    before = deltas(wrapper, layer, x)
    resident[:] = [8, 7, None]  # evicted and activated again the other way round, with the same rows running
    layer.set_lora(0, *factors[8])
    layer.set_lora(1, *factors[7])
    assert torch.equal(deltas(wrapper, layer, x), before)


def test_an_emptied_slot_serves_nothing(wrapper: PunicaWrapperRows) -> None:
    layer = make_linear(RowParallelLinearWithLoRA, (16,))
    layer.set_mapping(wrapper)
    layer.set_lora(2, torch.randn(4, INPUTS), torch.randn(16, 4))
    step(wrapper, [3], [None, None, 3])
    assert deltas(wrapper, layer, torch.ones(1, INPUTS)).any()
    layer.reset_lora(2)
    assert not deltas(wrapper, layer, torch.ones(1, INPUTS)).any()


def test_padding_rows_after_the_step_are_left_alone(wrapper: PunicaWrapperRows) -> None:
    layer = make_linear(RowParallelLinearWithLoRA, (16,))
    layer.set_mapping(wrapper)
    layer.set_lora(0, torch.randn(4, INPUTS), torch.randn(16, 4))
    step(wrapper, [3, 3], [3, None, None])
    y = deltas(wrapper, layer, torch.ones(8, INPUTS))
    assert y[:2].all()
    assert not y[2:].any()


def test_a_row_whose_adapter_has_no_slot_stops_the_step(wrapper: PunicaWrapperRows) -> None:
    with pytest.raises(EpochlessError, match="adapter 4 has rows in this step and no slot"):
        step(wrapper, [0, 4], [3, None, None])


def make_logits(wrapper: PunicaWrapperRows) -> Any:
    layer = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.lora_a_stacked = torch.zeros(SLOTS, 1, MAX_RANK, INPUTS)
    layer.lora_b_stacked = torch.zeros(SLOTS, 1, 50, MAX_RANK)
    layer.set_mapping(wrapper)
    return layer


def test_logits_follow_the_sampled_rows_and_prompt_logits_their_tokens(wrapper: PunicaWrapperRows) -> None:
    layer = make_logits(wrapper)
    factor_a, factor_b = torch.randn(4, INPUTS), torch.randn(50, 4)
    layer.set_lora(0, factor_a, factor_b)
    step(wrapper, [0, 0, 6, 6, 6], [6, None, None], sampled=[0, 6])
    hidden = torch.randn(5, INPUTS)

    def logits(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(len(x), 64)
        wrapper.add_lora_logits(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0)
        return y[:, :50]

    sampled = hidden[[1, 4]]
    assert not logits(sampled)[0].any()
    np.testing.assert_allclose(logits(sampled)[1], factor_b @ factor_a @ hidden[4], atol=1e-4)
    with pytest.raises(EpochlessError, match="3 rows"):
        logits(hidden[2:5])
    with wrapper.prompt_rows(hidden):
        # Two rows, as many as are sampled: the shape cannot tell whose they are, the address can.
        np.testing.assert_allclose(logits(hidden[2:4]), hidden[2:4] @ factor_a.T @ factor_b.T, atol=1e-4)
        assert not logits(hidden[0:2]).any()
        with pytest.raises(EpochlessError, match="outside this step"):
            logits(torch.randn(2, INPUTS))


def test_adapters_on_embeddings_are_refused_and_zero_ones_pass(wrapper: PunicaWrapperRows) -> None:
    layer = VocabParallelEmbeddingWithLoRA.__new__(VocabParallelEmbeddingWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.lora_a_stacked = torch.zeros(SLOTS, 50, MAX_RANK)
    layer.lora_b_stacked = torch.zeros(SLOTS, 1, 16, MAX_RANK)
    layer.set_mapping(wrapper)
    layer.set_lora(0, torch.zeros(4, 50), torch.zeros(16, 4))
    with pytest.raises(RefusedAdapterError, match="token embeddings"):
        layer.set_lora(0, torch.ones(4, 50), torch.ones(16, 4))
    assert not layer.lora_a_stacked.any()


def test_layers_of_experts_are_refused_at_start(wrapper: PunicaWrapperRows) -> None:
    class Experts(BaseLayerWithLoRA):  # type: ignore[misc]
        pass

    with pytest.raises(ConfigurationError, match="Experts: adapters on this kind of layer"):
        Experts().set_mapping(wrapper)


def test_fully_sharded_adapters_are_refused_at_start() -> None:
    config = SimpleNamespace(fully_sharded_loras=True)
    with pytest.raises(ConfigurationError, match="--fully-sharded-loras"):
        PunicaWrapperRows(64, 64, torch.device("cpu"), lora_config=config)


def test_vllm_own_operations_serve_the_base_row_by_an_adapter(wrapper: PunicaWrapperRows) -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    layer = make_linear(RowParallelLinearWithLoRA, (16,))
    layer.set_mapping(wrapper)
    layer.set_lora(2, torch.randn(4, INPUTS), torch.randn(16, 4))
    stock = PunicaWrapperCPU(64, 64, "cpu")
    x, outputs = torch.ones(2, INPUTS), {}
    for name, tested in (("stock", stock), ("grouped", wrapper)):
        step(tested, [0, 3], [None, None, 3])
        outputs[name] = deltas(tested, layer, x)
    np.testing.assert_allclose(outputs["stock"][1], outputs["grouped"][1], atol=1e-4)
    assert outputs["stock"][0].any(), "the defect is gone: this seam can be retired"
    assert not outputs["grouped"][0].any()
