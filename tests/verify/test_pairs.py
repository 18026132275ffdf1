from __future__ import annotations

import pytest

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.compact import encode_compact
from epochless_vllm.protocol.header import SEEDED
from epochless_vllm.protocol.receipts import ABORT, Receipt
from epochless_vllm.verify.pairs import verify_together
from epochless_vllm.verify.receipt import verify_receipt
from epochless_vllm.verify.verified import VerifiedReceipt
from tests.protocol.receipt_factory import make_header, make_receipt
from tests.verify.bases import base_receipt, known


def verified(receipt: Receipt) -> VerifiedReceipt:
    return verify_receipt(encode_compact(receipt), **{**known(), "nonce": receipt.header.nonce})


def refusal(*receipts: Receipt) -> str:
    with pytest.raises(ReceiptError) as caught:
        verify_together([verified(receipt) for receipt in receipts])
    return str(caught.value.fields["threat"])


def test_choices_of_one_request_and_copies_stand_together() -> None:
    choices = [make_receipt(10, header=make_header(max_tokens=10, choice_index=index)) for index in range(3)]
    assert len(verify_together([verified(receipt) for receipt in (*choices, choices[0])])) == 3


def test_shorter_receipt_signed_for_the_same_choice_is_refused() -> None:
    shorter = make_receipt(100, header=make_header(max_tokens=150), finish_reason=ABORT)
    assert refusal(base_receipt("sampled"), shorter) == "conflicting_receipts"


def test_seed_of_one_request_used_for_another_is_refused() -> None:
    one, other = (make_receipt(10, header=make_header(max_tokens=10, request_id=name)) for name in ("a", "b"))
    assert refusal(one, other) == "seed_reused"


def test_one_seed_that_two_clients_chose_is_no_offence() -> None:
    receipts = [
        make_receipt(10, header=make_header(max_tokens=10, draw_kind=SEEDED, request_id=name)) for name in ("a", "b")
    ]
    assert len(verify_together([verified(receipt) for receipt in receipts])) == 2
