"""Seam: ``n > 1`` on the tokens-in route.

Unless a request streams, its handler keeps the engine's last output, while the engine reports each choice in an output
of its own: of n choices n - 1 are lost, and their labels with them. Here such a request asks for one final output that
holds them all. Dies when upstream asks for it.
"""

from __future__ import annotations

import functools
from typing import Any

from epochless_vllm.errors import SeamError


def install() -> None:
    """Wrap ``ServingTokens.serve_tokens``.

    Raises:
        SeamError: the target is missing.
    """
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.sampling_params import RequestOutputKind

    original = getattr(ServingTokens, "serve_tokens", None)
    if original is None:
        raise SeamError("ServingTokens has no serve_tokens", target="serve_tokens")
    if getattr(original, "_epochless_final_only", False):
        return

    @functools.wraps(original)
    async def serve_tokens(self: Any, request: Any, raw_request: Any = None) -> Any:
        if not request.stream:
            request.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
        return await original(self, request, raw_request)

    serve_tokens._epochless_final_only = True  # type: ignore[attr-defined]  # the mark of an installed seam
    ServingTokens.serve_tokens = serve_tokens
