"""The forward pass: token by token, or many positions at once, each position under the adapter it names.

A position's keys and values are those of the adapter it was computed under; a later position attends to them as they
are, whatever its own adapter. ``rewind`` drops positions so that they can be computed again under others. Both ways of
computing fill the same cache and agree up to rounding. For a 16-bit server every result is rounded where the server
rounds it; see rounding.py. No array is allocated while computing; see buffers.py. Knows no revisions by name, no
sampling and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.errors import ReplayError
from epochless_vllm.reference.arithmetic import gate, normalize, rotate, softmax
from epochless_vllm.reference.buffers import Limits, allocate
from epochless_vllm.reference.lora import Adapter
from epochless_vllm.reference.model import Layer, Linear, Model

Array = NDArray[np.float32]
Adapters = Sequence["Adapter | None"]
Span = tuple[int, int, "Adapter | None"]
"""Rows from the first to before the second, computed under one adapter."""


class Engine:
    """One sequence of one model. Not safe to share between threads; a model may serve many engines."""

    def __init__(self, model: Model, limits: Limits) -> None:
        """Allocate everything the sequence will need.

        Raises:
            ReplayError: the limits are not those of a sequence of this model.
        """
        self.model = model
        self.limits = limits
        self.buffers = allocate(model.config, limits, model.rounding)
        self._length = 0
        self._scale = np.float32(model.config.head_dim**-0.5)

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return self._length

    def rewind(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        if not 0 <= length <= self._length:
            raise ReplayError(f"cannot rewind {self._length} positions to {length}", have=self._length, want=length)
        self._length = length

    def step(self, token: int, adapter: Adapter | None = None) -> Array:
        """Compute one more position; return its logits (vocab,), a view that the next call overwrites.

        Raises:
            ReplayError: no room, a token outside the vocabulary, or an adapter of a greater rank than provided for.
        """
        tokens = self._check([token], [adapter])
        self._embed(tokens)
        self._run_layers(1, [(0, 1, adapter)], self._attend_one)
        self._length += 1
        logits: Array = self._logits(0, 1, [(0, 1, adapter)])[0]
        return logits

    def extend(self, tokens: Sequence[int], adapters: Adapters | Adapter | None = None) -> None:
        """Compute more positions without their logits; arguments and errors as for ``prefill``."""
        for _ in self.prefill(tokens, adapters, logits_from=self._length + len(tokens)):
            raise AssertionError("no logits were asked for")

    def prefill(
        self, tokens: Sequence[int], adapters: Adapters | Adapter | None = None, *, logits_from: int = 0
    ) -> Iterator[tuple[int, Array]]:
        """Compute more positions, many at a time, as the iterator is consumed.

        Args:
            adapters: one for all tokens, or one for each.
            logits_from: the first position, counted from the start of the sequence, whose logits are wanted.

        Yields:
            (position, logits): (rows, vocab) logits of that position and on, a view that the next item overwrites.

        Raises:
            ReplayError: no room, a token outside the vocabulary, or an adapter of a greater rank than provided for.
        """
        each = list(adapters) if isinstance(adapters, Sequence) else [adapters] * len(tokens)
        return self._prefill(self._check(tokens, each), each, self._length, logits_from)

    def _prefill(
        self, tokens: NDArray[np.int64], adapters: Adapters, start: int, logits_from: int
    ) -> Iterator[tuple[int, Array]]:
        rows, block = self.buffers.hidden.shape[0], self.buffers.logits.shape[0]
        for begin in range(0, len(tokens), rows):
            first, count = start + begin, min(rows, len(tokens) - begin)
            if first != self._length:
                raise ReplayError("the engine was used before its prefill was consumed to the end")
            spans = _spans(adapters[begin : begin + count])
            self._embed(tokens[begin : begin + count])
            self._run_layers(count, spans, self._attend_many)
            self._length += count
            for row in range(max(0, min(count, logits_from - first)), count, block):
                yield first + row, self._logits(row, min(row + block, count), spans)

    def _check(self, tokens: Sequence[int], adapters: Adapters) -> NDArray[np.int64]:
        ids = np.asarray(tokens) if len(tokens) else np.zeros(0, np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) != len(adapters):
            raise ReplayError("tokens must be integers, with one adapter for all or one for each")
        vocab, room = self.model.config.vocab, self.limits.positions - self._length
        if len(ids) > room:
            raise ReplayError(f"{len(ids)} tokens do not fit the {room} positions left", need=len(ids), have=room)
        outside = ids[(ids < 0) | (ids >= vocab)]
        if outside.size:
            raise ReplayError(f"token {outside[0]} is not one of the {vocab} of this model", token=int(outside[0]))
        rank = max((adapter.max_rank for adapter in set(adapters) if adapter is not None), default=0)
        if rank > self.limits.rank:
            raise ReplayError(f"an adapter of rank {rank}, {self.limits.rank} provided for", rank=rank)
        return ids.astype(np.int64)

    def _embed(self, tokens: NDArray[np.int64]) -> None:
        # "clip" writes straight to ``out``; the ids have been checked.
        np.take(self.model.embedding, tokens, axis=0, out=self.buffers.hidden[: len(tokens)], mode="clip")

    def _run_layers(self, count: int, spans: list[Span], attend: Callable[[int, int], None]) -> None:
        with np.errstate(over="ignore"):  # exp overflows in silu of a very negative gate, whose limit is zero
            for index, layer in enumerate(self.model.layers):
                self._attention(index, layer, count, spans, attend)
                self._mlp(layer, count, spans)

    def _attention(
        self, index: int, layer: Layer, count: int, spans: list[Span], attend: Callable[[int, int], None]
    ) -> None:
        config, b = self.model.config, self.buffers
        hidden, normed = b.hidden[:count], b.normed[:count]
        q, k, v = b.q[:count], b.k[:count], b.v[:count]
        normalize(b.arithmetic, hidden, layer.input_norm, config.norm_epsilon, normed, b.sums[:count])
        b.arithmetic.round(hidden)  # not before: a server's norm reads the sum it has just added up
        self._linear(layer.q, normed, spans, q)
        self._linear(layer.k, normed, spans, k)
        self._linear(layer.v, normed, spans, v)
        self._place_heads(q, layer.q_norm, config.heads)
        self._place_heads(k, layer.k_norm, config.kv_heads)
        begin, end, size = self._length, self._length + count, config.head_dim
        for head in range(config.kv_heads):
            b.keys[index, head, begin:end] = k[:, head * size : (head + 1) * size]
            b.values[index, head, begin:end] = v[:, head * size : (head + 1) * size]
        attend(index, count)
        b.arithmetic.round(b.context[:count])
        self._linear(layer.o, b.context[:count], spans, normed)
        hidden += normed

    def _place_heads(self, x_TQ: Array, norm: Array | None, heads: int) -> None:
        """Normalize each head where the family does, and turn it by its position."""
        b, count, size = self.buffers, x_TQ.shape[0], self.model.config.head_dim
        if norm is not None:
            by_head, out = x_TQ.reshape(count * heads, size), b.context[:count].reshape(-1)[: x_TQ.size]
            out = out.reshape(by_head.shape)
            normalize(b.arithmetic, by_head, norm, self.model.config.norm_epsilon, out, b.sums[: count * heads])
            by_head[...] = out
        at = slice(self._length, self._length + count)
        pairs = count * heads * (size // 2)
        first = b.rotation[:pairs].reshape(count, heads, size // 2)
        second = b.rotation[pairs : 2 * pairs].reshape(count, heads, size // 2)
        rotate(x_TQ.reshape(count, heads, size), b.cosines[at], b.sines[at], first, second)
        b.arithmetic.round(x_TQ)

    def _attend_one(self, index: int, count: int) -> None:
        """Attend from the one position being computed to all positions up to it, one query head after another."""
        config, b, size = self.model.config, self.buffers, self.model.config.head_dim
        seen = self._length + count
        scores = b.scores[:seen].reshape(1, seen)
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            columns = slice(head * size, (head + 1) * size)
            b.arithmetic.product(b.q[:1, columns], b.keys[index, shared, :seen], scores)
            scores *= self._scale
            softmax(b.arithmetic, scores, b.sums[:1])
            b.arithmetic.product(scores, b.values[index, shared, :seen].T, b.context[:1, columns])

    def _attend_many(self, index: int, count: int) -> None:
        """Attend from each of ``count`` new positions to all positions up to it."""
        config, b, size = self.model.config, self.buffers, self.model.config.head_dim
        known, seen = self._length, self._length + count
        scores = b.scores[: count * seen].reshape(count, seen)
        queries, contexts = (x[:count].reshape(count, config.kv_heads, -1, size) for x in (b.q, b.context))
        for shared in range(config.kv_heads):
            keys, values = b.keys[index, shared, :seen], b.values[index, shared, :seen]
            for member in range(queries.shape[2]):
                b.arithmetic.product(queries[:, shared, member], keys, scores)
                scores *= self._scale
                scores[:, known:] += b.mask[:count, :count]
                softmax(b.arithmetic, scores, b.sums[:count])
                b.arithmetic.product(scores, values.T, contexts[:, shared, member])

    def _mlp(self, layer: Layer, count: int, spans: list[Span]) -> None:
        b = self.buffers
        hidden, normed = b.hidden[:count], b.normed[:count]
        gates, ups = b.gate[:count], b.up[:count]
        normalize(b.arithmetic, hidden, layer.post_norm, self.model.config.norm_epsilon, normed, b.sums[:count])
        b.arithmetic.round(hidden)
        self._linear(layer.gate, normed, spans, gates)
        self._linear(layer.up, normed, spans, ups)
        gate(gates, ups, b.scratch[:count], b.arithmetic)
        self._linear(layer.down, gates, spans, normed)
        hidden += normed

    def _logits(self, begin: int, end: int, spans: list[Span]) -> Array:
        b = self.buffers
        normed, logits = b.normed[begin:end], b.logits[: end - begin]
        epsilon = self.model.config.norm_epsilon
        normalize(b.arithmetic, b.hidden[begin:end], self.model.norm, epsilon, normed, b.sums[: end - begin])
        inside = [(max(a, begin) - begin, min(z, end) - begin, each) for a, z, each in spans if a < end and z > begin]
        self._linear(self.model.head, normed, inside, logits)
        return logits

    def _linear(self, linear: Linear, x_TI: Array, spans: list[Span], out_TO: Array) -> None:
        """Write a base module's output plus, for each span of rows, its own adapter's."""
        b = self.buffers
        b.arithmetic.product(x_TI, linear.weight, out_TO)
        if linear.bias is not None:
            out_TO += linear.bias
        b.arithmetic.round(out_TO)
        for begin, end, adapter in spans:
            factors = None if adapter is None else adapter.modules.get(linear.module)
            if factors is None:
                continue
            rows, rank, outputs = end - begin, factors.a.shape[0], factors.b.shape[0]
            low = b.low_rank[: rows * rank].reshape(rows, rank)
            delta = b.delta[: rows * outputs].reshape(rows, outputs)
            b.arithmetic.product(x_TI[begin:end], factors.a, low)
            low *= np.float32(factors.scaling)
            b.arithmetic.product(low, factors.b, delta)
            out_TO[begin:end] += delta
            b.arithmetic.round(out_TO[begin:end])


def _spans(adapters: Adapters) -> list[Span]:
    """Return maximal runs of rows with the same adapter."""
    starts = [row for row, adapter in enumerate(adapters) if row == 0 or adapter is not adapters[row - 1]]
    return [(begin, end, adapters[begin]) for begin, end in zip(starts, [*starts[1:], len(adapters)], strict=True)]
