"""A rank checks an adapter's names and shapes against the model once, as long as the same come again."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from epochless_vllm.errors import RefusedAdapterError

pytest.importorskip("vllm")

from epochless_vllm.plugin.loading import AdapterLoader


class Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]


class Loader(AdapterLoader):
    """Checks against no model, and counts."""

    def __init__(self) -> None:
        super().__init__(worker=None)
        self.checked: list[tuple[Entry, ...]] = []

    def _check_modules(self, tensors: Any) -> dict[str, str]:
        self.checked.append(tuple(tensors))
        if any(entry.name == "refused" for entry in tensors):
            raise RefusedAdapterError("refused", reason="unmapped_tensor")
        return {entry.name: str(entry.shape) for entry in tensors}


def test_names_and_shapes_that_come_again_are_not_checked_again() -> None:
    loader, tensors = Loader(), [Entry("a", (8, 4)), Entry("b", (4, 8))]
    assert loader._modules_of(tensors) == loader._modules_of(list(tensors)) == {"a": "(8, 4)", "b": "(4, 8)"}
    assert loader.checked == [tuple(tensors)]


@pytest.mark.parametrize(
    "others",
    [[Entry("a", (8, 5))], [Entry("c", (8, 4))], [Entry("a", (8, 4)), Entry("b", (4, 8))], []],
    ids=["shape", "name", "one more", "none"],
)
def test_another_shape_or_name_is_checked(others: list[Entry]) -> None:
    loader, tensors = Loader(), [Entry("a", (8, 4))]
    for each in (tensors, others, tensors):
        assert loader._modules_of(each) == {entry.name: str(entry.shape) for entry in each}
    assert loader.checked == [tuple(tensors), tuple(others), tuple(tensors)]


def test_what_was_refused_is_refused_again() -> None:
    loader = Loader()
    loader._modules_of([Entry("a", (8, 4))])
    for _ in range(2):
        with pytest.raises(RefusedAdapterError):
            loader._modules_of([Entry("refused", (8, 4))])
    assert loader._modules_of([Entry("a", (8, 4))]) == {"a": "(8, 4)"}
    assert len(loader.checked) == 3
