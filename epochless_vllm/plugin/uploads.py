"""The files of an adapter, taken from a multipart body and spooled to the store's disk as they arrive.

Promises that memory stays bounded whatever the body says, that nothing is written beyond the limits, and that the files
vanish with their handles, also after a kill. Knows nothing of what the files hold.
"""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from epochless_vllm.durable import storage_error
from epochless_vllm.errors import InvalidRequestError, UploadTooLargeError
from epochless_vllm.store.documents import MAX_BYTES as MAX_CONFIG_BYTES
from epochless_vllm.store.revisions import MAX_ADAPTER_BYTES, RESERVED_BYTES

HEADER_BYTES = 64 << 20  # of a safetensors file, over its tensors; the store checks the exact bound
MAX_FILE_BYTES = {
    "adapter_config.json": MAX_CONFIG_BYTES,
    "adapter_model.safetensors": MAX_ADAPTER_BYTES + HEADER_BYTES,
}
MAX_FIELD_BYTES = 64  # the only field is a step
MAX_HEADER_BYTES = 4096  # of one part
WRITE_BYTES = 1 << 20

_writer = ThreadPoolExecutor(2, thread_name_prefix="epochless-upload")


@dataclass
class Upload:
    """Spooled files by name, rewound, and the text fields."""

    files: dict[str, IO[bytes]] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)

    def close(self) -> None:
        """Discard the files."""
        for file in self.files.values():
            file.close()


class _Parts:
    """Callbacks of the multipart parser: where the bytes of the current part go."""

    def __init__(self, directory: Path) -> None:
        self.upload = Upload()
        self.pending = bytearray()
        self.finished = False
        self._directory = directory
        self._headers: dict[str, str] = {}
        self._header = ["", ""]
        self._name = ""
        self._text: bytearray | None = None
        self._written = 0
        self.target: IO[bytes] | None = None
        self.ready: list[tuple[IO[bytes], bytes]] = []

    def begin_part(self) -> None:
        self._headers, self._header = {}, ["", ""]

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._grow_header(0, data[start:end])

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._grow_header(1, data[start:end])

    def _grow_header(self, position: int, piece: bytes) -> None:
        self._header[position] += piece.decode("latin-1")
        if len(self._header[position]) > MAX_HEADER_BYTES:
            raise InvalidRequestError("body: a part's header is too long", field="body")

    def end_header(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]
        self._header = ["", ""]

    def end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get("content-disposition", ""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self.upload.files or self._name in self.upload.fields:
            raise InvalidRequestError(f"{self._name}: is given twice", field=self._name)
        self._written = 0
        if self._name in MAX_FILE_BYTES:
            self.target = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115  # closed by Upload.close
            self.upload.files[self._name] = self.target
        elif self._name == "step":
            self._text = bytearray()
        else:
            known = ", ".join([*MAX_FILE_BYTES, "step"])
            raise InvalidRequestError(
                f"{self._name[:80] or 'body'}: is not a part of an upload; send {known}",
                field=self._name[:80] or "body",
            )

    def part_data(self, data: bytes, start: int, end: int) -> None:
        self._written += end - start
        limit = MAX_FILE_BYTES.get(self._name, MAX_FIELD_BYTES)
        if self._written > limit:
            raise UploadTooLargeError(f"{self._name}: larger than {limit} bytes", field=self._name, limit=limit)
        if self._text is not None:
            self._text += data[start:end]
        else:
            self.pending += data[start:end]

    def end_part(self) -> None:
        if self._text is not None:
            self.upload.fields[self._name] = self._text.decode("utf-8", "replace")
            self._text = None
        self.take()
        self.target = None

    def take(self) -> None:
        """Move what is pending to the list of writes."""
        if self.target is not None and self.pending:
            self.ready.append((self.target, bytes(self.pending)))
            self.pending.clear()

    def end(self) -> None:
        self.finished = True


async def receive_upload(content_type: str, body: AsyncIterator[bytes], directory: Path) -> Upload:
    """Return the spooled parts of a multipart body; the caller closes them.

    Raises:
        InvalidRequestError: not multipart, malformed, cut short, or with unknown or repeated parts.
        UploadTooLargeError: a part is larger than an adapter's may be.
        StoreError: the disk refuses; StorageFullError when it is full but for what the journal may need.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    media_type, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if media_type != b"multipart/form-data" or not boundary:
        raise InvalidRequestError("content-type: must be multipart/form-data with a boundary", field="content-type")
    parts = _Parts(directory)
    callbacks: Any = {
        "on_part_begin": parts.begin_part,
        "on_header_field": parts.header_field,
        "on_header_value": parts.header_value,
        "on_header_end": parts.end_header,
        "on_headers_finished": parts.end_headers,
        "on_part_data": parts.part_data,
        "on_part_end": parts.end_part,
        "on_end": parts.end,
    }
    try:
        parser = MultipartParser(boundary, callbacks)
        async for chunk in body:
            parser.write(chunk)
            if len(parts.pending) >= WRITE_BYTES:
                parts.take()
            await _write(parts)
        parser.finalize()
        if not parts.finished:
            raise InvalidRequestError("body: the multipart body is cut short; send it whole", field="body")
        for file in parts.upload.files.values():
            file.seek(0)
    except FormParserError as error:  # of a boundary, too
        parts.upload.close()
        raise InvalidRequestError(f"body: not well-formed multipart ({error})", field="body") from error
    except OSError as error:
        parts.upload.close()
        raise storage_error(error, directory, "spool the upload") from error
    except BaseException:  # a client that left cancels this: its files go with it
        parts.upload.close()
        raise
    return parts.upload


async def _write(parts: _Parts) -> None:
    writes, parts.ready = parts.ready, []
    for file, data in writes:
        await asyncio.get_running_loop().run_in_executor(_writer, _write_with_room, file, data)


def _write_with_room(file: IO[bytes], data: bytes) -> None:
    disk = os.fstatvfs(file.fileno())
    if disk.f_bavail * disk.f_frsize < RESERVED_BYTES + len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file.write(data)
