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
    _C("malformed citations skipped", "    for line, span in document.malformed:", "    for line, span in ():"),
    _C("links unchecked", "    for line, target in document.links:", "    for line, target in ():"),
    _C("headings unchecked", "fragment not in read_document(file).headings:", "False:"),
    _C("flags of the server unchecked", "    yield from check_flags(document, sources)\n", ""),
    _C("names unchecked", "    yield from check_names(document, sources)\n", ""),
    _C("figures unchecked", "    yield from check_figures(text, sources.root)\n", ""),
    _C("claims without form", "yield from checks[document.path.name](text) if document.path.name in checks else ()", "yield from ()"),
    _C("writing removes", "    after = {**before, **report.digests}", "    after = dict(report.digests)"),
    _C("writing keeps what was", "{**before, **report.digests}", "{**report.digests, **before}"),
    _C("problems found and status 0", "    return 1 if report.problems else 0", "    return 0"),
    _D("the changelog is read", "        if path.name != HISTORY\n        and not", "        if not"),
    _D("built documents are read", " or part in SKIPPED for part", " for part"),
    _D("commands of prose unread", "            found.commands += [(number, words) for words in commands_of(span)]\n", ""),
    _D("one heading for another", 'replace(" ", "-")\n', 'replace(" ", "")\n'),
    _S("comments of a docstring count", "            value = _without_docstring(value)", "            pass"),
    _S("texts of an f-string as they were split", "            value = _joined(value)", "            pass"),
    _S("numbers by their value alone", "        return ascii(node)", "        return ascii(node + 0.0 if isinstance(node, int) else node)"),
    _S("nothing is nothing everywhere", "(absent and not isinstance(node, ast.Constant))", "absent"),
    _S("nested scopes are searched", "            if not isinstance(node, _SCOPES):\n                yield from _statements(node)", "            yield from _statements(node)"),
    _O("line need not be there", "        if not found:\n", "        if False:\n"),
    _O("symbol need not be there", "        if not nodes:\n", "        if False:\n"),
    _O("any vLLM is the patched one", "return base if all(", "return base if True or all("),
    _O("patched lines unread", "        if _bare(code) not in _bare(left):", "        if False:"),
    _O("removed lines count", 'line[:1] in ("+", " "):', 'line[:1] in ("+", "-", " "):'),
    _W("any target", "        if not assigned and not re.search(", "        if False and not re.search("),
    _W("any variable", "        if assigned and f", "        if False and f"),
    _W("any verb", "        if verb not in verbs:\n            raise", "        if verb not in verbs:\n            return\n            raise"),
    _W("any flag of a verb", 'if word.startswith("--") and word.partition("=")[0] not in known:\n                raise CitationError(f"epochless', 'if False:\n                raise CitationError(f"epochless'),
    _W("any action", "                    if action not in known:", "                    if False:"),
    _W("any module", "        if file is None:\n", "        if False:\n"),
    _W("any flag of a file", 'if word.startswith("--") and word.partition("=")[0] not in known:\n            raise CitationError(f"{words[0]}', 'if False:\n            raise CitationError(f"{words[0]}'),
    _W("any file of tests", "            if not (root / path).exists():", "            if False:"),
    _L("parts in any order", "        if tuple(parts) != PARTS:", "        if set(parts) != set(PARTS):"),
    _L("claims without a limit", "        if tuple(parts) != PARTS:", "        if not set(parts) <= set(PARTS):"),
    _L("claims not counted", '    if numbers != [f"C{number}"', '    if False and numbers != [f"C{number}"'),
    _L("no command needed", "        if not any(list(commands_of(span)) for span in spans):", "        if False:"),
    _L("no test needed", '        if "tests/" not in parts["Tested by"][1]:', "        if False:"),
    _L("trust without a reason", '        if "tests/" not in cells[-1] and', "        if False and"),
    _L("rounded figures of any value", "                elif not _is_rounded(", "                elif False and not _is_rounded("),
    _L("half of a digit more", "<= 0.5000001 *", "<= 1.5 *"),
    _L("misses unsaid", "                    if missed != (", "                    if False and missed != ("),
    _L("least for most", 'value < bound if wanted[1] == "least" else value > bound', 'value > bound if wanted[1] == "least" else value < bound'),
)  # fmt: skip

ROOMS = (Room("citations", ("tests/spec/test_check_citations.py",), CITATIONS),)
