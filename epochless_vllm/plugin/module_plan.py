"""How the engine's LoRA modules consume an adapter: which source feeds which slice, and which shard is this rank's.

Derived from the layers' kinds and full sizes with our own arithmetic, so that a slot read back from the device can be
compared with bytes cut out of the file independently of the engine's loader. Knows no adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epochless_vllm.errors import RefusedAdapterError, SeamError


@dataclass(frozen=True)
class SlicePlan:
    """One slice of a LoRA module.

    Attributes:
        source: the module name an adapter's tensors carry for it, in the engine's naming.
        input_size: columns of a whole A.
        output_size: rows of a whole B.
        columns: the columns of A this rank keeps, as (begin, end).
        rows: the row ranges of B this rank keeps, concatenated in order.
    """

    source: str
    input_size: int
    output_size: int
    columns: tuple[int, int]
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ModulePlan:
    """One LoRA module of the engine and its slices, in slot order."""

    name: str
    slices: tuple[SlicePlan, ...]


def plan_modules(manager: Any) -> tuple[ModulePlan, ...]:
    """Return the plan of every LoRA module of a vLLM LoRAModelManager, sorted by name.

    Raises:
        SeamError: a layer of a kind this version does not know.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    plans = []
    for name, module in sorted(manager.modules.items()):
        if type(getattr(module, "base_layer", None)) is VocabParallelEmbedding:
            continue  # embedding adapters are refused: their tensors match no planned module
        sources = manager.packed_modules.get(name, [name])
        plans.append(ModulePlan(name, _plan_slices(name, module, sources)))
    return tuple(plans)


def sources_of(plans: tuple[ModulePlan, ...]) -> Mapping[str, SlicePlan]:
    """Return slices by the source module that feeds them."""
    return {item.source: item for plan in plans for item in plan.slices}


def _plan_slices(name: str, module: Any, sources: list[str]) -> tuple[SlicePlan, ...]:
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )

    if isinstance(module, LogitsProcessorWithLoRA):
        vocabulary = module.base_layer.vocab_size
        return (_whole(sources[0], module.hidden_size, vocabulary),)
    base = getattr(module, "base_layer", None)
    if isinstance(base, RowParallelLinear):
        share = base.input_size // base.tp_size
        columns = (base.tp_rank * share, (base.tp_rank + 1) * share)
        return (SlicePlan(sources[0], base.input_size, base.output_size, columns, ((0, base.output_size),)),)
    if isinstance(base, QKVParallelLinear):
        return _plan_qkv(name, base, sources)
    if isinstance(base, MergedColumnParallelLinear):
        return _plan_merged(name, base, list(base.output_sizes), sources)
    if isinstance(base, ColumnParallelLinear):
        return _plan_merged(name, base, [base.output_size], sources)
    if isinstance(base, ReplicatedLinear):
        return (_whole(sources[0], base.input_size, base.output_size),)
    raise _unplanned(name, module)


def _unplanned(name: str, module: Any) -> SeamError:
    kind = type(module).__name__
    return SeamError(
        f"{name}: LoRA layer {kind} is not covered; narrow --lora-target-modules or serve another model",
        target=name,
        kind=kind,
    )


def _whole(source: str, input_size: int, output_size: int) -> SlicePlan:
    return SlicePlan(source, input_size, output_size, (0, input_size), ((0, output_size),))


def _plan_qkv(name: str, base: Any, sources: list[str]) -> tuple[SlicePlan, ...]:
    size, rank, parts = base.head_size, base.tp_rank, base.tp_size
    queries, keys = base.total_num_heads, base.total_num_kv_heads
    query_share = queries // parts * size
    # With fewer key-value heads than ranks a head is held by several ranks.
    key_share = max(1, keys // parts) * size
    key_index = rank * keys // parts if keys < parts else rank
    wholes = (queries * size, keys * size, keys * size)
    owned = (
        (rank * query_share, (rank + 1) * query_share),
        (key_index * key_share, (key_index + 1) * key_share),
        (key_index * key_share, (key_index + 1) * key_share),
    )
    if len(sources) == 3:
        return tuple(
            SlicePlan(source, base.input_size, whole, (0, base.input_size), (rows,))
            for source, whole, rows in zip(sources, wholes, owned, strict=True)
        )
    if len(sources) != 1:
        raise _unplanned(name, base)
    offsets = (0, wholes[0], wholes[0] + wholes[1])
    rows = tuple((offset + begin, offset + end) for offset, (begin, end) in zip(offsets, owned, strict=True))
    return (SlicePlan(sources[0], base.input_size, sum(wholes), (0, base.input_size), rows),)


def _plan_merged(name: str, base: Any, wholes: list[int], sources: list[str]) -> tuple[SlicePlan, ...]:
    def share(whole: int) -> tuple[int, int]:
        part = whole // base.tp_size
        return base.tp_rank * part, (base.tp_rank + 1) * part

    if len(sources) == len(wholes):
        return tuple(
            SlicePlan(source, base.input_size, whole, (0, base.input_size), (share(whole),))
            for source, whole in zip(sources, wholes, strict=True)
        )
    if len(sources) != 1:
        raise _unplanned(name, base)
    rows, offset = [], 0
    for whole in wholes:
        begin, end = share(whole)
        rows.append((offset + begin, offset + end))
        offset += whole
    return (SlicePlan(sources[0], base.input_size, offset, (0, base.input_size), tuple(rows)),)


def check_coverage(plans: tuple[ModulePlan, ...], shapes: Mapping[str, tuple[int, int, int]]) -> None:
    """Require that an adapter's modules are exactly modules of the engine, whole layers, of exactly their shapes.

    Args:
        shapes: (rank, input size, output size) by source module.

    Raises:
        RefusedAdapterError: naming the modules, and what the engine has instead.
    """
    slices = sources_of(plans)
    if unknown := sorted(set(shapes) - set(slices)):
        raise RefusedAdapterError(
            f"{len(unknown)} modules of the adapter match no module of the model, first {unknown[0]}; "
            f"the model has {_examples(slices)}",
            reason="unconsumed_tensor",
            modules=unknown[:20],
        )
    for source, (rank, input_size, output_size) in sorted(shapes.items()):
        want = slices[source]
        if (input_size, output_size) != (want.input_size, want.output_size):
            raise RefusedAdapterError(
                f"{source}: A is {rank}x{input_size} and B {output_size}x{rank}; the model's module takes "
                f"{want.input_size} inputs and gives {want.output_size} outputs",
                reason="shape_mismatch",
                module=source,
            )
    _check_layers(slices, shapes)


def _check_layers(slices: Mapping[str, SlicePlan], shapes: Mapping[str, tuple[int, int, int]]) -> None:
    kinds = {source.rsplit(".", 1)[-1] for source in shapes}
    missing = sorted(source for source in slices if source.rsplit(".", 1)[-1] in kinds and source not in shapes)
    if missing:
        raise RefusedAdapterError(
            f"the adapter trains {missing[0].rsplit('.', 1)[-1]} but lacks {len(missing)} of its modules, first "
            f"{missing[0]}; save the adapter with all its layers",
            reason="missing_layer",
            modules=missing[:20],
        )


def _examples(slices: Mapping[str, SlicePlan]) -> str:
    names = sorted(slices)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
