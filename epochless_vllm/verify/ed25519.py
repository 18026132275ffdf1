"""Ed25519 verification (RFC 8032, PureEdDSA without cofactor) in plain integers.

Refuses what lax verifiers let through: s >= L, a y that is not reduced, a sign bit on x = 0, points off the curve,
and keys or commitments of small order. Not constant time: it holds no secret.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from epochless_vllm.errors import ReceiptError

_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT_OF_MINUS_ONE = pow(2, (_P - 1) // 4, _P)

_Point = tuple[int, int, int, int]  # extended coordinates (X, Y, Z, T): x = X / Z, y = Y / Z, x * y = T / Z
_NEUTRAL: _Point = (0, 1, 1, 0)


def verify_ed25519(public_key: bytes, message: bytes, signature: bytes) -> bytes:
    """Return ``message`` if ``signature`` is a signature of it under ``public_key``.

    Args:
        public_key: 32 raw bytes.
        signature: 64 raw bytes.

    Raises:
        ReceiptError: it is not; the threat tells a malformed key or signature from a false one.
    """
    if len(public_key) != 32:
        raise ReceiptError("an Ed25519 public key has 32 bytes", threat="public_key")
    if len(signature) != 64:
        raise ReceiptError("an Ed25519 signature has 64 bytes", threat="signature_form")
    scalar = int.from_bytes(signature[32:], "little")
    if scalar >= _L:
        raise ReceiptError("the signature's scalar is not reduced", threat="signature_scalar")
    key = _decode_point(public_key, "public_key")
    commitment = signature[:32]
    _decode_point(commitment, "signature_point")
    challenge = int.from_bytes(hashlib.sha512(commitment + public_key + message).digest(), "little") % _L
    if _encode_point(_combine(scalar, challenge, _negate(key))) != commitment:
        raise ReceiptError("the signature is not of these bytes under this key", threat="signature")
    return message


def _decode_point(encoded: bytes, threat: str) -> _Point:
    value = int.from_bytes(encoded, "little")
    sign, y = value >> 255, value & ((1 << 255) - 1)
    if y >= _P:
        raise ReceiptError("a point with a coordinate that is not reduced", threat=threat)
    x_squared = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(x_squared, (_P + 3) // 8, _P)
    if (x * x - x_squared) % _P:
        x = x * _ROOT_OF_MINUS_ONE % _P
    if (x * x - x_squared) % _P or (x == 0 and sign):
        raise ReceiptError("a point that is not on the curve", threat=threat)
    if x & 1 != sign:
        x = _P - x
    point = (x, y, 1, x * y % _P)
    multiple = _double(_double(_double(point)))
    if multiple[0] == 0 and multiple[1] == multiple[2]:
        raise ReceiptError("a point of small order", threat="small_order")
    return point


def _encode_point(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _negate(point: _Point) -> _Point:
    return -point[0] % _P, point[1], point[2], -point[3] % _P


def _double(point: _Point) -> _Point:
    x, y, z, _ = point
    a, b = x * x % _P, y * y % _P
    h = a + b
    e = h - (x + y) * (x + y)
    g = a - b
    f = 2 * z * z + g
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _add(left: _Point, right: _Point) -> _Point:
    x1, y1, z1, t1 = left
    x2, y2, z2, t2 = right
    a, b = (y1 - x1) * (y2 - x2) % _P, (y1 + x1) * (y2 + x2) % _P
    c, d = 2 * _D * t1 % _P * t2 % _P, 2 * z1 * z2 % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _combine(scalar: int, challenge: int, point: _Point) -> _Point:
    """Return scalar * B + challenge * point, both read four bits at a time over one chain of doublings."""
    base, other = _base_multiples(), _multiples(point)
    result = _NEUTRAL
    for shift in range(252, -4, -4):
        result = _double(_double(_double(_double(result))))
        if digit := scalar >> shift & 15:
            result = _add(result, base[digit])
        if digit := challenge >> shift & 15:
            result = _add(result, other[digit])
    return result


def _multiples(point: _Point) -> list[_Point]:
    multiples = [_NEUTRAL, point]
    while len(multiples) < 16:
        multiples.append(_add(multiples[-1], point))
    return multiples


@lru_cache(maxsize=1)
def _base_multiples() -> list[_Point]:
    y = 4 * pow(5, -1, _P) % _P
    return _multiples(_decode_point(y.to_bytes(32, "little"), "public_key"))
