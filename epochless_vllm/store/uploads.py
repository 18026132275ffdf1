"""Adapter files that arrive as streams, read like files on disk.

Bounded by what the header says and the caller allows, never by trust in a sender's length. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO

from epochless_vllm.errors import InspectError
from epochless_vllm.store.sources import CONFIG_NAME, TENSORS_NAME

_PIECE_BYTES = 1 << 20

Upload = BinaryIO | Iterable[bytes]


class UploadReader:
    """A forward reader over a binary file object or an iterable of byte pieces."""

    def __init__(self, content: Upload) -> None:
        self._pieces = _pieces_of(content)
        self._rest = memoryview(b"")

    def read(self, count: int) -> bytes:
        """Return up to ``count`` next bytes, at least one unless the stream has ended."""
        self._refill()
        taken, self._rest = self._rest[:count], self._rest[count:]
        return bytes(taken)

    def read_bounded(self, most: int) -> bytes:
        """Return the whole stream, or ``most + 1`` bytes of a longer one."""
        payload = b""
        while len(payload) <= most and (piece := self.read(most + 1 - len(payload))):
            payload += piece
        return payload

    def read_into(self, view: memoryview) -> int:
        """Fill the front of ``view`` and return the count, 0 at the end."""
        self._refill()
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _refill(self) -> None:
        while not self._rest:
            try:
                piece = next(self._pieces, None)
            except OSError as error:
                raise InspectError(f"upload: cannot be read: {error}; send it again", reason="unreadable") from error
            if piece is None:
                return
            self._rest = memoryview(piece)


def open_uploads(files: Mapping[str, Upload]) -> tuple[UploadReader, UploadReader]:
    """Return readers of the configuration and the tensors.

    Raises:
        InspectError: a file is missing, or has another name.
    """
    for name in files:
        if name not in (CONFIG_NAME, TENSORS_NAME):
            raise InspectError(
                f"upload of {name[:120]!a}: only {CONFIG_NAME} and {TENSORS_NAME} are taken",
                reason="file_name",
                file=ascii(name[:120]),
            )
    for name in (CONFIG_NAME, TENSORS_NAME):
        if name not in files:
            raise InspectError(f"upload: {name} is missing", reason="file_missing", file=name)
    return UploadReader(files[CONFIG_NAME]), UploadReader(files[TENSORS_NAME])


def _pieces_of(content: Upload) -> Iterator[bytes]:
    if isinstance(content, Iterable) and not hasattr(content, "read"):
        return iter(content)
    return iter(lambda: content.read(_PIECE_BYTES), b"")
