"""The Markdown documents of a tree, and what they cite: symbols, files, links, commands, names of the package.

Reads text only; whether a citation finds anything is for others. A symbol is cited as ``path/to/file.py::Class.method``
and code inside one as ``path/to/file.py::function "the code"``, anywhere in a document.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

SKIPPED = {"build", "dist", "shared", "node_modules"}
HISTORY = "CHANGELOG.md"  # says what was, under the names it had

_SYMBOL = re.compile(r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.py)::([A-Za-z_][\w.]*(?:::\w+)*)(?: \"([^\"`]+)\")?")
_SPAN = re.compile(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"(?:[\w.*-]+/)*[\w.*-]+\.(?:py|md|patch|sh|toml|lock|c|json|txt)")
_MODULE = re.compile(r"epochless_vllm(?:\.\w+)+")
_FLAG = re.compile(r"--(?:enable-epochless|epochless-[a-z-]+)\b")
_COMMANDS = ("make", "python", "pytest", "epochless", ".venv/bin/python")


@dataclass(frozen=True)
class Place:
    """Where a document says something."""

    document: Path
    line: int


@dataclass(frozen=True)
class Symbol:
    """A cited symbol, or code inside one. ``path`` is as the document spells it."""

    path: str
    name: str
    code: str | None = None


@dataclass
class Document:
    """What one document cites, each with its line."""

    path: Path
    symbols: list[tuple[int, Symbol]] = field(default_factory=list)
    paths: list[tuple[int, str]] = field(default_factory=list)
    links: list[tuple[int, str]] = field(default_factory=list)
    commands: list[tuple[int, list[str]]] = field(default_factory=list)
    modules: list[tuple[int, str]] = field(default_factory=list)
    flags: list[tuple[int, str]] = field(default_factory=list)
    imports: list[tuple[int, str]] = field(default_factory=list)
    malformed: list[tuple[int, str]] = field(default_factory=list)
    headings: set[str] = field(default_factory=set)


def find_documents(root: Path) -> list[Path]:
    """Return the documents of a tree, sorted."""
    return sorted(
        path
        for path in root.rglob("*.md")
        if path.name != HISTORY
        and not any(part.startswith(".") or part in SKIPPED for part in path.relative_to(root).parts)
    )


def read_document(path: Path) -> Document:
    """Return what a document cites."""
    return _read(path, path.read_text())


@lru_cache(maxsize=64)  # links lead to the same documents again and again
def _read(path: Path, text: str) -> Document:
    found = Document(path)
    fence: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fence = line.strip("` ").lower() if fence is None else None
            continue
        if fence is None and line.startswith("#"):
            found.headings.add(slug_of(line))
        found.symbols += [(number, Symbol(*match.groups())) for match in _SYMBOL.finditer(line)]
        found.flags += [(number, flag) for flag in _FLAG.findall(line)]
        if fence == "python":
            if re.match(r"\s*from epochless_vllm[\w.]* import ", line):
                found.imports.append((number, line.strip()))
            continue
        if fence is not None or line.startswith("    "):
            found.commands += [(number, words) for words in commands_of(line)]
            continue
        prose = _SPAN.sub(" ", line)
        found.links += [(number, target) for target in _LINK.findall(prose)]
        for span in (match[2] for match in _SPAN.finditer(line)):
            found.commands += [(number, words) for words in commands_of(span)]
            if ".py::" in span and not span.startswith(_COMMANDS) and not _SYMBOL.fullmatch(span):
                found.malformed.append((number, span))
            if _PATH.fullmatch(span):
                found.paths.append((number, span))
            found.modules += [(number, name) for name in _MODULE.findall(span)]
    return found


def commands_of(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of ours on a line; alternatives such as ``apply|verify`` stay one word."""
    line = re.sub(r"\s+#.*", "", line.strip().removeprefix("$ "))
    line = re.split(r"\s{3,}", line)[0]  # what follows in a column of its own explains it
    line = re.sub(r"(?<=[\w\]]) ?\| ?(?=[A-Za-z])", "|", line)
    for part in re.split(r"\s*(?:;|&&|\s\|\s)\s*", line):
        if not part.startswith(tuple(f"{command} " for command in _COMMANDS)):
            continue
        try:
            words = shlex.split(part)
        except ValueError:  # a quotation that ends on another line
            words = part.split()
        yield words


def slug_of(heading: str) -> str:
    """Return the fragment by which a heading is linked to."""
    words = heading.lstrip("#").strip().lower().replace("`", "")
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def tables_of(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of each row of each table, header rows left out."""
    previous: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            previous = None
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if previous is not None and not all(re.fullmatch(r":?-+:?|", cell) for cell in cells):
            yield number, cells
        previous = cells
