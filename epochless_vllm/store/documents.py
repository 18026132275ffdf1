"""JSON written by others: strict, bounded, total. Knows no meaning of what it reads.

Unlike protocol/canonical.py it admits any spelling and finite floats, since trainers write with any library; like it,
it refuses duplicate keys, NaN and infinities, bytes that are not UTF-8, and nesting bombs before parsing.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from epochless_vllm.errors import InspectError

MAX_BYTES = 1 << 20  # a rank_pattern that names each of 10,000 modules fits
MAX_DEPTH = 16

_STRUCTURE = re.compile(r'["\\\[\]{}]')


def parse_document(payload: bytes, *, subject: str) -> dict[str, Any]:
    """Return the JSON object of a file's bytes.

    Args:
        subject: the file's name, for the error.

    Raises:
        InspectError: anything but one JSON object.
    """

    def refuse(reason: str, detail: str) -> NoReturn:
        raise InspectError(f"{subject}: {detail}; write the file again", reason=reason, file=subject)

    def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            refuse("duplicate_key", "an object names a key twice")
        return value

    def finite_float(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            refuse("not_finite", f"{text[:20]} is beyond every float")
        return value

    def bounded_integer(text: str) -> int:
        # Length first: Python raises a foreign error beyond 4300 digits.
        if len(text) > 19:
            refuse("overflow", f"an integer of {len(text)} digits")
        return int(text)

    if len(payload) > MAX_BYTES:
        refuse("too_large", f"more than {MAX_BYTES} bytes")
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        refuse("not_utf8", "not UTF-8")
    if _is_too_deep(text):
        refuse("too_deep", f"nested deeper than {MAX_DEPTH}")
    try:
        value = json.loads(
            text,
            object_pairs_hook=unique_pairs,
            parse_float=finite_float,
            parse_int=bounded_integer,
            parse_constant=lambda constant: refuse("not_finite", f"{constant} is not a number of JSON"),
        )
    except ValueError:
        refuse("not_json", "not JSON")
    if not isinstance(value, dict):
        refuse("not_object", "not a JSON object")
    return value


def _is_too_deep(text: str) -> bool:
    depth, quoted, escaped_at = 0, False, -1
    for match in _STRUCTURE.finditer(text):
        character, position = match.group(), match.start()
        if position == escaped_at:
            continue
        if character == "\\":
            escaped_at = position + 1
        elif character == '"':
            quoted = not quoted
        elif not quoted:
            depth += 1 if character in "[{" else -1
            if depth > MAX_DEPTH:
                return True
    return False
