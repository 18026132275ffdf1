"""The API keys of a server, checked by our own routes.

vLLM's middleware guards paths by prefix and subtracts a configured root path first, so that a route outside its list,
or a root path inside it, would go unguarded. Promises constant-time comparison and no hint of which key was near. Knows
no routes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from epochless_vllm.errors import UnauthorizedError


class ApiKeys:
    """The keys a server was started with; none at all admits everybody, as in vLLM."""

    def __init__(self, keys: Iterable[str | None]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys if key]

    def check(self, authorization: str | None) -> None:
        """Admit the value of an Authorization header.

        Raises:
            UnauthorizedError: keys are configured and it is not ``Bearer`` one of them.
        """
        if not self._digests:
            return
        scheme, _, token = (authorization or "").partition(" ")
        given = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise UnauthorizedError("this server needs an API key; send Authorization: Bearer <key>")


def keys_of(args: object) -> ApiKeys:
    """Return the keys of a server's parsed arguments: ``--api-key``, else ``VLLM_API_KEY``."""
    import vllm.envs as envs

    return ApiKeys(getattr(args, "api_key", None) or [envs.VLLM_API_KEY])
