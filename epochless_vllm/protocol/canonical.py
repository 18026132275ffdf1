"""The one byte encoding of a value: JSON restricted so that equal values have equal bytes.

The profile is RFC 8785 narrowed: ASCII object keys, no floats, integers within 2**53 - 1, no whitespace, UTF-8
without BOM. ``decode_canonical`` accepts exactly the bytes ``encode_canonical`` writes: canonicalisation is a
check, never a repair. Knows nothing of what the values mean.
"""

from __future__ import annotations

import json
import re
from typing import Any

from epochless_vllm.errors import EncodingError

MAX_INTEGER = (1 << 53) - 1  # the largest integer every JSON reader keeps exactly
MAX_DEPTH = 16  # nothing of ours nests deeper; checked before parsing, against recursion bombs
# An unterminated string runs to the end, so that the scan stays linear on hostile text.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
MAX_BYTES = 64 << 20  # a verbose receipt of the longest context fits


def encode_canonical(value: Any) -> bytes:
    """Return the canonical bytes of a value built from dict, list, tuple, str, int, bool and None.

    Raises:
        EncodingError: the value is outside the profile.
    """
    _check_value(value, 0)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False)
    return text.encode("utf-8")


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
    if isinstance(value, int):
        if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise _refusal("integer_range", f"integer of {value.bit_length()} bits")
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _refusal("lone_surrogate", "a string with a lone surrogate") from error
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not key.isascii():
                raise _refusal("key", "an object key that is not ASCII text")
            _check_value(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_value(item, depth + 1)
    else:
        raise _refusal("type", f"a {type(value).__name__}")
