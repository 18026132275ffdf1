"""SHA-256 digests with their purpose inside, and the text form every interface uses.

Promises that no two purposes share a hash input: each input opens with an ASCII context and a zero byte, and every
variable field is preceded by its length. Knows no files.
"""

from __future__ import annotations

import hashlib
import re
from typing import NewType

from epochless_vllm.errors import EncodingError

Digest = NewType("Digest", str)
"""``sha256:`` and 64 lowercase hexadecimal digits."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def digest(context: str, *fields: bytes) -> Digest:
    """Return the digest of fields under a purpose such as ``epochless/v1/manifest``."""
    hasher = hashlib.sha256(context.encode("ascii") + b"\0")
    for field in fields:
        hasher.update(len(field).to_bytes(8, "big"))
        hasher.update(field)
    return digest_from_bytes(hasher.digest())


def digest_from_bytes(raw: bytes) -> Digest:
    """Return the text form of a raw 32-byte SHA-256 value."""
    assert len(raw) == 32
    return Digest("sha256:" + raw.hex())


def bytes_from_digest(value: Digest) -> bytes:
    """Return the raw 32 bytes of a digest."""
    return bytes.fromhex(value[7:])


def parse_digest(text: object) -> Digest:
    """Return ``text`` if it is a well-formed digest.

    Raises:
        EncodingError: anything else: other algorithms, lengths, capitals, spaces.
    """
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise EncodingError(f"not a sha256 digest: {str(text)[:80]!r}", reason="digest")
    return Digest(text)
