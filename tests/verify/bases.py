"""The honest receipts that mutants start from, and what a caller of each knows."""

from __future__ import annotations

from functools import cache
from typing import Any

from epochless_vllm.protocol.header import SEEDED
from epochless_vllm.protocol.receipts import ABORT, STOP, Receipt
from epochless_vllm.protocol.records import FORCED, MASKED
from epochless_vllm.protocol.spans import CONTINUE, RECOMPUTE
from epochless_vllm.protocol.verbose import encode_verbose
from tests.protocol.receipt_factory import (
    GREEDY,
    NONCE,
    NUCLEUS,
    SIGNER,
    STOP_TOKEN,
    entry,
    make_header,
    make_receipt,
)

MOVES = ((70, entry("revision-b", 8)), (130, entry("revision-c", 9)))

_RECEIPTS = {
    "sampled": lambda: make_receipt(150),
    "stopped": lambda: make_receipt(90, header=make_header(), finish_reason=STOP, last_token=STOP_TOKEN),
    "seeded": lambda: make_receipt(80, header=make_header(max_tokens=80, draw_kind=SEEDED)),
    "greedy": lambda: make_receipt(80, header=make_header(max_tokens=80, sampler=GREEDY), rng_seed=1),
    "nucleus": lambda: make_receipt(
        100,
        header=make_header(max_tokens=100, sampler=NUCLEUS),
        flags=[(10, MASKED), (30, 0), (66, FORCED), (67, MASKED)],
    ),
    "continued": lambda: make_receipt(200, header=make_header(on_publish=CONTINUE), moves=MOVES),
    "recomputed": lambda: make_receipt(200, header=make_header(on_publish=RECOMPUTE), moves=MOVES),
    "aborted": lambda: make_receipt(0, header=make_header(), finish_reason=ABORT),
    "single": lambda: make_receipt(1),
    "two_blocks": lambda: make_receipt(128),
}
NAMES = tuple(_RECEIPTS)


@cache
def base_receipt(name: str) -> Receipt:
    return _RECEIPTS[name]()


@cache
def verbose_of(name: str) -> bytes:
    return encode_verbose(base_receipt(name))


def tokens_of(name: str) -> list[int]:
    return [token for block in base_receipt(name).blocks for token in block.tokens]


def known() -> dict[str, Any]:
    """What every client knows: the server's key and its own nonce."""
    return {"public_key": SIGNER.public_key, "nonce": NONCE}
