"""The campaign over mutants of the replay: every text is there, and one mutant of each outcome is judged rightly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.verify import replay_mutants
from tests.verify.replay_mutants import MUTANTS, ROOT, make_tree, run_mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_text_of_a_mutant_occurs_once_and_changes(mutant: replay_mutants.Mutant) -> None:
    source = (ROOT / "epochless_vllm" / f"{mutant.module}.py").read_text()
    assert source.count(mutant.old) == 1
    assert mutant.old != mutant.new


def test_mutant_is_caught_by_a_named_test_and_a_broken_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_mutants, "ROWS", ("tests/verify/test_mixture.py",))
    monkeypatch.setattr(replay_mutants, "REPLAY", ("tests/verify/test_mixture.py",))
    tree = make_tree(tmp_path)
    mutant = next(each for each in MUTANTS if each.name == "rebuilt KV replayed")
    passes, detail = run_mutant(mutant, tree)
    assert passes
    assert detail.startswith("tests/verify/test_mixture.py::test_kv_rebuilt")
    broken = replace(mutant, new="def")
    assert run_mutant(broken, tree)[0] is False
    assert run_mutant(replace(mutant, old="no such text"), tree) == (
        False, "campaign error: its text occurs 0 times",
    )  # fmt: skip
    harmless = replace(mutant, new=mutant.old)
    assert run_mutant(harmless, tree) == (False, "caught by nothing")
    assert run_mutant(replace(harmless, equivalent="the same text"), tree)[0] is True
