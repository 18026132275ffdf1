"""The checker of what the documents cite."""

# ruff: noqa: E501 - one mutant a line reads as the table it is
from __future__ import annotations

from functools import partial

from tests.mutation.mutants import Mutant, Room

_C = partial(Mutant, "spec/check_citations")
_D = partial(Mutant, "spec/documents")
_L = partial(Mutant, "spec/ledger")
_O = partial(Mutant, "spec/sources")
_S = partial(Mutant, "spec/symbols")
_W = partial(Mutant, "spec/commands")

CITATIONS = (
    _C("edited code unnoticed", "    elif registry[spelling] != digest:", "    elif False:"),
    _C("unregistered symbol accepted", "    if spelling not in registry:", "    if False:"),
    _C("uncited symbols stay registered", "    for spelling in sorted(set(registry) - set(cited)):", "    for spelling in ():"),
    _C("tests need not exist", "    if not symbol_nodes(parse_file(root / path), test.replace", "    if False and not symbol_nodes(parse_file(root / path), test.replace"),
    _C("files need not exist", "        if ours and sources.find(path, document.path) is None:", "        if False:"),
    _C("links unchecked", "    for line, target in document.links:", "    for line, target in ():"),
    _C("headings unchecked", "fragment not in read_document(file).headings:", "False:"),
    _C("flags of the server unchecked", "    yield from check_flags(document, sources)\n", ""),
    _C("claims without form", "yield from checks[document.path.name](text) if document.path.name in checks else ()", "yield from ()"),
    _C("writing removes", "    after = {**before, **report.digests}", "    after = dict(report.digests)"),
    _D("the changelog is read", "        if path.name != HISTORY\n        and not", "        if not"),
    _S("comments of a docstring count", "            value = _without_docstring(value)", "            pass"),
    _S("numbers by their value alone", "        return ascii(node)", "        return ascii(node + 0.0 if isinstance(node, int) else node)"),
    _S("nothing is nothing everywhere", "(absent and not isinstance(node, ast.Constant))", "absent"),
    _O("line need not be there", "        if not found:\n", "        if False:\n"),
    _O("symbol need not be there", "        if not nodes:\n", "        if False:\n"),
    _O("any vLLM is the patched one", "return base if all(", "return base if True or all("),
    _W("any target", "        if not assigned and not re.search(", "        if False and not re.search("),
    _W("any verb", "        if verb not in verbs:\n            raise", "        if verb not in verbs:\n            return\n            raise"),
    _W("any flag of a verb", 'if word.startswith("--") and word.partition("=")[0] not in known:\n                raise CitationError(f"epochless', 'if False:\n                raise CitationError(f"epochless'),
    _W("any module", "        if file is None:\n", "        if False:\n"),
    _L("parts in any order", "        if tuple(parts) != PARTS:", "        if set(parts) != set(PARTS):"),
    _L("trust without a reason", '        if "tests/" not in cells[-1] and', "        if False and"),
    _L("half of a digit more", "<= 0.5000001 *", "<= 1.5 *"),
    _L("misses unsaid", "                    if missed != (", "                    if False and missed != ("),
)  # fmt: skip

ROOMS = (Room("citations", ("tests/spec/test_check_citations.py",), CITATIONS),)
