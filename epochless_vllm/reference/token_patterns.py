"""Pre-tokenizer patterns of tokenizer.json, rewritten for the standard library's ``re`` with classes spelled out.

Accepted: literals, classes, ``\\p{..} \\P{..} \\s \\S \\d``, escaped punctuation, ``|``, ``(?: (?i: (?= (?!``, greedy
``? * + {m,n}``; a group may be optional but not repeated. In that subset the two engines match alike once every class
is a set of code points; anything else is refused by name rather than guessed. Knows no tokens.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import NoReturn

from epochless_vllm.errors import TokenizerError
from epochless_vllm.reference.unicode_tables import WHITE_SPACE, Ranges, invert_ranges, merge_ranges, points_of

MAX_LENGTH = 1000

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ByteLevel splits by when told to use its own pattern."""

_CONTROLS = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v"}
_PROPERTY = re.compile(r"\{(\^?)([A-Z][a-z]?)\}")
_REPEAT = re.compile(r"[?*+]|\{[0-9]{1,3}(?:,(?:[0-9]{1,3})?)?\}")
_GROUPS = ("(?:", "(?i:", "(?=", "(?!")
_SPECIAL = ".^$]}?*+{"


@functools.lru_cache(maxsize=64)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the compiled equivalent of a tokenizer.json pattern.

    Raises:
        TokenizerError: a construct outside the subset, or a pattern that matches nothing at all.
    """
    if len(pattern) > MAX_LENGTH:
        raise _refusal(pattern, f"longer than {MAX_LENGTH} characters")
    translated = _Translator(pattern).translate()
    try:
        return re.compile(translated)
    except (re.error, OverflowError, RecursionError):
        raise _refusal(pattern, "not well formed") from None


def spell_class(points: Ranges) -> str:
    """Return a class of ``re`` that matches any of the code points, of which there must be one."""
    return "[" + "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in merge_ranges(points)) + "]"


@dataclass
class _Group:
    """A group being read: whether some alternative before this one, and this one so far, need no character."""

    opening: str
    some_empty: bool = False
    this_empty: bool = True


class _Translator:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._groups = [_Group("")]

    def translate(self) -> str:
        out: list[str] = []
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            if character == "|":
                group = self._groups[-1]
                group.some_empty, group.this_empty = group.some_empty or group.this_empty, True
                out.append(self._take(1))
            elif character == "(":
                out.append(self._open_group())
            else:
                out += self._atom(character)
        if len(self._groups) > 1:
            self._fail("a group that does not end")
        if self._groups[0].some_empty or self._groups[0].this_empty:
            # Engines differ in where they look next after an empty match.
            self._fail("matches the empty text")
        return "".join(out)

    def _atom(self, character: str) -> list[str]:
        """Return one atom, or the end of a group, with its repetition if it has one."""
        consumes = repeatable = True
        if character == ")":
            group = self._groups.pop()
            if not self._groups:
                self._fail("an unmatched )")
            repeatable = group.opening in ("(?:", "(?i:")
            consumes = repeatable and not (group.some_empty or group.this_empty)
            atom = self._take(1)
        elif character == "[":
            atom = self._class()
        elif character == "\\":
            atom = self._escape()
        elif character in _SPECIAL:
            self._fail(f"an unescaped {character}")
        else:
            atom = self._literal(self._take(1))
        repetition = self._repetition(repeatable, after_group=character == ")")
        if consumes and not repetition.startswith(("?", "*", "{0")):
            self._groups[-1].this_empty = False
        return [atom, repetition]

    def _take(self, count: int) -> str:
        taken = self._pattern[self._at : self._at + count]
        self._at += count
        return taken

    def _open_group(self) -> str:
        for opening in _GROUPS:
            if self._pattern.startswith(opening, self._at):
                self._groups.append(_Group(opening))
                return self._take(len(opening))
        raise _refusal(self._pattern, "a group of another kind than " + " ".join(_GROUPS))

    def _repetition(self, repeatable: bool, *, after_group: bool) -> str:
        found = _REPEAT.match(self._pattern, self._at)
        if found is None:
            return ""
        taken = self._take(len(found.group()))
        if not repeatable:
            self._fail("a repeated lookahead")
        if after_group and taken != "?":
            self._fail("a repeated group")
        if self._pattern[self._at : self._at + 1] in ("?", "+", "*", "{"):
            self._fail("a lazy, possessive or double repetition")
        return taken

    def _literal(self, character: str) -> str:
        if any(group.opening == "(?i:" for group in self._groups) and not (
            character.isascii() and character.isprintable()
        ):
            self._fail("a caseless literal outside printable ASCII")
        return re.escape(character)

    def _escape(self) -> str:
        self._take(1)
        character = self._take(1)
        if character in _CONTROLS:
            return re.escape(_CONTROLS[character])
        if character and character.isascii() and not character.isalnum():
            return self._literal(character)
        return self._spell(self._set(character))

    def _set(self, letter: str) -> Ranges:
        """Return the code points of the class escape whose letter has just been taken."""
        if letter in ("s", "S"):
            return WHITE_SPACE if letter == "s" else invert_ranges(WHITE_SPACE)
        if letter == "d":
            return points_of("Nd")
        found = _PROPERTY.match(self._pattern, self._at) if letter in ("p", "P") else None
        points = points_of(found[2]) if found else []
        if found is None or not points:
            self._fail(f"the escape \\{letter}{self._pattern[self._at : self._at + 12]}")
        self._at = found.end()
        return points if (letter == "p") != bool(found[1]) else invert_ranges(points)

    def _class(self) -> str:
        self._take(1)
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        points: Ranges = []
        while not self._pattern.startswith("]", self._at) or not points:
            if self._at >= len(self._pattern):
                self._fail("a class that does not end")
            first = self._member()
            if isinstance(first, list):
                points += first
            elif self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                self._take(1)
                last = self._member()
                if not isinstance(last, int) or last < first:
                    self._fail("a range that is not one")
                points.append((first, last))
            else:
                points.append((first, first))
        self._take(1)
        return self._spell(invert_ranges(points) if negated else points)

    def _member(self) -> int | Ranges:
        character = self._take(1)
        if character == "\\":
            character = self._take(1)
            if character in _CONTROLS:
                return ord(_CONTROLS[character])
            if character and character.isascii() and not character.isalnum():
                return ord(character)
            return self._set(character)
        # The library's engine reads sets within sets and intersections here.
        if not character or character in "[]" or (character == "&" and self._pattern.startswith("&", self._at)):
            self._fail(f"an unescaped {character} in a class")
        return ord(character)

    def _spell(self, points: Ranges) -> str:
        if any(group.opening == "(?i:" for group in self._groups):
            self._fail("a caseless class")
        if not points:
            self._fail("a class of no characters")
        return spell_class(points)

    def _fail(self, detail: str) -> NoReturn:
        raise _refusal(self._pattern, detail)


def _refusal(pattern: str, detail: str) -> TokenizerError:
    return TokenizerError(
        f"tokenizer.json: the pattern {pattern[:80]!a}: {detail}; check text with the tokenizers library instead",
        field="pattern",
    )
