"""A coverage-guided fuzzer in the standard library: inputs that reach new code are kept and changed further.

Coverage is pairs of lines executed one after another, in this package unless told otherwise. Changes are those of bytes
and of text: bits flipped, numbers replaced by awkward ones, pieces cut, doubled, moved or taken from another input,
words of the target's format put in. An input is a finding if the target lets anything but its own error escape, or
allocates out of proportion. Deterministic for a seed and a number of runs. Knows no formats.
"""

from __future__ import annotations

import random
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import epochless_vllm

PACKAGE = str(Path(epochless_vllm.__file__).parent)
MAX_BYTES = 1 << 16
NUMBERS = (0, 1, -1, 7, 8, 63, 64, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, 10**30)
_NUMBER = re.compile(rb"-?[0-9]+")

Edge = tuple[str, int, int]


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Attributes:
        run: takes bytes; must return, or raise one of ``errors``.
        seeds: inputs to start from besides the corpus.
        words: pieces of the format.
        bytes_per_byte, bytes_at_least: memory it may take, as a multiple of the input and a constant.
        traced: the opening of the paths of files whose coverage counts.
    """

    name: str
    run: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()
    bytes_per_byte: int = 400
    bytes_at_least: int = 8 << 20
    traced: str = PACKAGE


@dataclass(frozen=True)
class Finding:
    """An input that broke the target's promise, and how."""

    data: bytes
    problem: str


@dataclass
class Campaign:
    """The state of one run over one target."""

    target: Target
    pool: list[bytes] = field(default_factory=list)
    seen: set[Edge] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    fresh: list[bytes] = field(default_factory=list)
    runs: int = 0
    accepted: int = 0

    def try_input(self, data: bytes, *, measured: bool = False) -> bool:
        """Run one input; keep it if it reached new code. Returns whether it did."""
        self.runs += 1
        problem, edges = execute(self.target, data, measured=measured)
        if problem == "":
            self.accepted += 1
        elif problem is not None and problem not in {each.problem for each in self.findings}:
            self.findings.append(Finding(data, problem))
        if edges <= self.seen:
            return False
        self.seen |= edges
        self.pool.append(data)
        return True


def fuzz(
    target: Target, corpus: list[bytes], *, seed: int = 0, runs: int | None = None, seconds: float | None = None
) -> Campaign:
    """Fuzz a target until so many runs or so much time; ``fresh`` holds inputs that the corpus lacked."""
    campaign, rng = Campaign(target), random.Random(seed)
    for data in [*target.seeds(), *corpus]:
        campaign.try_input(data, measured=True)
    ends = None if seconds is None else time.monotonic() + seconds
    while (runs is None or campaign.runs < runs) and (ends is None or time.monotonic() < ends):
        data = change(rng, rng.choice(campaign.pool), rng.choice(campaign.pool), target.words)
        if campaign.try_input(data, measured=campaign.runs % 64 == 0):
            campaign.fresh.append(data)
    return campaign


def execute(target: Target, data: bytes, *, measured: bool = False) -> tuple[str | None, set[Edge]]:
    """Return ("" if accepted, None if refused as promised, else the problem; the edges it took)."""
    problem: str | None = ""
    if measured:  # memory apart from tracing, whose own sets would count
        tracemalloc.start()
    try:
        with _tracing(target.traced, enabled=not measured) as edges:
            target.run(data)
    except target.errors:
        problem = None
    except Exception as error:  # noqa: BLE001  whatever else escapes is what is looked for
        problem = f"{type(error).__name__} at {_place(error)}"
    if measured:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        allowed = target.bytes_at_least + target.bytes_per_byte * len(data)
        if peak > allowed:
            problem = f"allocates more than {allowed} bytes for {len(data)}"
        _, edges = execute(target, data) if problem in ("", None) else (problem, set())
    return problem, edges


def change(rng: random.Random, data: bytes, donor: bytes, words: tuple[bytes, ...]) -> bytes:
    """Return a changed copy of ``data``; ``donor`` lends pieces."""
    out = bytearray(data)
    for _ in range(1 + rng.randrange(4)):
        rng.choice(_CHANGES)(rng, out, donor, words)
    return bytes(out[:MAX_BYTES])


def _flip(rng: random.Random, out: bytearray, donor: bytes, words: tuple[bytes, ...]) -> None:
    if out:
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)


def _number(rng: random.Random, out: bytearray, donor: bytes, words: tuple[bytes, ...]) -> None:
    value = rng.choice(NUMBERS)
    if found := list(_NUMBER.finditer(out)):
        at = rng.choice(found)
        out[at.start() : at.end()] = str(value).encode()


def _integer(rng: random.Random, out: bytearray, donor: bytes, words: tuple[bytes, ...]) -> None:
    width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
    value = rng.choice(NUMBERS) % (1 << 8 * width)
    at = rng.randrange(len(out) + 1)
    out[at : at + width] = value.to_bytes(width, order)  # type: ignore[arg-type]  # one of the two


def _cut(rng: random.Random, out: bytearray, donor: bytes, words: tuple[bytes, ...]) -> None:
    begin, end = _piece(rng, len(out))
    del out[begin:end]


def _double(rng: random.Random, out: bytearray, donor: bytes, words: tuple[bytes, ...]) -> None:
    begin, end = _piece(rng, len(out))
    at = rng.randrange(len(out) + 1)
    out[at:at] = out[begin:end]


def _lend(rng: random.Random, out: bytearray, donor: bytes, words: tuple[bytes, ...]) -> None:
    begin, end = _piece(rng, len(donor))
    at = rng.randrange(len(out) + 1)
    out[at : at + rng.choice((0, end - begin))] = donor[begin:end]


def _word(rng: random.Random, out: bytearray, donor: bytes, words: tuple[bytes, ...]) -> None:
    if words:
        at = rng.randrange(len(out) + 1)
        word = rng.choice(words)
        out[at : at + rng.choice((0, len(word)))] = word


_CHANGES = (_flip, _number, _integer, _cut, _double, _lend, _word, _number, _word)


def _piece(rng: random.Random, length: int) -> tuple[int, int]:
    begin = rng.randrange(length + 1)
    return begin, min(length, begin + rng.choice((1, 4, 16, 64, length)))


class _tracing:  # noqa: N801  a context manager used like a function
    """Collects the edges of this package's code while it is entered."""

    def __init__(self, traced: str, *, enabled: bool) -> None:
        self._traced, self._enabled = traced, enabled
        self._edges, self._last = set[Edge](), 0

    def __enter__(self) -> set[Edge]:
        if self._enabled:
            self._before = sys.gettrace()
            sys.settrace(self._enter_frame)
        return self._edges

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(self._traced):
            return None
        self._last = 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                self._edges.add((name, self._last, frame.f_lineno))
                self._last = frame.f_lineno
            return line

        return line


def _place(error: BaseException) -> str:
    trace, place = error.__traceback__, "?"
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.startswith(PACKAGE):
            place = f"{Path(name).relative_to(PACKAGE)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def corpus_of(folder: Path) -> Iterator[bytes]:
    """Yield the inputs of a corpus folder in order of name; none if it does not exist."""
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        yield path.read_bytes()
