"""The house rule as data: which room may import which, and what each may import from elsewhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "epochless_vllm"
ROOT = Path(__file__).parent.parent / PACKAGE

# room -> (rooms of ours it may import, third-party packages it may import)
RULES: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "durable": ({"errors"}, set()),
    "protocol": ({"errors"}, set()),
    "store": ({"errors", "protocol", "durable"}, set()),
    "publication": ({"errors", "protocol", "store", "durable"}, set()),
    "patch": ({"errors", "durable"}, {"git"}),
    "wire": ({"errors", "protocol"}, {"pydantic"}),
    "sampling": ({"errors", "protocol"}, {"torch", "numba", "triton", "numpy"}),
    "execution": ({"errors"}, {"torch", "numba", "numpy"}),
    "reference": ({"errors", "protocol", "store"}, {"numpy"}),
    "simulator": ({"errors", "protocol"}, set()),
    "verify": ({"errors", "protocol", "store", "reference"}, set()),
    "plugin": (
        {"errors", "durable", "protocol", "store", "publication", "patch", "wire", "sampling", "execution"},
        {"vllm", "torch", "numpy", "numba", "fastapi", "starlette", "pydantic", "prometheus_client", "cryptography"}
        | {"python_multipart", "model_hosting_container_standards"},  # vLLM's own: form support, SageMaker routes
    ),
    "client": ({"errors", "protocol", "wire", "verify"}, {"httpx", "openai", "peft", "pydantic"}),
    "cli": (
        {"errors", "durable", "protocol", "store", "publication", "patch", "wire", "reference", "simulator", "verify"}
        | {"client"},
        {"rich", "httpx", "git", "numpy", "pydantic"},
    ),
}
# Rooms whose every module must import in a bare interpreter, and what must then not be loaded.
BARE = {"errors", "durable", "protocol", "store", "publication", "verify"}
SERVING, AUDIT = {"sampling", "execution", "plugin"}, {"reference", "verify"}


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def modules() -> list[Path]:
    skipped = {ROOT / "__init__.py", ROOT / "patch" / "data" / "verify_patch.py"}
    return sorted(path for path in ROOT.rglob("*.py") if path not in skipped)


def imported_names(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names.add(node.module)
            if node.module == PACKAGE:
                names |= {f"{PACKAGE}.{alias.name}" for alias in node.names}
    return names


def violations(room: str, source: str, *, numpy_allowed: bool = False) -> list[str]:
    """Return the imports of a module that its room may not make."""
    ours, others = RULES[room]
    found = []
    for name in sorted(imported_names(source)):
        top, _, rest = name.partition(".")
        if top == PACKAGE:
            target = rest.partition(".")[0]
            if target and target != room and target not in ours and target != "__version__":
                found.append(name)
        elif top not in sys.stdlib_module_names and top not in others and not (numpy_allowed and top == "numpy"):
            found.append(name)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_only_what_its_room_may(path: Path) -> None:
    numpy_allowed = path.relative_to(ROOT).as_posix() == "verify/replay.py"
    assert violations(room_of(path), path.read_text(), numpy_allowed=numpy_allowed) == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_stays_under_350_lines_and_opens_with_a_docstring(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 350
    assert ast.get_docstring(ast.parse(source)) is not None


def test_every_room_has_a_rule() -> None:
    assert {room_of(path) for path in modules()} <= set(RULES)


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("protocol", "import numpy"),
        ("protocol", "from epochless_vllm.store.revisions import RevisionStore"),
        ("verify", "from epochless_vllm import sampling"),
        ("sampling", "import epochless_vllm.reference.sampler"),
        ("publication", "import torch"),
        ("client", "import vllm"),
    ],
)
def test_a_forbidden_import_is_found(room: str, line: str) -> None:
    assert violations(room, line) != []


def test_serving_and_audit_wings_never_meet() -> None:
    for room in SERVING:
        assert not RULES[room][0] & AUDIT
    for room in AUDIT:
        assert not RULES[room][0] & SERVING


def _loaded_after_importing(room: str) -> set[str]:
    names = [
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in modules()
        if room_of(path) == room and path.name != "replay.py"
    ]
    program = "import sys\n" + "".join(f"import {name}\n" for name in names) + "print(*sys.modules, sep='\\n')"
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT.parent)!r})\n{program}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.partition(".")[0] for line in result.stdout.split()}


@pytest.mark.parametrize("room", sorted(BARE))
def test_room_loads_nothing_outside_the_standard_library(room: str) -> None:
    loaded = _loaded_after_importing(room) - {PACKAGE, "__main__", "__mp_main__"}
    # Start-up hooks of an editable install are the interpreter's, not ours.
    foreign = {
        name for name in loaded if name not in sys.stdlib_module_names and not name.startswith(("_", "distutils"))
    }
    assert foreign <= {"sitecustomize", "usercustomize"}


@pytest.mark.parametrize("room", ["reference", "client", "wire", "cli", "patch"])
def test_room_loads_neither_torch_nor_the_engine(room: str) -> None:
    assert not _loaded_after_importing(room) & {"torch", "vllm"}
