"""What only several receipts together reveal: a seed used twice, and two stories about one choice.

Takes verified receipts. Knows nothing of where they were collected: the more, the more it can see.
"""

from __future__ import annotations

from collections.abc import Iterable

from epochless_vllm.errors import ReceiptError
from epochless_vllm.verify.verified import VerifiedReceipt


def verify_together(receipts: Iterable[VerifiedReceipt]) -> tuple[VerifiedReceipt, ...]:
    """Return the receipts if no two contradict each other; a copy of a receipt contradicts nothing.

    Draw keys contain request id, nonce and choice, so two requests share a key only if they are told apart by none of
    these, which is a contradiction already; a server that reuses a request's secret seed is refused beside it. The
    choices of one request share its seed, and seeded requests may share theirs: a seed is meant to reproduce.

    Raises:
        ReceiptError: two receipts speak of one choice of one request, or two unseeded requests reveal one seed.
    """
    seen: dict[str, VerifiedReceipt] = {}
    choices: dict[tuple[object, ...], str] = {}
    seeds: dict[bytes, tuple[object, ...]] = {}
    for receipt in receipts:
        header, final = receipt.header, receipt.final
        if final is None or final.receipt_id in seen:
            continue
        name = final.receipt_id
        seen[name] = receipt
        request = (header.request_id, header.nonce)
        choice = (*request, header.prompt_index, header.choice_index)
        if choice in choices:
            raise ReceiptError(
                f"{choices[choice]} and {name} speak of the same choice of {header.request_id}",
                threat="conflicting_receipts",
            )
        choices[choice] = name
        if isinstance(final.seed, bytes) and seeds.setdefault(final.seed, request) != request:
            raise ReceiptError(f"{name} reveals the seed of another request", threat="seed_reused")
    return tuple(seen.values())
