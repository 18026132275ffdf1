from __future__ import annotations

from typing import Any

import pytest

from epochless_vllm.verify import checker
from tests.verify.campaign import bit_flips, failures, random_mutants

FLIPS, MUTANTS = 120, 2_000  # one flip in 120; `python -m tests.verify.campaign` does all, and 100,000 mutants


def test_share_of_the_single_bit_flips_is_refused_without_a_foreign_exception() -> None:
    codes = bit_flips(FLIPS, seed=1)
    assert sum(codes.values()) > 1000
    assert failures(codes) == 0, codes


def test_share_of_the_structure_aware_mutants_is_refused_without_a_foreign_exception() -> None:
    codes = random_mutants(MUTANTS, seed=2)
    assert failures(codes) == 0, codes
    assert len(codes) >= 25, "the mutants reach too few of the checks"


@pytest.mark.parametrize("blinded", ["verify_ed25519", "check_partition"])
def test_campaign_notices_a_verifier_that_skips_a_check(blinded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(*_: Any, **__: Any) -> None: ...

    monkeypatch.setattr(checker, blinded, skip)
    if blinded == "verify_ed25519":
        assert failures(random_mutants(400, seed=3)) > 0
    else:
        monkeypatch.setattr(checker, "verify_ed25519", skip)
        assert failures(random_mutants(400, seed=3)) > 0
