"""What the documents say about receipts is what the code does: the example, the threats, the codes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import epochless_vllm
from tests.verify.golden import FOLDER
from tests.verify.mutants import MUTANTS

PACKAGE = Path(epochless_vllm.__file__).parent
ROOT = PACKAGE.parent
FORMAT = (PACKAGE / "protocol" / "README.md").read_text()
THREATS = (PACKAGE / "verify" / "README.md").read_text()
LAYERS = {"bytes", "pin", "caller", "pair", "replay", "loader"}
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in THREATS.splitlines()
    if re.match(r"\| [TS]\d+ \|", line)
]
SOURCES = [
    *(PACKAGE / "verify").glob("*.py"),
    *(PACKAGE / "reference" / f"{name}.py" for name in ("processors", "rows")),
    *(PACKAGE / "protocol" / f"{name}.py" for name in (
        "builder", "canonical", "columns", "compact", "disclosure", "envelope", "header", "merkle", "receipts",
        "records", "shapes", "spans", "stream", "verbose",
    )),
]  # fmt: skip


def documented_codes() -> set[str]:
    section = THREATS.split("## Codes")[1]
    return {
        code
        for line in section.splitlines()
        if line.startswith("| `")
        for code in re.findall(r"`(\w+)`", line.split("|")[1])
    }


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_example_of_the_format_is_a_golden_receipt() -> None:
    block = re.search(r"```json\n(.*?)```", FORMAT, re.DOTALL)
    assert block is not None
    assert json.loads(block[1]) == json.loads((FOLDER / "example.json").read_text())


def test_every_threat_has_one_row_in_order() -> None:
    names = [row[0] for row in ROWS]
    assert names == [f"T{number:02}" for number in range(1, 77)] + [f"S{number}" for number in range(1, 8)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_threat_names_layers_codes_and_tests_that_exist(row: tuple[str, ...]) -> None:
    threat, _, layers, codes, tests = row
    assert set(layers.split(", ")) <= LAYERS
    named = set(re.findall(r"`(\w+)`", codes))
    assert named or codes == "none offline"
    if not layers.startswith("loader"):
        assert named <= documented_codes()
    assert tests
    from_mutants = {code for mutant in MUTANTS if mutant.threat == threat for code in mutant.codes.values()}
    for reference in tests.split():
        if reference == "mutants":
            assert from_mutants
            continue
        path, name = reference.split("::")
        assert name in functions(ROOT / path)
    assert ("mutants" in tests.split()) == bool(from_mutants)
    assert from_mutants <= named
    if tests == "mutants":
        assert from_mutants == named


def test_codes_in_the_source_and_in_the_document_are_the_same() -> None:
    raised, words = set(), set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            if isinstance(node, ast.keyword) and node.arg == "threat" and isinstance(node.value, ast.Constant):
                raised.add(node.value.value)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_refusal" and path.stem == "canonical":
                raised.add(node.args[0].value)  # type: ignore[attr-defined]
    tiling = {
        f"{kind}_{fault}" for kind in ("kv", "sampling") for fault in ("empty", "gap", "overlap", "not_merged", "total")
    }
    documented = documented_codes()
    assert raised - {"type"} <= documented  # a value from bytes always has a JSON type
    assert documented - tiling - {"sampler_index"} <= words
