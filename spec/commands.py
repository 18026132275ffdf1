"""The commands a document shows: their files, modules, verbs, flags and targets exist.

Reads the sources of a command, never runs it. A flag counts where the command's file, or one of ours that it imports,
spells it as a string. What follows is not looked at: values, files of the reader's, commands of others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from spec.documents import Document
from spec.sources import PACKAGE, CitationError, Sources, parse_file
from spec.symbols import symbol_nodes

CLI = f"{PACKAGE}/cli"
MAIN = f"{CLI}/main.py"
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(?:\|[A-Z_]+)*|\.\.\.|\[.*")


def check_command(words: Sequence[str], sources: Sources) -> None:
    """Check one command, given from the root.

    Raises:
        CitationError: something it names is gone; the message says what.
    """
    program, *rest = words
    if program == "make":
        _check_make(rest, sources.root / "Makefile")
    elif program == "epochless":
        _check_verbs(rest, sources)
    elif program == "pytest":
        _check_pytest(rest, sources.root)
    else:
        _check_python(rest, sources.root)


def _check_make(words: Sequence[str], makefile: Path) -> None:
    text = makefile.read_text() if makefile.is_file() else ""
    for word in words:
        variable, assigned, _ = word.partition("=")
        if assigned and f"$({variable})" not in text and f"$(or $({variable})" not in text:
            raise CitationError(f"the Makefile does not read {variable}")
        if not assigned and not re.search(rf"^{re.escape(word)}:", text, re.MULTILINE):
            raise CitationError(f"the Makefile has no target {word}")


def _check_verbs(words: Sequence[str], sources: Sources) -> None:
    (assignment,) = symbol_nodes(parse_file(sources.root / MAIN), "VERBS")
    verbs: dict[str, tuple[str, str]] = ast.literal_eval(assignment.value)  # type: ignore[attr-defined]
    if not words or _PLACEHOLDER.fullmatch(words[0]):
        return
    for verb in words[0].split("|"):
        if verb.startswith("-"):
            return
        if verb not in verbs:
            raise CitationError(f"epochless has no verb {verb}")
        files = _with_imports(sources.root / CLI / f"{verbs[verb][0]}.py", sources.root)
        known = _strings([*files, sources.root / MAIN])
        for position, word in enumerate(words[1:]):
            if word.startswith("--") and word.partition("=")[0] not in known:
                raise CitationError(f"epochless {verb} has no flag {word}")
            if position == 0 and re.fullmatch(r"[a-z]+(\|[a-z]+)*", word) and verbs[verb][0] in ("patch", "store"):
                for action in word.split("|"):
                    if action not in known:
                        raise CitationError(f"epochless {verb} has no action {action}")


def _check_pytest(words: Sequence[str], root: Path) -> None:
    for word in words:
        path, _, test = word.partition("::")
        if "/" in path or path.endswith(".py"):
            if not (root / path).exists():
                raise CitationError(f"there is no {path}")
            if test and not symbol_nodes(parse_file(root / path), test.partition("[")[0].replace("::", ".")):
                raise CitationError(f"{path} has no {test}")


def _check_python(words: Sequence[str], root: Path) -> None:
    if words[:1] == ["-m"] and len(words) > 1:
        if words[1] == "pytest":
            _check_pytest(words[2:], root)
            return
        parts = Path(*words[1].split("."))
        if not (root / parts.parts[0]).is_dir():  # a module of somebody else's
            return
        candidates = (root / parts.with_suffix(".py"), root / parts / "__main__.py")
        file = next((path for path in candidates if path.is_file()), None)
        if file is None:
            raise CitationError(f"there is no module {words[1]}")
        words = words[1:]
    elif words and words[0].endswith(".py"):
        file = root / words[0]
        if not file.is_file():
            raise CitationError(f"there is no file {words[0]}")
    else:
        return
    known = _strings(_with_imports(file, root))
    for word in words[1:]:
        if word.startswith("--") and word.partition("=")[0] not in known:
            raise CitationError(f"{words[0]} has no flag {word}")


def _with_imports(file: Path, root: Path) -> list[Path]:
    """Return a file and those beside it, or in the command's own room, that it imports."""
    if not file.is_file():
        raise CitationError(f"there is no file {file.name}")
    found = [file]
    for module in _imported_modules(parse_file(file)):
        parts = Path(*module.split(".")).with_suffix(".py")
        found += [path for path in (file.parent / parts, root / parts) if path.parent == file.parent]
    return [path for path in dict.fromkeys(found) if path.is_file()]


@lru_cache(maxsize=512)
def _imported_modules(tree: ast.Module) -> tuple[str, ...]:
    """Return what ``from`` imports name, modules or not: ``from a import b`` gives ``a`` and ``a.b``."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return tuple(
        name for node in nodes for name in (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
    )


def _strings(files: Sequence[Path]) -> set[str]:
    return {text for file in files for text in _strings_of(parse_file(file))}


@lru_cache(maxsize=512)
def _strings_of(tree: ast.Module) -> frozenset[str]:
    return frozenset(
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def check_flags(document: Document, sources: Sources) -> Iterator[tuple[int, str]]:
    """Yield the flags of the server that it does not have."""
    known = _strings([sources.root / PACKAGE / "plugin" / "options.py"])
    for line, flag in document.flags:
        if flag not in known:
            yield line, f"vllm serve has no flag {flag}"


def check_names(document: Document, sources: Sources) -> Iterator[tuple[int, str]]:
    """Yield what is imported from this package, or named by dots, and is not there."""
    for line, statement in document.imports:
        (node,) = ast.parse(statement).body
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            if not _has(f"{node.module}.{alias.name}", sources.root):
                yield line, f"{node.module} has no {alias.name}"
    for line, dotted in document.modules:
        if not _has(dotted, sources.root):
            yield line, f"there is no {dotted}"


def _has(dotted: str, root: Path) -> bool:
    """Whether a dotted name is a module of ours, or defined in one or imported by it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = root.joinpath(*parts[:length])
        file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if file.is_file():
            rest = parts[length:]
            return not rest or bool(symbol_nodes(parse_file(file), ".".join(rest))) or rest[0] in _imported(file)
    return False


def _imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(parse_file(file)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names
