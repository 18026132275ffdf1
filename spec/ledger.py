"""The form of the two pages that say what is claimed and what is trusted, and the figures any page quotes.

Each claim has the same five parts, and a command that shows it; each trusted part has a test or an assumption behind
it; a figure is the one in the results it names, rounded as it is written. Knows nothing of whether a claim is true.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spec.documents import commands_of, tables_of

CLAIMS, TRUST = "CLAIMS.md", "TRUST.md"
PARTS = ("Say", "Shown by", "Rests on", "Tested by", "Not said")
_FIGURE = re.compile(r"`(benchmarks/results/[\w.-]+\.json)::([^`]+)`")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_WANTED = re.compile(r"at (least|most) (\d[\d,]*(?:\.\d+)?)")


def claims_of(text: str) -> dict[str, dict[str, tuple[int, str]]]:
    """Return each claim's parts with their lines, by its heading: ``### C7 …``."""
    claims: dict[str, dict[str, tuple[int, str]]] = {}
    parts: dict[str, tuple[int, str]] | None = None
    name = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            parts = claims.setdefault(line.lstrip("# "), {}) if line.startswith("### ") else None
        elif parts is not None and (match := re.match(r"- \*\*([^*]+)\*\*:? ?(.*)", line)):
            name = match[1].rstrip(":")
            parts[name] = (number, match[2])
        elif parts is not None and name in parts and line.startswith("  "):
            parts[name] = (parts[name][0], f"{parts[name][1]} {line.strip()}")
    return claims


def check_claims(text: str) -> Iterator[tuple[int, str]]:
    """Yield what a page of claims lacks."""
    claims = claims_of(text)
    lines = {line.lstrip("# "): number for number, line in enumerate(text.splitlines(), 1) if line.startswith("### ")}
    numbers = [heading.split()[0] for heading in claims]
    if numbers != [f"C{number}" for number in range(1, len(claims) + 1)]:
        yield 1, f"claims are numbered C1, C2, … in order; found {', '.join(numbers)}"
    for heading, parts in claims.items():
        if tuple(parts) != PARTS:
            yield lines[heading], f"{heading}: the parts are {', '.join(PARTS)}, in this order, not {', '.join(parts)}"
            continue
        spans = re.findall(r"`([^`]+)`", parts["Shown by"][1])
        if not any(list(commands_of(span)) for span in spans):
            yield parts["Shown by"][0], f"{heading}: no command shows it"
        if "tests/" not in parts["Tested by"][1]:
            yield parts["Tested by"][0], f"{heading}: no test is named"


def check_trust(text: str) -> Iterator[tuple[int, str]]:
    """Yield the rows of a page of trusted parts that name neither a test nor an assumption."""
    for number, cells in tables_of(text):
        if "tests/" not in cells[-1] and "assumption" not in cells[-1].lower():
            yield number, f"{cells[0]}: name the test behind it, or say that it is an assumption"


def check_figures(text: str, root: Path) -> Iterator[tuple[int, str]]:
    """Yield the figures that are not those of the results they name.

    A row of a table that names ``benchmarks/results/x.json::key/key`` has its figure in the cell before that. Where the
    row also says ``at least`` or ``at most`` what was wanted, it says ``missed`` exactly where the figure misses it.
    """
    for number, cells in tables_of(text):
        for position, cell in enumerate(cells):
            for file, pointer in _FIGURE.findall(cell):
                try:
                    value = _value(root / file, pointer.split("/"))
                except (OSError, LookupError, ValueError, TypeError) as error:
                    yield number, f"{file} has no number at {pointer} ({type(error).__name__})"
                    continue
                written = _NUMBER.search(cells[position - 1]) if position else None
                if written is None:
                    yield number, f"{file}::{pointer} is {value:g}, and the cell before it holds no number"
                elif not _is_rounded(written[0].replace(",", ""), value):
                    yield number, f"{written[0]} is written where {file}::{pointer} is {value:g}"
                if (wanted := _WANTED.search(" ".join(cells[:position]))) is not None:
                    bound = float(wanted[2].replace(",", ""))
                    missed = value < bound if wanted[1] == "least" else value > bound
                    if missed != ("missed" in " ".join(cells[:position])):
                        yield number, f"{value:g} {'misses' if missed else 'meets'} {wanted[0]}: say so"


def _value(path: Path, keys: Sequence[str]) -> float:
    value: Any = json.loads(path.read_text())
    for key in keys:
        value = value[key] if isinstance(value, Mapping) else value[int(key)]
    return float(value)


def _is_rounded(written: str, value: float) -> bool:
    """Whether a decimal is a value rounded to the places it is written with; a half may go either way."""
    places = len(written.partition(".")[2])
    return abs(float(written) - value) <= 0.5000001 * float(f"1e-{places}")
