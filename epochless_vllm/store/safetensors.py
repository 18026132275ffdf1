"""The safetensors header, read as an enemy would write it, and the canonical header of a stored file.

Promises: any bytes give tensor records that tile the data exactly once or an InspectError whose ``reason`` is one of
REASONS; nothing is allocated on the word of a number that has not been checked against bytes at hand. Stricter than
the format where it is loose: no duplicate or unknown keys, no escapes that spell a second name, no holes, ASCII names.
Knows no adapters and reads no tensor data.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from epochless_vllm.errors import InspectError

MAX_HEADER_BYTES = 16 << 20  # 65,536 tensors of 250 bytes each; the format itself allows 100 MB
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 8
LIMIT = 1 << 63  # no count, size or offset of a real file reaches it; beyond it is an overflow by name
ALIGNMENT = 8
REMEMBERED = 4  # headers
MAX_REMEMBERED_BYTES = 1 << 19  # of each: 3,000 tensors; what is parsed from them takes up to six times that

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

REASONS = frozenset({
    "truncated", "header_length", "header_text", "header_syntax", "duplicate_key", "unknown_field", "missing_field",
    "not_integer", "overflow", "dtype", "name", "dimensions", "too_many_tensors", "byte_length", "offsets", "overlap",
    "hole", "trailing_bytes",
})  # fmt: skip

_SPACES = frozenset(" \t\n\r")
_SPACE = re.compile(r"[ \t\n\r]*")
_DIGITS = re.compile(r"[0-9]+")
_NAME = re.compile(r"[\x21-\x7e]{1,512}")  # visible ASCII: no NUL, no look-alikes of another script
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a file; ``begin`` and ``end`` are byte offsets into the data after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def byte_length(self) -> int:
        return self.end - self.begin


def refuse(reason: str, detail: str, **fields: Any) -> NoReturn:
    """Raise the InspectError of a safetensors file."""
    raise InspectError(f"safetensors: {detail}; write the file again", reason=reason, **fields)


def read_header(
    read: Callable[[int], bytes], file_bytes: int | None, *, max_header_bytes: int = MAX_HEADER_BYTES
) -> tuple[list[TensorRecord], int]:
    """Return the records of a file, in the order of its data, and the offset at which the data begin.

    Args:
        read: returns up to that many next bytes of the file, empty at its end.
        file_bytes: the size of the file; None for a stream, whose length the caller must check against the records.

    Raises:
        InspectError: the file is not well formed.
    """
    opening = _read_exactly(read, 8)
    length = int.from_bytes(opening, "little")
    if not 0 < length <= max_header_bytes:
        refuse("header_length", f"a header of {length} bytes; at most {max_header_bytes} are read", have=length)
    if file_bytes is not None and length > file_bytes - 8:
        refuse("truncated", f"a header of {length} bytes in a file of {file_bytes}", need=length + 8, have=file_bytes)
    header = _read_exactly(read, length)
    return parse_header(header, None if file_bytes is None else file_bytes - 8 - length), 8 + length


def parse_header(header: bytes, data_length: int | None) -> list[TensorRecord]:
    """Return the records of a header, in the order of their data.

    The last few are remembered: the adapters of a policy differ in their data only, and a publication waits for this.

    Args:
        header: the JSON text, without its length.
        data_length: bytes that follow the header; None when not known yet.

    Raises:
        InspectError: the header is not well formed or does not describe exactly those bytes.
    """
    parse = _parse if len(header) > MAX_REMEMBERED_BYTES else _parse_remembered
    return list(parse(header, data_length))


def _parse(header: bytes, data_length: int | None) -> tuple[TensorRecord, ...]:
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError:
        refuse("header_text", "the header is not UTF-8")
    cursor = _Cursor(text)
    if not text.startswith("{"):
        refuse("header_syntax", "the header does not open with '{'")
    records: list[TensorRecord] = []
    for name in cursor.members():
        if name == "__metadata__":
            for _ in cursor.members():
                cursor.string()
        elif len(records) == MAX_TENSORS:
            refuse("too_many_tensors", f"more than {MAX_TENSORS} tensors")
        else:
            records.append(_parse_entry(cursor, name))
    if text[cursor.position :].strip(" "):
        refuse("header_syntax", "text after the header's object")
    return tuple(_check_tiling(records, data_length))


_parse_remembered = lru_cache(maxsize=REMEMBERED)(_parse)


def encode_header(records: list[TensorRecord]) -> bytes:
    """Return the length and header bytes of a file, padded so that the data are aligned."""
    entries = {
        record.name: {"dtype": record.dtype, "shape": list(record.shape), "data_offsets": [record.begin, record.end]}
        for record in records
    }
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def lay_out(tensors: list[tuple[str, str, tuple[int, ...]]]) -> list[TensorRecord]:
    """Return records of (name, dtype, shape) in canonical order: wider items first, so that each is aligned."""
    offset = 0
    records = []
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor[1]], tensor[0])):
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        records.append(TensorRecord(name, dtype, shape, offset, end))
        offset = end
    return records


def _read_exactly(read: Callable[[int], bytes], count: int) -> bytes:
    pieces: list[bytes] = []
    missing = count
    while missing > 0:
        piece = read(min(missing, 1 << 20))
        if not piece:
            refuse("truncated", f"the file ends inside its header, {missing} bytes early", need=count)
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


def _parse_entry(cursor: _Cursor, name: str) -> TensorRecord:
    if not _NAME.fullmatch(name):
        refuse("name", f"tensor name {name[:80]!a} is not 1-512 visible ASCII characters")
    shown = repr(name[:120])
    dtype, shape, offsets = None, None, None
    for key in cursor.members():
        if key == "dtype":
            dtype = cursor.string()
        elif key == "shape":
            shape = cursor.integers(MAX_DIMENSIONS, reason="dimensions")
        elif key == "data_offsets":
            offsets = cursor.integers(2, reason="offsets")
        else:
            refuse("unknown_field", f"tensor {shown} has the unknown field {key[:80]!a}")
    if dtype is None or shape is None or offsets is None:
        refuse("missing_field", f"tensor {shown} lacks dtype, shape or data_offsets")
    if dtype not in ITEM_BYTES:
        refuse("dtype", f"tensor {shown} has the unknown dtype {dtype[:40]!a}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse("offsets", f"tensor {shown} has data_offsets {list(offsets)}")
    # Zero counts as one: an empty tensor must not hide a size that overflows elsewhere.
    if math.prod(max(size, 1) for size in shape) * ITEM_BYTES[dtype] >= LIMIT:
        refuse("overflow", f"tensor {shown} of shape {list(shape)} has 2**63 bytes or more")
    size = math.prod(shape) * ITEM_BYTES[dtype]
    if size != offsets[1] - offsets[0]:
        refuse(
            "byte_length",
            f"tensor {shown} of shape {list(shape)} and {dtype} needs {size} bytes, its offsets span "
            f"{offsets[1] - offsets[0]}",
            need=size,
            have=offsets[1] - offsets[0],
        )
    return TensorRecord(name, dtype, shape, offsets[0], offsets[1])


def _check_tiling(records: list[TensorRecord], data_length: int | None) -> list[TensorRecord]:
    ordered = sorted(records, key=lambda record: (record.begin, record.end))
    reached = 0
    for record in ordered:
        if record.begin < reached:
            refuse("overlap", f"tensor {record.name[:120]!r} shares bytes with another")
        if record.begin > reached:
            refuse("hole", f"{record.begin - reached} bytes before tensor {record.name[:120]!r} belong to no tensor")
        reached = record.end
    if data_length is not None and reached > data_length:
        refuse("truncated", f"the tensors need {reached} bytes, {data_length} follow", need=reached, have=data_length)
    if data_length is not None and reached < data_length:
        refuse("trailing_bytes", f"{data_length - reached} bytes after the last tensor", need=reached, have=data_length)
    return ordered


class _Cursor:
    """A position in the header's text that moves only past what it has checked. JSON without floats or nesting."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0

    def members(self) -> Iterator[str]:
        """Yield the keys of the object here, each with the cursor at its value; a key given twice is refused."""
        seen: set[str] = set()
        self._expect("{")
        if self._accept("}"):
            return
        while True:
            key = self.string()
            if key in seen:
                refuse("duplicate_key", f"the header names {key[:120]!a} twice")
            seen.add(key)
            self._expect(":")
            yield key
            if self._accept("}"):
                return
            self._expect(",")

    def string(self) -> str:
        """Return the JSON string here."""
        self._skip_space()
        if self._text[self.position : self.position + 1] != '"':
            self._fail("a string")
        try:
            value, self.position = _DECODER.raw_decode(self._text, self.position)
        except ValueError:
            self._fail("a string")
        assert isinstance(value, str)
        # Escapes may spell half a surrogate pair: text that no UTF-8 encodes.
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            refuse("header_text", "a string with a lone surrogate")
        return value

    def integers(self, most: int, *, reason: str) -> tuple[int, ...]:
        """Return the array of at most ``most`` non-negative integers here."""
        values: list[int] = []
        self._expect("[")
        if self._accept("]"):
            return ()
        while True:
            if len(values) == most:
                refuse(reason, f"an array of more than {most} integers")
            values.append(self._integer())
            if self._accept("]"):
                return tuple(values)
            self._expect(",")

    def _integer(self) -> int:
        self._skip_space()
        match = _DIGITS.match(self._text, self.position)
        if match is None:
            refuse("not_integer", f"not a non-negative integer at character {self.position} of the header")
        start, end = match.span()
        if self._text[end : end + 1] in (".", "e", "E") or (self._text[start] == "0" and end - start > 1):
            refuse("not_integer", f"not an integer at character {start} of the header")
        # Length first: Python raises a foreign error beyond 4300 digits.
        if end - start > 19 or (value := int(match.group())) >= LIMIT:
            refuse("overflow", f"an integer of {end - start} digits; sizes stay below 2**63")
        self.position = end
        return value

    def _skip_space(self) -> None:
        if self._text[self.position : self.position + 1] in _SPACES:
            match = _SPACE.match(self._text, self.position)
            assert match is not None
            self.position = match.end()

    def _accept(self, character: str) -> bool:
        if self._text[self.position : self.position + 1] != character:
            self._skip_space()
            if self._text[self.position : self.position + 1] != character:
                return False
        self.position += 1
        return True

    def _expect(self, character: str) -> None:
        if not self._accept(character):
            self._fail(repr(character))

    def _fail(self, wanted: str) -> NoReturn:
        refuse("header_syntax", f"expected {wanted} at character {self.position} of the header")
