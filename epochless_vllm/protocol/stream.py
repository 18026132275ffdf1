"""The streaming format: frames that a client checks as they arrive, while the seed is still secret.

Frames are (type, length, payload): one H with the header, B per block, one F with signature and final record. A block
frame carries, beside the block's bytes, the draws of its rows: the client checks each draw against its interval at
once, and when the final record reveals the seed it recomputes them all and compares. Promises that decoding does not
depend on how the bytes were cut, and memory of one frame. Does not check relations between frames.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.columns import Cursor, column, decode_column, encode_column
from epochless_vllm.protocol.digests import bytes_from_digest, digest_from_bytes
from epochless_vllm.protocol.draw_window import DrawWindow
from epochless_vllm.protocol.envelope import SIGNATURE_BYTES, Signature
from epochless_vllm.protocol.header import NO_DRAWS, Header, decode_header, reveal_key
from epochless_vllm.protocol.receipts import Final, Receipt, decode_final
from epochless_vllm.protocol.records import BLOCK_TOKENS, Block, decode_block
from epochless_vllm.protocol.shapes import decode_json
from epochless_vllm.protocol.spans import MAX_ENTRY_BYTES

MAGIC = b"EPs1"
_FRAME = struct.Struct(">cI")
_LIMITS = {  # bytes of a frame
    b"H": 8 << 20,
    b"B": BLOCK_TOKENS * (20 + 16 + MAX_ENTRY_BYTES + 4) + 64,
    b"F": 8 << 20,
}


class BlockFrame(NamedTuple):
    """A block, its encoded bytes, and the draws of its rows (empty where nothing is drawn)."""

    block: Block
    body: bytes
    draws: array[int]


class FinalFrame(NamedTuple):
    """The final record and its signature."""

    final: Final
    signature: Signature


Frame = Header | BlockFrame | FinalFrame


def encode_header_frame(header: Header) -> bytes:
    """Return the magic and the header frame, the first bytes of a stream."""
    return MAGIC + _frame(b"H", header.encoded)


def encode_block_frame(block: Block, draws: Sequence[int]) -> bytes:
    """Return a block frame; ``draws`` are those of all its rows, none where the header draws nothing."""
    return _frame(b"B", block.encode() + encode_column(column(draws)))


def encode_final_frame(final: Final, signature: Signature) -> bytes:
    """Return the final frame, the last bytes of a stream."""
    return _frame(b"F", bytes_from_digest(signature.keyid) + signature.signature + final.encoded)


def encode_stream(receipt: Receipt) -> bytes:
    """Return the whole stream of a receipt.

    Raises:
        ReceiptError: the seed is missing.
    """
    key = reveal_key(receipt.header, receipt.final.seed)
    window = DrawWindow(key, receipt.final.tokens) if key is not None else None
    frames = [encode_header_frame(receipt.header)]
    for block in receipt.blocks:
        frames.append(encode_block_frame(block, window.read(block.first, block.count) if window else ()))
    return b"".join([*frames, encode_final_frame(receipt.final, receipt.signature)])


class StreamDecoder:
    """Turns bytes, cut anywhere, into frames.

    Attributes:
        finished: the final frame was read; nothing may follow.
    """

    def __init__(self) -> None:
        self.finished = False
        self._buffer = bytearray()
        self._header: Header | None = None
        self._opened = False

    @property
    def pending(self) -> int:
        """Bytes of a frame that has not arrived whole."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """Return the frames that ``data`` completes.

        Raises:
            ReceiptError: the bytes are no stream, or continue after the final frame.
        """
        self._buffer += data
        frames: list[Frame] = []
        position = 0
        if not self._opened and len(self._buffer) >= len(MAGIC):
            if self._buffer[: len(MAGIC)] != MAGIC:
                raise ReceiptError("not a receipt stream", threat="format")
            self._opened, position = True, len(MAGIC)
        while self._opened and len(self._buffer) - position >= _FRAME.size:
            kind, size = _FRAME.unpack_from(self._buffer, position)
            self._check_order(kind, size)
            end = position + _FRAME.size + size
            if end > len(self._buffer):
                break
            frames.append(self._decode(kind, bytes(self._buffer[position + _FRAME.size : end])))
            position = end
        del self._buffer[:position]
        if self.finished and self._buffer:
            raise ReceiptError("bytes follow the final record", threat="trailing_bytes")
        return frames

    def _check_order(self, kind: bytes, size: int) -> None:
        if kind not in _LIMITS:
            raise ReceiptError(f"unknown frame {kind!r}", threat="trailing_bytes" if self.finished else "frame_order")
        if self.finished:
            threat = "second_final" if kind == b"F" else "trailing_bytes"
            raise ReceiptError("a frame follows the final record", threat=threat)
        if (kind == b"H") != (self._header is None):
            raise ReceiptError("a stream opens with one header", threat="frame_order")
        if size > _LIMITS[kind]:
            raise ReceiptError(f"a frame of {size} bytes", threat="limit_exceeded")

    def _decode(self, kind: bytes, payload: bytes) -> Frame:
        if kind == b"H":
            self._header = decode_header(decode_json(payload))
            return self._header
        if kind == b"B":
            return self._decode_block(payload)
        cursor = Cursor(payload)
        signature = Signature(digest_from_bytes(bytes(cursor.take(32))), bytes(cursor.take(SIGNATURE_BYTES)))
        self.finished = True
        return FinalFrame(decode_final(decode_json(payload[cursor.position :])), signature)

    def _decode_block(self, payload: bytes) -> BlockFrame:
        assert self._header is not None
        block, consumed = decode_block(payload)
        draws = payload[consumed:]
        expected = 0 if self._header.draw_kind == NO_DRAWS else 4 * block.count
        if len(draws) != expected:
            raise ReceiptError(f"{len(draws)} bytes of draws; {expected} wanted", threat="column_lengths")
        return BlockFrame(block, payload[:consumed], decode_column(draws))


def _frame(kind: bytes, payload: bytes) -> bytes:
    return _FRAME.pack(kind, len(payload)) + payload
