"""The patch of vLLM: the standalone verifier, the package's own reading of the same rules, and the layer check."""

from __future__ import annotations

from functools import partial

from tests.mutation.mutants import Mutant, Room

_V = partial(Mutant, "verify_patch")
_P = partial(Mutant, "patch/pin")
_D = partial(Mutant, "patch/diff")
_T = partial(Mutant, "patch/tree")
_I = partial(Mutant, "patch/installation")
_L = partial(Mutant, "tests/test_layers")

STANDALONE = (
    _V("any pin", "        need(actual == pin_sha256,", "        need(True,"),
    _V("stray patches", "        need(not stray,", "        need(True,"),
    _V("digest of a patch unchecked", "            need(actual == digest,", "            need(True,"),
    _V("symbolic link followed", "        need(not place.is_symlink(),", "        need(True,"),
    _V("any format", "    need(pin[\"format\"] == FORMAT,", "    need(True,"),
    _V("any upstream", "        need(upstream[key] == value,", "        need(True,"),
    _V("key given twice", "        need(len({key for key, _ in pairs}) == len(pairs),", "        need(True,"),
    _V("rows with other keys", "isinstance(row, dict) and set(row) == set(keys)", "isinstance(row, dict) and set(row) >= set(keys)"),
    _V("entry listed twice", "        need(len({row[0] for row in rows}) == len(rows),", "        need(True,"),
    _V("allowed paths unsorted", "    need(allow == sorted(set(allow)),", "    need(True,"),
    _V("any allowed path", "isinstance(path, str) and PATH.fullmatch(path) for path in allow", "isinstance(path, str) for path in allow"),
    _V("pattern that begins well", "re.fullmatch(pattern, row[key])", "re.match(pattern, row[key])"),
    _V("refused forms accepted", "        need(not re.search(pattern, raw, re.MULTILINE), message)", "        pass"),
    _V("description without reasons", "        need(len(found) == 1 and found[0] != section,", "        need(True,"),
    _V("seam of another file", "    need(b\"Seam: \" + name.removesuffix", "    need(True or name.removesuffix"),
    _V("change in the description", "    need(not re.search(OTHER_DIFF, raw[:start], re.MULTILINE),", "    need(True,"),
    _V("file of any kind", "        need(PATH.fullmatch(path), f", "        need(True, f"),
    _V("file changed twice", "        need(path not in changes,", "        need(True,"),
    _V("patch of nothing", "    need(changes, \"changes nothing\")", "    pass"),
    _V("hunks of other lengths", "        need((len(old), len(new)) == (int(match[2]), int(match[4])),", "        need(True,"),
    _V("hunk of nothing", "        need(old != new,", "        need(True,"),
    _V("hunks overlap", "        need(int(match[1]) > end,", "        need(True,"),
    _V("line numbers disagree", "        need(int(match[3]) == int(match[1]) + shift,", "        need(True,"),
    _V("foreign version", "        need(known, f", "        need(True, f"),
    _V("foreign file", "    need(not foreign, f", "    need(True, f"),
    _V("half patched", "    need(patched in (0, len(ids)), f", "    need(True, f"),
    _V("context differs", "        need(lines[begin:end] == hunk.old, f", "        need(True, f"),
    _V("file without its newline", '    need(content.endswith(b"\\n"),', "    need(True,"),
    _V("index before unchecked", "            need(blob_id(scratch[path]) == before,", "            need(True,"),
    _V("index after unchecked", "            need(blob_id(scratch[path]) == after,", "            need(True,"),
    _V("touched but not allowed", "        need(touched <= allowed,", "        need(True,"),
    _V("allowed but not touched", "        need(allowed <= touched,", "        need(True,"),
    _V("files of the pin unchecked", "        need(touched == set(pin.files),", "        need(True,"),
    _V("results unchecked", "            need(ids == pinned, f", "            need(True, f"),
    _V("syntax unchecked", '                compile(content, path, "exec", dont_inherit=True)', "                pass"),
    _V("expected state ignored", "            need(options.expect in (None, verdict),", "            need(True,"),
    _V("refusal exits 0", "    return 1 if failed else 0", "    return 0"),
    _V("patched called unpatched", 'return ("patched" if patched else "unpatched"), contents', 'return "unpatched", contents'),
)  # fmt: skip

PACKAGED = (
    _P("any pin", "    if actual != pin_sha256:", "    if False:"),
    _P("stray patches", "    if stray:", "    if False:"),
    _P("digest of a patch unchecked", ".hexdigest()) != expected:", ".hexdigest()) is None:"),
    _P("symbolic link followed", "        if place.is_symlink():", "        if False:"),
    _P("any format", '    if pin["format"] != FORMAT:', "    if False:"),
    _P("any upstream", "        if pin[\"upstream\"].get(key) != UPSTREAM.get(key):", "        if False:"),
    _P("more of upstream", "for key in sorted({*UPSTREAM, *pin[\"upstream\"]}):", "for key in sorted(UPSTREAM):"),
    _P("key given twice", "    if len(dict(pairs)) != len(pairs):", "    if False:"),
    _P("more fields", " if len(pin) == 5:", ":"),
    _P("allowed paths unsorted", "    if allow != sorted(allow):", "    if False:"),
    _P("rows with other keys", "set(row) != {key, *other.split()}", "not set(row) >= {key, *other.split()}"),
    _P("entry listed twice", "    if not values or (unique and len(set(values)) != len(values)):", "    if not values:"),
    _P("value that begins well", "pattern.fullmatch(row[key]) is None", "pattern.match(row[key]) is None"),
    _P("touched but not allowed", "        (touched - set(pin.allow), ", "        (set(), "),
    _P("allowed but not touched", "        (set(pin.allow) - touched, ", "        (set(), "),
    _P("files of the pin unchecked", "        (touched ^ set(pin.files), ", "        (set(), "),
    _D("file changed twice", "        if change.path in changes:", "        if False:"),
    _D("patch of nothing", "    if not changes:\n", "    if False:\n"),
    _D("index before unchecked", "    if blob_id(content) != change.before:", "    if False:"),
    _D("index after unchecked", "    if blob_id(result) != change.after:", "    if False:"),
    _D("context differs", "        if tuple(lines[window]) != hunk.old:", "        if False:"),
    _D("hunks applied from the top", "for hunk in reversed(change.hunks):", "for hunk in change.hunks:"),
    _D("carriage returns", 'if b"\\0" in raw or b"\\r" in raw:', 'if b"\\0" in raw:'),
    _D("unwanted lines", "            if line.startswith(start):", "            if False:"),
    _D("description without reasons", "            if len(texts) != 1 or not texts[0]:", "            if len(texts) > 1:"),
    _D("seam of another file", '        if found[b"Seam"][0] + b".patch" != self.name.encode():', "        if False:"),
    _D("two paths", " or names[0][2:] != names[1][2:]:", ":"),
    _D("path that leaves the tree", '        if {b"", b".", b".."} & set(path.split(b"/")):', "        if False:", equivalent="no path of vllm/**.py has such a part; the next check refuses with another message"),
    _D("file of any kind", "        if _PATH.fullmatch(path) is None:", "        if False:"),
    _D("mode of any kind", '        if index[3] != b"100644":', "        if False:"),
    _D("other names in the lines", '        if (self.take(), self.take()) != (b"--- a/" + path, b"+++ b/" + path):', "        if None in (self.take(), self.take()):"),
    _D("hunks overlap", "if old_start <= end or new_start", "if new_start"),
    _D("line numbers disagree", "if old_start <= end or new_start != old_start + shift:", "if old_start <= end:"),
    _D("change without a hunk", "        if not hunks:\n", "        if False:\n"),
    _D("hunk of nothing", "        if old == new:", "        if False:"),
    _D("hunk with more lines", "        if (len(old), len(new)) != (old_count, new_count):", "        if False:"),
    _T("foreign version", "    if version is not None and not is_pinned_version(version):", "    if False:"),
    _T("foreign file", '    elif count["foreign"]:', "    elif False:"),
    _T("half patched taken for patched", "    elif len(count) > 1:", "    elif False:"),
    _T("mode lost", "        os.chmod(place, mode)  # whatever the umask is\n", "", equivalent="the file was written with that mode, and a umask takes only what the tests' own leaves"),
    _T("compiled files stay", "            compiled.unlink(missing_ok=True)", "            pass"),
    _T("abandoned files stay", "            abandoned.unlink(missing_ok=True)", "            pass"),
    _I("half patched verified", '    if status.state == "interrupted":', "    if False:"),
    _I("foreign tree verified", "    require_known(status)\n", ""),
    _I("foreign tree patched", "    require_known(read_status(root, series.pin, contents))\n", ""),
    _I("results unchecked", "    _check_blobs(series.pin, _run(results, inverse), results)\n", ""),
    _I("syntax unchecked", "        _check_syntax(path, content)\n", "        pass\n"),
    _I("files written again", " for path, content in wanted.items() if content != contents[path]}", " for path, content in wanted.items()}"),
    _I("files read back unchecked", "    if held != wanted:", "    if False:"),
)  # fmt: skip

LAYERS = (
    Mutant("protocol/digests", "a floor below uses NumPy", "import hashlib\n", "import hashlib\n\nimport numpy\n"),
    Mutant("store/finite", "the store uses torch, late", "    width = _WIDTH[dtype]\n    for", "    import torch\n\n    width = _WIDTH[dtype]\n    for"),
    Mutant("publication/decisions", "publication uses the plugin", "from epochless_vllm.protocol.names", "from epochless_vllm.plugin import options  # noqa: F401\nfrom epochless_vllm.protocol.names"),
    Mutant("sampling/tables", "the sampler uses its reference", "from epochless_vllm.protocol.digests", "from epochless_vllm.reference import philox  # noqa: F401\nfrom epochless_vllm.protocol.digests"),
    Mutant("verify/pairs", "the verifier uses the sampler", "from epochless_vllm.verify.verified", "from epochless_vllm.sampling import rows  # noqa: F401\nfrom epochless_vllm.verify.verified"),
    Mutant("errors", "errors import a room", "from __future__ import annotations\n", "from __future__ import annotations\n\nfrom epochless_vllm import protocol  # noqa: F401\n"),
    Mutant("cli/output", "the command loads torch through another", "from __future__ import annotations\n", "from __future__ import annotations\n\nimport importlib\n\nimportlib.import_module('torch')\n"),
    Mutant("store/__init__", "a module without a docstring", '"""Immutable', 'TEXT = """Immutable'),
    Mutant("protocol/merkle", "a module of 350 lines more", "EMPTY_ROOT = ", "\n" * 350 + "EMPTY_ROOT = "),
    _L("nothing is forbidden", "    return found\n", "    return []\n"),
    _L("our own rooms are open", "            if target and target != room and target not in ours", "            if False and target != room and target not in ours"),
    _L("packages of others are open", "top not in others and not", "False and not"),
    _L("imports of names unseen", '        elif isinstance(node, ast.ImportFrom):', "        elif isinstance(node, ast.Assert):"),
    _L("rooms of the package unseen", '                names |= {f"{PACKAGE}.{alias.name}" for alias in node.names}\n', "                pass\n"),
    _L("torch below", '"protocol": ({"errors"}, set()),', '"protocol": ({"errors"}, {"numpy"}),'),
    _L("the wings may meet", '"sampling": ({"errors", "protocol"}, {"torch"', '"sampling": ({"errors", "protocol", "reference"}, {"torch"'),
    _L("a room without a rule", '    "execution": ({"errors"}, {"torch", "numba", "numpy"}),\n', ""),
)  # fmt: skip

_PATCH = ("tests/patch/test_form.py", "tests/patch/test_pin.py", "tests/patch/test_installation.py")
# Any edit of one copy is caught by these: the rooms ask what else notices.
_COPIES = ("tests/patch/test_form.py::test_the_package_ships_the_repository_s_series_and_verifier",)

ROOMS = (
    Room("patch verifier, standalone", _PATCH, STANDALONE, without=_COPIES),
    Room("patch verifier, packaged", _PATCH, PACKAGED, without=_COPIES),
    Room(
        "copies of the patch verifier",
        _COPIES,
        (
            Mutant("patch/data/verify_patch", "the packaged copy differs", "MAX_BYTES = 4 << 20", "MAX_BYTES = 5 << 20"),
            Mutant("verify_patch", "the repository's copy differs", "MAX_BYTES = 4 << 20", "MAX_BYTES = 5 << 20"),
        ),
    ),
    Room("layers", ("tests/test_layers.py",), LAYERS),
)
