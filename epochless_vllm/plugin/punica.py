"""Seam: the platform's Punica wrapper, on CPU.

vLLM's CPU wrapper indexes the stacked adapters with -1 for a row without one, so a base request in a mixed batch is
served by the adapter of the last slot; and it copies one A and one B per token, which costs most of the throughput.
This wrapper hands each layer's rows to ``epochless_vllm.execution`` instead. GPU platforms keep vLLM's kernels.

``mixed_rows: "stock"`` leaves vLLM's operations in place, for comparison or for adapters refused here (embeddings).
Its cost: a base request batched with an adapter request is answered by an adapter, and adapters decode at a fraction
of the base model's speed.

Dies when vLLM's CPU operations leave rows without an adapter alone and stop copying weights per token
(vllm-project/vllm pull requests 48421 and 49656).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from epochless_vllm.errors import ConfigurationError, EpochlessError, SeamError
from epochless_vllm.execution.linear import add_adapters
from epochless_vllm.execution.rows import RowPlan, plan_rows, slots_of_ids
from epochless_vllm.plugin.adopted_layers import adopt, adopted_layer
from epochless_vllm.plugin.options import Options

STOCK = "epochless_stock"  # attribute of our replacements that holds what they replaced


def install(options: Options) -> None:
    """Choose the wrapper of CPU engines made later in this process: ours, or vLLM's for ``mixed_rows == "stock"``.

    Raises:
        SeamError: this vLLM has no such wrapper to replace.
    """
    from vllm.lora.layers import BaseLayerWithLoRA  # heavy, and needed by engines only
    from vllm.platforms.cpu import CpuPlatform

    set_mapping, stock_choice = _target(BaseLayerWithLoRA, "set_mapping"), _target(CpuPlatform, "get_punica_wrapper")
    if not hasattr(set_mapping, STOCK):
        BaseLayerWithLoRA.set_mapping = _adopting(set_mapping)
    if options.mixed_rows == "stock":
        CpuPlatform.get_punica_wrapper = getattr(stock_choice, STOCK, stock_choice)
    elif not hasattr(stock_choice, STOCK):
        CpuPlatform.get_punica_wrapper = _choose_ours(stock_choice)


class PunicaWrapperRows(PunicaWrapperBase):  # type: ignore[misc]
    """vLLM's interface to per-row adapters, over ``execution``; one object serves all layers of a model."""

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any
    ) -> None:
        lora_config = kwargs.get("lora_config")
        if lora_config is not None and lora_config.fully_sharded_loras:
            raise ConfigurationError(
                "fully sharded adapters are not served by the grouped CPU operations; drop --fully-sharded-loras",
                flag="fully-sharded-loras",
            )
        super().__init__(max_num_batched_tokens, max_batches, device)
        # The embedding layer reads slot 0's first row for every token, then adds nothing: see add_lora_embedding.
        self._embeddings_indices.zero_()
        self._mapping: Any = None
        self._resident_ids: list[int | None] = []
        self._token_slots = np.zeros(0, np.int64)
        self._token_plan = self._sampler_plan = plan_rows(self._token_slots)
        self._is_stale = False
        self._prompt_hidden: torch.Tensor | None = None
        _hook_prompt_logprobs()

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Group the rows of the coming step."""
        self._mapping, self._resident_ids = mapping, lora_index_to_id
        self._plan_step()

    def slots_changed(self) -> None:
        """Group again before the next use: vLLM skips update_metadata when only the slots have moved."""
        self._is_stale = self._mapping is not None

    def token_plan(self) -> RowPlan:
        """Return the grouping of this step's tokens."""
        if self._is_stale:
            self._plan_step()
        return self._token_plan

    def logits_plan(self, x: torch.Tensor) -> RowPlan:
        """Return the grouping of ``x`` [rows, hidden], the hidden states that logits are computed of."""
        if self._is_stale:
            self._plan_step()
        if self._prompt_hidden is not None:
            return plan_rows(self._token_slots[_rows_of_view(x, self._prompt_hidden)])
        if len(x) != self._sampler_plan.num_rows:
            raise EpochlessError(
                f"logits of {len(x)} rows are computed in a step that samples {self._sampler_plan.num_rows}; "
                "whose rows they are is unknown. Report this as a defect, with the request",
                rows=len(x),
                sampled=self._sampler_plan.num_rows,
            )
        return self._sampler_plan

    @contextmanager
    def prompt_rows(self, hidden: torch.Tensor) -> Iterator[None]:
        """Within, logits are of views into ``hidden`` [tokens of the step, hidden], not of the sampled rows."""
        self._prompt_hidden = hidden
        try:
            yield
        finally:
            self._prompt_hidden = None

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Add every token's delta to ``y`` in place."""
        # A compiled graph keeps what Python saw while it was traced; an operator looks plan and slots up at each call.
        add = torch.ops.epochless.add_adapters if torch.compiler.is_compiling() else _add_to_tokens
        add(y, x, lora_a_stacked[0])

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Add every sampled (or prompt) row's delta to the logits ``y`` in place."""
        weights = adopted_layer(lora_a_stacked).weights
        if weights.row_products:
            add_adapters(y, x, weights, self.logits_plan(x))

    def add_lora_embedding(self, y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Leave embeddings alone: an adapter that changes them is never written to a slot."""

    def add_shrink(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: only fully sharded layers call this, and they are refused at start."""
        raise SeamError("the grouped CPU operations have no separate shrink", target="add_shrink")

    def add_expand(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: only fully sharded layers call this, and they are refused at start."""
        raise SeamError("the grouped CPU operations have no separate expansion", target="add_expand")

    def _plan_step(self) -> None:
        self._token_slots = self._slots_of(self._mapping.index_mapping)
        self._token_plan = plan_rows(self._token_slots)
        self._sampler_plan = plan_rows(self._slots_of(self._mapping.prompt_mapping))
        self._is_stale = False

    def _slots_of(self, ids: tuple[int, ...]) -> np.ndarray:
        try:
            return slots_of_ids(np.array(ids, dtype=np.int64), self._resident_ids)
        except KeyError as error:
            raise EpochlessError(
                f"adapter {error} has rows in this step and no slot: the scheduler and the slots disagree",
                lora_int_id=error.args[0],
                resident=[held for held in self._resident_ids if held],
            ) from error


def _add_to_tokens(y: torch.Tensor, x: torch.Tensor, a_stacked: torch.Tensor) -> None:
    layer = adopted_layer(a_stacked)
    if layer.weights.row_products:
        add_adapters(y, x, layer.weights, layer.step_rows.token_plan())


_OPERATORS = torch.library.Library("epochless", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATORS.define("add_adapters(Tensor(a!) y, Tensor x, Tensor a_stacked) -> ()")  # type: ignore[no-untyped-call]
_OPERATORS.impl("add_adapters", _add_to_tokens, "CPU")  # type: ignore[no-untyped-call]
_OPERATORS.impl("add_adapters", lambda y, x, a_stacked: None, "Meta")  # type: ignore[no-untyped-call]


def _choose_ours(stock_choice: Any) -> Any:
    def get_punica_wrapper(cls: type) -> str:
        return f"{PunicaWrapperRows.__module__}.{PunicaWrapperRows.__qualname__}"

    choice = classmethod(get_punica_wrapper)
    setattr(choice, STOCK, stock_choice)
    return choice


def _adopting(set_mapping: Any) -> Any:
    @wraps(set_mapping)
    def adopting(layer: Any, punica_wrapper: Any) -> None:
        set_mapping(layer, punica_wrapper)
        if isinstance(punica_wrapper, PunicaWrapperRows):
            adopt(layer, punica_wrapper)

    setattr(adopting, STOCK, set_mapping)
    return adopting


def _hook_prompt_logprobs() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the runner that made this model: loaded by now

    stock = _target(GPUModelRunner, "_get_prompt_logprobs_dict")
    if hasattr(stock, STOCK):
        return

    @wraps(stock)
    def get_prompt_logprobs(runner: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        manager = getattr(getattr(runner, "lora_manager", None), "_adapter_manager", None)
        with ExitStack() as stack:
            for wrapper in set(manager.punica_wrapper_mapping.values()) if manager else ():
                if isinstance(wrapper, PunicaWrapperRows):
                    stack.enter_context(wrapper.prompt_rows(hidden_states))
            return stock(runner, hidden_states, *args, **kwargs)

    setattr(get_prompt_logprobs, STOCK, stock)
    GPUModelRunner._get_prompt_logprobs_dict = get_prompt_logprobs


def _rows_of_view(x: torch.Tensor, whole: torch.Tensor) -> slice:
    """Return which rows of ``whole`` the view ``x`` of some of them is."""
    first, rest = divmod(x.data_ptr() - whole.data_ptr(), whole.stride(0) * whole.element_size())
    if rest or not 0 <= first <= len(whole) - len(x):
        raise EpochlessError("prompt logprobs are computed of rows outside this step; report this as a defect")
    return slice(first, first + len(x))


def _target(owner: type, name: str) -> Any:
    if name not in vars(owner):
        raise SeamError(
            f"{owner.__module__}.{owner.__qualname__}.{name} is missing: this is not the pinned vLLM",
            target=f"{owner.__qualname__}.{name}",
        )
    return vars(owner)[name]
