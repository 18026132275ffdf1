"""The header of a receipt: what is fixed before the first token and opens every leaf of the tree.

Promises one canonical form, that its fields do not contradict each other, and that the draw key follows from the
header and the revealed seed. Does not know which of its claims a caller expects: see verify/.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from epochless_vllm.errors import EncodingError, ReceiptError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.columns import column, encode_column
from epochless_vllm.protocol.digests import Digest, bytes_from_digest, digest
from epochless_vllm.protocol.draws import DrawKey, seeded_key, unseeded_key
from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_value
from epochless_vllm.protocol.shapes import (
    read_choice,
    read_digest,
    read_integer,
    read_list,
    read_object,
    read_text,
)
from epochless_vllm.protocol.spans import BASE_PREFIX, CONTINUE, MAX_REVISIONS, PIN, RECOMPUTE, RevisionEntry

FORMAT = "epochless/receipt/v1"
ALGORITHM = "philox4x32-10"
MAX_TOKENS = 1 << 40  # far above any context; keeps every position exact in JSON
MAX_VOCABULARY = 1 << 22  # the sampler's own bound
MIN_NONCE, MAX_NONCE = 16, 128  # characters
SEEDED, UNSEEDED, NO_DRAWS = "seeded", "unseeded", "none"


def prompt_digest(token_ids: Iterable[int]) -> Digest:
    """Return the digest of a prompt's token ids."""
    return digest("epochless/v1/prompt", encode_column(column(token_ids)))


def seed_commitment(request_seed: bytes) -> Digest:
    """Return the commitment to a request's 32-byte seed, for publication before the request."""
    return digest("epochless/v1/seed-commitment", request_seed)


@dataclass(frozen=True)
class Header:
    """What is fixed before the first token.

    Attributes:
        engine_name, engine_digest: the build that served: a name for readers, a digest for comparison.
        base, tokenizer: digests of the base model and the tokenizer.
        max_tokens: the effective limit on output tokens, context length included.
        stop_token_ids: ids that end the response, ascending; without the end-of-sequence id where it was ignored.
        nonce: the client's, or None.
        revisions: the table at admission; blocks may add rows.
        draw_kind: "seeded", "unseeded", or "none" where every sampler is greedy.
        commitment: of the unseeded request's seed, where one was published before the request.
    """

    engine_name: str
    engine_digest: Digest
    base: Digest
    tokenizer: Digest
    vocab_size: int
    prompt: Digest
    prompt_length: int
    prompt_index: int
    choice_index: int
    request_id: str
    nonce: str | None
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    on_publish: str
    revisions: tuple[RevisionEntry, ...]
    samplers: tuple[SamplerConfig, ...]
    draw_kind: str
    commitment: Digest | None = None

    def encode_json(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "choice_index": self.choice_index,
            "draws": {"algorithm": ALGORITHM, "commitment": self.commitment, "kind": self.draw_kind},
            "engine": {"digest": self.engine_digest, "name": self.engine_name},
            "format": FORMAT,
            "max_tokens": self.max_tokens,
            "nonce": self.nonce,
            "on_publish": self.on_publish,
            "prompt": {"digest": self.prompt, "length": self.prompt_length},
            "prompt_index": self.prompt_index,
            "request_id": self.request_id,
            "revisions": [entry.encode() for entry in self.revisions],
            "samplers": [sampler.describe() for sampler in self.samplers],
            "stop_token_ids": list(self.stop_token_ids),
            "tokenizer": self.tokenizer,
            "vocab_size": self.vocab_size,
        }

    @cached_property
    def encoded(self) -> bytes:
        """The header's canonical bytes."""
        return encode_canonical(self.encode_json())

    @cached_property
    def digest(self) -> Digest:
        return digest("epochless/v1/header", self.encoded)

    @cached_property
    def digest_bytes(self) -> bytes:
        """The raw 32 bytes that open every leaf."""
        return bytes_from_digest(self.digest)


def decode_header(value: Any) -> Header:
    """Return the header of a JSON value.

    Raises:
        ReceiptError: a field is missing, unknown, malformed, or contradicts another.
    """
    if isinstance(value, dict) and value.get("format") != FORMAT:
        raise ReceiptError(f"format is not {FORMAT}", threat="format")
    fields = read_object(value, _HEADER_KEYS, "header")
    draws = read_object(fields["draws"], ("algorithm", "commitment", "kind"), "draws")
    engine = read_object(fields["engine"], ("digest", "name"), "engine")
    prompt = read_object(fields["prompt"], ("digest", "length"), "prompt")
    vocab_size = read_integer(fields["vocab_size"], "vocab_size", minimum=1, maximum=MAX_VOCABULARY)
    stops = [read_integer(item, "stop_token_ids") for item in read_list(fields["stop_token_ids"], "stop_token_ids")]
    if any(later <= earlier for earlier, later in pairwise(stops)):
        raise ReceiptError("stop_token_ids are not ascending", threat="not_canonical")
    if stops and stops[-1] >= vocab_size:
        raise ReceiptError("a stop token is outside the vocabulary", threat="token_out_of_vocabulary")
    read_choice(draws["algorithm"], "draws.algorithm", (ALGORITHM,), threat="draw_algorithm")
    header = Header(
        engine_name=read_text(engine["name"], "engine.name"),
        engine_digest=read_digest(engine["digest"], "engine.digest"),
        base=read_digest(fields["base"], "base"),
        tokenizer=read_digest(fields["tokenizer"], "tokenizer"),
        vocab_size=vocab_size,
        prompt=read_digest(prompt["digest"], "prompt.digest"),
        prompt_length=read_integer(prompt["length"], "prompt.length", minimum=1, maximum=MAX_TOKENS),
        prompt_index=read_integer(fields["prompt_index"], "prompt_index"),
        choice_index=read_integer(fields["choice_index"], "choice_index"),
        request_id=read_text(fields["request_id"], "request_id"),
        nonce=None
        if fields["nonce"] is None
        else read_text(fields["nonce"], "nonce", minimum=MIN_NONCE, maximum=MAX_NONCE),
        max_tokens=read_integer(fields["max_tokens"], "max_tokens", maximum=MAX_TOKENS),
        stop_token_ids=tuple(stops),
        on_publish=read_choice(fields["on_publish"], "on_publish", (PIN, RECOMPUTE, CONTINUE)),
        revisions=tuple(
            RevisionEntry.decode(entry) for entry in read_list(fields["revisions"], "revisions", at_most=MAX_REVISIONS)
        ),
        samplers=tuple(_sampler(item) for item in read_list(fields["samplers"], "samplers", at_most=16)),
        draw_kind=read_choice(draws["kind"], "draws.kind", (SEEDED, UNSEEDED, NO_DRAWS)),
        commitment=None if draws["commitment"] is None else read_digest(draws["commitment"], "draws.commitment"),
    )
    _check_header(header)
    return header


def reveal_key(header: Header, seed: int | bytes | None) -> DrawKey | None:
    """Return the draw key that a revealed seed gives, or None where nothing is drawn.

    Raises:
        ReceiptError: the seed is not of the header's kind, or not the one the header committed to.
    """
    kinds: dict[str, type] = {SEEDED: int, UNSEEDED: bytes, NO_DRAWS: type(None)}
    if not isinstance(seed, kinds[header.draw_kind]):
        raise ReceiptError(f"the revealed seed is not that of {header.draw_kind} draws", threat="seed_kind")
    if isinstance(seed, int):
        return seeded_key(seed=seed, prompt_index=header.prompt_index, choice_index=header.choice_index)
    if seed is None:
        return None
    if header.commitment is not None and seed_commitment(seed) != header.commitment:
        raise ReceiptError("the revealed seed is not the one committed to", threat="seed_commitment")
    return unseeded_key(
        request_seed=seed,
        client_nonce=(header.nonce or "").encode("ascii"),
        external_request_id=header.request_id,
        prompt_index=header.prompt_index,
        choice_index=header.choice_index,
    )


def check_entry(entry: RevisionEntry, header: Header) -> None:
    """Raise ReceiptError if a table row names a base model other than the header's."""
    if entry.policy is None and entry.revision != BASE_PREFIX + header.base:
        raise ReceiptError("a table row names another base model", threat="table_entry")


_HEADER_KEYS = (
    "base", "choice_index", "draws", "engine", "format", "max_tokens", "nonce", "on_publish", "prompt", "prompt_index",
    "request_id", "revisions", "samplers", "stop_token_ids", "tokenizer", "vocab_size",
)  # fmt: skip


def _sampler(value: Any) -> SamplerConfig:
    try:
        return sampler_from_value(value)
    except EncodingError as error:
        raise ReceiptError(error.message, threat="sampler_form") from error


def _check_header(header: Header) -> None:
    if not header.revisions or not header.samplers:
        raise ReceiptError("an empty revision or sampler table", threat="missing_field")
    if len({entry.revision for entry in header.revisions}) != len(header.revisions):
        raise ReceiptError("the revision table names a revision twice", threat="table_duplicate")
    for entry in header.revisions:
        check_entry(entry, header)
    if len({sampler.digest for sampler in header.samplers}) != len(header.samplers):
        raise ReceiptError("the sampler table names a sampler twice", threat="table_duplicate")
    if (header.draw_kind == NO_DRAWS) != all(sampler.greedy for sampler in header.samplers):
        raise ReceiptError(f"draws of kind {header.draw_kind} beside these samplers", threat="draw_kind")
    if header.commitment is not None and header.draw_kind != UNSEEDED:
        raise ReceiptError("only an unseeded request commits to a seed", threat="draw_kind")
