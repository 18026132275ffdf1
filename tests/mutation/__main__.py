"""The mutation campaign.

    python -m tests.mutation                      every room; one line a mutant, last line `N passed, N failed`
    python -m tests.mutation --room ROOM NAME ... some rooms, some mutants
    python -m tests.mutation --first              stop at a mutant's first failing test: whether, not by which
    python -m tests.mutation --write              write tests/mutation/README.md from it; with --room, those sections

A mutant is one edit of the sources, or one fault in a datum. An edit passes when a named test fails, or, where ``only``
is given, when exactly those tests do. One whose text is not there once, or that does not import, is an error of the
campaign and fails. Equivalent mutants are listed apart with the argument and must pass every test. A datum passes when
the checkers that are to refuse it do, for the reason expected: see tests/mutation/data.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.campaigns import summary
from tests.mutation.data import DataOutcome, run_data_rooms
from tests.mutation.data_rooms import DATA_ROOMS
from tests.mutation.matrix import README, describe, render
from tests.mutation.rooms import ROOMS
from tests.mutation.runner import Outcome, run_rooms

ORDER = [room.name for room in (*ROOMS, *DATA_ROOMS)]


def main() -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; all without")
    parser.add_argument("--room", action="append", choices=ORDER, metavar="ROOM", help="may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first", action="store_true", help="stop at a mutant's first failing test")
    parser.add_argument("--write", action="store_true", help="write tests/mutation/README.md")
    options = parser.parse_args()
    if options.write and (options.names or options.first):
        parser.error("--write is of whole rooms and all their tests")
    chosen = options.room or ORDER
    begin = time.monotonic()
    outcomes: list[Outcome | DataOutcome] = []
    outcomes += run_rooms(
        [room for room in ROOMS if room.name in chosen],
        jobs=options.jobs,
        names=options.names,
        first=options.first,
        tell=lambda each: print(describe(each), flush=True),
    )
    outcomes += run_data_rooms(
        [room for room in DATA_ROOMS if room.name in chosen],
        names=options.names,
        tell=lambda each: print(describe(each), flush=True),
    )
    print(f"{time.monotonic() - begin:.0f} s")
    print(summary(outcomes))
    if options.write:
        earlier = README.read_text(encoding="utf-8") if README.exists() else ""
        README.write_text(render(outcomes, ORDER, earlier), encoding="utf-8")
    return 0 if outcomes and all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
