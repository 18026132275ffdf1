"""What a mutant and a room are: one edit of one file, and the tests that are to notice it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OUTSIDE = ("tests/", "spec/", "verify_patch")  # what is not below the package


@dataclass(frozen=True)
class Mutant:
    """One edit: ``old`` occurs exactly once in ``module`` and becomes ``new``.

    Attributes:
        module: below the package, without suffix; ``tests/...``, ``spec/...`` and ``verify_patch`` are beside it.
        only: the tests, as the room labels them, that catch it: these and no others. Empty: any may.
        equivalent: the argument, for an edit that changes nothing a test could see: all tests must pass.
    """

    module: str
    name: str
    old: str
    new: str
    only: frozenset[str] = frozenset()
    equivalent: str = ""

    @property
    def path(self) -> str:
        """The file, below the repository's root."""
        return f"{self.module}.py" if self.module.startswith(_OUTSIDE) else f"epochless_vllm/{self.module}.py"

    def edit(self, source: str) -> str:
        """Return the source after the edit.

        Raises:
            ValueError: the text is not there exactly once, or does not change.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"its text occurs {count} times in {self.path}")
        if self.old == self.new:
            raise ValueError("it changes nothing")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Room:
    """Mutants that the same tests are to catch.

    Attributes:
        tests: files and single tests, run for every mutant.
        without: tests of these files that are left out, by node id.
        preload: modules of others loaded once, before the runs part.
        environment: variables of the tests.
        prepare: a module whose ``main(directory)`` writes once what the tests then read; they find the directory in
            the variable ``MUTATION_FILES``.
        by_parameter: whether a test's parameter names what caught a mutant, not its function.
    """

    name: str
    tests: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    without: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    prepare: str = ""
    by_parameter: bool = False

    def label(self, node: str) -> str:
        """Return what a failed test is called in the matrix."""
        function, _, parameter = node.rpartition("::")[2].partition("[")
        return parameter.removesuffix("]") if self.by_parameter else function


def faults_of(rooms: Iterable[Room], root: Path = ROOT) -> list[str]:
    """Return what is wrong with a campaign's data, looking at the sources and running nothing."""
    faults = []
    names = Counter(f"{room.name}: {mutant.name}" for room in rooms for mutant in room.mutants)
    faults += [f"{name}: {count} mutants of one name" for name, count in names.items() if count > 1]
    sources: dict[str, str] = {}
    for room in rooms:
        for test in (*room.tests, *room.without):
            if not (root / test.partition("::")[0]).is_file():
                faults.append(f"{room.name}: there is no {test}")
        for mutant in room.mutants:
            if mutant.path not in sources:
                sources[mutant.path] = (root / mutant.path).read_text(encoding="utf-8")
            try:
                compile(mutant.edit(sources[mutant.path]), mutant.path, "exec", dont_inherit=True)
            except (ValueError, SyntaxError) as error:
                faults.append(f"{room.name}: {mutant.name}: {error}")
    return faults
