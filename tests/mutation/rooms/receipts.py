"""Receipts: identity (canonical bytes, manifest, tree), draws, and the verifier."""

# ruff: noqa: E501 - one mutant a line reads as the table it is
from __future__ import annotations

from functools import partial

from tests.mutation.mutants import Mutant, Room

_J = partial(Mutant, "protocol/canonical")
_M = partial(Mutant, "protocol/manifest")
_G = partial(Mutant, "protocol/digests")
_T = partial(Mutant, "protocol/merkle")
_D = partial(Mutant, "protocol/draws")
_C = partial(Mutant, "verify/checker")
_V = partial(Mutant, "verify/receipt")
_N = partial(Mutant, "verify/expected")
_U = partial(Mutant, "verify/ed25519")
_I = partial(Mutant, "verify/disclosure")
_Q = partial(Mutant, "verify/pairs")

IDENTITY = (
    _J("second spelling", "    if encode_canonical(value) != payload:", "    if False:"),
    _J("key given twice", "    if len(keys) != len(pairs):", "    if False:"),
    _J("integers beyond exact", "    if not -MAX_INTEGER <= number <= MAX_INTEGER:", "    if False:"),
    _J("floats read", '    raise _refusal("not_integer", f"{text[:20]} is not an integer")', "    return int(float(text))"),
    _J("negative zero", '    if text == "-0":', "    if False:"),
    _J("keys in any script", "if not isinstance(key, str) or not key.isascii():", "if not isinstance(key, str):"),
    _M("recipe unchecked", '    if value["recipe"] != RECIPE:', "    if False:"),
    _M("unknown keys of a manifest", 'or set(value) != {"config", "recipe", "tensors"}:', 'or not set(value) >= {"config", "recipe", "tensors"}:'),
    _M("order unchecked", "    if manifest.encode() != payload:", "    if False:"),
    _M("tensor named twice", "        if before.name == after.name:", "        if False:"),
    _M("size unchecked", "    if size != entry.byte_length:", "    if False:"),
    _M("bytes outside the identity", '            "sha256": self.sha256,\n', '            "sha256": "sha256:" + "0" * 64,\n'),
    _M("identity without its purpose", "RevisionId(digest(RECIPE, self.encode()))", 'RevisionId(digest("", self.encode()))'),
    _G("digest without lengths", '        hasher.update(len(field).to_bytes(8, "big"))\n', ""),
    _T("leaf like a node", 'hashlib.sha256(b"\\x00" + data)', 'hashlib.sha256(b"\\x01" + data)'),
    _T("children exchanged", 'hashlib.sha256(b"\\x01" + left + right)', 'hashlib.sha256(b"\\x01" + right + left)'),
    _T("path of any length", "    if used != len(path):", "    if False:"),
    _T("leaf outside the tree", "    if not 0 <= index < size:", "    if not 0 <= index <= size:"),
)  # fmt: skip

DRAWS = (
    _D("nine rounds", "_ROUNDS = 10", "_ROUNDS = 9"),
    _D("multiplier of another generator", "0xD2511F53, 0xCD9E8D57", "0xD2511F53, 0xCD9E8D53"),
    _D("key not bumped, many at once", "        key_0, key_1 = (key_0 + _WEYL_0) & _WORD, (key_1 + _WEYL_1) & _WORD\n    layout", "    layout"),
    _D("purposes share noise", "(block & _WORD, block >> 32, purpose, 0)", "(block & _WORD, block >> 32, 0, 0)"),
    _D("purposes share noise, many at once", "ones * purpose, 0", "ones * 0, 0"),
    _D("counter of one word", "(block & _WORD, block >> 32, purpose, 0)", "(block & _WORD, 0, purpose, 0)"),
    _D("counter of one word, many at once", "(numbers >> 32) & mask, ones * purpose", "(numbers >> 32) & 0, ones * purpose"),
    _D("lanes in reverse", "purpose, 0))[index & 3]", "purpose, 0))[3 - (index & 3)]"),
    _D("range begins at its block", "    offset = start & 3\n", "    offset = 0\n"),
    _D("batch begins one late", "range(first, last, _BATCH_BLOCKS)", "range(first, last, _BATCH_BLOCKS + 1)"),
    _D("indices beyond the counter", "start + count > MAX_INDEX", "start + count > MAX_INDEX + 1"),
    _D("key words exchanged", 'struct.unpack("<II"', 'struct.unpack(">II"'),
    _D("seeded and unseeded share a purpose", 'UNSEEDED_CONTEXT = "epochless/v1/draw-key/unseeded"', 'UNSEEDED_CONTEXT = SEEDED_CONTEXT'),
    _D("nonce outside the key", "prompt_index, choice_index, client_nonce, identifier)", 'prompt_index, choice_index, b"", identifier)'),
    _D("request outside the key", "prompt_index, choice_index, client_nonce, identifier)", 'prompt_index, choice_index, client_nonce, b"")'),
    _D("choice outside the key", "_encode_integer(prompt_index), _encode_integer(choice_index))", "_encode_integer(prompt_index), _encode_integer(0))"),
    _D("prompt outside the key", "_encode_integer(prompt_index), _encode_integer(choice_index))", "_encode_integer(0), _encode_integer(choice_index))"),
    _D("seed of any length", "    if len(request_seed) != REQUEST_SEED_BYTES:", "    if False:"),
)  # fmt: skip

VERIFIER = (
    _C("header not as expected", "        expected.check_header(header)  # (1)\n", ""),
    _C("block out of place", "        if block.first != self.tokens or self._short:  # (2)", "        if self._short:  # (2)"),
    _C("short block inside", "        if block.first != self.tokens or self._short:  # (2)", "        if block.first != self.tokens:  # (2)"),
    _C("rows unchecked", "        check_rows(block, self.header, len(self._table))  # (3)\n", ""),
    _C("tokens unchecked", "        self._check_tokens(block)  # (4)\n", ""),
    _C("draws of a stream unchecked", "            check_draws(block, draws, self.header, None)\n", ""),
    _C("spans without end", "        if len(self._spans) > MAX_SPANS:", "        if False:", equivalent="the final record's spans, equal to these or refused, are at most as many"),
    _C("final record of another header", "        if final.header != self.header.digest:", "        if False:"),
    _C("counts unchecked", "if (final.tokens, final.blocks) != (self.tokens, self._frontier.size):  # (7)", "if False:  # (7)"),
    _C("blocks uncounted", "(final.tokens, final.blocks) != (self.tokens, self._frontier.size)", "final.tokens != self.tokens"),
    _C("root unchecked", "        if final.root != self._frontier.root():  # (6)", "        if False:  # (6)"),
    _C("final record unchecked", "        self._check_final(final)\n        verdict", "        verdict"),
    _C("revealed draws unchecked", "            self._check_revealed(key, final.seed)\n", ""),
    _C("draws of a stream taken for checked", "        if sampling_checked or key is None or not self.tokens:", "        if True:"),
    _C("signature unchecked", "            check_signature(final, signature, self._expected.public_key)\n", ""),
    _C("pinned id taken for nothing", 'anchor = "none" if self._expected.receipt_id is None else "receipt_id"', 'anchor = "none"'),
    _C("revision added twice", "            if entry.revision in self._names:", "            if False:"),
    _C("KV unchecked", "            mode=header.on_publish,", '            mode="",'),
    _C("draw at the end of its interval", "if all(low <= draw <= low + most for", "if all(low <= draw < low + most for"),
    _C("draw past its interval", "if all(low <= draw <= low + most for", "if all(low <= draw <= low + most + 1 for"),
    _V("incomplete stream accepted", "            if not allow_incomplete:", "            if False:"),
    _N("nonce unchecked", '            ("nonce", self.nonce, header.nonce, "nonce_mismatch"),\n', ""),
    _N("prompt unchecked", '            ("prompt", prompt, header.prompt, "prompt_mismatch"),\n', ""),
    _N("seed unchecked", "        if self.seed is not None and self.seed != final.seed:", "        if False:"),
    _N("nothing said of the key", "            notes.append(UNSIGNED)\n", "            pass\n"),
    _U("scalar not reduced", "    if scalar >= _L:", "    if False:"),
    _U("small order", "    if multiple[0] == 0 and multiple[1] == multiple[2]:", "    if False:"),
    _U("anything signed", "    if _encode_point(_combine(scalar, challenge, _negate(key))) != commitment:", "    if False:"),
    _U("message outside the challenge", "hashlib.sha512(commitment + public_key + message)", "hashlib.sha512(commitment + public_key)"),
    _I("root unchecked, one token", "disclosure.path) != final.root:", "disclosure.path) is None:"),
    _I("draw unchecked, one token", "    if key is not None and not low <= draw_at(key, position) <= low + most:", "    if False:"),
    _Q("two stories of one choice", "        if choice in choices:", "        if False:"),
)  # fmt: skip

ROOMS = (
    Room(
        "identity",
        (
            "tests/protocol/test_canonical.py",
            "tests/protocol/test_manifest.py",
            "tests/protocol/test_digests.py",
            "tests/protocol/test_merkle.py",
        ),
        IDENTITY,
    ),
    Room(
        "draw keys and draws",
        ("tests/sampling/test_draws.py",),
        DRAWS,
        preload=("numpy", "torch", "numba"),
        environment=(("NUMBA_DISABLE_JIT", "1"),),
    ),
    Room(
        "receipt verifier",
        (
            "tests/verify/test_ed25519.py",
            "tests/verify/test_disclosure.py",
            "tests/verify/test_pairs.py",
            "tests/verify/test_receipt.py",
            "tests/verify/test_bytes.py",
            "tests/verify/test_mutants.py::test_mutant_is_refused_with_its_code",
            "tests/verify/test_mutants.py::test_draw_that_does_not_pick_its_token_is_refused_in_a_stream_too",
        ),
        VERIFIER,
        preload=("cryptography.hazmat.primitives.asymmetric.ed25519",),
    ),
)
