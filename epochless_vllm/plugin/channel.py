"""A rank's channel: publication messages that need no step of the engine reach it beside its step loop.

A call of the engine waits until the step in progress ends, three times a publication; a message here waits for nobody.
Promises that both ends belong to the same user, that a reply is the reply to its message, and that a peer which ended
is known at once. Linux only: sockets without files, under names nobody can guess. Knows no message.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from epochless_vllm.errors import ChannelError, ConfigurationError
from epochless_vllm.plugin.background import leave_ranks_their_cores
from epochless_vllm.plugin.logs import logger

Message = dict[str, Any]

MAX_FRAME = 1 << 20  # bytes; a message or a reply holds a few digests
CONNECT_S = 5.0
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")  # SO_PEERCRED: process, user, group


class Listener:
    """A rank's end: answers each message of each connection with what ``handle`` returns.

    Attributes:
        address: what a ``Channel`` needs to find it.
    """

    def __init__(self, handle: Callable[[Message], Message]) -> None:
        """Listen from now on, until ``close``; ``handle`` never raises and may be called from several threads."""
        self._handle = handle
        self.address = f"epochless-{secrets.token_hex(16)}"
        self._socket = _open_socket()
        self._socket.bind("\0" + self.address)
        self._socket.listen()
        threading.Thread(target=self._accept, name="epochless-channel", daemon=True).start()

    def close(self) -> None:
        """Take no further connections."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        except OSError:
            return  # it is closed
        self._socket.close()

    def _accept(self) -> None:
        leave_ranks_their_cores()
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="epochless-channel", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                _require_same_user(connection)
                while True:
                    _send(connection, self._handle(_receive(connection, deadline=None)))
            except ChannelError as end:
                logger.debug("a publication channel ended: %s", end)


class Channel:
    """A coordinator's end: asks every rank of a deployment at once. One message at a time."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """Connect to the ranks.

        Args:
            addresses: ``Listener.address`` by rank.

        Raises:
            ChannelError: a rank does not listen, or another user does in its place.
        """
        self._lock = threading.Lock()
        self._connections: dict[str, socket.socket] = {}
        try:
            for rank, address in addresses.items():
                self._connections[rank] = _connect(address)
        except ChannelError:
            self.close()
            raise

    def ask(self, message: Message, *, timeout_s: float) -> dict[str, Message | ChannelError]:
        """Send a message to every rank; return each rank's reply or why there is none.

        A rank without a reply is cut off: what it says later would be taken for the reply to another message.
        """
        with self._lock:
            deadline = time.monotonic() + timeout_s
            replies: dict[str, Message | ChannelError] = {
                rank: self._attempt(rank, lambda c: _send(c, message)) for rank in self._connections
            }
            for rank in [rank for rank, sent in replies.items() if not isinstance(sent, ChannelError)]:
                replies[rank] = self._attempt(rank, lambda c: _receive(c, deadline=deadline))
            for rank in [rank for rank, reply in replies.items() if isinstance(reply, ChannelError)]:
                self._connections[rank].close()
            return replies

    def _attempt(self, rank: str, action: Callable[[socket.socket], Any]) -> Any:
        try:
            return action(self._connections[rank])
        except ChannelError as end:
            return end

    def close(self) -> None:
        """Close every connection."""
        for connection in self._connections.values():
            connection.close()


def _open_socket() -> socket.socket:
    if not hasattr(socket, "SO_PEERCRED"):
        raise ConfigurationError("Epochless runs on Linux only: publication channels need its sockets", flag="platform")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _connect(address: str) -> socket.socket:
    connection = _open_socket()
    try:
        connection.settimeout(CONNECT_S)
        try:
            connection.connect("\0" + address)
        except OSError as error:
            raise ChannelError(f"it does not listen: {error}") from error
        _require_same_user(connection)
    except ChannelError:
        connection.close()
        raise
    return connection


def _require_same_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise ChannelError(f"process {process} of user {user} is at the other end")


def _send(connection: socket.socket, message: Message) -> None:
    payload = json.dumps(message).encode()
    try:
        connection.sendall(_LENGTH.pack(len(payload)) + payload)
    except OSError as error:
        raise ChannelError(f"it takes no message: {error}") from error


def _receive(connection: socket.socket, *, deadline: float | None) -> Message:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))
    if length > MAX_FRAME:
        raise ChannelError(f"it sends {length} bytes at once")
    payload = _read(connection, length, deadline)
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ChannelError(f"it does not send JSON: {error}") from error
    if not isinstance(message, dict):
        raise ChannelError("it does not send an object")
    return message


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            connection.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            part = connection.recv(size - len(parts))
        except TimeoutError as error:
            raise ChannelError("it did not answer in time") from error
        except OSError as error:
            raise ChannelError(f"it broke off: {error}") from error
        if not part:
            raise ChannelError("its process ended")
        parts += part
    return bytes(parts)
