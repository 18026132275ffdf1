"""What a verb prints: text and tables for people, one JSON value for machines.

Promises that with ``--json`` standard output holds exactly one JSON value, errors included. Knows no verbs.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from typing import Any

from epochless_vllm.errors import EpochlessError


class Output:
    """Prints the result of one run."""

    def __init__(self, *, json: bool) -> None:
        self.json = json

    def value(self, value: Any) -> None:
        """Print a result for machines; nothing for people."""
        if self.json:
            sys.stdout.write(json_module.dumps(value, indent=2) + "\n")

    def line(self, text: str = "") -> None:
        """Print a line for people; nothing for machines."""
        if not self.json:
            sys.stdout.write(text + "\n")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table for people; nothing for machines."""
        if self.json:
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*("-" if cell is None else str(cell) for cell in row))
        # A pipe has no width to fit: cutting digests there would lose them.
        console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 10_000)
        with console.capture() as capture:
            console.print(table)
        sys.stdout.write("\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n") + "\n")

    def error(self, error: EpochlessError) -> None:
        """Print an error: on standard error for people, as the JSON value for machines."""
        if self.json:
            sys.stdout.write(json_module.dumps({"error": error.describe()}, indent=2, default=str) + "\n")
        else:
            sys.stderr.write(f"error: {error.message}\n")


def short(digest: str) -> str:
    """Return the opening of a digest, long enough to pin a revision with."""
    return digest[: len("sha256:") + 12]


def size(count: int) -> str:
    """Return a number of bytes for people."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
