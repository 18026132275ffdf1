"""The one byte encoding of a value: JSON restricted so that equal values have equal bytes.

The profile is RFC 8785 narrowed: ASCII object keys, no floats, integers within 2**53 - 1, no whitespace, UTF-8
without BOM. ``decode_canonical`` accepts exactly the bytes ``encode_canonical`` writes: canonicalisation is a
check, never a repair. Knows nothing of what the values mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from epochless_vllm.errors import EncodingError

MAX_INTEGER = (1 << 53) - 1  # the largest integer every JSON reader keeps exactly
MAX_DEPTH = 16  # nothing of ours nests deeper; checked before parsing, against recursion bombs
# An unterminated string runs to the end, so that the scan stays linear on hostile text.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
MAX_BYTES = 64 << 20  # a verbose receipt of the longest context fits
# Made once: json.dumps makes one a call. A value within MAX_DEPTH is not circular.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False, check_circular=False
)


def encode_canonical(value: Any) -> bytes:
    """Return the canonical bytes of a value built from dict, list, tuple, str, int, bool and None.

    Raises:
        EncodingError: the value is outside the profile.
    """
    _check_value(value, 0)
    return _ENCODER.encode(value).encode("utf-8")


def decode_canonical(payload: bytes, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value of canonical bytes.

    Raises:
        EncodingError: the bytes are not valid UTF-8 JSON, are outside the profile, or are a second spelling.
    """
    if len(payload) > max_bytes:
        raise _refusal("too_large", f"{len(payload)} bytes; at most {max_bytes} are read")
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal("not_utf8", "not UTF-8") from error
    _check_nesting(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_pairs,
            parse_float=_refuse_number,
            parse_constant=_refuse_constant,
            parse_int=_parse_integer,
        )
    except ValueError as error:
        raise _refusal("not_json", "not JSON") from error
    if encode_canonical(value) != payload:
        raise _refusal("not_canonical", "valid JSON but not its canonical spelling")
    return value


def _refusal(reason: str, detail: str) -> EncodingError:
    return EncodingError(f"not canonical JSON: {detail}", reason=reason)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = {key for key, _ in pairs}
    if len(keys) != len(pairs):
        raise _refusal("duplicate_key", "an object names a key twice")
    return dict(pairs)


def _refuse_number(text: str) -> Any:
    raise _refusal("not_integer", f"{text[:20]} is not an integer")


def _refuse_constant(text: str) -> Any:
    raise _refusal("not_finite", f"{text} is not a number")


def _parse_integer(text: str) -> int:
    # Length first: Python raises a foreign error beyond 4300 digits.
    if len(text) > 17:
        raise _refusal("integer_digits", f"an integer of {len(text)} characters")
    if text == "-0":
        raise _refusal("integer_range", "a negative zero")
    return int(text)


def _check_nesting(text: str) -> None:
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            raise _refusal("too_deep", f"nested deeper than {MAX_DEPTH}")


def _check_value(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _refusal("too_deep", f"nested deeper than {MAX_DEPTH}")
    if value is None or value is True or value is False:
        return
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, int):
        _check_integer(value)
    elif isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or not key.isascii():
                raise _refusal("key", "an object key that is not ASCII text")
        _check_items(value.values(), depth + 1)
    elif isinstance(value, (list, tuple)):
        _check_items(value, depth + 1)
    else:
        raise _refusal("type", f"a {type(value).__name__}")


def _check_items(items: Iterable[Any], depth: int) -> None:
    for item in items:  # leaves are most of a value; a call for each would be most of the time
        kind = type(item)
        if depth <= MAX_DEPTH and kind is str:
            if not item.isascii():
                _check_text(item)
        elif depth <= MAX_DEPTH and kind is int:
            if not -MAX_INTEGER <= item <= MAX_INTEGER:
                _check_integer(item)
        else:
            _check_value(item, depth)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _refusal("lone_surrogate", "a string with a lone surrogate") from error


def _check_integer(number: int) -> None:
    if not -MAX_INTEGER <= number <= MAX_INTEGER:
        raise _refusal("integer_range", f"integer of {number.bit_length()} bits")
