"""The tree against RFC 6962's test vectors and its own recursive definition, written again here."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.merkle import Frontier, inclusion_path, leaf_hash, node_hash, root_from_path, root_of

# The leaves and roots of the Certificate Transparency reference tests.
LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = {
    0: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    2: "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    4: "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    5: "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    6: "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    7: "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


def recursive_root(leaves: list[bytes]) -> bytes:
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    split = max(1 << power for power in range(20) if 1 << power < len(leaves))
    return hashlib.sha256(b"\1" + recursive_root(leaves[:split]) + recursive_root(leaves[split:])).digest()


@pytest.mark.parametrize(("size", "root"), ROOTS.items())
def test_roots_are_those_of_rfc_6962(size: int, root: str) -> None:
    assert root_of([leaf_hash(bytes.fromhex(leaf)) for leaf in LEAVES[:size]]).hex() == root


@pytest.mark.parametrize("size", range(1, 40))
def test_every_leaf_of_every_tree_has_one_path_to_the_root(size: int) -> None:
    leaves = [leaf_hash(bytes([number])) for number in range(size)]
    root = recursive_root(leaves)
    assert root_of(leaves) == root
    for index, leaf in enumerate(leaves):
        path = inclusion_path(leaves, index)
        assert len(path) <= (size - 1).bit_length()
        assert root_from_path(leaf, index, size, path) == root
        for wrong in (path[:-1], [*path, bytes(32)]):
            if len(wrong) != len(path):
                with pytest.raises(ReceiptError) as refusal:
                    root_from_path(leaf, index, size, wrong)
                assert refusal.value.fields["threat"] == "path_length"


@given(st.integers(1, 300), st.data())
def test_path_proves_its_leaf_at_its_index_and_nothing_else(size: int, data: st.DataObject) -> None:
    leaves = [leaf_hash(number.to_bytes(2, "big")) for number in range(size)]
    index, other = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    path, root = inclusion_path(leaves, index), root_of(leaves)
    if other != index:
        assert root_from_path(leaves[other], index, size, path) != root
        try:
            implied = root_from_path(leaves[index], other, size, path)
        except ReceiptError:
            return  # a leaf there has a path of another length
        assert implied != root


@pytest.mark.parametrize(("index", "size"), [(0, 0), (1, 1), (5, 5), (-1, 3)])
def test_index_outside_the_tree_is_refused(index: int, size: int) -> None:
    with pytest.raises(ReceiptError) as refusal:
        root_from_path(bytes(32), index, size, [])
    assert refusal.value.fields["threat"] == "leaf_index"


def test_frontier_keeps_one_hash_per_level() -> None:
    frontier = Frontier()
    for number in range(1000):
        frontier.append(leaf_hash(number.to_bytes(2, "big")))
        assert len(frontier._subtrees) == (number + 1).bit_count()
    assert frontier.size == 1000


def test_repeating_the_odd_last_leaf_changes_the_root() -> None:
    leaves = [leaf_hash(bytes([number])) for number in range(5)]
    assert root_of(leaves) != root_of([*leaves, leaves[-1]])


def test_two_leaves_are_no_leaf() -> None:
    left, right = leaf_hash(b"a"), leaf_hash(b"b")
    assert node_hash(left, right) != leaf_hash(left + right)
