"""Fuzz for a while: ``python -m tests.fuzz [TARGET ...] [--seconds N] [--save]``; exit 1 if anything was found.

The time is shared evenly by the targets. ``--save`` adds inputs that reached code the corpus does not to it, and writes
every finding beside; without it nothing is written.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from tests.fuzz.fuzzer import corpus_of, fuzz
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MAX_SAVED = 4096  # bytes of an input worth keeping: the seeds are there already


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="*", choices=[[], *TARGETS], help="default: all of them")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    names = arguments.target or list(TARGETS)
    found = 0
    for name in names:
        folder = CORPUS / name
        campaign = fuzz(
            TARGETS[name], list(corpus_of(folder)), seed=arguments.seed, seconds=arguments.seconds / len(names)
        )
        found += len(campaign.findings)
        print(
            f"{name:16} {campaign.runs:7} runs, {campaign.accepted:6} accepted, {len(campaign.seen):5} edges, "
            f"{len(campaign.fresh):4} new inputs, {len(campaign.findings)} findings",
            flush=True,
        )
        for finding in campaign.findings:
            print(f"  {finding.problem}: {finding.data[:200]!r}")
        if arguments.save:
            folder.mkdir(parents=True, exist_ok=True)
            kept = [data for data in campaign.fresh if len(data) <= MAX_SAVED]
            for data in [*kept, *(finding.data for finding in campaign.findings)]:
                (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
