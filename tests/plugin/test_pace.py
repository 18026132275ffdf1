"""Senders who stop or trickle are let go; as many upload at once as there are places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.errors import BodyTooSlowError, UploadsBusyError
from epochless_vllm.plugin import pace
from tests.adapters import make_adapter
from tests.plugin.front_end import FrontEnd, run_front_end


async def body(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def silence() -> AsyncIterator[bytes]:
    yield b"x"
    await asyncio.Event().wait()


def read(source: AsyncIterator[bytes], times: list[float] | None = None, **options: Any) -> bytes:
    """Return what is let through; the clock shows ``times`` one after the other."""
    clock = iter(times or [])

    async def collect() -> bytes:
        if times is not None:
            options["clock"] = lambda: next(clock)
        return b"".join([piece async for piece in pace.paced(source, **options)])

    return asyncio.run(collect())


def test_a_body_that_comes_is_let_through_whole() -> None:
    assert read(body(b"ab", b"", b"c")) == b"abc"
    assert read(body()) == b""


def test_a_body_that_begins_slowly_has_time_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(body(b"a", b"b"), [0.0, 20.0, 29.9]) == b"ab"


def test_a_body_that_trickles_is_cut() -> None:
    pieces = [b"x"] * 100
    with pytest.raises(BodyTooSlowError, match="bytes a second"):
        read(body(*pieces), [0.0, *(float(second) for second in range(100))])


def test_a_large_body_at_the_slowest_rate_is_let_through() -> None:
    pieces = [b"x" * pace.MIN_BYTES_PER_S] * 100
    assert len(read(body(*pieces), [0.0, *(float(second) for second in range(100))])) == 100 * pace.MIN_BYTES_PER_S


def test_a_body_that_stops_is_cut() -> None:
    with pytest.raises(BodyTooSlowError, match="nothing came"):
        read(silence(), idle_s=0.01)


def test_places_are_given_back_however_an_upload_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MAX_UPLOADS", 1)
    with pytest.raises(ValueError, match="upload"), pace.upload_place():
        raise ValueError("upload")
    with pace.upload_place(), pytest.raises(UploadsBusyError), pace.upload_place():
        pass
    with pace.upload_place():
        pass


@pytest.mark.parametrize("content_type", ["multipart/form-data; boundary=b", "application/json"])
def test_a_route_answers_a_sender_who_stops_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content_type: str
) -> None:
    monkeypatch.setattr(pace.paced, "__kwdefaults__", {**pace.paced.__kwdefaults__, "idle_s": 0.01})

    async def sender() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="adapter_model.safetensors"\r\n\r\nabc'
        await asyncio.Event().wait()

    async def scenario(front: FrontEnd) -> None:
        url = "/v1/policies/p/revisions"
        response = await front.http.post(url, content=sender(), headers={"content-type": content_type})
        assert response.status_code == 408, response.text
        assert list((tmp_path / "store" / "incoming").iterdir()) == []

    run_front_end(tmp_path / "store", scenario)


def test_one_upload_too_many_is_told_to_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MAX_UPLOADS", 1)
    adapter = make_adapter(tmp_path / "a", seed=1)
    names = ("adapter_config.json", "adapter_model.safetensors")
    files = {name: (name, (adapter / name).read_bytes()) for name in names}

    async def scenario(front: FrontEnd) -> None:
        with pace.upload_place():
            response = await front.http.post("/v1/policies/p/revisions", files=files)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            by_path = await front.http.post("/v1/policies/p/revisions", json={"path": str(adapter)})
            assert by_path.status_code == 200
        assert (await front.http.post("/v1/policies/p/revisions", files=files)).json()["repeated"]

    run_front_end(tmp_path / "store", scenario)
