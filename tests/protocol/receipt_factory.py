"""Receipts made from a seed, honest in every row, for tests, golden vectors and benchmarks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from epochless_vllm.protocol.builder import ReceiptBuilder
from epochless_vllm.protocol.digests import Digest
from epochless_vllm.protocol.draws import draw_range
from epochless_vllm.protocol.envelope import key_id
from epochless_vllm.protocol.header import NO_DRAWS, SEEDED, UNSEEDED, Header, prompt_digest, reveal_key
from epochless_vllm.protocol.receipts import LENGTH, Receipt
from epochless_vllm.protocol.records import FILTERED, FORCED, ONE
from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters
from epochless_vllm.protocol.spans import PIN, KVSpan, RevisionEntry

PROMPT = (1, 2, 3, 5, 8, 13, 21)
NONCE = "nonce-of-the-client-0001"
REQUEST_SEED = bytes(range(32))
STOP_TOKEN = 2
VOCABULARY = 151_936


class TestSigner:
    """Signs with a key derived from one byte, so that vectors regenerate to the same bytes."""

    __test__ = False  # not a test class, whatever its name

    def __init__(self, identity: int = 1) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes([identity]) * 32)
        self.public_key = self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.keyid = key_id(self.public_key)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


SIGNER = TestSigner()


def named_digest(name: str) -> Digest:
    return Digest("sha256:" + hashlib.sha256(name.encode()).hexdigest())


def entry(name: str, step: int, policy: str = "math") -> RevisionEntry:
    return RevisionEntry(named_digest(name), policy, step)


SAMPLED = sampler_from_parameters(temperature=1.0)
NUCLEUS = sampler_from_parameters(temperature=0.7, top_p=0.95)
GREEDY = sampler_from_parameters(temperature=0.0)


def make_header(
    *,
    sampler: SamplerConfig = SAMPLED,
    max_tokens: int = 200,
    on_publish: str = PIN,
    request_id: str = "cmpl-3f1a",
    nonce: str | None = NONCE,
    draw_kind: str | None = None,
    revisions: Sequence[RevisionEntry] = (entry("revision-a", 7),),
    **changes: object,
) -> Header:
    kind = draw_kind or (NO_DRAWS if sampler.greedy else UNSEEDED)
    header = Header(
        engine_name="vllm-0.25.1+cpu/epochless-0.1.0",
        engine_digest=named_digest("engine"),
        base=named_digest("base"),
        tokenizer=named_digest("tokenizer"),
        vocab_size=VOCABULARY,
        prompt=prompt_digest(PROMPT),
        prompt_length=len(PROMPT),
        prompt_index=0,
        choice_index=0,
        request_id=request_id,
        nonce=nonce,
        max_tokens=max_tokens,
        stop_token_ids=(STOP_TOKEN,),
        on_publish=on_publish,
        revisions=tuple(revisions),
        samplers=(sampler,),
        draw_kind=kind,
    )
    return replace(header, **changes)  # type: ignore[arg-type]


def seed_of(header: Header) -> int | bytes | None:
    return {SEEDED: 1234, UNSEEDED: REQUEST_SEED, NO_DRAWS: None}[header.draw_kind]


def make_rows(
    header: Header, first: int, count: int, rng: random.Random, *, sharpness: float = 4.0
) -> tuple[list[int], list[int], list[int]]:
    """Return honest (tokens, low, width): every draw lies in its interval.

    ``sharpness`` is how peaked the distribution is: width is ``1 - u**sharpness`` of the mass.
    """
    tokens = [rng.randrange(3, header.vocab_size) for _ in range(count)]
    key = reveal_key(header, seed_of(header))
    if key is None:
        return tokens, [0] * count, [ONE] * count
    low, width = [], []
    for draw in draw_range(key, first, count):
        size = max(1, min(ONE, round((1 - rng.random() ** sharpness) * ONE)))
        start = draw - rng.randint(max(0, draw + size - ONE), min(draw, size - 1))
        low.append(start)
        width.append(size)
    return tokens, low, width


def make_receipt(
    tokens: int = 100,
    *,
    header: Header | None = None,
    finish_reason: str = LENGTH,
    rng_seed: int = 0,
    signer: TestSigner = SIGNER,
    last_token: int | None = None,
    moves: Sequence[tuple[int, RevisionEntry]] = (),
    flags: Sequence[tuple[int, int]] = (),
    kv: Sequence[KVSpan] | None = None,
    kv_rebuilds: int = 0,
    step: int = 1,
) -> Receipt:
    """Return a signed receipt.

    Args:
        moves: (position, entry): from that position on the revision samples.
        flags: (position, flags): from that position on rows carry these besides FILTERED.
        step: rows appended at a time.
    """
    if header is None:
        header = make_header(max_tokens=tokens)
    rng = random.Random(rng_seed)
    builder = ReceiptBuilder(header)
    ids, low, width = make_rows(header, 0, tokens, rng)
    if last_token is not None:
        ids[-1] = last_token
    revision, mark = 0, 0
    for start in range(0, tokens, step):
        for position, moved in moves:
            if start <= position < start + step:
                revision = builder.revision_index(moved)
        for position, changed in flags:
            if start <= position < start + step:
                mark = changed
        end = min(start + step, tokens)
        row_low, row_width = low[start:end], width[start:end]
        marks = mark
        if mark & FORCED:
            row_low, row_width = [0] * (end - start), [ONE] * (end - start)
        elif header.samplers[0].filtered:
            marks |= FILTERED
        kept = [rng.randint(ONE * 95 // 100, ONE) for _ in range(end - start)] if marks & FILTERED else []
        builder.append(ids[start:end], row_low, row_width, revision=revision, flags=marks, kept=kept)
    return builder.seal(finish_reason, signer, seed=seed_of(header), kv=kv, kv_rebuilds=kv_rebuilds)
