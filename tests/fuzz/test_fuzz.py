"""The corpus and a short campaign hold for every target, and the fuzzer finds defects that are planted for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epochless_vllm.errors import ReceiptError
from epochless_vllm.verify.answer import attested_choices
from tests.fuzz.fuzzer import Target, corpus_of, fuzz
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_corpus_and_a_short_campaign_have_no_finding(name: str) -> None:
    target, corpus = TARGETS[name], list(corpus_of(CORPUS / name))
    assert corpus, "python -m tests.fuzz --save makes one"
    campaign = fuzz(target, corpus, runs=len(corpus) + len(target.seeds()) + 60, seed=1)
    assert campaign.findings == []
    assert 0 < campaign.accepted < campaign.runs


def plant(run: object, *, seeds: list[bytes], **limits: int) -> Target:
    return Target("planted", run, (ReceiptError,), lambda: seeds, (b"[", b"null"), traced=__file__, **limits)  # type: ignore[arg-type]


def test_foreign_exception_is_found_behind_a_branch() -> None:
    def careless(data: bytes) -> object:
        try:
            choices = json.loads(data)["choices"]
        except (ValueError, TypeError, RecursionError):
            raise ReceiptError("no", threat="response_form") from None
        return [choice["index"] for choice in choices]  # a hostile answer has choices without one

    campaign = fuzz(plant(careless, seeds=[b'{"choices": [{"index": 0}]}']), [], runs=4000)
    assert "KeyError" in {each.problem.split()[0] for each in campaign.findings}


def test_allocation_on_the_word_of_a_number_is_found() -> None:
    def trusting(data: bytes) -> object:
        return bytes(min(int.from_bytes(data[:4], "big"), 1 << 28))

    campaign = fuzz(plant(trusting, seeds=[b"\x00\x00\x00\x04data"], bytes_at_least=1 << 20), [], runs=2000)
    assert any(each.problem.startswith("allocates") for each in campaign.findings)


def test_coverage_leads_deeper_than_chance() -> None:
    """Inputs are kept because they reach new code, so later ones start from there."""
    seed = b'data: {"choices": []}\n'
    target = Target("answer", attested_choices, (ReceiptError,), lambda: [seed], TARGETS["answer"].words)
    campaign = fuzz(target, [], runs=400)
    assert len(campaign.pool) > 5
    assert len(campaign.fresh) == len(campaign.pool) - 1


def test_campaign_repeats_for_a_seed() -> None:
    first, again, other = (fuzz(TARGETS["answer"], [], runs=80, seed=seed).pool for seed in (3, 3, 4))
    assert first == again
    assert first != other
