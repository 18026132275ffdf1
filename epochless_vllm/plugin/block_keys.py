"""Seam: the extra keys of a prefix-KV block.

vLLM keys a block by the adapter's name, untagged: new bytes under an old name hit old blocks, and a cache salt equal to
an adapter's name hits that adapter's. Here every block, base requests included, carries one tagged component with the
base digest and the revision. Dies when upstream keys blocks by adapter content, tagged.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from epochless_vllm.errors import InvalidRequestError, SeamError
from epochless_vllm.protocol.blocks import block_extra_key
from epochless_vllm.protocol.digests import Digest
from epochless_vllm.protocol.names import split_lora_name

_base_digest: Digest | None = None


def set_base_digest(base_digest: str) -> None:
    """Set the base digest of the engine in this process."""
    global _base_digest
    _base_digest = Digest(base_digest)
    _keys_of.cache_clear()


@lru_cache(maxsize=4096)
def _keys_of(lora_name: str | None) -> list[tuple[str, str, str]]:
    assert _base_digest is not None, "the engine core sets the base digest before it hashes a block"
    if lora_name is None:
        return [block_extra_key(_base_digest, None)]
    try:
        revision_id = split_lora_name(lora_name)[1]
    except InvalidRequestError:
        # Only vLLM's own warm-up adapters get here: the engine core refuses other names before hashing.
        return [("epochless-unmanaged", _base_digest, lora_name)]
    return [block_extra_key(_base_digest, revision_id)]


def generate_revision_extra_keys(request: Any) -> list[tuple[str, str, str]]:
    """Return the tagged component of a request's blocks, in vLLM's place for LoRA keys."""
    lora_request = request.lora_request
    return _keys_of(lora_request.lora_name if lora_request is not None else None)


def install() -> None:
    """Rebind vLLM's two functions.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.v1.core import kv_cache_utils

    for name in ("_gen_lora_extra_hash_keys", "need_extra_keys"):
        if not hasattr(kv_cache_utils, name):
            raise SeamError(f"vllm.v1.core.kv_cache_utils has no {name}", target=name)
    stock = kv_cache_utils._gen_lora_extra_hash_keys
    if getattr(stock, "_epochless", False):
        return

    def extra_hash_keys(request: Any) -> list[Any]:
        # Another engine of this process may run without Epochless; it has no base digest.
        return stock(request) if _base_digest is None else generate_revision_extra_keys(request)

    extra_hash_keys._epochless = True  # type: ignore[attr-defined]  # the mark of an installed seam
    kv_cache_utils._gen_lora_extra_hash_keys = extra_hash_keys
    kv_cache_utils.need_extra_keys = lambda request: True
