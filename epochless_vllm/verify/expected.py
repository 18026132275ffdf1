"""What the caller knows from elsewhere and a receipt must agree with.

A receipt alone proves only that it agrees with itself. Each field here pins one of its claims to something the
verifier's caller already holds: a key, the nonce it sent, the tokens it received. Fields left out are not checked and
the verdict says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.header import SEEDED, Header, prompt_digest
from epochless_vllm.protocol.receipts import Final
from epochless_vllm.protocol.sampler_config import SamplerConfig
from epochless_vllm.protocol.spans import merge
from epochless_vllm.verify.response import ResponseClaims, read_response

UNSIGNED = "unpinned: no public key and no receipt id was given, so anyone could have made this receipt"
UNCHECKED_SEED = "the request's seed was not given: a seed chosen by server looks the same"
SERVER_SEED = "seed chosen by server"
UNCHECKED_NONCE = "the nonce was not given: an old receipt of the same request would verify"
UNCHECKED_TOKENS = "the response was not given: the receipt may belong to another"


@dataclass(frozen=True)
class Expected:
    """Everything a caller may pin.

    Attributes:
        public_key: raw 32-byte Ed25519 key of the server.
        receipt_id: id learned over another channel.
        nonce, request_id: as sent, as answered.
        token_ids: output tokens received; prompt_token_ids: as sent.
        finish_reason: the response's word: stop, length, abort, repetition.
        base, tokenizer: digests the caller trusts.
        revisions: revision ids that may have sampled or computed KV.
        sampler: the sampler that was asked for.
        logprobs: behaviour log-probabilities as told to a trainer.
        seed: the request's seed; seed_commitment: as published before the request.
        response: bytes of an OpenAI-style response; ``resolve`` reads them into ``claims`` and the fields above.
    """

    public_key: bytes | None = None
    receipt_id: str | None = None
    nonce: str | None = None
    request_id: str | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    finish_reason: str | None = None
    logprobs: Sequence[Decimal] | None = None
    base: str | None = None
    tokenizer: str | None = None
    revisions: frozenset[str] | None = None
    sampler: SamplerConfig | None = None
    seed: int | None = None
    seed_commitment: str | None = None
    response: bytes | None = None
    claims: ResponseClaims | None = None

    def resolve(self, header: Header) -> Expected:
        """Return these expectations with the response's claims about the header's choice in their fields."""
        if self.response is None:
            return self
        claims = read_response(self.response, header.choice_index, header.prompt_index)
        return replace(
            self,
            claims=claims,
            token_ids=claims.token_ids if self.token_ids is None else self.token_ids,
            finish_reason=self.finish_reason or claims.finish_reason,
            logprobs=claims.logprobs if self.logprobs is None else self.logprobs,
        )

    def check_header(self, header: Header) -> None:
        """Raise ReceiptError where a header contradicts what is expected."""
        prompt = None if self.prompt_token_ids is None else prompt_digest(self.prompt_token_ids)
        for subject, wanted, actual, threat in (
            ("nonce", self.nonce, header.nonce, "nonce_mismatch"),
            ("request id", self.request_id, header.request_id, "request_id_mismatch"),
            ("base", self.base, header.base, "base_mismatch"),
            ("tokenizer", self.tokenizer, header.tokenizer, "tokenizer_mismatch"),
            ("prompt", prompt, header.prompt, "prompt_mismatch"),
            ("seed commitment", self.seed_commitment, header.commitment, "seed_commitment"),
        ):
            if wanted is not None and wanted != actual:
                raise ReceiptError(f"{subject}: expected {wanted}, the receipt says {actual}", threat=threat)
        if self.prompt_token_ids is not None and len(self.prompt_token_ids) != header.prompt_length:
            raise ReceiptError("the prompt has another length", threat="prompt_mismatch")
        if self.sampler is not None and any(sampler != self.sampler for sampler in header.samplers):
            raise ReceiptError("the sampler is not the one that was asked for", threat="sampler_mismatch")

    def check_final(self, header: Header, final: Final, table: Sequence[str]) -> None:
        """Raise ReceiptError where a final record contradicts what is expected; ``table`` holds revision names."""
        if self.receipt_id is not None and self.receipt_id != final.receipt_id:
            raise ReceiptError(
                f"receipt id: expected {self.receipt_id}, this is {final.receipt_id}", threat="receipt_id"
            )
        if self.seed is not None and self.seed != final.seed:
            raise ReceiptError("seed: the draws do not come from the one given", threat="seed_mismatch")
        if self.revisions is not None and (strangers := set(table) - self.revisions):
            raise ReceiptError(f"revision: {min(strangers)} was not expected to serve", threat="revision_mismatch")
        if self.claims is not None:
            self._check_claims(self.claims, final, table)
        reason = final.finish_reason.split("_")[0]  # the response says "stop" for stop tokens and stop strings alike
        if self.finish_reason is not None and self.finish_reason != reason:
            raise ReceiptError(
                f"finish reason: expected {self.finish_reason}, the receipt says {reason}", threat="finish_mismatch"
            )

    @staticmethod
    def _check_claims(claims: ResponseClaims, final: Final, table: Sequence[str]) -> None:
        spans = merge((span.start, span.end, span.revision) for span in final.sampling)
        served = tuple((table[span.revision], span.start, span.end) for span in spans)
        if claims.weight_versions is not None and claims.weight_versions != served:
            raise ReceiptError("the response names other weight versions", threat="revision_mismatch")
        if claims.receipt_id is not None and claims.receipt_id != final.receipt_id:
            raise ReceiptError("the response names another receipt", threat="receipt_id")

    def caveats(self, header: Header) -> tuple[str, ...]:
        """Return what was not checked, in words."""
        notes = []
        if self.public_key is None and self.receipt_id is None:
            notes.append(UNSIGNED)
        if self.nonce is None:
            notes.append(UNCHECKED_NONCE)
        if self.token_ids is None:
            notes.append(UNCHECKED_TOKENS)
        if header.draw_kind == SEEDED and self.seed is None:
            notes.append(UNCHECKED_SEED)
        if header.draw_kind == "unseeded" and self.seed_commitment is None:
            notes.append(SERVER_SEED)
        return tuple(notes)


def compare_tokens(expected: Sequence[int], actual: Sequence[int], first: int) -> None:
    """Compare the receipt's tokens from position ``first`` with the response's, and name the difference.

    Args:
        expected: the whole response.
        actual: the tokens of one block.

    Raises:
        ReceiptError: with the threat that explains the difference best.
    """
    end = first + len(actual)
    wanted = expected[first:end]
    if list(wanted) == list(actual):
        return
    place = next((i for i, pair in enumerate(zip(wanted, actual, strict=False)) if pair[0] != pair[1]), len(wanted))
    rest, given = list(expected[first + place : end + 1]), list(actual[place:])
    where = f"at position {first + place}"
    if not rest:
        raise ReceiptError(f"the receipt goes on after the response {where}", threat="token_inserted")
    if given[1:] == rest[1 : len(given)] and len(rest) >= len(given):
        raise ReceiptError(f"another token stands {where}", threat="token_swapped")
    if given[:2] == rest[1::-1] and given[2:] == rest[2 : len(given)]:
        raise ReceiptError(f"two tokens are transposed {where}", threat="tokens_transposed")
    if given[1:] == rest[: len(given) - 1]:
        raise ReceiptError(f"a token is inserted {where}", threat="token_inserted")
    if given[: len(rest) - 1] == rest[1:]:
        raise ReceiptError(f"a token is missing {where}", threat="token_deleted")
    raise ReceiptError(f"other tokens stand from {where[3:]}", threat="token_swapped")
