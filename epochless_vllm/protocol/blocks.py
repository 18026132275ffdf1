"""The identity of a prefix-KV block beyond its tokens: which base and which revision materialised it.

The key is one tagged tuple, present for every block, base requests included, so that no caller-chosen string (a
cache salt, an adapter name) can equal it. Knows nothing of block sizes or hash functions.
"""

from __future__ import annotations

from epochless_vllm.protocol.digests import Digest
from epochless_vllm.protocol.manifest import RevisionId

TAG = "epochless"


def block_extra_key(base_digest: Digest, revision_id: RevisionId | None) -> tuple[str, str, str]:
    """Return the extra key of a block: tag, base digest, revision_id or the empty string for the base model."""
    return (TAG, base_digest, revision_id or "")
