from __future__ import annotations

import pytest

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.compact import decode_compact, encode_compact
from epochless_vllm.protocol.stream import encode_stream
from epochless_vllm.protocol.verbose import decode_verbose
from epochless_vllm.verify import checker, receipt
from epochless_vllm.verify.checker import ReceiptChecker
from epochless_vllm.verify.expected import Expected
from epochless_vllm.verify.receipt import verify_receipt
from epochless_vllm.verify.verified import Verdict
from tests.verify.bases import NAMES, base_receipt, known, verbose_of
from tests.verify.forge import canonical, edited, rehash, resign
from tests.verify.mutants import MUTANTS, VARIANTS, Mutant

CASES = [(mutant, variant) for mutant in MUTANTS for variant in VARIANTS if variant in mutant.codes]


@pytest.mark.parametrize(("mutant", "variant"), CASES, ids=lambda case: getattr(case, "name", case))
def test_mutant_is_refused_with_its_code(mutant: Mutant, variant: str) -> None:
    with pytest.raises(ReceiptError) as refusal:
        verify_receipt(mutant.payload(variant), **mutant.expectations(variant))
    assert refusal.value.fields["threat"] == mutant.codes[variant]


def test_there_are_at_least_63_ordered_mutants() -> None:
    assert len(CASES) >= 63
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("name", NAMES)
def test_unchanged_receipt_verifies_in_every_format_and_survives_the_forgers_own_encoder(name: str) -> None:
    receipt = base_receipt(name)
    doc = edited(verbose_of(name), lambda _: None)
    assert canonical(rehash(doc)) == canonical(resign(doc)) == verbose_of(name)
    for payload in (verbose_of(name), encode_compact(receipt), encode_stream(receipt)):
        assert verify_receipt(payload, **known()).verdict is Verdict.SAMPLING_CONSISTENT


def schema_only(payload: bytes) -> None:
    """A checker that trusts shapes and digests: well-formed parts, a root over the blocks, a statement, a signature."""
    receipt = decode_verbose(payload)
    doc = edited(payload, lambda _: None)
    assert canonical(resign(doc, count=False)) == payload
    assert receipt.final.statement


def test_relational_mutants_pass_a_schema_only_checker_and_are_refused() -> None:
    accepted = []
    for mutant in MUTANTS:
        if "resigned" not in mutant.codes:
            continue
        payload = mutant.payload("resigned")
        try:
            schema_only(payload)
        except ReceiptError:
            continue
        with pytest.raises(ReceiptError):
            verify_receipt(payload, **mutant.expectations("resigned"))
        if not mutant.known:  # refused by the receipt's own relations, without anything the client knows
            accepted.append(mutant.codes["resigned"])
    assert len(set(accepted)) >= 9


@pytest.mark.parametrize(("mutant", "variant"), CASES, ids=lambda case: getattr(case, "name", case))
def test_mutant_that_has_a_compact_form_is_refused_there_too(mutant: Mutant, variant: str) -> None:
    try:
        receipt = decode_verbose(mutant.payload(variant))
        compact = encode_compact(receipt)
    except ReceiptError:
        return  # the compact form cannot say it
    assert decode_compact(compact) == receipt
    with pytest.raises(ReceiptError):
        verify_receipt(compact, **mutant.expectations(variant))


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if "draw_outside_interval" in mutant.codes.values()])
def test_draw_that_does_not_pick_its_token_is_refused_in_a_stream_too(mutant: Mutant) -> None:
    stream = encode_stream(decode_verbose(mutant.payload("resigned")))
    with pytest.raises(ReceiptError) as refusal:
        verify_receipt(stream, **mutant.expectations("resigned"))
    assert refusal.value.fields["threat"] == "draw_outside_interval"


@pytest.mark.parametrize(
    ("owner", "check"),
    [
        (checker, "check_rows"),
        (checker, "check_partition"),
        (checker, "check_table_use"),
        (checker, "check_kv"),
        (checker, "check_signature"),
        (checker, "compare_tokens"),
        (checker, "compare_logprobs"),
        (receipt, "check_draws"),
        (ReceiptChecker, "_check_tokens"),
        (ReceiptChecker, "_check_end"),
        (ReceiptChecker, "_check_final"),
        (Expected, "check_header"),
        (Expected, "check_final"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_verifier_without_any_one_check_accepts_some_mutant(
    owner: object, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, check, lambda *_, **__: None)
    for mutant, variant in CASES:
        try:
            verify_receipt(mutant.payload(variant), **mutant.expectations(variant))
        except (ReceiptError, IndexError):  # without its bounds checked, an index may lead nowhere
            continue
        return
    pytest.fail(f"{check} could be left out unnoticed")
