"""The mutation campaign can fail, and its mutants still fit the source; the campaign itself is a command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference.mutants import CONFIGURATIONS, MUTANTS, ROOT, Mutant, judge, run_mutant, sandbox, write_oracles

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

SOME = ("tiny none", "gqa-2x none", "mqa none", "untied-cls none")


@pytest.fixture(scope="module")
def box() -> Iterator[Path]:
    with sandbox() as directory:
        yield directory


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("oracles")
    write_oracles(directory, SOME)
    return directory


def named(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def test_every_mutant_is_one_edit_of_the_source_as_it_is() -> None:
    for mutant in MUTANTS:
        source = (ROOT / "epochless_vllm" / "reference" / f"{mutant.module}.py").read_text()
        assert source.count(mutant.old) == 1, mutant.name
        assert set(filter(None, mutant.only.split(", "))) <= set(CONFIGURATIONS)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_grouping_by_modulo_is_seen_by_grouped_heads_only_and_a_tied_head_by_untied_models_only(
    box: Path, oracles: Path
) -> None:
    assert set(run_mutant(None, box, oracles, SOME).values()) == {"agrees"}
    modulo = run_mutant(named("gqa-modulo, by position"), box, oracles, SOME)
    assert [name for name, verdict in modulo.items() if verdict == "differs"] == ["gqa-2x none"]
    untied = run_mutant(named("ignore-untied"), box, oracles, SOME)
    assert [name for name, verdict in untied.items() if verdict == "differs"] == ["untied-cls none"]
    assert set(run_mutant(None, box, oracles, SOME).values()) == {"agrees"}


def test_mutant_that_does_not_import_or_fit_is_an_error_and_not_a_catch(box: Path, oracles: Path) -> None:
    with pytest.raises(ValueError, match="does not run"):
        run_mutant(Mutant("broken", "forward", "import numpy as np", "import numpy as np ="), box, oracles, SOME[:1])
    with pytest.raises(ValueError, match="occurs 0 times"):
        run_mutant(Mutant("lost", "forward", "no such text", ""), box, oracles, SOME[:1])


def test_mutant_passes_only_when_caught_where_it_should_be() -> None:
    verdicts = {"tiny none": "agrees", "gqa-2x none": "differs", "mqa none": "raises ValueError"}
    plain = Mutant("m", "forward", "a", "b")
    assert judge(plain, verdicts)[0]
    assert not judge(plain, dict.fromkeys(verdicts, "agrees"))[0]
    assert not judge(Mutant("m", "forward", "a", "b", only="gqa-2x none"), verdicts)[0]
    assert judge(Mutant("m", "forward", "a", "b", only="gqa-2x none, mqa none"), verdicts)[0]
    assert not judge(Mutant("m", "forward", "a", "b", equivalent="no"), verdicts)[0]
    assert judge(Mutant("m", "forward", "a", "b", equivalent="yes"), dict.fromkeys(verdicts, "agrees"))[0]
