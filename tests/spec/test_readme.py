"""The README lists every verb, every flag and every route there is, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from epochless_vllm.cli.main import VERBS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PLUGIN = ROOT / "epochless_vllm" / "plugin"


def section(heading: str) -> str:
    return README.split(f"\n### {heading}\n")[1].split("\n## ")[0].split("\n### ")[0]


def first_cells(text: str) -> str:
    return "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))


def calls_of(path: Path, *names: str) -> list[ast.Call]:
    """Return the calls of methods of these names."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in names]


def test_every_verb_is_listed_and_no_other() -> None:
    spans = re.findall(r"`([a-z][^`]*)`", section("The command"))
    listed = [word for span in spans for word in span.removeprefix("epochless ").split(" --")[0].split(" | ")]
    assert {word.split()[0] for word in listed} == set(VERBS)


def test_every_flag_is_listed_and_no_other() -> None:
    added = {call.args[0].value for call in calls_of(PLUGIN / "options.py", "add_argument")}  # type: ignore[attr-defined]
    assert set(re.findall(r"--[a-z-]+", first_cells(section("Flags")))) == added


def test_every_route_is_listed() -> None:
    routes = set()
    for call in calls_of(PLUGIN / "routes.py", "get", "post", "delete"):
        path = call.args[0]
        if isinstance(path, ast.Constant) and path.value.startswith("/"):
            routes.add((call.func.attr.upper(), path.value))  # type: ignore[attr-defined]
    assert len(routes) >= 7
    listed = first_cells(section("Routes"))
    for method, path in routes:
        prefix = re.escape(path.partition("{")[0].rstrip("/"))
        assert re.search(rf"`{method} [^`]*{prefix}", listed), (method, path)
    for other in ("/load_lora_adapter", "/unload_lora_adapter", "/weight_info", "/get_weight_version"):
        assert other in listed
