"""A restart on the real engine: the recovered set is the committed set, whatever cut the server before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epochless_vllm.durable import CRASH_EXIT_CODE, CRASH_VARIABLE
from epochless_vllm.errors import RetiredRevisionError, StoreLockedError, UnknownRevisionError
from tests.engines import generate, make_engine, tokens_of
from tests.tiny_model import make_adapter, make_model

pytestmark = pytest.mark.engine

PROMPT = "What was committed before the power went is served after it. " * 3

# The life of the server before: publishes r1..r3, retires r1, then stops where the environment says, publishing r4.
EARLIER = """
import json, sys
from pathlib import Path
from epochless_vllm.plugin.engine import publish, resolve, retire, service_of
from tests.engines import generate, make_engine, tokens_of

root = Path(sys.argv[1])
llm = make_engine(root / "model", root / "store", epochless={"keep": None}, max_loras=2, max_cpu_loras=8)
for step in (1, 2, 3):
    publish(llm, root / f"r{step}", policy="policy", step=step)
said = {s: tokens_of(generate(llm, sys.argv[2], resolve(llm, f"policy@{s}"))) for s in (2, 3)}
retire(llm, "policy@1")
service_of(llm).pump()
print("SAID " + json.dumps(said), flush=True)
import os
os.environ["EPOCHLESS_CRASH_AT"] = "prepare.done"
publish(llm, root / "r4", policy="policy", step=4)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("restart")
    make_model(root / "model")
    for step in (1, 2, 3, 4):
        make_adapter(root / f"r{step}", seed=step)
    return root


@pytest.fixture(scope="module")
def said(root: Path) -> dict[int, list[int]]:
    """What the earlier server answered on r2 and r3 before it was cut."""
    environment = {name: value for name, value in os.environ.items() if name != CRASH_VARIABLE}
    result = subprocess.run(
        [sys.executable, "-c", EARLIER, str(root), PROMPT],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
        env=environment,
        check=False,
    )
    assert result.returncode == CRASH_EXIT_CODE, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("SAID "))
    return {int(step): tokens for step, tokens in json.loads(line[5:]).items()}


@pytest.fixture(scope="module")
def llm(root: Path, said: dict[int, list[int]]) -> Iterator[Any]:
    engine = make_engine(root / "model", root / "store", epochless={"keep": None}, max_loras=2, max_cpu_loras=8)
    yield engine
    engine.llm_engine.engine_core.shutdown()


def test_committed_revisions_are_back_and_say_the_same(llm: Any, said: dict[int, list[int]]) -> None:
    from epochless_vllm.plugin.engine import resolve

    for step, tokens in said.items():
        assert tokens_of(generate(llm, PROMPT, resolve(llm, f"policy@{step}"))) == tokens
    assert resolve(llm, "policy").lora_name == resolve(llm, "policy@3").lora_name


def test_retired_and_uncommitted_revisions_are_not(llm: Any) -> None:
    from epochless_vllm.plugin.engine import resolve, service_of

    with pytest.raises(RetiredRevisionError):
        resolve(llm, "policy@1")
    with pytest.raises(UnknownRevisionError):
        resolve(llm, "policy@4")
    assert len(llm.llm_engine.list_loras()) == len(service_of(llm).state().adapters) == 2


def test_publishing_what_was_cut_succeeds(llm: Any, root: Path) -> None:
    from epochless_vllm.plugin.engine import publish, resolve

    published = publish(llm, root / "r4", policy="policy", step=4)
    assert not published.repeated
    assert len(tokens_of(generate(llm, PROMPT, resolve(llm, "policy")))) == 16


def test_a_second_server_on_the_store_is_refused(llm: Any, root: Path) -> None:
    program = f"""
from epochless_vllm.durable import FileLock
from epochless_vllm.errors import StoreLockedError
try:
    FileLock({str(root / "store" / "lock")!r}, purpose="second")
except StoreLockedError as error:
    print(error.code, error.message)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(StoreLockedError.code)
    assert f"process {os.getpid()}" in result.stdout
