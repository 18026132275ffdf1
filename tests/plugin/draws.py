"""Draws and records recomputed without the serving code: keys from their definition, the sampler from reference/."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.protocol.sampler_config import SamplerConfig
from epochless_vllm.reference import philox, sampler

Logits = NDArray[np.float32]


def oracle_key(context: str, *fields: bytes) -> tuple[int, int]:
    """Return the key as its definition reads: tagged, length-prefixed fields under SHA-256."""
    text = context.encode() + b"\0" + b"".join(struct.pack(">Q", len(field)) + field for field in fields)
    word_0, word_1 = struct.unpack("<II", hashlib.sha256(text).digest()[:8])
    return word_0, word_1


def seeded(seed: int, *, prompt: int = 0, choice: int = 0) -> tuple[int, int]:
    return oracle_key("epochless/v1/draw-key/seeded", *(str(n).encode() for n in (seed, prompt, choice)))


def unseeded(material: Mapping[str, Any]) -> tuple[int, int]:
    """Return the key of a request whose whole contract is ``material``."""
    indices = [str(material[name]).encode() for name in ("prompt", "choice")]
    texts = [material[name].encode() for name in ("nonce", "request")]
    return oracle_key("epochless/v1/draw-key/unseeded", bytes.fromhex(material["seed"]), *texts, *indices)


def expected_rows(logits: Logits, config: SamplerConfig, key: tuple[int, int]) -> tuple[list[int], list[list[int]]]:
    """Return the tokens and ``[lo, w, kept]`` that positions 0, 1, … of a choice draw from their rows of logits."""
    draws = np.array([philox.draw(key, position) for position in range(len(logits))], dtype=np.int64)
    records = sampler.sample_rows(np.asarray(logits, dtype=np.float32), config, draws)
    assert not records.status.any()
    kept = records.kept if config.filtered else np.zeros_like(records.kept)
    return records.token.tolist(), np.stack([records.lo, records.w, kept], axis=1).tolist()


def penalised(
    logits: Logits, prompt: Sequence[int], tokens: Sequence[int], repetition: float, frequency: float, presence: float
) -> Logits:
    """Return rows of raw logits after the three penalties, in float32, row i what token i was drawn from."""
    rows = np.array(logits, dtype=np.float32)
    one = np.float32(1)
    for position, row in enumerate(rows):
        counts = np.bincount(tokens[:position], minlength=rows.shape[1]).astype(np.float32)
        seen = (counts > 0) | (np.bincount(prompt, minlength=rows.shape[1]) > 0)
        factor = np.where(seen, np.float32(repetition), one)
        row *= np.where(row > 0, one / factor, factor)
        row -= np.float32(frequency) * counts
        row -= np.float32(presence) * (counts > 0)
    return rows
