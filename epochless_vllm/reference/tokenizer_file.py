"""The tables of a tokenizer.json: options, vocabulary, merges, added tokens and template, each checked as it is read.

Total over hostile files: a table, or a TokenizerError whose ``field`` names what is malformed or not implemented. Knows
no text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from epochless_vllm.errors import TokenizerError
from epochless_vllm.reference.bpe import Merges
from epochless_vllm.reference.pretokenizers import BYTE_CHARACTERS

_KEYS = {
    "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder",
    "model",
}  # fmt: skip
_MODEL_KEYS = {
    "type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
    "ignore_merges", "vocab", "merges",
}  # fmt: skip


@dataclass(frozen=True)
class AddedToken:
    """A token matched as a whole before the text is cut; ``normalized`` ones are sought in normalized text."""

    id: int
    content: str
    special: bool
    normalized: bool


def check_keys(document: Mapping[str, Any]) -> None:
    """Check that a file has no part that would change tokens and is not read.

    Raises:
        TokenizerError: it has; as for every function here.
    """
    for key in ("truncation", "padding"):
        if document.get(key) is not None:
            refuse(key, f"{key} is set, which would change tokens")
    unknown = set(document) - _KEYS
    if unknown:
        refuse(min(unknown)[:80], f"the key {min(unknown)[:80]!a} is not known")
    if as_object(document.get("decoder"), "decoder").get("type") != "ByteLevel":
        refuse("decoder", "a decoder other than ByteLevel is not implemented")


def read_model_options(model: Mapping[str, Any]) -> bool:
    """Check everything about the model but its tables; return ``ignore_merges``."""
    if model.get("type", "BPE") != "BPE":
        refuse("model", f"model type {str(model['type'])[:40]!a} is not implemented; only BPE is")
    unknown = set(model) - _MODEL_KEYS
    if unknown:
        refuse("model", f"the model key {min(unknown)[:80]!a} is not known")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key) not in (None, "", False):
            refuse(key, f"{key} = {str(model[key])[:40]!a} is not implemented")
    ignore_merges = model.get("ignore_merges", False)
    if not isinstance(ignore_merges, bool):
        refuse("ignore_merges", "ignore_merges must be true or false")
    return ignore_merges


def read_vocabulary(document: object) -> dict[str, int]:
    """Return the id of each token, all 256 bytes among them."""
    vocabulary = as_object(document, "vocab")
    used: set[int] = set()
    for token, token_id in vocabulary.items():
        if type(token_id) is not int or not 0 <= token_id < 1 << 31 or token_id in used:
            refuse("vocab", f"the id of {token[:40]!a} is not an integer of its own")
        if not token.isascii() and any("\ud800" <= character <= "\udfff" for character in token):
            refuse("vocab", f"the token {token[:40]!a} is not text")
        used.add(token_id)
    missing = [byte for byte, character in enumerate(BYTE_CHARACTERS) if character not in vocabulary]
    if missing:
        refuse("vocab", f"not byte-level: byte {missing[0]} has no token of its own")
    return dict(vocabulary)


def read_merges(document: object, ids: Mapping[str, int]) -> Merges:
    """Return the merges by pair."""
    if not isinstance(document, list):
        refuse("merges", "merges must be a list")
    merges: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, entry in enumerate(document):
        pair = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            refuse("merges", f"merge {rank} is not a pair of tokens")
        if pair[0] not in ids or pair[1] not in ids or pair[0] + pair[1] not in ids:
            refuse("merges", f"merge {rank} names a token outside the vocabulary")
        key = ids[pair[0]], ids[pair[1]]
        if key in merges:
            refuse("merges", f"merge {rank} is there twice")
        merges[key] = rank, ids[pair[0] + pair[1]]
    return merges


def read_added_tokens(document: object, ids: Mapping[str, int]) -> list[AddedToken]:
    """Return the added tokens in the order of the file."""
    if document is None:
        return []
    if not isinstance(document, list):
        refuse("added_tokens", "added_tokens must be a list")
    added: list[AddedToken] = []
    seen: dict[str, int] = {}
    for entry in document:
        token = as_object(entry, "added_tokens")
        content, token_id = token.get("content"), token.get("id")
        if not isinstance(content, str) or not content or type(token_id) is not int or content in seen:
            refuse("added_tokens", f"an added token without content or id, or one there twice: {str(content)[:40]!a}")
        if any("\ud800" <= character <= "\udfff" for character in content):
            refuse("added_tokens", f"the added token {content[:40]!a} is not text")
        switches = {key: token.get(key, False) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        if not all(isinstance(value, bool) for value in switches.values()):
            refuse("added_tokens", f"the options of {content[:40]!a} must be true or false")
        for key in ("single_word", "lstrip", "rstrip"):
            if switches[key]:
                refuse(key, f"the added token {content[:40]!a} with {key} is not implemented")
        # The library numbers a token that the vocabulary lacks itself, whatever the file says.
        wanted = ids.get(content, max(len(ids), max(seen.values(), default=-1) + 1))
        if token_id != wanted:
            refuse("added_tokens", f"the added token {content[:40]!a} has id {token_id}, the library gives {wanted}")
        seen[content] = token_id
        added.append(AddedToken(token_id, content, switches["special"], switches["normalized"]))
    return added


def read_template(document: object) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a single text."""
    if document is None:
        return [], []
    step = as_object(document, "post_processor")
    kind = step.get("type")
    if kind == "ByteLevel":  # moves offsets only
        return [], []
    if kind == "Sequence" and isinstance(step.get("processors"), list):
        inner = [read_template(each) for each in step["processors"]]
        adding = [pair for pair in inner if pair != ([], [])]
        if len(adding) > 1:
            refuse("post_processor", "several templates in sequence are not implemented")
        return adding[0] if adding else ([], [])
    if kind != "TemplateProcessing":
        refuse("post_processor", f"post-processor {str(kind)[:40]!a} is not implemented")
    parts, known = step.get("single"), as_object(step.get("special_tokens"), "special_tokens")
    before: list[int] = []
    after: list[int] = []
    texts = 0
    for part in parts if isinstance(parts, list) else []:
        text = as_object(part, "post_processor").get("Sequence")
        if text is not None:
            if as_object(text, "post_processor").get("id") != "A":
                refuse("post_processor", "a template with a second text is not implemented")
            texts += 1
            continue
        name = as_object(part.get("SpecialToken"), "post_processor").get("id")
        ids = as_object(known.get(name) if isinstance(name, str) else None, "special_tokens").get("ids")
        if not isinstance(ids, list) or not all(type(each) is int for each in ids):
            refuse("post_processor", f"the template's token {str(name)[:40]!a} has no ids")
        (after if texts else before).extend(ids)
    if texts != 1:
        refuse("post_processor", "a template must hold the text once")
    return before, after


def as_object(document: object, field: str) -> Mapping[str, Any]:
    """Return a JSON object, or refuse the field it stands in."""
    if not isinstance(document, dict):
        refuse(field, f"{field} must be an object")
    return document


def refuse(field: str, detail: str) -> NoReturn:
    """Raise the TokenizerError of a field."""
    raise TokenizerError(f"tokenizer: {detail}; check text with the tokenizers library instead", field=field)
