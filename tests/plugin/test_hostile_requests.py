"""Paths, names and bodies of strangers: refused in words, with nothing read, published, left over or given away."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from epochless_vllm.durable import FileLock
from epochless_vllm.errors import ConfigurationError, StorageFullError, StoreError, UnknownRevisionError
from epochless_vllm.plugin import uploads
from epochless_vllm.plugin.deployment import take_store
from epochless_vllm.plugin.error_responses import json_response
from epochless_vllm.plugin.options import Options
from epochless_vllm.plugin.signer import ensure_key
from epochless_vllm.plugin.sink import Entry, ReceiptSink
from epochless_vllm.publication.journal import Journal
from epochless_vllm.store import sources
from epochless_vllm.store.base_model import BaseSettings, compute_base_digest
from epochless_vllm.store.revisions import RevisionStore
from tests.adapters import make_adapter
from tests.plugin.front_end import FrontEnd, run_front_end
from tests.tiny_model import make_model

KEY = "sk-a-key-that-must-not-be-told"
SECRET = "what only the server may read"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An import root, and beside it a secret that looks like an adapter."""
    make_adapter(tmp_path / "secret", seed=1)
    (tmp_path / "secret" / "adapter_config.json").write_text(SECRET)
    root = tmp_path / "root"
    make_adapter(root / "good", seed=2)
    for name, target in (("out", tmp_path / "secret"), ("loop", root / "loop"), ("devices", Path("/dev"))):
        (root / name).symlink_to(target)
    for name in ("link", "pipe", "zero", "directory"):
        make_adapter(root / name, seed=3)
        weights = root / name / "adapter_model.safetensors"
        weights.unlink()
        {
            "link": lambda w: w.symlink_to(tmp_path / "secret" / "adapter_model.safetensors"),
            "pipe": lambda w: os.mkfifo(w),
            "zero": lambda w: w.symlink_to("/dev/zero"),
            "directory": lambda w: w.mkdir(),
        }[name](weights)
    return root


PATHS: list[Callable[[Path], str]] = [
    lambda root: "../secret",
    lambda root: "good/../../secret",
    lambda root: str(root.parent / "secret"),
    lambda root: str(root / "out"),
    lambda root: "out",
    lambda root: "loop",
    lambda root: "devices",
    lambda root: "link",
    lambda root: "pipe",
    lambda root: "zero",
    lambda root: "directory",
    lambda root: "/dev/zero",
    lambda root: "/proc/self/environ",
    lambda root: "/proc/self/cwd",
    lambda root: "good\0/../../secret",
    lambda root: "\0",
    lambda root: "",
    lambda root: "a" * 60_000,
    lambda root: "/".join(["a"] * 20_000),
    lambda root: "\ud800",
    lambda root: "~root",
    lambda root: "file:///etc",
    lambda root: "http://127.0.0.1/adapter",
    lambda root: "meta-llama/Llama-3-lora",
    lambda root: "$(touch pwned)",
]
NAMES = [
    "",
    ".",
    "..",
    "../x",
    "/etc",
    "a//b/",
    "a\0b",
    "a\nb",
    "a b",
    "ä",
    "x" * 129,
    "x" * 60_000,
    "base-model",
    "%2e",
]


@pytest.mark.parametrize("number", range(len(PATHS)))
def test_a_path_of_a_stranger_is_refused_and_gives_nothing_away(
    tmp_path: Path, place: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    caplog.set_level(logging.DEBUG)
    path = PATHS[number](place)

    async def scenario(front: FrontEnd) -> None:
        for url, body in (
            ("/v1/load_lora_adapter", {"lora_name": "p", "lora_path": path}),
            ("/v1/policies/p/revisions", {"path": path}),
        ):
            given = {**HEADERS, "content-type": "application/json"}
            response = await front.http.post(url, content=json.dumps(body).encode(), headers=given)
            assert response.status_code in (400, 403, 404, 422), response.text
            for told in (response.text, caplog.text):
                assert SECRET not in told
                assert KEY not in told
            assert len(response.text) < 2000
        assert front.service.state().sequence == 0
        assert os.listdir(tmp_path / "store" / "incoming") == []
        good = await front.http.post("/v1/policies/p/revisions", json={"path": "good"}, headers=HEADERS)
        assert good.status_code == 200

    run_front_end(tmp_path / "store", scenario, keys=(KEY,), import_root=str(place))


def test_the_paths_would_be_noticed_without_the_import_root(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant: the same request reads what it must not."""
    (tmp_path / "secret" / "adapter_config.json").write_text((place / "good" / "adapter_config.json").read_text())
    monkeypatch.setattr(sources, "_confine", lambda text, root: ("/", str(tmp_path / "secret").lstrip("/")))

    async def scenario(front: FrontEnd) -> None:
        body = {"path": str(tmp_path / "secret")}
        assert (await front.http.post("/v1/policies/p/revisions", json=body)).status_code == 200

    run_front_end(tmp_path / "store", scenario, import_root=str(place))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_stranger_is_refused(tmp_path: Path, place: Path, name: str) -> None:
    async def scenario(front: FrontEnd) -> None:
        answers = [
            await front.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "good"}),
            await front.http.post("/v1/unload_lora_adapter", json={"lora_name": name}),
        ]
        if len(name) < 1000:
            url = f"/v1/policies/{quote(name, safe='')}/revisions"
            answers.append(await front.http.post(url, json={"path": "good"}))
            answers.append(await front.http.get(f"/v1/policies/{quote(name, safe='')}/revisions/7"))
            answers.append(await front.http.get(f"/v1/receipts/{quote(name, safe='')}"))
        assert {answer.status_code for answer in answers} <= {307, 400, 404, 405, 422}, [a.text for a in answers]
        assert all(len(answer.text) < 4000 for answer in answers)
        assert front.service.state().sequence == 0

    run_front_end(tmp_path / "store", scenario, import_root=str(place))


def test_a_key_that_is_wrong_is_not_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "sk-wrong-but-nearly-right"

    async def scenario(front: FrontEnd) -> None:
        for header in (f"Bearer {wrong}", wrong, f"bearer  {wrong}", f"Basic {wrong}", "Bearer ", "Bearer \xff"):
            response = await front.http.get("/v1/policies", headers={"Authorization": header.encode("latin-1")})
            assert response.status_code == 401
            assert wrong not in response.text + caplog.text
            assert KEY not in response.text + caplog.text

    run_front_end(tmp_path / "store", scenario, keys=(KEY,))


def test_a_part_with_countless_headers_is_refused(tmp_path: Path) -> None:
    headers = b"".join(b"X-%d: a\r\n" % number for number in range(1000))
    content = b'--b\r\nContent-Disposition: form-data; name="step"\r\n' + headers + b"\r\n1\r\n--b--\r\n"

    async def scenario(front: FrontEnd) -> None:
        given = {"content-type": "multipart/form-data; boundary=b"}
        response = await front.http.post("/v1/policies/p/revisions", content=content, headers=given)
        assert response.status_code == 400
        assert "header" in response.text

    run_front_end(tmp_path / "store", scenario)


def test_an_upload_leaves_the_journal_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "RESERVED_BYTES", 1 << 62)
    adapter = make_adapter(tmp_path / "a", seed=1)
    names = ("adapter_config.json", "adapter_model.safetensors")

    async def scenario(front: FrontEnd) -> None:
        files = {name: (name, (adapter / name).read_bytes()) for name in names}
        response = await front.http.post("/v1/policies/p/revisions", files=files)
        assert response.status_code == StorageFullError.status
        assert os.listdir(tmp_path / "store" / "incoming") == []

    run_front_end(tmp_path / "store", scenario)


def test_what_a_server_writes_is_its_own(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)
    store = tmp_path / "store"

    async def scenario(front: FrontEnd) -> None:
        assert (await front.http.post("/v1/policies/p/revisions", json={"path": str(adapter)})).status_code == 200

    before = os.umask(0)
    try:
        store.mkdir(mode=0o700)
        run_front_end(store, scenario)
    finally:
        os.umask(before)
    open_to_others = [path for path in store.rglob("*") if path.lstat().st_mode & 0o077]
    shared = {path.name for path in open_to_others}
    # SQLite gives its side files the mode of the journal.
    assert shared == set(), shared


@pytest.mark.parametrize(
    ("bits", "writers", "change"),
    [(0o020, "its group", "g-w"), (0o002, "everybody", "o-w"), (0o022, "its group and everybody", "go-w")],
)
def test_a_store_that_others_may_write_to_is_refused(tmp_path: Path, bits: int, writers: str, change: str) -> None:
    journal, revisions = tmp_path / "journal.sqlite", tmp_path / "revisions"
    journal.touch(mode=0o600)
    revisions.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("/nowhere")
    take_store(tmp_path)
    for path in (tmp_path, journal, revisions):
        mode = path.stat().st_mode
        path.chmod(mode | bits)
        remedy = f"{writers} may write to {path}; run: chmod {change} {path}$"
        with pytest.raises(ConfigurationError, match=remedy) as caught:
            take_store(tmp_path)
        assert (caught.value.fields["flag"], caught.value.fields["path"]) == ("store", str(path))
        subprocess.run(["chmod", change, str(path)], check=True)
        take_store(tmp_path)
        assert path.stat().st_mode == mode


@pytest.mark.parametrize("umask", [0o002, 0o000])
def test_a_new_store_is_its_owners_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    store = tmp_path / "a" / "b" / "store"
    options = Options(store=str(store))
    before = os.umask(umask)
    try:
        take_store(store)
        FileLock(store / "lock", purpose="test").release()
        make_model(tmp_path / "model")
        compute_base_digest(tmp_path / "model", BaseSettings("float32").encode(), mode="full", cache_directory=store)
        ensure_key(options)
        RevisionStore(store).ingest_directory(make_adapter(tmp_path / "adapter", seed=1))
        Journal(store / "journal.sqlite").close()
        sink = ReceiptSink(store, max_bytes=1 << 20, max_age_s=60)
        assert sink.submit(lambda: Entry("sha256:1", "cmpl-1", 0, 0, "stop", 1, b"x")).result(60).kept
        take_store(store)
        sink.close()
    finally:
        os.umask(before)
    made = [tmp_path / "a", tmp_path / "a" / "b", store, *store.rglob("*")]
    assert {"base-digests.json", "signing-key.pem", "receipts.sqlite", "journal.sqlite"} <= {path.name for path in made}
    assert [path for path in made if path.lstat().st_mode & 0o022] == []
    take_store(store)


def test_a_store_that_is_no_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for store in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match=f"--epochless-store {store}: .*; name a directory$") as caught:
            take_store(store)
        assert caught.value.fields["flag"] == "store"
    with pytest.raises(StoreError, match=r"cannot open the lock file: Not a directory; name a directory$"):
        FileLock(tmp_path / "file" / "lock", purpose="test")


def test_the_request_that_published_is_not_in_the_way_of_the_next(tmp_path: Path, place: Path) -> None:
    async def scenario(front: FrontEnd) -> None:
        for _ in range(2):
            answer: Any = await front.http.post("/v1/policies/p/revisions", json={"path": "good"})
            assert answer.status_code == 200

    run_front_end(tmp_path / "store", scenario, import_root=str(place))


def test_an_answer_repeats_half_a_character_in_words() -> None:
    """JSON may spell a lone surrogate, which no UTF-8 answer can carry."""
    answer = json_response(UnknownRevisionError("model \ud800: none", model="\ud800", field="\ud800"))
    error = json.loads(bytes(answer.body))["error"]
    assert (error["message"], error["model"], error["param"]) == ("model \\ud800: none", "\\ud800", "\\ud800")
