"""Module-name patterns of a PEFT configuration, matched in linear time.

PEFT matches each key of ``rank_pattern`` and ``alpha_pattern`` as ``(.*\\.)?(key)$`` with a backtracking engine; a
hostile key would hold the server for hours. Here the useful part of that syntax runs as a simulated automaton under a
budget of steps: literals, ``. \\d \\w``, classes, ``* + ?`` (lazy too), groups, ``|``, ``^ $``. The rest is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from epochless_vllm.errors import AdapterConfigError

MAX_PATTERN_LENGTH = 512
MAX_GROUP_DEPTH = 16
MAX_STEPS = 4_000_000  # about two seconds; a literal key for each of 1,000 modules takes half of it

_LITERAL = re.compile(r"\^?(?:[A-Za-z0-9_.\-]|\\[.\-])+\$?")
_ASCII = "".join(map(chr, range(128)))
_ESCAPES = {
    "d": frozenset("0123456789"),
    "w": frozenset(character for character in _ASCII if character.isalnum() or character == "_"),
    **{character: frozenset(character) for character in ".-_^$*+?()[]{}|\\/"},
}
_ANY = frozenset(_ASCII) - {"\n"}

# An automaton is a list of instructions: (accepted characters, -1) consumes one and goes on to the next instruction;
# ("split", target) goes on to both; ("jump", target); ("begin", -1) and ("end", -1) hold at the ends of the name.
_Instruction = tuple["frozenset[str] | str", int]


@dataclass(frozen=True)
class _Literal:
    """A key without repetition or choice: its text, and (offset, text) of the parts between unescaped dots."""

    text: str
    parts: tuple[tuple[int, str], ...]
    anchored: bool

    @classmethod
    def from_key(cls, key: str) -> _Literal:
        characters = re.findall(r"\\?.", key.removeprefix("^").removesuffix("$"))
        text = "".join(character[-1] for character in characters)
        wild = [index for index, character in enumerate(characters) if character == "."]
        begins, ends = [0, *(index + 1 for index in wild)], [*wild, len(text)]
        parts = tuple((begin, text[begin:end]) for begin, end in zip(begins, ends, strict=True))
        return cls(text, parts, key.startswith("^"))


class PatternSet:
    """The keys of one pattern field, in their order: the first that matches a module counts, as in PEFT."""

    def __init__(self, keys: Iterable[str], *, field: str) -> None:
        """Compile the keys.

        Raises:
            AdapterConfigError: a key uses syntax that is not supported here.
        """
        self._field = field
        self._steps = 0
        keys = tuple(keys)
        for key in keys:
            if not key.isascii() or not 0 < len(key) <= MAX_PATTERN_LENGTH:
                raise _unsupported(key, field, f"is not 1-{MAX_PATTERN_LENGTH} ASCII characters")
        self._keys = [
            (key, _Literal.from_key(key) if _LITERAL.fullmatch(key) else _Parser(key, field).parse()) for key in keys
        ]

    def first_match(self, module: str) -> str | None:
        """Return the first key that matches a module's dotted ASCII name, or None.

        Raises:
            AdapterConfigError: the keys are too expensive to match.
        """
        for key, matcher in self._keys:
            self._spend(1)
            if isinstance(matcher, _Literal):
                matched = self._match_literal(matcher, module)
            else:
                matched = self._run(matcher, module)
            if matched:
                return key
        return None

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise AdapterConfigError(
                f"adapter_config.json: {self._field} takes too long to match; name the modules in full",
                field=self._field,
            )

    def _match_literal(self, literal: _Literal, module: str) -> bool:
        # A pattern of fixed length has one place to match: the end, after a dot.
        start = len(module) - len(literal.text)
        if start < 0 or (start > 0 and (literal.anchored or module[start - 1] != ".")):
            return False
        tail = module[start:]
        if tail == literal.text:
            return True
        for offset, part in literal.parts:
            self._spend(1)
            if not tail.startswith(part, offset):
                return False
        return True

    def _run(self, program: list[_Instruction], module: str) -> bool:
        current = self._follow(program, {0}, 0, len(module))
        for position, character in enumerate(module):
            reached = set()
            for index in current:
                accepted = program[index][0] if index < len(program) else ""
                if isinstance(accepted, frozenset) and character in accepted:
                    reached.add(index + 1)
            if not reached:
                return False
            current = self._follow(program, reached, position + 1, len(module))
        return len(program) in current

    def _follow(self, program: list[_Instruction], starts: set[int], position: int, length: int) -> set[int]:
        """Return every instruction reachable from ``starts`` without consuming a character."""
        seen: set[int] = set()
        waiting = list(starts)
        while waiting:
            index = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            if index == len(program):
                continue
            action, target = program[index]
            if action == "split":
                waiting += (index + 1, target)
            elif action == "jump":
                waiting.append(target)
            elif (action == "begin" and position == 0) or (action == "end" and position == length):
                waiting.append(index + 1)
        self._spend(len(seen))
        return seen


class _Parser:
    """Recursive descent over one key; emits instructions as it goes."""

    def __init__(self, key: str, field: str) -> None:
        self._key, self._field, self._position = key, field, 0

    def parse(self) -> list[_Instruction]:
        body = self._alternatives(0)
        if self._position != len(self._key):
            self._refuse(f"has an unbalanced ')' at character {self._position}")
        # (.*\.)? of PEFT: any prefix that ends in a dot, or none.
        return _joined([("split", 5), ("split", 4), (_ANY, -1), ("jump", 1), (frozenset("."), -1)], body)

    def _refuse(self, detail: str) -> NoReturn:
        raise _unsupported(self._key, self._field, detail)

    def _peek(self) -> str:
        return self._key[self._position : self._position + 1]

    def _take(self) -> str:
        character = self._peek()
        self._position += 1
        return character

    def _alternatives(self, depth: int) -> list[_Instruction]:
        if depth > MAX_GROUP_DEPTH:
            self._refuse("nests groups too deeply")
        branches = [self._sequence(depth)]
        while self._peek() == "|":
            self._take()
            branches.append(self._sequence(depth))
        program = branches.pop()
        while branches:
            branch = branches.pop()
            choice: list[_Instruction] = [("split", len(branch) + 2), *_shifted(branch, 1)]
            choice.append(("jump", len(branch) + 2 + len(program)))
            program = _joined(choice, program)
        return program

    def _sequence(self, depth: int) -> list[_Instruction]:
        program: list[_Instruction] = []
        while self._peek() not in ("", "|", ")"):
            program = _joined(program, self._quantified(self._atom(depth)))
        return program

    def _quantified(self, atom: list[_Instruction]) -> list[_Instruction]:
        quantifier = self._peek()
        if quantifier == "" or quantifier not in "*+?":
            return atom
        self._take()
        if self._peek() == "?":  # lazy: another order of trying, the same set of matches
            self._take()
        size = len(atom)
        if quantifier == "+":
            return [*atom, ("split", 0)] if size else []
        if quantifier == "*":
            return [("split", size + 2), *_shifted(atom, 1), ("jump", 0)]
        return [("split", size + 1), *_shifted(atom, 1)]

    def _atom(self, depth: int) -> list[_Instruction]:
        character = self._take()
        if character == "(":
            return self._group(depth)
        if character == "[":
            return [(self._class(), -1)]
        if character == "\\":
            return [(self._escape(), -1)]
        if character in "^$":
            if self._peek() != "" and self._peek() in "*+?":
                self._refuse("repeats an anchor")
            return [("begin" if character == "^" else "end", -1)]
        if character == ".":
            return [(_ANY, -1)]
        if character in "*+?{}]":
            self._refuse(f"uses {character!r} in a way that is not supported")
        return [(frozenset(character), -1)]

    def _group(self, depth: int) -> list[_Instruction]:
        if self._peek() == "?":
            self._take()
            if self._take() != ":":
                self._refuse("uses a (?...) group that is not supported")
        body = self._alternatives(depth + 1)
        if self._take() != ")":
            self._refuse("has an unbalanced '('")
        return body

    def _escape(self) -> frozenset[str]:
        character = self._take()
        if character not in _ESCAPES:
            self._refuse(f"uses the escape \\{character}, which is not supported")
        return _ESCAPES[character]

    def _class(self) -> frozenset[str]:
        negated = self._peek() == "^"
        if negated:
            self._take()
        members: set[str] = set()
        while True:
            character = self._take()
            if character == "]" and members:
                return frozenset(_ASCII) - members if negated else frozenset(members)
            if character in ("", "[", "]", "-", "&", "~", "|"):
                self._refuse("has a character class that is not supported")
            if character == "\\":
                members |= self._escape()
            elif self._peek() == "-":
                self._take()
                last = self._take()
                if not (character.isalnum() and last.isalnum() and character <= last):
                    self._refuse("has a character range that is not supported")
                members |= set(map(chr, range(ord(character), ord(last) + 1)))
            else:
                members.add(character)


def _shifted(program: list[_Instruction], distance: int) -> list[_Instruction]:
    return [(action, target + distance if target >= 0 else target) for action, target in program]


def _joined(first: list[_Instruction], second: list[_Instruction]) -> list[_Instruction]:
    return [*first, *_shifted(second, len(first))]


def _unsupported(key: str, field: str, detail: str) -> AdapterConfigError:
    return AdapterConfigError(
        f"adapter_config.json: the key {key[:80]!a} of {field} {detail}; name the modules in full", field=field
    )
