"""The command line: what it prints, what it ends with, and that each verb is imported only when it is used."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from epochless_vllm.cli import connection, main
from epochless_vllm.cli.output import size
from epochless_vllm.client.client import EpochlessClient
from epochless_vllm.protocol.publication import Committed, Intended, Intent, RetireBegan, Retired
from epochless_vllm.publication.journal import Journal
from epochless_vllm.store.revisions import RevisionStore
from tests.adapters import make_adapter

PUBLISHED = {
    "status": "ok",
    "policy": "policy",
    "lora_name": "policy@sha256:" + "a" * 64,
    "lora_int_id": 1,
    "weight_version": "sha256:" + "a" * 64,
    "step": 3,
    "sequence": 1,
    "repeated": False,
    "receipts": {"engine0/rank0": {}},
}
REVISION = {
    "revision_id": "sha256:" + "a" * 64,
    "step": 3,
    "sequence": 1,
    "lora_int_id": 1,
    "status": "live",
    "head": True,
}
RETIRED = {**REVISION, "revision_id": "sha256:" + "c" * 64, "step": 1, "status": "retired", "head": False}
POLICY = {"policy": "policy", "head": REVISION["revision_id"], "revisions": [REVISION, RETIRED]}


class Run:
    """One run of the command: its exit status and what it wrote."""

    def __init__(self, status: int, captured: Any) -> None:
        self.status, self.out, self.err = status, captured.out, captured.err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: object) -> Run:
        status = main.main([str(word) for word in words])
        return Run(status, capsys.readouterr())

    return call


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Request]:
    """Answer as a server would, and return the requests that came."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        request.read()
        seen.append(request)
        path = request.url.path
        if path == "/v1/policies/policy/revisions":
            return httpx.Response(200, json=PUBLISHED)
        if path == "/v1/policies":
            return httpx.Response(200, json={"base_digest": "sha256:b", "epoch": 1, "policies": [POLICY]})
        if path == "/v1/policies/policy":
            return httpx.Response(200, json=POLICY)
        if path == "/v1/unload_lora_adapter":
            item = {"policy": "policy", "step": 3, "weight_version": REVISION["revision_id"], "in_flight": 2}
            return httpx.Response(200, json={"status": "draining", "in_flight": 2, "revisions": [item]})
        if path == "/v1/receipts":
            item = {"id": "sha256:r", "prompt_index": 0, "choice_index": 1, "finish_reason": "abort", "tokens": 5}
            return httpx.Response(200, json={"receipts": [item]})
        if path in ("/v1/receipts/sha256:abc", "/v1/receipts/key"):
            return httpx.Response(200, content=path.encode() + request.url.query)
        error = {"message": "policy x: does not exist", "code": 404, "error_code": "unknown_revision"}
        return httpx.Response(404, json={"error": error})

    transport = httpx.MockTransport(answer)
    for name in ("publish", "revisions", "retire", "receipt"):
        monkeypatch.setattr(
            f"epochless_vllm.cli.{name}.connect",
            lambda arguments: EpochlessClient(arguments.url, api_key=arguments.api_key, transport=transport),
        )
    return seen


def test_no_verb_an_unknown_verb_and_wrong_words_are_usage(run: Any) -> None:
    assert run().status == 2
    unknown = run("publsh")
    assert unknown.status == 2
    assert "no verb 'publsh'" in unknown.err
    assert run("publish").status == 2
    assert run("publish", "p", "x", "--step", "-1").status == 2
    assert run("publish", "p", "x", "--step", "3.0").status == 2
    assert run("store", "collect", "x", "--older-than", "soon").status == 2
    assert run("store").status == 2


@pytest.mark.parametrize("verb", sorted(main.VERBS))
def test_every_verb_has_help_and_a_line_in_the_list(run: Any, verb: str) -> None:
    helped = run(verb, "--help")
    assert helped.status == 0
    assert helped.out.startswith(f"usage: epochless {verb}")
    assert f"  {verb} " in run("--help").out


def test_the_list_of_verbs_imports_no_verb() -> None:
    source = (
        "import sys; from epochless_vllm.cli import main; main.main(['--help']);"
        "print(sorted(m for m in sys.modules if m in ('httpx', 'rich', 'torch', 'vllm', 'numpy')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_publishing_sends_an_absolute_path_and_prints_the_revision(
    run: Any, server: list[httpx.Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("publish", "policy", "adapter", "--step", 3)
    assert done.status == 0
    assert json.loads(server[0].content) == {"path": str(tmp_path / "adapter"), "step": 3}
    assert f"published {PUBLISHED['lora_name']}" in done.out
    assert run("publish", "policy", "adapter", "--json").json == PUBLISHED


def test_uploading_sends_the_files(run: Any, server: list[httpx.Request], tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)
    assert run("publish", "policy", adapter, "--upload", "--api-key", "k").status == 0
    assert (adapter / "adapter_model.safetensors").read_bytes() in server[0].content
    assert server[0].headers["authorization"] == "Bearer k"
    missing = run("publish", "policy", tmp_path / "none", "--upload")
    assert missing.status == 1
    assert "adapter_config.json" in missing.err


def test_revisions_lists_what_lives_and_on_request_what_is_retired(run: Any, server: list[httpx.Request]) -> None:
    listed = run("revisions").out
    assert "sha256:aaaaaaaaaaaa" in listed
    assert "live, head" in listed
    assert "retired" not in listed
    assert "retired" in run("revisions", "policy", "--retired").out
    assert "a" * 64 in run("revisions", "--full").out
    assert run("revisions", "policy", "--json").json == POLICY
    unknown = run("revisions", "x")
    assert (unknown.status, unknown.err) == (1, "error: policy x: does not exist\n")
    assert run("revisions", "x", "--json").json["error"]["code"] == "unknown_revision"


def test_retiring_prints_what_runs_and_waits_on_request(run: Any, server: list[httpx.Request]) -> None:
    assert "draining, 2 in flight" in run("retire", "policy").out
    done = run("retire", "policy", "--wait", 1)
    assert (done.status, done.out.splitlines()[-1]) == (0, "retired")
    assert run("retire", "policy", "--json", "--wait", 1).json["retired"] is True


def test_a_server_that_is_not_there_is_named(run: Any) -> None:
    done = run("revisions", "--url", "http://127.0.0.1:9")
    assert done.status == 1
    assert "http://127.0.0.1:9" in done.err


def test_the_default_server_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    monkeypatch.setenv(connection.URL_VARIABLE, "http://elsewhere:1")
    parser = argparse.ArgumentParser()
    connection.add_server_options(parser)
    assert parser.parse_args([]).url == "http://elsewhere:1"


def test_inspect_names_the_revision_the_store_would_give(run: Any, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1, rank=4, alpha=16)
    expected = RevisionStore(tmp_path / "store").ingest_directory(adapter).revision_id
    done = run("inspect", adapter)
    assert done.status == 0
    assert expected in done.out
    described = run("inspect", adapter, "--json").json
    assert described["revision_id"] == expected
    assert {module["rank"] for module in described["modules"]} == {4}
    assert {module["scaling"] for module in described["modules"]} == {4.0}
    assert "model.layers.0.self_attn.q_proj" in run("inspect", adapter, "--modules").out


@pytest.mark.parametrize("damage", ["missing", "truncated", "nan", "pickle"])
def test_inspect_refuses_what_a_server_would(run: Any, tmp_path: Path, damage: str) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)
    tensors = adapter / "adapter_model.safetensors"
    if damage == "missing":
        tensors.unlink()
    if damage == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-1])
    if damage == "nan":
        tensors.write_bytes(tensors.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")
    if damage == "pickle":
        tensors.rename(adapter / "adapter_model.bin")
    done = run("inspect", adapter)
    assert done.status == 1
    assert done.err.startswith("error: ")


def publish_offline(root: Path, adapter: Path, step: int) -> str:
    """Publish to a store as a server's journal would record it; return the revision."""
    revision_id = RevisionStore(root).ingest_directory(adapter).revision_id
    journal = Journal(root / "journal.sqlite")
    if journal.state.epoch == 0:
        journal.begin_epoch()
    state = journal.state
    intent = Intent(state.last_transaction_id + 1, "policy", step, revision_id, state.last_lora_int_id + 1)
    journal.append(Intended(intent))
    journal.append(Committed(intent.transaction_id, state.sequence + 1), receipts={})
    journal.close()
    return revision_id


def test_fsck_finds_a_flipped_byte_a_missing_revision_and_a_stray(run: Any, tmp_path: Path) -> None:
    root = tmp_path / "store"
    first = publish_offline(root, make_adapter(tmp_path / "a", seed=1), 1)
    second = publish_offline(root, make_adapter(tmp_path / "b", seed=2), 2)
    assert run("fsck", root).status == 0
    assert run("store", "fsck", root).out.splitlines()[-1] == "sound"
    doctor = {item["check"]: item for item in run("doctor", "--store", root, "--json").json["findings"]}
    assert doctor["store"]["detail"].startswith("2 revisions")
    tensors = root / "revisions" / first[7:] / "adapter_model.safetensors"
    tensors.chmod(0o600)
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x55")
    found = run("fsck", root, "--json")
    assert found.status == 1
    assert [item["revision_id"] for item in found.json["damaged"]] == [first]
    for path in (root / "revisions" / second[7:]).iterdir():
        path.chmod(0o600)
        path.unlink()
    (root / "revisions" / second[7:]).rmdir()
    (root / "revisions" / "notes.txt").write_text("x")
    found = run("fsck", root, "--json")
    assert found.json["missing"] == [second]
    assert found.json["strays"] == ["revisions/notes.txt"]
    shown = run("fsck", root).out
    assert "missing" in shown
    assert "stray" in shown


@pytest.mark.parametrize("name", [".", "journal.sqlite", "revisions"])
def test_a_store_that_a_group_may_write_to_is_found_and_its_journal_removes_nothing(
    run: Any, tmp_path: Path, name: str
) -> None:
    root = tmp_path / "store"
    publish_offline(root, make_adapter(tmp_path / "a", seed=1), 1)
    (root / name).chmod(0o770)
    found = run("fsck", root, "--json")
    assert (found.status, found.json["sound"]) == (1, False)
    assert [item["path"] for item in found.json["shared"]] == [str(root / name)]
    assert f"run: chmod g-w {root / name}\n" in run("fsck", root).out
    assert run("doctor", "--store", root, "--json").status == 1
    refused = run("store", "collect", root, "--older-than", "7d")
    assert refused.status == 1
    assert f"run: chmod g-w {root / name}" in refused.err
    for path in (root, *root.iterdir()):  # side files that SQLite made meanwhile have the journal's mode
        path.chmod(path.stat().st_mode & ~0o020)
    assert run("fsck", root).status == 0


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (("publish", "policy"), "path"),
        (("publish", "", "x"), "policy"),
        (("publish", "../models", "x"), "policy"),
        (("publish", "policy", "x", "--step", "-1"), "--step"),
        (("revisions", ""), "policy"),
        (("revisions", "--url", "host:8000"), "url"),
        (("retire", "policy", "--wait", "nan"), "--wait"),
        (("retire", "policy", "--wait", "-1"), "--wait"),
        (("store",), "fsck|collect"),
        (("store", "collect", "x", "--older-than", "soon"), "--older-than"),
        (("patch", "mend"), "mend"),
        (("verify",), "receipt"),
    ],
)
def test_wrong_words_are_usage_for_people_and_for_machines(run: Any, words: tuple[str, ...], about: str) -> None:
    told = run(*words)
    assert (told.status, told.out) == (2, "")
    assert about in told.err.splitlines()[-1]
    coded = run(*words, "--json")
    assert coded.status == 2
    assert about in coded.json["error"]["message"]


def test_a_file_that_may_not_be_looked_at_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied", f"{path}/revisions")

    monkeypatch.setattr("epochless_vllm.cli.fsck.open_root", refuse)
    refused = run("fsck", "store")
    assert refused.status == 1
    assert refused.err.startswith("error: store/revisions: cannot use it: Permission denied; let the user")
    assert run("fsck", "store", "--json").json["error"]["path"] == "store/revisions"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_disk_behind_standard_output_is_said_in_words(tmp_path: Path, options: tuple[str, ...]) -> None:
    adapter = make_adapter(tmp_path / "a", seed=1)
    command = [sys.executable, "-m", "epochless_vllm.cli.main", "inspect", str(adapter), *options]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "error: standard output: No space left on device\n")


def test_fsck_finds_a_damaged_journal(run: Any, tmp_path: Path) -> None:
    root = tmp_path / "store"
    publish_offline(root, make_adapter(tmp_path / "a", seed=1), 1)
    journal = root / "journal.sqlite"
    journal.write_bytes(b"not a database" * 100)
    found = run("fsck", root, "--json")
    assert found.status == 1
    assert found.json["journal"]["error"]


def test_fsck_makes_no_store_where_there_is_none(run: Any, tmp_path: Path) -> None:
    assert run("fsck", tmp_path).status == 1
    assert list(tmp_path.iterdir()) == []


def test_collect_removes_what_no_policy_holds_and_nothing_else(run: Any, tmp_path: Path) -> None:
    root = tmp_path / "store"
    first = publish_offline(root, make_adapter(tmp_path / "a", seed=1), 1)
    second = publish_offline(root, make_adapter(tmp_path / "b", seed=2), 2)
    assert run("store", "collect", root, "--older-than", "0s", "--json").json["removed"] == []
    journal = Journal(root / "journal.sqlite")
    journal.append(RetireBegan("policy", first))  # type: ignore[arg-type]  # a revision_id
    journal.append(Retired("policy", first))  # type: ignore[arg-type]
    journal.close()
    assert run("store", "collect", root, "--older-than", "2d", "--json").json["removed"] == []
    collected = run("store", "collect", root, "--older-than", "0s", "--json").json
    assert (collected["removed"], collected["kept"]) == ([first], 1)
    assert RevisionStore(root).list() == (second,)


def test_collect_of_young_revisions_beside_a_running_server_is_refused(run: Any, tmp_path: Path) -> None:
    from epochless_vllm.durable import FileLock

    root = tmp_path / "store"
    publish_offline(root, make_adapter(tmp_path / "a", seed=1), 1)
    lock = FileLock(root / "lock", purpose="vLLM server")
    try:
        refused = run("store", "collect", root, "--older-than", "5m")
        assert refused.status == 1
        assert "vLLM server" in refused.err
        assert run("store", "collect", root, "--older-than", "7d").status == 0
    finally:
        lock.release()


def test_patch_status_describes_a_tree_and_refuses_what_is_none(run: Any, tmp_path: Path) -> None:
    nothing = run("patch", "status", "--tree", tmp_path)
    assert nothing.status == 1
    assert nothing.err.startswith("error: ")
    assert run("patch", "repair").status == 2


def test_doctor_says_what_to_fix(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    done = run("doctor", "--store", tmp_path / "missing" / "store", "--json")
    assert done.status == 1
    findings = {finding["check"]: finding for finding in done.json["findings"]}
    assert findings["python"]["state"] == "ok"
    assert findings["store"]["state"] == "failed"
    assert all(f["remedy"] for f in findings.values() if f["state"] == "failed")
    assert "->" in run("doctor", "--store", tmp_path / "missing" / "store").out


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (64 << 20, "64.0 MiB"), (5 << 40, "5120.0 GiB")],
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert size(count) == text


def test_receipt_fetches_lists_and_writes(server: list[httpx.Request], run: Any, tmp_path: Path) -> None:
    assert run("receipt", "sha256:abc", "-o", tmp_path / "r").status == 0
    assert (tmp_path / "r").read_bytes() == b"/v1/receipts/sha256:abcformat=verbose"
    assert run("receipt", "sha256:abc", "--format", "compact", "-o", tmp_path / "r").status == 0
    assert (tmp_path / "r").read_bytes().endswith(b"format=compact")
    assert run("receipt", "key", "-o", tmp_path / "key").status == 0
    assert (tmp_path / "key").read_bytes().startswith(b"/v1/receipts/key")
    listed = run("receipt", "cmpl-1")
    assert listed.status == 0
    assert "abort" in listed.out
    assert run("receipt", "cmpl-1", "--json").json["receipts"][0]["tokens"] == 5
    assert run("receipt", "sha256:none").status == 1
    assert run("receipt", "sha256:abc", "-o", tmp_path).status == 2
