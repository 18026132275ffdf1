"""What only several receipts together reveal: reused draws, and two stories about one choice.

Takes verified receipts. Knows nothing of where they were collected: the more, the more it can see.
"""

from __future__ import annotations

from collections.abc import Iterable

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.draws import DrawKey
from epochless_vllm.protocol.header import UNSEEDED, reveal_key
from epochless_vllm.verify.verified import VerifiedReceipt


def verify_together(receipts: Iterable[VerifiedReceipt]) -> tuple[VerifiedReceipt, ...]:
    """Return the receipts if no two contradict each other; a copy of a receipt contradicts nothing.

    Seeded requests may share a key: a seed is meant to reproduce.

    Raises:
        ReceiptError: two receipts speak of one choice of one request, or two requests drew from one key.
    """
    seen: dict[str, VerifiedReceipt] = {}
    choices: dict[tuple[object, ...], str] = {}
    keys: dict[DrawKey, str] = {}
    for receipt in receipts:
        header, final = receipt.header, receipt.final
        if final is None or final.receipt_id in seen:
            continue
        name = final.receipt_id
        seen[name] = receipt
        choice = (header.request_id, header.nonce, header.prompt_index, header.choice_index)
        if choice in choices:
            raise ReceiptError(
                f"{choices[choice]} and {name} speak of the same choice of {header.request_id}",
                threat="conflicting_receipts",
            )
        choices[choice] = name
        key = reveal_key(header, final.seed) if header.draw_kind == UNSEEDED and final.tokens else None
        if key is not None and key in keys:
            raise ReceiptError(f"{keys[key]} and {name} drew from one key", threat="key_reused")
        if key is not None:
            keys[key] = name
    return tuple(seen.values())
