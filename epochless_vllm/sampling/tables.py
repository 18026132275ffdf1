"""The two integer tables of the recipe: ``rint(2**31 * 2**(-i / 2**8))`` and ``rint(2**31 * 2**(-i / 2**16))``.

Promises the exact integers on every machine, because only integer arithmetic makes them, and refuses to serve with
others. Knows nothing of rows: a weight is looked up where it is needed.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.errors import ConfigurationError
from epochless_vllm.protocol.digests import Digest, digest
from epochless_vllm.protocol.sampler_config import TABLES_DIGEST

ENTRIES = 256
PRODUCT_SHIFT = 22  # two 31-bit factors, less the 40 bits of a weight
_UNIT_BITS = 31
_GUARD_BITS = 256  # working precision; an entry lies far further than 2**-200 from a rounding tie


def build_tables() -> NDArray[np.int64]:
    """Return both tables as ``[2, 256]``, coarse then fine.

    Raises:
        ConfigurationError: the integers are not those of the recipe.
    """
    tables = [_powers(8), _powers(16)]
    if tables_digest(tables) != TABLES_DIGEST:
        raise ConfigurationError(
            "the sampler's tables differ from the recipe's; reinstall epochless-vllm", flag="tables"
        )
    return np.array(tables, dtype=np.int64)


def tables_digest(tables: list[list[int]]) -> Digest:
    """Return the digest of a coarse and a fine table."""
    return digest(
        "epochless/v1/sampler-tables", b"".join(entry.to_bytes(8, "big") for table in tables for entry in table)
    )


def _powers(fraction_bits: int) -> list[int]:
    unit = 1 << _GUARD_BITS
    root = unit // 2
    for _ in range(fraction_bits):  # the 2**fraction_bits-th root of 1/2, by square roots
        root = isqrt(root * unit)
    powers, value = [], unit
    for _ in range(ENTRIES):
        powers.append((value + (1 << (_GUARD_BITS - _UNIT_BITS - 1))) >> (_GUARD_BITS - _UNIT_BITS))
        value = value * root >> _GUARD_BITS
    return powers
