"""Verification of receipts and journals; standard library only, except replay."""

from epochless_vllm.verify.answer import AttestedChoice, attested_choices
from epochless_vllm.verify.disclosure import VerifiedToken, verify_disclosure
from epochless_vllm.verify.expected import Expected
from epochless_vllm.verify.pairs import verify_together
from epochless_vllm.verify.receipt import StreamVerifier, verify_receipt
from epochless_vllm.verify.verified import Verdict, VerifiedReceipt, describe

__all__ = [
    "AttestedChoice",
    "Expected",
    "StreamVerifier",
    "Verdict",
    "VerifiedReceipt",
    "VerifiedToken",
    "attested_choices",
    "describe",
    "verify_disclosure",
    "verify_receipt",
    "verify_together",
]
