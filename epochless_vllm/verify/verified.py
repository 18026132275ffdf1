"""What verification returns: the verdict, what vouches for it, what was not checked, and the verified claims."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from epochless_vllm.protocol.header import Header
from epochless_vllm.protocol.receipts import Final
from epochless_vllm.protocol.records import Block


class Verdict(enum.Enum):
    """How much was established. A stronger verdict includes the weaker ones; only the last says logits were right."""

    INCOMPLETE = "INCOMPLETE"
    """A stream without its final record: blocks are well-formed, nothing binds them."""
    INTEGRITY = "INTEGRITY"
    """Every byte is bound to the tree root and the final record; draws were not recomputed."""
    SAMPLING_CONSISTENT = "SAMPLING-CONSISTENT"
    """INTEGRITY, and the revealed seed's draws pick every token from its recorded interval."""
    REPLAYED = "REPLAYED"
    """SAMPLING-CONSISTENT, and every row is the one that the named weights give, within a stated tolerance."""


@dataclass(frozen=True)
class VerifiedReceipt:
    """The verified value of a receipt.

    Attributes:
        anchor: what makes the receipt more than self-consistent: "signature", "receipt_id" or "none".
        caveats: what was not checked, in words; empty if the caller pinned everything.
        tokens: output tokens covered.
        table: revision names by table index.
        final: None if the verdict is INCOMPLETE.
        blocks: the rows, where the caller asked to keep them.
    """

    verdict: Verdict
    anchor: str
    caveats: tuple[str, ...]
    header: Header = field(repr=False)
    final: Final | None = field(repr=False)
    tokens: int
    table: tuple[str, ...]
    blocks: tuple[Block, ...] = field(default=(), repr=False)

    @property
    def receipt_id(self) -> str | None:
        return None if self.final is None else self.final.receipt_id


def describe(verified: VerifiedReceipt) -> dict[str, Any]:
    """Return a verified receipt as a JSON-encodable value, for ``epochless verify --json`` and logs."""
    header, final = verified.header, verified.final
    names = verified.table
    return {
        "anchor": verified.anchor,
        "base": header.base,
        "caveats": list(verified.caveats),
        "choice_index": header.choice_index,
        "finish_reason": final.finish_reason if final else None,
        "kv": [{"version": names[s.revision], "start": s.start, "end": s.end} for s in final.kv] if final else None,
        "nonce": header.nonce,
        "prompt_index": header.prompt_index,
        "receipt_id": verified.receipt_id,
        "request_id": header.request_id,
        "tokens": verified.tokens,
        "verdict": verified.verdict.value,
        "weight_versions": [
            {
                "version": names[span.revision],
                "step": _steps(verified)[span.revision],
                "start": span.start,
                "end": span.end,
            }
            for span in final.sampling
        ]
        if final
        else None,
    }


def _steps(verified: VerifiedReceipt) -> list[int | None]:
    added = verified.final.added if verified.final else ()
    return [entry.step for entry in (*verified.header.revisions, *(entry for _, entry in added))]
