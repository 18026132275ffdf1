"""vLLM's LoRA layers, each with its slots mirrored in the form the grouped kernel reads.

Adoption replaces ``set_lora`` and ``reset_lora`` of the one layer object: whoever writes a slot also packs it, at the
rank of the adapter written and from what vLLM itself wrote (this rank's shard, in the LoRA dtype). Knows nothing of
rows; dies with the seam in ``punica``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from epochless_vllm.errors import ConfigurationError, RefusedAdapterError
from epochless_vllm.execution.kernel import compile_kernel
from epochless_vllm.execution.rows import RowPlan
from epochless_vllm.execution.slots import Factors, SlotWeights, stored_dtype


class StepRows(Protocol):
    """What a layer needs of the wrapper that serves it."""

    def token_plan(self) -> RowPlan:
        """Return the grouping of this step's tokens."""

    def slots_changed(self) -> None:
        """Take note that a slot was written or emptied."""


class AdoptedLayer:
    """One layer of vLLM: its packed slots, and the wrapper that groups its rows."""

    def __init__(self, layer: Any, step_rows: StepRows) -> None:
        self.step_rows = step_rows
        self._a_stacked, self._b_stacked = _as_tuple(layer.lora_a_stacked), _as_tuple(layer.lora_b_stacked)
        slots, _, max_rank, inputs = self._a_stacked[0].shape
        outputs = [b_stacked.shape[2] for b_stacked in self._b_stacked]
        self.weights = SlotWeights(
            num_slots=slots,
            max_rank=max_rank,
            input_size=inputs,
            output_sizes=outputs,
            dtype=self._a_stacked[0].dtype,
        )
        compile_kernel(stored_dtype(self.weights.dtype), torch.get_num_threads())
        stock_set, stock_reset = layer.set_lora, layer.reset_lora

        def set_lora(index: int, lora_a: Any, lora_b: Any) -> None:
            stock_set(index, lora_a, lora_b)
            self.weights.write(index, self._factors(index, lora_a))
            step_rows.slots_changed()

        def reset_lora(index: int) -> None:
            stock_reset(index)
            self.weights.clear(index)
            step_rows.slots_changed()

        layer.set_lora, layer.reset_lora = set_lora, reset_lora
        _ADOPTED[self._a_stacked[0].data_ptr()] = self

    def check(self, index: int, lora_a: Any) -> None:
        """Compare the packed copy of a slot with vLLM's own.

        Args:
            lora_a: what the slot was written from, for its ranks; None for a slot without an adapter.

        Raises:
            ValueError: they differ.
        """
        empty: list[Factors | None] = [None] * len(self._a_stacked)
        self.weights.check(index, empty if lora_a is None else self._factors(index, lora_a))

    def _factors(self, index: int, lora_a: Any) -> list[Factors | None]:
        factors: list[Factors | None] = []
        for part, (a_stacked, b_stacked) in enumerate(zip(self._a_stacked, self._b_stacked, strict=True)):
            rank = _rank_of_slice(lora_a, part, len(self._a_stacked))
            factors.append((a_stacked[index, 0, :rank], b_stacked[index, 0, :, :rank]) if rank else None)
        return factors


# By address of a layer's first stacked A, which is what vLLM's calls carry. An entry lives as long as its layer.
_ADOPTED: WeakValueDictionary[int, AdoptedLayer] = WeakValueDictionary()


def adopted_layer(a_stacked: torch.Tensor) -> AdoptedLayer:
    """Return the layer that owns this stacked A."""
    return _ADOPTED[a_stacked.data_ptr()]


def adopt(layer: Any, step_rows: StepRows) -> None:
    """Mirror a layer's slots from now on, or arrange for its adapters to be refused.

    Raises:
        ConfigurationError: a kind of layer (mixture of experts) that the grouped operations do not serve.
    """
    from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    if isinstance(layer, VocabParallelEmbeddingWithLoRA):
        layer.set_lora = _refusing(layer.set_lora)
    elif isinstance(layer, (BaseLinearLayerWithLoRA, LogitsProcessorWithLoRA)):
        layer.epochless = AdoptedLayer(layer, step_rows)
    else:
        raise ConfigurationError(
            f"{type(layer).__name__}: adapters on this kind of layer are not served by the grouped CPU operations; "
            "name the layers that carry adapters with --lora-target-modules, leaving it out",
            flag="lora-target-modules",
        )


def _refusing(set_lora: Callable[[int, Any, Any], None]) -> Callable[[int, Any, Any], None]:
    def refuse(index: int, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        if lora_a.any() and lora_b.any():  # start-up writes an all-zero adapter, which changes nothing
            raise RefusedAdapterError(
                "the adapter changes the token embeddings, which the grouped CPU operations do not serve; train "
                "without embed_tokens among the target modules, or serve with --epochless-mixed-rows stock",
                module="embed_tokens",
            )
        set_lora(index, lora_a, lora_b)

    return refuse


def _rank_of_slice(lora_a: Any, part: int, slices: int) -> int:
    if isinstance(lora_a, torch.Tensor):  # one A for the whole layer
        return int(lora_a.shape[0])
    ranks = [0 if factor is None else int(factor.shape[0]) for factor in lora_a]
    # Fewer factors than slices: vLLM spreads them over the slices, padding with zeros up to the largest.
    return ranks[part] if len(ranks) == slices else max(ranks)


def _as_tuple(stacked: Any) -> tuple[torch.Tensor, ...]:
    return (stacked,) if isinstance(stacked, torch.Tensor) else tuple(stacked)
