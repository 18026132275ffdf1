"""How slowly a body may arrive, and how many uploads may arrive at once.

Promises that a sender who stops, or trickles, is let go within a bounded time, so that strangers with patience cannot
hold the server's places or its disk. Knows nothing of what the bodies hold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from epochless_vllm.errors import BodyTooSlowError, UploadsBusyError

IDLE_S = 30.0  # without a byte
GRACE_S = 30.0  # before the rate counts: connections begin slowly
MIN_BYTES_PER_S = 16 << 10  # the slowest line an adapter is sent over
MAX_UPLOADS = 8  # of one front end, each on the store's disk until it is whole

_uploads = 0


async def paced(
    body: AsyncIterator[bytes], *, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[bytes]:
    """Yield the pieces of a body while they come fast enough.

    Args:
        clock: seconds, for the rate.

    Raises:
        BodyTooSlowError: no piece for ``idle_s``, or too few bytes since the body began.
    """
    began, received = clock(), 0
    pieces = body.__aiter__()
    while True:
        try:
            piece = await asyncio.wait_for(pieces.__anext__(), idle_s)
        except StopAsyncIteration:
            return
        except asyncio.TimeoutError as error:
            raise BodyTooSlowError(f"body: nothing came for {idle_s:g} s; send it again", field="body") from error
        received += len(piece)
        if received < MIN_BYTES_PER_S * (clock() - began - GRACE_S):
            raise BodyTooSlowError(
                f"body: slower than {MIN_BYTES_PER_S} bytes a second; send it over a faster line", field="body"
            )
        yield piece


@contextmanager
def upload_place() -> Iterator[None]:
    """Hold one of the places for uploads.

    Raises:
        UploadsBusyError: all are taken.
    """
    global _uploads
    if _uploads >= MAX_UPLOADS:
        raise UploadsBusyError(
            f"{MAX_UPLOADS} uploads are arriving already; retry when one is done, or publish by path", retryable=True
        )
    _uploads += 1
    try:
        yield
    finally:
        _uploads -= 1
