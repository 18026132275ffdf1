"""What the rows of one step draw with, and the rows beside their tokens.

Each request's parameters, key and flags are packed once, when it enters the runner, and stay with the runner's state of
it; a batch's arrays are stacked when its members change; a step adds positions and adapters. A position is the number
of tokens the request has emitted, so preemption, chunked prefill, discarded samples and neighbours cannot move a draw.

Knows vLLM's input batch by its fields, and nothing of logits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from epochless_vllm.plugin.draw_keys import key_of, sampler_of
from epochless_vllm.plugin.token_rows import COLUMNS, FAILED, FILTERED, FLAGS, GREEDY, KEPT, LO, LORA, RESTRICTED, W
from epochless_vllm.protocol.draws import DrawKey
from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters
from epochless_vllm.sampling import OK, Sampled, parameter_row
from epochless_vllm.sampling import rows as columns

_PACKED = "_epochless_draws"  # the attribute of a CachedRequestState that holds its PackedRequest

Integers = NDArray[np.int64]


class PackedRequest(NamedTuple):
    """One request's sampler as the kernels read it, its draw key, and the flags of all its rows."""

    parameters: Integers
    key: DrawKey
    flags: int


@lru_cache(maxsize=4096)
def _packed_sampler(config: SamplerConfig) -> tuple[Integers, int]:
    return parameter_row(config), (GREEDY if config.greedy else 0) | (FILTERED if config.filtered else 0)


def pack_request(params: Any, *, restricted: bool) -> PackedRequest:
    """Return the packed form of a request's SamplingParams.

    Args:
        restricted: whether a processor of the engine's own may have changed any row.

    Raises:
        InvalidRequestError: the request passed no gate.
    """
    parameters, flags = _packed_sampler(sampler_of(params))
    restricted = restricted or params.structured_outputs is not None or bool(params.allowed_token_ids)
    if restricted or params.thinking_token_budget is not None:
        flags |= RESTRICTED
    return PackedRequest(parameters, key_of(params), flags)


class DrawBatch:
    """The arrays of a runner's current batch of B rows.

    Attributes:
        parameters, keys, positions: ``[B, 8]``, ``[B, 2]`` and ``[B]``, as ``sampling.sample_rows`` takes them.
        flags: each row's flags, ``[B]`` int64, on the host.
    """

    parameters: Integers
    keys: NDArray[np.uint32]
    positions: Integers
    flags: Integers

    def __init__(self, device: torch.device | str, *, restricted: bool) -> None:
        self._device = torch.device(device)
        self._restricted = restricted
        self._members: Any = None
        self._loras: Integers

    def refresh(self, batch: Any, requests: dict[str, Any]) -> None:
        """Take in the step that is about to be sampled.

        Args:
            batch: the runner's InputBatch, after the forward pass and before the tokens are added.
            requests: the runner's state of each request, by id.
        """
        rows = batch.num_reqs
        if batch.sampling_metadata is not self._members:  # vLLM makes a new one whenever a row changes its place
            self._stack([self._packed(requests[request_id]) for request_id in batch.req_ids])
            self._members = batch.sampling_metadata
        self.positions = (batch.num_tokens_no_spec[:rows] - batch.num_prompt_tokens[:rows]).astype(np.int64)
        self._loras = batch.request_lora_mapping[:rows].astype(np.int64)  # a copy: the next step may change it

    def fill(self, rows: int) -> None:
        """Stand in for a step where vLLM measures a batch that is no request's."""
        config = sampler_from_parameters(temperature=0.5, top_p=0.9)
        parameters, flags = _packed_sampler(config)
        self._stack([PackedRequest(parameters, DrawKey(0, row), flags) for row in range(rows)])
        self._members = None
        self.positions = self._loras = np.zeros(rows, dtype=np.int64)

    def rows_of(self, sampled: Sampled) -> torch.Tensor:
        """Return the rows of a step's tokens, ``[B, 1, 5]`` int64, on the device that sampled."""
        if sampled.records.device.type == "cpu":  # a tenth of the cost: NumPy's operations start sooner
            return torch.from_numpy(self._rows_on_host(sampled.records.numpy()))
        return self._rows_on_device(sampled)

    def _rows_on_host(self, records: Integers) -> Integers:
        rows = np.empty((len(records), 1, COLUMNS), dtype=np.int64)
        rows[:, 0, LORA] = self._loras
        rows[:, 0, LO] = records[:, columns.LO]
        rows[:, 0, W] = records[:, columns.W]
        rows[:, 0, FLAGS] = self.flags + (records[:, columns.STATUS] != OK) * FAILED
        rows[:, 0, KEPT] = records[:, columns.KEPT] * self._kept
        return rows

    def _rows_on_device(self, sampled: Sampled) -> torch.Tensor:
        rows = sampled.records.new_empty((len(sampled.tokens), 1, COLUMNS))
        rows[:, 0, LORA] = torch.as_tensor(self._loras, device=self._device)
        rows[:, 0, LO] = sampled.lo
        rows[:, 0, W] = sampled.w
        torch.add(self._flags, (sampled.status != OK).to(torch.int64), alpha=FAILED, out=rows[:, 0, FLAGS])
        torch.mul(sampled.kept, self._filtered, out=rows[:, 0, KEPT])
        return rows

    def _packed(self, request: Any) -> PackedRequest:
        packed: PackedRequest | None = getattr(request, _PACKED, None)
        if packed is None:
            packed = pack_request(request.sampling_params, restricted=self._restricted)
            setattr(request, _PACKED, packed)
        return packed

    def _stack(self, packed: list[PackedRequest]) -> None:
        self.parameters = np.stack([request.parameters for request in packed])
        self.keys = np.array([request.key for request in packed], dtype=np.uint32)
        self.flags = np.array([request.flags for request in packed], dtype=np.int64)
        self._flags = torch.as_tensor(self.flags, device=self._device)
        self._kept = (self.flags & FILTERED) // FILTERED
        self._filtered = torch.as_tensor(self._kept, device=self._device)
