"""Strict readers of JSON values from a stranger: exact keys, exact types, exact text forms.

Everything a receipt, disclosure or envelope holds passes through here, so that a hostile value surfaces as a
ReceiptError with a stable code and never as a KeyError or a lenient conversion.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from epochless_vllm.errors import EncodingError, ReceiptError
from epochless_vllm.protocol.canonical import MAX_BYTES, MAX_INTEGER, decode_canonical
from epochless_vllm.protocol.digests import Digest

MAX_TEXT = 256

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_DECIMAL = re.compile(r"0|-?[1-9][0-9]{0,38}")
_PRINTABLE = re.compile(r"[!-~]+")  # ASCII without spaces: no look-alikes, no control characters
_PLACEHOLDERS = {
    "0" * 64,
    "f" * 64,
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",  # SHA-256 of nothing
}


def decode_json(payload: bytes, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value of canonical JSON bytes.

    Raises:
        ReceiptError: the bytes are not canonical JSON; the threat is the reason canonical.py names.
    """
    try:
        return decode_canonical(payload, max_bytes=max_bytes)
    except EncodingError as error:
        raise ReceiptError(error.message, threat=str(error.fields["reason"])) from error


def read_object(value: Any, keys: tuple[str, ...], name: str) -> dict[str, Any]:
    """Return a JSON object that has exactly ``keys``."""
    if not isinstance(value, dict):
        raise ReceiptError(f"{name}: not an object", threat="wrong_type")
    if missing := [key for key in keys if key not in value]:
        raise ReceiptError(f"{name}: {missing[0]} is missing", threat="missing_field")
    if len(value) != len(keys):
        unknown = sorted(set(value) - set(keys))[0]
        raise ReceiptError(f"{name}: unknown field {unknown[:80]!r}", threat="unknown_field")
    return value


def read_list(value: Any, name: str, *, at_most: int | None = None, exactly: int | None = None) -> list[Any]:
    """Return a JSON array within a length."""
    if not isinstance(value, list):
        raise ReceiptError(f"{name}: not an array", threat="wrong_type")
    if exactly is not None and len(value) != exactly:
        raise ReceiptError(f"{name}: {len(value)} items; {exactly} wanted", threat="wrong_type")
    if at_most is not None and len(value) > at_most:
        raise ReceiptError(f"{name}: {len(value)} items; at most {at_most}", threat="limit_exceeded")
    return value


def read_integer(
    value: Any, name: str, *, minimum: int = 0, maximum: int = MAX_INTEGER, threat: str = "limit_exceeded"
) -> int:
    """Return an integer of a range; booleans are not integers."""
    if type(value) is not int:
        raise ReceiptError(f"{name}: not an integer", threat="not_integer")
    if not minimum <= value <= maximum:
        raise ReceiptError(f"{name}: {value} is outside [{minimum}, {maximum}]", threat=threat)
    return value


def read_choice(value: Any, name: str, choices: tuple[str, ...], *, threat: str = "unknown_word") -> str:
    """Return a string that is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ReceiptError(f"{name}: {str(value)[:80]!r} is not one of {', '.join(choices)}", threat=threat)
    return value


def read_text(value: Any, name: str, *, minimum: int = 1, maximum: int = MAX_TEXT) -> str:
    """Return a string of printable ASCII without spaces, ``minimum`` to ``maximum`` characters."""
    if not isinstance(value, str):
        raise ReceiptError(f"{name}: not a string", threat="wrong_type")
    if not minimum <= len(value) <= maximum or not _PRINTABLE.fullmatch(value):
        raise ReceiptError(
            f"{name}: must be {minimum} to {maximum} printable ASCII characters without spaces", threat="text_form"
        )
    return value


def read_digest(value: Any, name: str) -> Digest:
    """Return a well-formed digest that is no placeholder."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ReceiptError(f"{name}: not a sha256 digest: {str(value)[:80]!r}", threat="digest_form")
    if value[7:] in _PLACEHOLDERS:
        raise ReceiptError(f"{name}: a placeholder stands where a digest belongs", threat="digest_placeholder")
    return Digest(value)


def read_hex64(value: Any, name: str) -> bytes:
    """Return 32 bytes written as 64 lowercase hexadecimal digits."""
    if not isinstance(value, str) or not _HEX64.fullmatch(value):
        raise ReceiptError(f"{name}: not 64 lowercase hexadecimal digits", threat="digest_form")
    return bytes.fromhex(value)


def read_decimal(value: Any, name: str, *, minimum: int, maximum: int) -> int:
    """Return an integer written as a string in its one decimal form, for values beyond exact JSON numbers."""
    if not isinstance(value, str) or not _DECIMAL.fullmatch(value) or not value.isascii():
        raise ReceiptError(f"{name}: not a decimal integer in a string", threat="decimal_form")
    return read_integer(int(value), name, minimum=minimum, maximum=maximum)


def read_base64(value: Any, name: str, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of standard padded base64 in its one spelling."""
    if not isinstance(value, str) or len(value) > (max_bytes + 2) // 3 * 4:
        raise ReceiptError(f"{name}: not base64 of at most {max_bytes} bytes", threat="base64")
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ReceiptError(f"{name}: not base64", threat="base64") from error
    if base64.b64encode(raw).decode("ascii") != value:
        raise ReceiptError(f"{name}: not the one base64 spelling of its bytes", threat="base64")
    return raw
