"""Replay of a verified receipt: the forward pass again, every recorded row held against it.

1. The model's files are the header's base model; the digest says in which dtype the server held it.
2. The prompt is the header's.
3. Every revision is read from the store under the digest that the receipt names, and hashed.
4. Each position is computed under the revision the receipt says computed it (mixture.py).
5. Every sampled row is the recorded one within tolerance (reference/rows.py): the token's probability, both ends of its
   interval, the kept mass; the draw lies in the recorded interval and in the recomputed one.
6. Over windows of tokens and over all of them, errors are no larger than rounding makes them (findings.py), and go no
   one way: neither that of another temperature nor, in 16 bits, away from what the weights give unrounded (series.py).

Rows under a grammar, a list of allowed tokens or a custom processor are not replayable; they are counted by reason and
keep the verdict below REPLAYED, as does a sample of the positions. Shares nothing with the server but file formats.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from epochless_vllm.errors import ModelRefusedError, ReceiptError
from epochless_vllm.protocol.draws import draw_range
from epochless_vllm.protocol.header import Header, prompt_digest, reveal_key
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.records import FILTERED, FORCED, MASKED, ONE
from epochless_vllm.protocol.spans import BASE_PREFIX
from epochless_vllm.reference.buffers import Limits
from epochless_vllm.reference.contrasts import with_contrasts
from epochless_vllm.reference.forward import Engine
from epochless_vllm.reference.lora import Adapter, adapter_from_revision
from epochless_vllm.reference.model import Model, load_model
from epochless_vllm.reference.processors import Processors, unknown_processor
from epochless_vllm.reference.rounding import Rounding
from epochless_vllm.reference.rows import Record, RowResult, Tolerance, compare_rows
from epochless_vllm.reference.sequences import replay_mixture
from epochless_vllm.store.base_model import BaseSettings, identify_base
from epochless_vllm.store.revisions import RevisionStore
from epochless_vllm.verify.findings import Replay, summarise
from epochless_vllm.verify.mixture import REBUILT, Pass, passes_of, revision_at
from epochless_vllm.verify.verified import Verdict, VerifiedReceipt

Progress = Callable[[int], None]

# At least twice the worst row, window and whole that honest CPU engines were measured to give, eager (float16: eager
# only) and compiled; see README.md. benchmarks/audit_detection.py measures the eager ones again.
TOLERANCES = {
    "float32": Tolerance(absolute=1e-4, relative=2e-5, drift=0.1),
    "bfloat16": Tolerance(absolute=0.06, relative=0.024, drift=0.11),
    "float16": Tolerance(absolute=0.01, relative=0.004, drift=0.11),
}


class Auditor:
    """One base model and a store, ready for any number of receipts; safe to share between threads."""

    def __init__(
        self, model: Path | str, base: str, store: RevisionStore | None, *, tolerance: Tolerance | None = None
    ) -> None:
        """Load a model directory as the server of ``base`` did.

        Args:
            base: the base digest of the receipts to come.
            store: where revisions are; None if only the base model is expected.
            tolerance: of the server's logits; default by its dtype.

        Raises:
            DigestMismatchError: the directory is not that base model.
            ModelRefusedError: the reference engine does not compute this model, or the server quantised its KV.
            ConfigurationError: the model is not a local directory.
        """
        settings = identify_base(model, base)  # (1)
        _refuse_rounded_kv(settings)
        self.base = base
        self.settings = settings
        self.tolerance = tolerance or TOLERANCES[settings.dtype]
        self.model: Model = load_model(model, _ROUNDINGS[settings.dtype])
        # The same weights, shared. In 16 bits a tolerance of the caller's says itself what roundings do.
        self._plain = None if tolerance or settings.dtype == "float32" else replace(self.model, rounding="float32")
        self._sums = self._plain is not None or settings.dtype == "float32"
        self._store = store
        self._adapters: dict[str, Adapter | None] = {BASE_PREFIX + base: None}
        self._lock = threading.Lock()

    def adapter(self, revision: str) -> Adapter | None:
        """Return the adapter of a table row, None for the base model.

        Raises:
            ReceiptError: the row names another base model, or there is no store to take a revision from.
            UnknownRevisionError, DigestMismatchError: the store does not hold it, or not whole.
        """
        with self._lock:  # (3)
            if revision not in self._adapters:
                if revision.startswith(BASE_PREFIX) or self._store is None:
                    raise ReceiptError(
                        f"{revision} is needed and there is no store to read it from; give the server's store",
                        threat="base_mismatch" if revision.startswith(BASE_PREFIX) else "replay_revision",
                    )
                stored = self._store.read(RevisionId(revision))
                self._adapters[revision] = adapter_from_revision(
                    stored, self.model.config, _ROUNDINGS[self.settings.dtype]
                )
            return self._adapters[revision]

    def replay(
        self,
        receipt: VerifiedReceipt,
        prompt: Sequence[int],
        *,
        positions: Collection[int] | None = None,
        progress: Progress | None = None,
    ) -> Replay:
        """Recompute a verified receipt and compare its rows; see ``compare`` for arguments and errors."""
        results, reasons = self.compare(receipt, prompt, positions=positions, progress=progress)
        return summarise(receipt, self.tolerance, results, reasons)  # (6)

    def compare(
        self,
        receipt: VerifiedReceipt,
        prompt: Sequence[int],
        *,
        positions: Collection[int] | None = None,
        progress: Progress | None = None,
    ) -> tuple[dict[int, RowResult], dict[str, int]]:
        """Return how each row compares, by token position, and how many rows cannot be recomputed, by reason.

        Args:
            receipt: complete, verified with ``keep_blocks``.
            prompt: the request's token ids.
            positions: the token positions to compare; default all.
            progress: told how many more rows are done.

        Raises:
            ReceiptError: the receipt is not for this base, this prompt or this vocabulary, or cannot be replayed.
            ReplayError: the sequence does not fit the model.
        """
        header, final = receipt.header, receipt.final
        if final is None or receipt.verdict is Verdict.INCOMPLETE:
            raise ReceiptError("an incomplete receipt is not replayed", threat="incomplete")
        if sum(block.count for block in receipt.blocks) != receipt.tokens:
            raise ValueError("verify with keep_blocks=True to replay")
        self._check_header(header, prompt)
        rows = _rows_of(receipt)
        wanted = set(range(len(rows))) if positions is None else set(positions) & set(range(len(rows)))
        reasons: Counter[str] = Counter()
        plan = passes_of(final, prompt_length=len(prompt), mode=header.on_publish)
        for at in sorted(wanted):
            reason = rows[at].unreplayable(header)
            if reason is None and not any(each.start <= at < each.end for each in plan):
                reason = REBUILT
            if reason is not None:
                reasons[reason] += 1
                wanted.discard(at)
        adapters = {index: self.adapter(receipt.table[index]) for index in _used(plan, rows, wanted)}
        results: dict[int, RowResult] = {}
        for each in plan:
            for at, result in self._run(each, receipt, prompt, rows, wanted, adapters):
                results[at] = result
                if progress is not None:
                    progress(1)
        return results, dict(reasons)

    def _check_header(self, header: Header, prompt: Sequence[int]) -> None:
        if header.base != self.base:
            raise ReceiptError(f"the receipt is of base {header.base}, not {self.base}", threat="base_mismatch")
        if len(prompt) != header.prompt_length or prompt_digest(prompt) != header.prompt:  # (2)
            raise ReceiptError(
                "the prompt is not the receipt's; give the request's token ids", threat="prompt_mismatch"
            )
        if header.vocab_size != self.model.config.vocab:
            raise ReceiptError(
                f"a vocabulary of {header.vocab_size}, the model has {self.model.config.vocab}",
                threat="token_out_of_vocabulary",
            )

    def _run(
        self,
        each: Pass,
        receipt: VerifiedReceipt,
        prompt: Sequence[int],
        rows: Sequence[_Row],
        wanted: set[int],
        adapters: dict[int, Adapter | None],
    ) -> Iterator[tuple[int, RowResult]]:
        """Yield (token position, result) of the wanted tokens of one pass."""
        inside = [at for at in range(each.start, each.end) if at in wanted]
        if not inside:
            return
        length, offset = len(prompt) + inside[-1], len(prompt) - 1
        output = [row.record.token for row in rows]
        cached = [adapters[index] for index in revision_at(each.kv, length)]  # (4)
        sampled = list(cached)
        for at in range(each.start, inside[-1] + 1):
            sampled[offset + at] = adapters.get(rows[at].revision, cached[offset + at])
        rank = max((adapter.max_rank for adapter in {*cached, *sampled} if adapter is not None), default=0)
        engines = [Engine(model, Limits(length, rank=rank)) for model in (self.model, self._plain) if model is not None]
        samplers = [
            None
            if unknown_processor(each.processors)
            else Processors(each.processors, prompt, receipt.header.vocab_size)
            for each in receipt.header.samplers
        ]
        tokens = [*prompt, *output[: inside[-1]]]
        blocks = [replay_mixture(each, tokens, cached, sampled, logits_from=offset + inside[0]) for each in engines]
        for (first, block), *beside in zip(*blocks, strict=True):
            plain = beside[0][1] if beside else None
            picked = [at for at in range(first - offset, first - offset + len(block)) if at in wanted]
            for group in _by_sampler(picked, rows):  # (5)
                config = receipt.header.samplers[rows[group[0]].sampler]
                processors = samplers[rows[group[0]].sampler]
                here = [at - (first - offset) for at in group]
                logits, unrounded = block[here], None if plain is None else plain[here]
                reach = [self.tolerance.of_row(row) for row in logits]
                if processors is not None and processors.active:
                    tables = [logits] if unrounded is None else [logits, unrounded]
                    for at, *pair in zip(group, *tables, strict=True):
                        for row in pair:
                            processors.apply(row, output, at)
                records = [rows[at].record for at in group]
                results = compare_rows(logits, config, records, reach)
                if self._sums:
                    results = with_contrasts(results, logits, unrounded, config, records, reach)
                yield from zip(group, results, strict=True)


@dataclass(frozen=True)
class _Row:
    """A receipt's row in the words of reference/rows.py, with its table indices and flags."""

    record: Record
    revision: int
    sampler: int
    flags: int

    def unreplayable(self, header: Header) -> str | None:
        if self.flags & FORCED:
            return "forced"
        unknown = unknown_processor(header.samplers[self.sampler].processors)
        return unknown or ("masked" if self.flags & MASKED else None)


_ROUNDINGS: dict[str, Rounding] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


def _refuse_rounded_kv(settings: BaseSettings) -> None:
    if settings.kv_cache_dtype not in ("auto", settings.dtype):
        raise ModelRefusedError(
            f"the server kept its KV as {settings.kv_cache_dtype} beside {settings.dtype} weights; the reference "
            "engine keeps it in the weights' dtype, so honest rows would not be its own",
            field="kv_cache_dtype",
        )


def _rows_of(receipt: VerifiedReceipt) -> list[_Row]:
    final = receipt.final
    assert final is not None
    key = reveal_key(receipt.header, final.seed)
    draws = [0] * receipt.tokens if key is None else draw_range(key, 0, receipt.tokens)
    rows: list[_Row] = []
    for block in receipt.blocks:
        at, kept = 0, iter(block.kept_less_one)
        for run in block.runs:
            for _ in range(run.rows):
                mass = next(kept) + 1 if run.flags & FILTERED else ONE
                record = Record(block.tokens[at], block.low[at], block.width_less_one[at] + 1, mass, draws[len(rows)])
                rows.append(_Row(record, run.revision, run.sampler, run.flags))
                at += 1
    return rows


def _used(plan: Sequence[Pass], rows: Sequence[_Row], wanted: set[int]) -> set[int]:
    """Return the table rows that the passes of the wanted tokens need."""
    needed = [each for each in plan if any(each.start <= at < each.end for at in wanted)]
    return {rows[at].revision for at in wanted} | {span.revision for each in needed for span in each.kv}


def _by_sampler(positions: Sequence[int], rows: Sequence[_Row]) -> Iterator[list[int]]:
    group: list[int] = []
    for at in positions:
        if group and rows[at].sampler != rows[group[-1]].sampler:
            yield group
            group = []
        group.append(at)
    if group:
        yield group
