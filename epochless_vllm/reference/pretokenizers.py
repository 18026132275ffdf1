"""The steps of tokenizer.json between text and pieces: normalizers, pre-tokenizers, and the byte alphabet.

Each step is read from its JSON object or refused by its type's name. Pieces are text until the last step, ByteLevel,
which spells every byte as one printable character. Knows no vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from epochless_vllm.errors import TokenizerError
from epochless_vllm.reference.token_patterns import GPT2, compile_pattern, spell_class
from epochless_vllm.reference.unicode_tables import INERT, numerals

Normalize = Callable[[str], str]
Split = Callable[[str], list[str]]


def _byte_alphabet() -> list[str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


BYTE_CHARACTERS = _byte_alphabet()
"""The character that stands for each byte."""
BYTES_BY_CHARACTER = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


def normalizer_from_document(document: object) -> Normalize | None:
    """Return the normalizer of a tokenizer.json: none or NFC, alone or in sequences.

    Raises:
        TokenizerError: a normalizer of another type.
    """
    if document is None:
        return None
    step = _object(document, "normalizer")
    if step.get("type") == "NFC":
        return normalize_nfc
    if step.get("type") == "Sequence" and isinstance(step.get("normalizers"), list):
        # NFC twice is NFC.
        inner = [normalizer_from_document(each) for each in step["normalizers"]]
        return normalize_nfc if any(inner) else None
    raise _refusal("normalizer", f"normalizer {str(step.get('type'))[:40]!a}")


def normalize_nfc(text: str) -> str:
    """Return the text in NFC as of Unicode 9.0, the state of the library's tables."""
    if text.isascii():
        return text
    out: list[str] = []
    begin = 0
    for at, character in enumerate(text):
        if character in INERT:
            out += [unicodedata.normalize("NFC", text[begin:at]), character]
            begin = at + 1
    return "".join(out) + unicodedata.normalize("NFC", text[begin:])


def splits_from_document(document: object) -> list[Split]:
    """Return the pre-tokenizer's steps, the last of which is ByteLevel.

    Raises:
        TokenizerError: a step of another type or with options that are not implemented, or no ByteLevel at the end.
    """
    steps: list[Mapping[str, Any]] = []
    _flatten(document, steps)
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or kinds.count("ByteLevel") != 1:
        raise _refusal("pre_tokenizer", "a pre-tokenizer that does not end in ByteLevel")
    return [split for step in steps for split in _splits_of(step)]


def _flatten(document: object, steps: list[Mapping[str, Any]]) -> None:
    step = _object(document, "pre_tokenizer")
    if step.get("type") != "Sequence":
        steps.append(step)
        return
    inner = step.get("pretokenizers")
    if not isinstance(inner, list):
        raise _refusal("pre_tokenizer", "a Sequence without pretokenizers")
    for each in inner:
        _flatten(each, steps)


def _splits_of(step: Mapping[str, Any]) -> list[Split]:
    kind = step.get("type")
    if kind == "ByteLevel":
        prefix = [_prefix_space] if _switch(step, "add_prefix_space", "pre_tokenizer", default=True) else []
        own = [_isolate(compile_pattern(GPT2))] if _switch(step, "use_regex", "pre_tokenizer", default=True) else []
        return [*prefix, *own, _spell_bytes]
    if kind == "Digits":
        individual = _switch(step, "individual_digits", "pre_tokenizer", default=False)
        return [_isolate(re.compile(spell_class(numerals()) + ("" if individual else "+")))]
    if kind == "Split":
        pattern, behavior = _pattern(step.get("pattern")), step.get("behavior")
        inverted = _switch(step, "invert", "pre_tokenizer", default=False)
        if behavior == "Isolated" and not inverted:
            return [_isolate(pattern)]
        if behavior == "Removed" and inverted:
            return [_keep_matches(pattern)]
        raise _refusal("pre_tokenizer", f"Split with behavior {str(behavior)[:40]!a}, invert {inverted}")
    raise _refusal("pre_tokenizer", f"pre-tokenizer {str(kind)[:40]!a}")


def _pattern(document: object) -> re.Pattern[str]:
    given = _object(document, "pattern")
    if set(given) == {"Regex"} and isinstance(given["Regex"], str):
        return compile_pattern(given["Regex"])
    if set(given) == {"String"} and isinstance(given["String"], str) and given["String"]:
        return re.compile(re.escape(given["String"]))
    raise _refusal("pattern", "a pattern that is neither a Regex nor a String")


def _isolate(pattern: re.Pattern[str]) -> Split:
    """Return the split that keeps both matches and what lies between them."""

    def split(text: str) -> list[str]:
        pieces: list[str] = []
        reached = 0
        for match in pattern.finditer(text):
            if match.start() > reached:
                pieces.append(text[reached : match.start()])
            pieces.append(match.group())
            reached = match.end()
        return [*pieces, text[reached:]] if reached < len(text) else pieces

    return split


def _keep_matches(pattern: re.Pattern[str]) -> Split:
    """Return the split that keeps the matches only."""
    return lambda text: [match.group() for match in pattern.finditer(text)]


def _prefix_space(text: str) -> list[str]:
    return [text if text.startswith(" ") else " " + text]


def _spell_bytes(text: str) -> list[str]:
    return ["".join(BYTE_CHARACTERS[byte] for byte in text.encode("utf-8"))]


def _switch(step: Mapping[str, Any], key: str, field: str, *, default: bool) -> bool:
    value = step.get(key, default)
    if not isinstance(value, bool):
        raise _refusal(field, f"{key} = {str(value)[:40]!a}")
    return value


def _object(document: object, field: str) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise _refusal(field, f"{field} = {str(document)[:40]!a}")
    return document


def _refusal(field: str, detail: str) -> TokenizerError:
    return TokenizerError(
        f"tokenizer.json: {detail} is not implemented; check text with the tokenizers library instead", field=field
    )
