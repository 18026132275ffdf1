"""A front end's receipts without an engine: honest rows made for the key material a stream carries, and its outputs."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from epochless_vllm.plugin import token_rows
from epochless_vllm.plugin.draw_keys import key_of, sampler_of, set_material
from epochless_vllm.plugin.engine_identity import EngineIdentity
from epochless_vllm.plugin.response_receipts import Attestor
from epochless_vllm.plugin.signer import Ed25519Signer
from epochless_vllm.plugin.sink import ReceiptSink
from epochless_vllm.protocol.draws import draw_range
from tests.plugin.front_end import BASE_DIGEST
from tests.protocol.receipt_factory import named_digest

ONE = 1 << 32
STOP_TOKEN = 2
VOCABULARY = 258
PROMPT = [5, 6, 7, 8]
IDENTITY = EngineIdentity(
    name="vllm-test/epochless-test",
    digest=named_digest("engine"),
    base=BASE_DIGEST,  # type: ignore[arg-type]  # a Digest is text
    tokenizer=named_digest("tokenizer"),
    vocab_size=VOCABULARY,
    max_model_len=1024,
)


def make_attestor(store: Path, *, max_bytes: int = 1 << 20, max_age_s: int = 3600) -> Attestor:
    store.mkdir(parents=True, exist_ok=True)
    signer = Ed25519Signer(Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32))
    return Attestor(signer, ReceiptSink(store, max_bytes=max_bytes, max_age_s=max_age_s), IDENTITY)


class FakeEngine:
    """As much of an AsyncLLM as completes sampling parameters."""

    def __init__(self) -> None:
        self.input_processor = SimpleNamespace(generation_config_fields={}, tokenizer=None)
        self.renderer = SimpleNamespace(get_eos_token_id=lambda: STOP_TOKEN)


def honest_rows(params: Any, choice: int, count: int, *, lora: int, first: int = 0) -> np.ndarray:
    """Return rows that the draws of a stream's parameters, as the engine got them, would pick."""
    own = params.clone()
    set_material(own, choice=choice)
    config, rng = sampler_of(own), random.Random(f"{choice}/{first}")
    rows = np.zeros((count, token_rows.COLUMNS), dtype=np.int64)
    rows[:, token_rows.LORA] = lora
    for row, draw in zip(rows, draw_range(key_of(own), first, count), strict=True):
        if config.greedy:
            row[1:] = (0, ONE, token_rows.GREEDY, 0)
            continue
        width = rng.randint(1, ONE)
        low = draw - rng.randint(max(0, draw + width - ONE), min(draw, width - 1))
        row[1:] = (low, width, token_rows.FILTERED if config.filtered else 0, rng.randint(1, ONE) * config.filtered)
    return rows


def output_of(
    request_id: str, index: int, token_ids: Sequence[int], rows: Any, finish: str | None = None, stop: Any = None
) -> Any:
    """Return the RequestOutput of one choice's tokens."""
    from vllm.outputs import CompletionOutput, RequestOutput

    choice = CompletionOutput(index, "", list(token_ids), None, None, finish_reason=finish, stop_reason=stop)
    choice.token_attest = rows if len(token_ids) else None
    return RequestOutput(request_id, None, list(PROMPT), None, [choice], finish is not None)


async def stream_of(outputs: Iterable[Any]) -> AsyncGenerator[Any, None]:
    for output in outputs:
        yield output


def tokens_for(seed: int, count: int) -> list[int]:
    """Return token ids that stop nothing."""
    rng = random.Random(seed)
    return [rng.randrange(STOP_TOKEN + 1, VOCABULARY) for _ in range(count)]
