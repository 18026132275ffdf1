"""The patch of vLLM: the standalone verifier, the package's own reading of the same rules, and the layer check."""

# ruff: noqa: E501 - one mutant a line reads as the table it is
from __future__ import annotations

from functools import partial

from tests.mutation.mutants import Mutant, Room

_V = partial(Mutant, "verify_patch")
_P = partial(Mutant, "patch/pin")
_D = partial(Mutant, "patch/diff")
_L = partial(Mutant, "tests/test_layers")

STANDALONE = (
    _V("any pin", "        need(actual == pin_sha256,", "        need(True,"),
    _V("stray patches", "        need(not stray,", "        need(True,"),
    _V("digest of a patch unchecked", "            need(actual == digest,", "            need(True,"),
    _V("symbolic link followed", "        need(not place.is_symlink(),", "        need(True,"),
    _V("any upstream", "        need(upstream[key] == value,", "        need(True,"),
    _V("key given twice", "        need(len({key for key, _ in pairs}) == len(pairs),", "        need(True,"),
    _V("refused forms accepted", "        need(not re.search(pattern, raw, re.MULTILINE), message)", "        pass"),
    _V("description without reasons", "        need(len(found) == 1 and found[0] != section,", "        need(True,"),
    _V("file changed twice", "        need(path not in changes,", "        need(True,"),
    _V("hunks of other lengths", "        need((len(old), len(new)) == (int(match[2]), int(match[4])),", "        need(True,"),
    _V("hunks overlap", "        need(int(match[1]) > end,", "        need(True,"),
    _V("context differs", "        need(lines[begin:end] == hunk.old, f", "        need(True, f"),
    _V("index before unchecked", "            need(blob_id(scratch[path]) == before,", "            need(True,"),
    _V("touched but not allowed", "        need(touched <= allowed,", "        need(True,"),
    _V("allowed but not touched", "        need(allowed <= touched,", "        need(True,"),
    _V("syntax unchecked", '                compile(content, path, "exec", dont_inherit=True)', "                pass"),
)  # fmt: skip

PACKAGED = (
    _P("any pin", "    if actual != pin_sha256:", "    if False:"),
    _P("stray patches", "    if stray:", "    if False:"),
    _P("digest of a patch unchecked", ".hexdigest()) != expected:", ".hexdigest()) is None:"),
    _P("key given twice", "    if len(dict(pairs)) != len(pairs):", "    if False:"),
    _P("touched but not allowed", "        (touched - set(pin.allow), ", "        (set(), "),
    _D("index before unchecked", "    if blob_id(content) != change.before:", "    if False:"),
    _D("context differs", "        if tuple(lines[window]) != hunk.old:", "        if False:"),
    _D("description without reasons", "            if len(texts) != 1 or not texts[0]:", "            if len(texts) > 1:"),
    _D("mode of any kind", '        if index[3] != b"100644":', "        if False:"),
    _D("hunks overlap", "if old_start <= end or new_start", "if new_start"),
)  # fmt: skip

LAYERS = (
    Mutant("protocol/digests", "a floor below uses NumPy", "import hashlib\n", "import hashlib\n\nimport numpy\n"),
    Mutant("store/finite", "the store uses torch, late", "    width = _WIDTH[dtype]\n    for", "    import torch\n\n    width = _WIDTH[dtype]\n    for"),
    Mutant("publication/decisions", "publication uses the plugin", "from epochless_vllm.protocol.names", "from epochless_vllm.plugin import options  # noqa: F401\nfrom epochless_vllm.protocol.names"),
    Mutant("sampling/tables", "the sampler uses its reference", "from epochless_vllm.protocol.digests", "from epochless_vllm.reference import philox  # noqa: F401\nfrom epochless_vllm.protocol.digests"),
    Mutant("verify/pairs", "the verifier uses the sampler", "from epochless_vllm.verify.verified", "from epochless_vllm.sampling import rows  # noqa: F401\nfrom epochless_vllm.verify.verified"),
    Mutant("errors", "errors import a room", "from __future__ import annotations\n", "from __future__ import annotations\n\nfrom epochless_vllm import protocol  # noqa: F401\n"),
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

_PATCH = ("tests/patch/test_form.py", "tests/patch/test_pin.py")
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
    Room(
        "layers",
        ("tests/test_layers.py",),
        LAYERS,
        without=(  # each starts an interpreter; what they ask is asked of the sources by the others
            "tests/test_layers.py::test_room_loads_nothing_outside_the_standard_library",
            "tests/test_layers.py::test_room_loads_neither_torch_nor_the_engine",
        ),
    ),
)
