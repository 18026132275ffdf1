"""The extra keys of prefix-KV blocks: what a block's identity holds, and that no string a client chooses equals it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.plugin import block_keys

BASE, OTHER = ("sha256:" + letter * 64 for letter in "bc")
A, B = ("sha256:" + letter * 64 for letter in "de")


@pytest.fixture(autouse=True)
def _base() -> Iterator[None]:
    block_keys.set_base_digest(BASE)
    yield
    block_keys._base_digest = None
    block_keys._keys_of.cache_clear()


def request(lora_name: str | None = None, **fields: Any) -> Any:
    adapter = None if lora_name is None else SimpleNamespace(lora_name=lora_name)
    return SimpleNamespace(lora_request=adapter, mm_features=[], cache_salt=None, prompt_embeds=None, **fields)


def keys(lora_name: str | None = None) -> list[tuple[str, str, str]]:
    return block_keys.generate_revision_extra_keys(request(lora_name))


def test_every_block_names_its_base_and_its_revision_base_requests_too() -> None:
    assert keys() == [("epochless", BASE, "")]
    assert keys(f"policy@{A}") == [("epochless", BASE, A)]


def test_equal_content_is_shared_under_two_names_and_other_content_never() -> None:
    assert keys(f"one@{A}") == keys(f"two@{A}")
    assert len({tuple(found) for found in (keys(), keys(f"one@{A}"), keys(f"one@{B}"))}) == 3


def test_a_block_of_another_base_is_another_block() -> None:
    mine = keys(f"policy@{A}")
    block_keys.set_base_digest(OTHER)
    assert keys(f"policy@{A}") == [("epochless", OTHER, A)]
    assert keys(f"policy@{A}") != mine


def test_an_adapter_that_nobody_published_has_a_key_of_its_own() -> None:
    for name in ("warm-up", f"warm-up@{A[:20]}", A):
        (found,) = keys(name)
        assert found[0] not in ("epochless", "")
        assert found == (found[0], BASE, name)


def test_the_engine_hashes_every_block_with_its_key_and_a_salt_imitates_none() -> None:
    cache = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    block_keys.install()
    block_keys.install()

    def extra(asked: Any, start: int = 0) -> Any:
        assert cache.need_extra_keys(asked)
        return cache.generate_block_hash_extra_keys(asked, start, start + 16, 0)[0]

    assert extra(request()) == (("epochless", BASE, ""),)
    assert extra(request(f"policy@{A}"), start=32) == (("epochless", BASE, A),)
    for salt in (A, f"policy@{A}", str(keys(f"policy@{A}")[0])):
        salted = request()
        salted.cache_salt = salt
        assert extra(salted) == (("epochless", BASE, ""), salt)


def test_an_engine_of_this_process_without_epochless_keeps_its_own_keys() -> None:
    cache = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    block_keys.install()
    block_keys._base_digest = None
    assert cache.generate_block_hash_extra_keys(request(), 0, 16, 0)[0] is None
    assert cache.generate_block_hash_extra_keys(request("adapter"), 0, 16, 0)[0] == ("adapter",)
