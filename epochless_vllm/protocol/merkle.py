"""The Merkle tree of RFC 6962 over SHA-256: root, frontier, inclusion path.

Promises O(log n) memory to whoever appends, and that a leaf can never be read as an inner node (0x00 and 0x01 open
their inputs). Does not know what a leaf holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from epochless_vllm.errors import ReceiptError

EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(data: bytes) -> bytes:
    """Return the 32-byte hash of a leaf's data."""
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the 32-byte hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Frontier:
    """The right edge of a growing tree: at most one complete subtree per power of two."""

    def __init__(self) -> None:
        self.size = 0
        self._subtrees: list[bytes] = []  # of decreasing height; the set bits of size say which heights

    def append(self, leaf: bytes) -> None:
        """Add the hash of the next leaf."""
        node, remaining = leaf, self.size
        while remaining & 1:
            node = node_hash(self._subtrees.pop(), node)
            remaining >>= 1
        self._subtrees.append(node)
        self.size += 1

    def root(self) -> bytes:
        """Return the 32-byte root of the leaves appended so far."""
        if not self._subtrees:
            return EMPTY_ROOT
        node = self._subtrees[-1]
        for left in reversed(self._subtrees[:-1]):
            node = node_hash(left, node)
        return node


def root_of(leaves: Sequence[bytes]) -> bytes:
    """Return the root over leaf hashes."""
    frontier = Frontier()
    for leaf in leaves:
        frontier.append(leaf)
    return frontier.root()


def inclusion_path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Return the sibling hashes from leaf ``index`` up to the root."""
    if len(leaves) == 1:
        return []
    split = 1 << (len(leaves) - 1).bit_length() - 1  # the largest power of two below the size
    if index < split:
        return [*inclusion_path(leaves[:split], index), root_of(leaves[split:])]
    return [*inclusion_path(leaves[split:], index - split), root_of(leaves[:split])]


def root_from_path(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes:
    """Return the root that a leaf hash and its path imply in a tree of ``size`` leaves.

    Raises:
        ReceiptError: the index is outside the tree, or the path has not the one length that (index, size) allows.
    """
    if not 0 <= index < size:
        raise ReceiptError(f"leaf {index} is outside a tree of {size}", threat="leaf_index")
    node, last, used = leaf, size - 1, 0
    while last:
        if index & 1 or index != last:
            if used == len(path):
                raise ReceiptError("the inclusion path is too short for this leaf", threat="path_length")
            sibling = path[used]
            used += 1
            node = node_hash(sibling, node) if index & 1 else node_hash(node, sibling)
        index >>= 1
        last >>= 1
    if used != len(path):
        raise ReceiptError("the inclusion path is too long for this leaf", threat="path_length")
    return node
