"""A server made of the reference engine: it decodes token by token, errs a little, and signs receipts of what it did.

``rounding`` adds Gaussian noise to every logit of every step, as another summation order does. What it computes may be
other than what it claims: the model, adapter, temperature or position it uses are separate from those of the header.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from epochless_vllm.protocol.builder import ReceiptBuilder
from epochless_vllm.protocol.digests import Digest
from epochless_vllm.protocol.draws import draw_range
from epochless_vllm.protocol.header import NO_DRAWS, UNSEEDED, Header, prompt_digest, reveal_key
from epochless_vllm.protocol.receipts import LENGTH, Receipt
from epochless_vllm.protocol.records import FILTERED
from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters
from epochless_vllm.protocol.spans import BASE_PREFIX, KVSpan, RevisionEntry
from epochless_vllm.protocol.verbose import encode_verbose
from epochless_vllm.reference.buffers import Limits
from epochless_vllm.reference.forward import Engine
from epochless_vllm.reference.lora import Adapter
from epochless_vllm.reference.model import Model
from epochless_vllm.reference.sampler import sample_rows
from epochless_vllm.store.base_model import BaseSettings, compute_base_digest
from epochless_vllm.verify.receipt import verify_receipt
from epochless_vllm.verify.verified import VerifiedReceipt
from tests.protocol.receipt_factory import SIGNER, make_header

PLAIN = sampler_from_parameters(temperature=1.0)


def base_of(directory: Path, cache: Path, dtype: str = "float32", kv: str = "auto") -> Digest:
    """Return the base digest a server started on a directory would sign."""
    settings = BaseSettings(dtype, kv_cache_dtype=kv)
    return compute_base_digest(directory, settings.encode(), mode="full", cache_directory=cache)


@dataclass
class Server:
    """One model that claims to be ``base``.

    Attributes:
        model: what it computes with.
        rounding: standard deviation of the error of one logit.
        quantise: applied to the whole KV cache after each step, in place.
        tokenizer: the digest it claims; default one of no files.
    """

    model: Model
    base: Digest
    rounding: float = 0.0
    seed: int = 0
    quantise: Any = None
    tokenizer: Digest | None = None

    def header(self, prompt: Sequence[int], entries: Sequence[RevisionEntry], tokens: int, **changes: Any) -> Header:
        sampler = changes.pop("sampler", PLAIN)
        header = make_header(
            sampler=sampler,
            max_tokens=tokens,
            revisions=tuple(entries),
            request_id=changes.pop("request_id", f"cmpl-{self.seed}"),
            draw_kind=NO_DRAWS if sampler.greedy else UNSEEDED,
            **changes,
        )
        return replace(
            header,
            base=self.base,
            tokenizer=self.tokenizer or header.tokenizer,
            vocab_size=self.model.config.vocab,
            prompt=prompt_digest(prompt),
            prompt_length=len(prompt),
            stop_token_ids=(),
        )

    def base_entry(self) -> RevisionEntry:
        return RevisionEntry(BASE_PREFIX + self.base, None, None)

    def answer(
        self,
        prompt: Sequence[int],
        tokens: int,
        *,
        entry: RevisionEntry | None = None,
        adapter: Adapter | None = None,
        claimed: SamplerConfig = PLAIN,
        used: SamplerConfig | None = None,
        computed_prompt: Sequence[int] | None = None,
        cached: tuple[int, Adapter | None] | None = None,
        processors: Any = None,
        flags: int = 0,
        **changes: Any,
    ) -> Receipt:
        """Return the signed receipt of one pinned request of exactly ``tokens`` tokens.

        Args:
            entry: the revision it claims; default the base.
            adapter: what it computes with.
            claimed, used: the sampler of the header, and the one that runs; default the same.
            computed_prompt: the prompt that it computes, if another than it was given.
            cached: how many of its tokens come from a prefix cache, and what had computed them.
            processors: called as ``(logits, output, position)`` before sampling.
        """
        header = self.header(prompt, [entry or self.base_entry()], tokens, sampler=claimed, **changes)
        start = list(prompt if computed_prompt is None else computed_prompt)
        engine = Engine(self.model, Limits(len(start) + tokens, rank=adapter.max_rank if adapter else 0))
        builder, output = ReceiptBuilder(header), []
        draws, noise = self._draws(header, tokens), np.random.default_rng(self.seed)
        if cached is not None:
            engine.extend(start[: cached[0]], cached[1])
        for _, block in engine.prefill(start[engine.length :], adapter, logits_from=len(start) - 1):
            logits = block[-1]
        for position in range(tokens):
            row = self._row(logits, noise)
            if processors is not None:
                processors(row, output, position)
            self._emit(builder, row, used or claimed, claimed, draws[position], output, flags=flags)
            if position + 1 < tokens:
                logits = engine.step(output[-1], adapter)
                if self.quantise is not None:
                    self.quantise(engine)
        return builder.seal(LENGTH, SIGNER, seed=self._seed(header))

    def continued(
        self,
        prompt: Sequence[int],
        moves: Sequence[tuple[int, RevisionEntry, Adapter | None]],
        tokens: int,
        *,
        mode: str,
        rebuilt_at: int | None = None,
    ) -> Receipt:
        """Return the receipt of a request that moves to other revisions before some tokens.

        Args:
            moves: (token position, entry, adapter) in order, the first at 0.
            mode: "recompute" discards the KV at each move, "continue" keeps it.
            rebuilt_at: a token before which the KV is discarded and computed again by the revision then current.
        """
        header = self.header(prompt, [moves[0][1]], tokens, on_publish=mode)
        rank = max((adapter.max_rank for _, _, adapter in moves if adapter), default=0)
        engine = Engine(self.model, Limits(len(prompt) + tokens, rank=rank))
        builder, output = ReceiptBuilder(header), []
        draws, noise = self._draws(header, tokens), np.random.default_rng(self.seed)
        kv: list[int] = []
        index, adapter = 0, moves[0][2]
        for position in range(tokens):
            for at, entry, moved in moves:
                if at == position:
                    index, adapter = builder.revision_index(entry), moved
                    if position and mode == "recompute":
                        kv.clear()
            if position == rebuilt_at:
                kv.clear()
            engine.rewind(len(kv))
            missing = [*prompt, *output][len(kv) :]
            for _, block in engine.prefill(missing, adapter, logits_from=len(prompt) + position - 1):
                logits = block[-1]
            kv += [index] * len(missing)
            self._emit(builder, self._row(logits, noise), PLAIN, PLAIN, draws[position], output, revision=index)
        spans: list[KVSpan] = []
        for at, revision in enumerate(kv):
            if spans and spans[-1].revision == revision:
                spans[-1] = spans[-1]._replace(end=at + 1)
            else:
                spans.append(KVSpan(at, at + 1, revision))
        rebuilds = int(rebuilt_at is not None)
        return builder.seal(LENGTH, SIGNER, seed=self._seed(header), kv=spans, kv_rebuilds=rebuilds)

    def _row(self, logits: np.ndarray, noise: np.random.Generator) -> np.ndarray:
        error = self.rounding * noise.standard_normal(len(logits)) if self.rounding else 0.0
        row: np.ndarray = (logits + error).astype(np.float32)
        return row

    def _emit(
        self,
        builder: ReceiptBuilder,
        row: np.ndarray,
        used: SamplerConfig,
        claimed: SamplerConfig,
        draw: int,
        output: list[int],
        *,
        flags: int = 0,
        revision: int = 0,
    ) -> None:
        record = sample_rows(row[None], used, np.array([draw]))
        output.append(int(record.token[0]))
        mark = flags | (FILTERED if claimed.filtered else 0)
        kept = [int(record.kept[0])] if claimed.filtered else []
        builder.append(
            output[-1:], [int(record.lo[0])], [int(record.w[0])], kept=kept, flags=mark, revision=revision
        )  # fmt: skip

    def _seed(self, header: Header) -> bytes | None:
        return None if header.draw_kind == NO_DRAWS else random.Random(self.seed).randbytes(32)

    def _draws(self, header: Header, count: int) -> list[int]:
        key = reveal_key(header, self._seed(header))
        return [0] * count if key is None else draw_range(key, 0, count)


def verified(receipt: Receipt) -> VerifiedReceipt:
    """Return the receipt as the verifier lets it through, with its rows."""
    return verify_receipt(encode_verbose(receipt), public_key=SIGNER.public_key, keep_blocks=True)
