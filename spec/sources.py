"""The files a document may cite: this repository's, and those of the vLLM it patches.

Symbols of vLLM are looked up in an installed vLLM whose patched files are byte for byte the pinned ones. Without such a
vLLM, code cited in a patched file is looked up in the lines that the series leaves behind, and the rest is not checked,
which is counted. Reads; runs and imports nothing of what it reads.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from functools import cached_property, lru_cache
from pathlib import Path

from spec.documents import Symbol
from spec.symbols import defined_names, digest_of, matching_code, symbol_nodes

PACKAGE = "epochless_vllm"
VLLM = "vllm/"


class CitationError(Exception):
    """What is cited is not there; the message says where else it may be."""


class NotCheckableError(Exception):
    """It is vLLM's, and there is no patched vLLM to look at."""


def parse_file(path: Path) -> ast.Module:
    """Return the syntax tree of a file as it is now."""
    return _parse(path.read_bytes())


@lru_cache(maxsize=512)
def _parse(source: bytes) -> ast.Module:
    return ast.parse(source)


class Sources:
    """One checkout, and the vLLM beside it."""

    def __init__(self, root: Path, site_packages: Path | None = None) -> None:
        """Look at a checkout.

        Args:
            site_packages: the directory that holds the package vllm; default the interpreter's own.
        """
        self.root = root
        self._site_packages = site_packages

    def find(self, spelling: str, document: Path) -> Path | None:
        """Return the file or directory a document means: beside it, from the root, or from the package."""
        for base in (document.parent, self.root, self.root / PACKAGE):
            if "*" in spelling:
                if next(base.glob(spelling), None) is not None:
                    return base
            elif (base / spelling).exists():
                return (base / spelling).resolve()
        return None

    def name_of(self, symbol: Symbol, document: Path) -> str:
        """Return the one spelling of a cited symbol, with its path from the root; vLLM's start with ``vllm/``.

        Raises:
            CitationError: there is no such file.
        """
        path = symbol.path
        if not path.startswith(VLLM):
            found = self.find(path, document)
            if found is None or self.root not in found.parents:
                raise CitationError(f"there is no file {path}")
            path = found.relative_to(self.root).as_posix()
        return f"{path}::{symbol.name}" + (f' "{symbol.code}"' if symbol.code else "")

    def digest(self, name: str) -> str:
        """Return the digest of what a symbol's spelling names: its source, or the code cited inside it.

        Raises:
            CitationError: it is not there.
            NotCheckableError: nobody can tell here.
        """
        path, symbol, code = split_name(name)
        if path.startswith(VLLM) and self.vllm is None:
            self._look_in_patch(path, code)
            raise NotCheckableError
        file = (self.vllm if path.startswith(VLLM) else self.root) / path  # type: ignore[operator]
        if not file.is_file():
            raise CitationError(f"there is no file {path}{self._elsewhere(symbol, path)}")
        nodes = symbol_nodes(parse_file(file), symbol.replace("::", "."))
        if not nodes:
            raise CitationError(f"{path} has no {symbol}{self._elsewhere(symbol, path)}")
        if code is None:
            return digest_of(nodes)
        try:
            found = matching_code(nodes, code)
        except (SyntaxError, ValueError) as error:
            raise CitationError(f"{code!r} is not one statement or expression; cite whole ones") from error
        if not found:
            raise CitationError(f"{path}::{symbol} no longer has the line {code!r}")
        return digest_of(found)

    @cached_property
    def vllm(self) -> Path | None:
        """The directory that holds the patched vLLM; None if there is none, or its files are not the pinned ones."""
        base = self._site_packages
        if base is None:
            spec = importlib.util.find_spec("vllm")  # found, not imported
            if spec is None or spec.origin is None:
                return None
            base = Path(spec.origin).parent.parent
        return base if all(_is_blob(base / path, after) for path, after in self._pinned.items()) else None

    @cached_property
    def _pinned(self) -> dict[str, str]:
        pin = json.loads((self.root / "patches" / "pin.json").read_text())
        return {file["path"]: file["after"] for file in pin["files"]}

    def _look_in_patch(self, path: str, code: str | None) -> None:
        """Require cited code among the lines of a patched file that the series shows."""
        if code is None or path not in self._pinned:
            return
        patches = sorted((self.root / "patches").glob("*.patch"))
        left = "".join(_postimages(patch.read_text()).get(path, "") for patch in patches)
        if _bare(code) not in _bare(left):
            raise CitationError(f"no patch of the series leaves {code!r} in {path}")

    def _elsewhere(self, symbol: str, path: str) -> str:
        """Say which other file of the repository has a symbol of that name."""
        if path.startswith(VLLM):
            return ""
        places = [
            other.relative_to(self.root).as_posix()
            for folder in (PACKAGE, "tests", "spec", "patches", "benchmarks")
            for other in sorted((self.root / folder).rglob("*.py"))
            if symbol.replace("::", ".") in set(defined_names(parse_file(other)))
        ]
        return f"; {', '.join(places[:3])} has one of that name: cite it there" if places else ""


def split_name(name: str) -> tuple[str, str, str | None]:
    """Return path, symbol and cited code of a symbol's one spelling."""
    where, _, code = name.partition(' "')
    path, _, symbol = where.partition("::")
    return path, symbol, code[:-1] if code else None


def _is_blob(path: Path, blob_id: str) -> bool:
    if not path.is_file():
        return False
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest() == blob_id


def _postimages(patch: str) -> dict[str, str]:
    """Return by path the lines of each file that a patch adds or shows as unchanged."""
    lines: dict[str, str] = {}
    path = ""
    for line in patch.splitlines(keepends=True):
        if line.startswith("+++ b/"):
            path = line[6:].strip()
        elif path and line[:1] in ("+", " "):
            lines[path] = lines.get(path, "") + line[1:]
    return lines


def _bare(code: str) -> str:
    return "".join(code.split())
