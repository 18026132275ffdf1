"""tokenizer.json of a byte-level BPE vocabulary: text to tokens and back, exactly as the tokenizers library does.

Standard library only, so that an auditor checks text without trusting the server's code. What is not implemented is
refused by name when the file is read; hostile files surface as TokenizerError. Knows no model and no chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from epochless_vllm.errors import TokenizerError
from epochless_vllm.reference.bpe import merge_symbols
from epochless_vllm.reference.pretokenizers import (
    BYTES_BY_CHARACTER,
    Normalize,
    Split,
    normalizer_from_document,
    splits_from_document,
)
from epochless_vllm.reference.tokenizer_file import (
    as_object,
    check_keys,
    read_added_tokens,
    read_merges,
    read_model_options,
    read_template,
    read_vocabulary,
    refuse,
)

FILE_NAME = "tokenizer.json"
MAX_BYTES = 64 << 20  # 256k entries with their merges take 33 MB


class Tokenizer:
    """Text to tokens and back. Immutable; safe to share between threads."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Read a parsed tokenizer.json.

        Raises:
            TokenizerError: ``field`` names what is malformed or not implemented.
        """
        check_keys(document)
        model = as_object(document.get("model"), "model")
        self._ignore_merges = read_model_options(model)
        self._ids = read_vocabulary(model.get("vocab"))
        self._merges = read_merges(model.get("merges"), self._ids)
        self._added = read_added_tokens(document.get("added_tokens"), self._ids)
        self._normalize: Normalize | None = normalizer_from_document(document.get("normalizer"))
        self._splits: list[Split] = splits_from_document(document.get("pre_tokenizer"))
        self._before, self._after = read_template(document.get("post_processor"))
        self._special = frozenset(token.id for token in self._added if token.special)
        self._tokens = {token_id: text for text, token_id in self._ids.items()}
        self._tokens |= {token.id: token.content for token in self._added}
        outside = [each for each in (*self._before, *self._after) if each not in self._tokens]
        if outside:
            refuse("post_processor", f"the template adds token {outside[0]}, which is not in the vocabulary")
        verbatim = [(token.content, token.id) for token in self._added if not token.normalized]
        sought = [(self._normalized(token.content), token.id) for token in self._added if token.normalized]
        self._verbatim, self._sought = _Finder(verbatim), _Finder(sought)

    @property
    def size(self) -> int:
        """Tokens of the vocabulary, added ones included."""
        return len(self._tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, between those of the template unless told otherwise.

        Raises:
            TokenizerError: the text has half of a surrogate pair, which is no character.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            refuse("text", "a text with a lone surrogate has no tokens")
        ids: list[int] = []
        for piece, token_id in self._verbatim.cut(text):
            ids += [token_id] if token_id is not None else self._encode_piece(piece)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        return self.decode_bytes(ids, skip_special_tokens=skip_special_tokens).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> bytes:
        """Return the bytes of tokens, whole or not as UTF-8.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        return b"".join(self._bytes_of(each) for each in ids if not (skip_special_tokens and each in self._special))

    def _encode_piece(self, piece: str) -> list[int]:
        ids: list[int] = []
        for part, token_id in self._sought.cut(self._normalized(piece)):
            if token_id is not None:
                ids.append(token_id)
                continue
            words = [part]
            for split in self._splits:
                words = [word for each in words for word in split(each)]
            for word in words:
                ids += self._encode_word(word)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        if self._ignore_merges and word in self._ids:
            return [self._ids[word]]
        return merge_symbols([self._ids[character] for character in word], self._merges)

    def _normalized(self, text: str) -> str:
        return text if self._normalize is None else self._normalize(text)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokens.get(token_id)
        if token is None:
            refuse("id", f"{token_id} is not one of {self.size} tokens")
        # A token with a character outside the byte alphabet was added as plain text.
        values = [BYTES_BY_CHARACTER.get(character) for character in token]
        known = [value for value in values if value is not None]
        return bytes(known) if len(known) == len(values) else token.encode("utf-8")


def read_tokenizer(directory: Path | str) -> Tokenizer:
    """Return the tokenizer of a model directory.

    Raises:
        TokenizerError: no such file, or ``field`` names what is malformed or not implemented.
    """
    path = Path(directory) / FILE_NAME
    try:
        with path.open("rb") as file:
            payload = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}; name a complete model directory", field=FILE_NAME) from error
    return tokenizer_from_bytes(payload)


def tokenizer_from_bytes(payload: bytes) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json's bytes.

    Raises:
        TokenizerError: ``field`` names what is malformed or not implemented.
    """
    if len(payload) > MAX_BYTES:
        refuse(FILE_NAME, f"more than {MAX_BYTES} bytes")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            refuse(FILE_NAME, "an object names a key twice")
        return value

    def finite(constant: str) -> float:
        refuse(FILE_NAME, f"{constant} is not a number of JSON")

    try:
        document = json.loads(payload.decode("utf-8"), object_pairs_hook=unique, parse_constant=finite)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, endless digits, or nested without end
        refuse(FILE_NAME, "not strict JSON")
    return Tokenizer(as_object(document, FILE_NAME))


class _Finder:
    """Whole tokens in text: the leftmost first, the longest of those that begin there."""

    def __init__(self, tokens: Iterable[tuple[str, int]]) -> None:
        self._ids: dict[str, int] = {}
        for content, token_id in tokens:
            if self._ids.setdefault(content, token_id) != token_id:
                refuse("added_tokens", f"the added token {content[:40]!a} is there twice")
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def cut(self, text: str) -> Iterable[tuple[str, int | None]]:
        """Yield non-empty pieces of text without tokens, with None, and tokens found, with their ids, in order."""
        reached = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() > reached:
                yield text[reached : match.start()], None
            yield match.group(), self._ids[match.group()]
            reached = match.end()
        if reached < len(text):
            yield text[reached:], None
