"""What the processes of a group use, read from /proc: a server in a process group of its own.

Promises that a process which ends while it is read is left out. Knows no server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_GROUP, _USER, _SYSTEM = 2, 11, 12  # fields of /proc/<pid>/stat, counted behind the name


class Use(NamedTuple):
    """What a process group uses.

    Attributes:
        bytes: by name of the process and its id: memory of its own and its share of what it shares with others of the
            group, without pages of files.
        cpu_s: processor time of its living processes, in seconds.
    """

    bytes: dict[str, int]
    cpu_s: float


def use_of(group: int) -> Use:
    """Return what a process group uses now."""
    held: dict[str, int] = {}
    ticks = 0
    for entry, fields in _members(group):
        try:
            name = entry.joinpath("comm").read_text().strip()
            rollup = entry.joinpath("smaps_rollup").read_text()
        except OSError:  # it ended meanwhile
            continue
        sizes = dict(line.split(":", 1) for line in rollup.splitlines()[1:])
        held[f"{name} {entry.name}"] = 1024 * sum(int(sizes[key].split()[0]) for key in ("Pss_Anon", "Pss_Shmem"))
        ticks += int(fields[_USER]) + int(fields[_SYSTEM])
    return Use(held, ticks / TICKS_PER_S)


def _members(group: int) -> Iterator[tuple[Path, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = entry.joinpath("stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(fields[_GROUP]) == group:
                yield entry, fields
