"""What the documents cite is there, is what it was when the document was last read, and is all that is registered.

    python spec/check_citations.py            1 if anything does not hold, with a line for each
    python spec/check_citations.py --write    renews spec/anchors.json after a person has read the claims again

In every Markdown file but the changelog:

1. A symbol outside the tests, ``path/to/file.py::Class.method``, or code inside one, ``path/to/file.py::f "the code"``,
   is registered in anchors.json, and its normal form (no comments, docstrings, layout) has the digest that is there.
   Paths that start with ``vllm/`` are the patched vLLM's.
2. A registered symbol is cited by some document.
3. A test named so exists; so does every file, link and heading, and every name of this package.
4. Every command's file, module, target, verb and flag exists.
5. Claims, trusted parts and figures have the form of ledger.py, and figures are those of the results.

The standard library only; runs and imports nothing that it reads about.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from spec.commands import check_command, check_flags, check_names  # noqa: E402
from spec.documents import Document, find_documents, read_document  # noqa: E402
from spec.ledger import CLAIMS, TRUST, check_claims, check_figures, check_trust  # noqa: E402
from spec.sources import CitationError, NotCheckableError, Sources, parse_file, split_name  # noqa: E402
from spec.symbols import symbol_nodes  # noqa: E402

REGISTRY = Path("spec") / "anchors.json"


@dataclass
class Report:
    """What a run found.

    Attributes:
        problems: a line each, none where all holds.
        digests: of every cited symbol that could be looked at, by its one spelling.
        unchecked: registered symbols of vLLM that could not be looked at here.
    """

    problems: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)
    documents: int = 0
    commands: int = 0


def check(root: Path, site_packages: Path | None = None) -> Report:
    """Check the documents of a tree."""
    root = root.resolve()
    sources, report = Sources(root, site_packages), Report()
    cited: dict[str, list[str]] = defaultdict(list)
    for path in find_documents(root):
        document = read_document(path)
        name = path.relative_to(root).as_posix()
        report.documents += 1
        report.commands += len(document.commands)
        report.problems += [f"{name}:{line}: {message}" for line, message in _check_document(document, sources)]
        for line, symbol in document.symbols:
            try:
                spelling = sources.name_of(symbol, path)
                if spelling.startswith("tests/"):
                    _require_test(root, spelling)
                else:
                    cited[spelling].append(f"{name}:{line}")
            except CitationError as error:
                report.problems.append(f"{name}:{line}: {error}")
    registry = read_registry(root)
    for spelling, places in sorted(cited.items()):
        report.problems += _check_symbol(spelling, places, sources, registry, report)
    for spelling in sorted(set(registry) - set(cited)):
        report.problems.append(f"{REGISTRY}: {spelling} is registered and no document cites it: cite it, or remove it")
    return report


def read_registry(root: Path) -> dict[str, str]:
    """Return digests by the one spelling of each registered symbol."""
    path = root / REGISTRY
    registry: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    return registry


def _check_symbol(
    spelling: str, places: Sequence[str], sources: Sources, registry: dict[str, str], report: Report
) -> Iterator[str]:
    where = ", ".join(places)
    try:
        digest = sources.digest(spelling)
    except CitationError as error:
        yield f"{where}: {error}"
        return
    except NotCheckableError:
        if spelling in registry:
            report.unchecked.append(spelling)
        else:
            yield f"{where}: {spelling} is not registered, and there is no patched vLLM here to take its digest from"
        return
    report.digests[spelling] = digest
    if spelling not in registry:
        yield f"{where}: {spelling} is not registered: read the claim beside it, then run with --write"
    elif registry[spelling] != digest:
        yield (
            f"{where}: {spelling} was edited since this was last read: read it again; where it still holds, run "
            "with --write, otherwise correct it first"
        )


def _check_document(document: Document, sources: Sources) -> Iterator[tuple[int, str]]:
    for line, path in document.paths:
        # A bare name of another kind is the reader's own file: answer.json, tokenizer.json.
        ours = "/" in path or path.endswith((".py", ".md", ".patch"))
        if ours and sources.find(path, document.path) is None:
            yield line, f"there is no file {path}"
    for line, span in document.malformed:
        yield (
            line,
            f'{span} is no citation; write path.py::symbol, or path.py::symbol "code" with no double quote in it',
        )
    for line, target in document.links:
        yield from ((line, message) for message in _check_link(target, document))
    for line, words in document.commands:
        try:
            check_command(words, sources)
        except CitationError as error:
            yield line, f"{' '.join(words)}: {error}"
    yield from check_flags(document, sources)
    yield from check_names(document, sources)
    text = document.path.read_text()
    yield from check_figures(text, sources.root)
    if document.path.parent == sources.root / "spec":
        checks = {CLAIMS: check_claims, TRUST: check_trust}
        yield from checks[document.path.name](text) if document.path.name in checks else ()


def _check_link(target: str, document: Document) -> Iterator[str]:
    if "://" in target or target.startswith("mailto:"):
        return
    path, _, fragment = target.partition("#")
    file = (document.path.parent / path) if path else document.path
    if not file.exists():
        yield f"the link {target} leads nowhere"
    elif fragment and file.suffix == ".md" and fragment not in read_document(file).headings:
        yield f"the link {target} leads to no heading"


def _require_test(root: Path, spelling: str) -> None:
    path, test, _ = split_name(spelling)
    if not symbol_nodes(parse_file(root / path), test.replace("::", ".")):
        raise CitationError(f"{path} has no {test}")


def write_registry(root: Path, report: Report) -> list[str]:
    """Take the digests of a report into the registry; return what changed. Nothing is removed from it."""
    before = read_registry(root)
    after = {**before, **report.digests}
    (root / REGISTRY).write_text(json.dumps(after, indent=2, sort_keys=True) + "\n")
    return [
        f"{'renewed' if spelling in before else 'added'}: {spelling}"
        for spelling in sorted(after)
        if before.get(spelling) != after[spelling]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_citations.py", description="Check what the documents cite.")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="the checkout (default: this one)")
    parser.add_argument("--site-packages", type=Path, metavar="DIR", help="what holds vllm (default: this Python's)")
    parser.add_argument("--write", action="store_true", help="renew the digests of what is cited")
    options = parser.parse_args(arguments)
    report = check(options.root, options.site_packages)
    if options.write:
        for line in write_registry(options.root, report):
            print(line)
        report = check(options.root, options.site_packages)
    for problem in report.problems:
        print(problem)
    looked = f"{report.documents} documents, {len(report.digests)} symbols, {report.commands} commands"
    if report.unchecked:
        looked += f"; not checked for want of the patched vLLM: {len(report.unchecked)} symbols"
    print(f"{looked}: {len(report.problems)} problems" if report.problems else f"{looked}: all found")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
