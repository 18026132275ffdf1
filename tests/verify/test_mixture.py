"""Which revision computes which position: plans read off final records."""

from __future__ import annotations

import pytest

from epochless_vllm.protocol.spans import KVSpan
from epochless_vllm.verify.mixture import Pass, passes_of, revision_at
from tests.protocol.receipt_factory import entry, make_header, make_receipt

P = 7  # the factory's prompt


def plan(mode: str, tokens: int, moves: list[int], **options: object) -> tuple[Pass, ...]:
    receipt = make_receipt(
        tokens,
        header=make_header(on_publish=mode, max_tokens=tokens),
        moves=[(at, entry(f"revision-{at}", 8 + at)) for at in moves],
        **options,  # type: ignore[arg-type]
    )
    return passes_of(receipt.final, prompt_length=P, mode=mode)


def test_pinned_request_takes_one_pass() -> None:
    assert plan("pin", 10, []) == (Pass(0, 10, (KVSpan(0, P + 9, 0),)),)


def test_recomputed_request_takes_a_pass_a_revision_over_its_own_kv() -> None:
    assert plan("recompute", 20, [5, 12]) == (
        Pass(0, 5, (KVSpan(0, P + 4, 0),)),
        Pass(5, 12, (KVSpan(0, P + 11, 1),)),
        Pass(12, 20, (KVSpan(0, P + 19, 2),)),
    )


def test_continued_request_takes_one_pass_over_the_recorded_mixture() -> None:
    (only,) = plan("continue", 20, [5])
    assert (only.start, only.end) == (0, 20)
    assert revision_at(only.kv, P + 19) == [0] * (P + 4) + [1] * 15


def test_kv_rebuilt_among_revisions_leaves_the_last_token() -> None:
    rebuilt = [KVSpan(0, P + 19, 1)]
    (only,) = plan("continue", 20, [5], kv=rebuilt, kv_rebuilds=1)
    assert only == Pass(19, 20, tuple(rebuilt))


def test_kv_rebuilt_under_one_revision_changes_nothing() -> None:
    assert plan("continue", 20, [], kv_rebuilds=2) == plan("continue", 20, [])


@pytest.mark.parametrize("mode", ["pin", "recompute", "continue"])
def test_every_token_is_of_one_pass(mode: str) -> None:
    for moves in [[], [1], [3, 4, 17]] if mode != "pin" else [[]]:
        covered = [at for each in plan(mode, 20, moves) for at in range(each.start, each.end)]
        assert covered == list(range(20))


def test_revisions_are_cut_at_the_wanted_length() -> None:
    assert revision_at([KVSpan(0, 3, 4), KVSpan(3, 9, 5)], 5) == [4, 4, 4, 5, 5]
    assert revision_at([KVSpan(0, 3, 4), KVSpan(3, 9, 5)], 2) == [4, 4]
