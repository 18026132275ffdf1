"""Three cuts of a real server, and proof that the chain notices a server that does not recover."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.crash.server_cuts import CUTS, POLICY, Chain, ServerCut

FAST = {("rank", "rank.register"), ("API server", "decide"), ("API server", "retire.remove")}


@pytest.mark.engine
def test_a_real_server_loses_nothing_committed_and_shows_nothing_uncommitted(tmp_path: Path) -> None:
    cuts = [cut for cut in CUTS if (cut.process, cut.point) in FAST]
    assert len(cuts) == len(FAST)
    assert [(outcome.cut.point, outcome.problems) for outcome in Chain(tmp_path, cuts).run()] == [
        (cut.point, []) for cut in cuts
    ]


def test_every_class_of_durable_step_is_cut_on_a_real_server() -> None:
    classes = {point.partition(".")[0] for point in ("ingest.", "intend", "prepare.", "decide", "commit.reply")}
    assert classes | {"rank", "retire"} == {cut.point.partition(".")[0] for cut in CUTS}
    removed = {"retire.begin", "retire.fence", "retire.remove", "rank.remove", "rank.register"}
    assert removed < {cut.point for cut in CUTS}
    assert {cut.manner for cut in CUTS} == {"exit", "kill"}


class FakeServer:
    """Answers as a server that holds steps 1 (retired) and 2 (live)."""

    def __init__(self) -> None:
        self.revisions = [
            {"step": 1, "status": "retired", "revision_id": "sha256:a"},
            {"step": 2, "status": "live", "revision_id": "sha256:b"},
        ]
        self.models = ["base", POLICY, f"{POLICY}@sha256:b"]
        self.tokens = [7]

    def get(self, path: str) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": name} for name in self.models]}
        return {"step": 2} if path.startswith("/weight_info") else {"revisions": self.revisions}

    def post(self, path: str, *, model: str, **body: Any) -> Any:
        status = {"1": 410, "2": 200}.get(model.rpartition("@")[2], 404)
        reply = {"choices": [{"token_ids": self.tokens}]}
        return SimpleNamespace(status_code=status, text="", json=lambda: reply)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain.__new__(Chain)
    chain.root, chain.said, chain.expected, chain.next = tmp_path, {2: [7]}, {1: "retired", 2: "live"}, 3
    for name in ("incoming", "revisions"):
        (tmp_path / "store" / name).mkdir(parents=True)
    return chain


def test_the_chain_notices_what_a_server_should_not_show_or_say(chain: Chain) -> None:
    check: Any = chain._check
    check(FakeServer())
    for spoil, problem in (
        (lambda s: s.revisions.append({"step": 3, "status": "live", "revision_id": "sha256:c"}), "it shows"),
        (lambda s: s.revisions[0].update(status="draining"), "it shows"),
        (lambda s: s.models.append(f"{POLICY}@sha256:c"), "listed"),
        (lambda s: s.tokens.append(8), "other tokens"),
    ):
        server = FakeServer()
        spoil(server)
        with pytest.raises(AssertionError, match=problem):
            check(server)
    (chain.root / "store" / "incoming" / "half").mkdir()
    with pytest.raises(AssertionError, match="leftovers"):
        check(FakeServer())


def test_a_cut_names_its_point_and_manner() -> None:
    assert isinstance(CUTS[0], ServerCut)
    assert len({(cut.during, cut.process, cut.point) for cut in CUTS}) == len(CUTS)
