"""A rank's channel: replies belong to their messages, strangers are refused, and an end is known at once."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from epochless_vllm.errors import ChannelError
from epochless_vllm.plugin import channel
from epochless_vllm.plugin.channel import Channel, Listener


def echo(message: dict[str, Any]) -> dict[str, Any]:
    return {"echo": message}


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    listeners: list[Listener] = []

    def listen(handle: Any = echo) -> Listener:
        listeners.append(Listener(handle))
        return listeners[-1]

    yield listen
    for listener in listeners:
        listener.close()


def raw(listener: Listener) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    connection.connect("\0" + listener.address)
    return connection


def test_every_rank_answers_its_own_message(listen: Callable[..., Listener]) -> None:
    ranks = {name: listen(lambda message, name=name: {"by": name, **message}) for name in ("a", "b", "c")}
    asked = Channel({name: listener.address for name, listener in ranks.items()})
    for serial in range(50):
        replies = asked.ask({"serial": serial, "text": "\u2028" * serial}, timeout_s=10)
        assert replies == {name: {"by": name, "serial": serial, "text": "\u2028" * serial} for name in ranks}
    asked.close()


def test_ranks_are_asked_at_once(listen: Callable[..., Listener]) -> None:
    """Each of two ranks answers only when both have been asked."""
    both = threading.Barrier(2)

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        both.wait(10)
        return {}

    asked = Channel({name: listen(handle).address for name in ("a", "b")})
    assert asked.ask({}, timeout_s=10) == {"a": {}, "b": {}}


def test_several_coordinators_are_served_beside_one_another(listen: Callable[..., Listener]) -> None:
    busy, free = threading.Event(), threading.Event()

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        if message["kind"] == "long":
            busy.set()
            assert free.wait(10)
        return message

    listener = listen(handle)
    first, second = Channel({"r": listener.address}), Channel({"r": listener.address})
    replies: list[Any] = []
    waiting = threading.Thread(target=lambda: replies.append(first.ask({"kind": "long"}, timeout_s=10)))
    waiting.start()
    assert busy.wait(10)
    assert second.ask({"kind": "short"}, timeout_s=10) == {"r": {"kind": "short"}}
    free.set()
    waiting.join(10)
    assert replies == [{"r": {"kind": "long"}}]


def test_a_late_reply_is_never_taken_for_the_next(listen: Callable[..., Listener]) -> None:
    free = threading.Event()
    asked = Channel({"r": listen(lambda message: message if message["n"] else (free.wait(10) and message)).address})
    late = asked.ask({"n": 0}, timeout_s=0.01)["r"]
    assert isinstance(late, ChannelError)
    assert "in time" in str(late)
    free.set()
    assert isinstance(asked.ask({"n": 1}, timeout_s=10)["r"], ChannelError)


def test_a_rank_that_ends_is_known_without_waiting(listen: Callable[..., Listener]) -> None:
    program = (
        "import sys; from epochless_vllm.plugin.channel import Listener; import os\n"
        "listener = Listener(lambda message: os._exit(9))\n"
        "print(listener.address, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        asked = Channel({"alive": listen().address, "dead": process.stdout.readline().strip()})
        replies = asked.ask({"n": 1}, timeout_s=600)
    assert replies["alive"] == {"echo": {"n": 1}}
    assert isinstance(replies["dead"], ChannelError)


def test_nobody_listens_after_the_end(listen: Callable[..., Listener]) -> None:
    listener = listen()
    listener.close()
    listener.close()
    with pytest.raises(ChannelError, match="does not listen"):
        Channel({"r": listener.address})


def test_addresses_are_not_guessed(listen: Callable[..., Listener]) -> None:
    addresses = {listen().address for _ in range(8)}
    assert len(addresses) == 8
    assert min(map(len, addresses)) >= 32 + len("epochless-")


@pytest.mark.parametrize("end", ["coordinator", "rank"])
def test_another_user_at_the_other_end_is_refused(
    listen: Callable[..., Listener], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    listener = listen()
    inside = threading.current_thread()
    mine = os.geteuid()

    def geteuid() -> int:  # each end asks in a thread of its own
        return mine + ((threading.current_thread() is inside) == (end == "coordinator"))

    monkeypatch.setattr(channel.os, "geteuid", geteuid)
    if end == "coordinator":
        with pytest.raises(ChannelError, match=f"user {mine}"):
            Channel({"r": listener.address})
    else:
        asked = Channel({"r": listener.address})
        assert isinstance(asked.ask({}, timeout_s=10)["r"], ChannelError)


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">I", channel.MAX_FRAME + 1),
        struct.pack(">I", 3) + b"{x}",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 4) + b'"a\xff"',
        struct.pack(">I", 100_000) + b"[" * 100_000,
    ],
    ids=["too long", "no JSON", "no object", "no UTF-8", "too deep"],
)
def test_what_is_no_message_ends_its_connection_and_no_other(listen: Callable[..., Listener], sent: bytes) -> None:
    listener = listen()
    asked = Channel({"r": listener.address})
    with raw(listener) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""
    assert asked.ask({}, timeout_s=10) == {"r": {"echo": {}}}
