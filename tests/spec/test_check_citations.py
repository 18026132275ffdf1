"""The documents cite what is there; and each way in which they might not is noticed, on an edited copy of the tree."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec.check_citations import Report, check, main, write_registry
from spec.documents import commands_of, find_documents
from spec.symbols import digest_of, symbol_nodes

ROOT = Path(__file__).parents[2]
BLOCKS = "epochless_vllm/protocol/blocks.py"
DRAWS = "epochless_vllm/protocol/draws.py"
SERVING = "vllm/entrypoints/generate/base/serving.py"
CORE = "vllm/v1/engine/core.py"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what documents may cite, its registry renewed: one stale digest is one failed test, not all."""
    unneeded = shutil.ignore_patterns(".*", "build", "dist", "shared", "__pycache__", "*.egg-info", "corpus")
    tree = shutil.copytree(ROOT, tmp_path_factory.mktemp("copy") / "tree", ignore=unneeded)
    write_registry(tree, check(tree, site_packages=tree / "absent"))
    return tree


def contents_of(tree: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def contents(copy: Path) -> dict[Path, bytes]:
    return contents_of(copy)


@pytest.fixture
def tree(copy: Path, contents: dict[Path, bytes]) -> Iterator[Path]:
    """The copy, as the test's own: what the test changed is restored."""
    yield copy
    left = contents_of(copy)
    for path in left.keys() - contents.keys():
        path.unlink()
    for path, content in contents.items():
        if left.get(path) != content:
            path.write_bytes(content)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, old
    path.write_text(text.replace(old, new, 1))


def problems_of(tree: Path) -> list[str]:
    return check(tree, site_packages=tree / "absent").problems


def only_problem(tree: Path) -> str:
    found = problems_of(tree)
    assert len(found) == 1, found
    return found[0]


def test_every_citation_of_this_tree_is_found() -> None:
    report = check(ROOT)
    assert report.problems == []
    assert report.documents >= 10
    assert len(report.digests) >= 50
    assert report.commands >= 40


def test_the_command_says_how_much_it_found_and_runs_with_nothing_installed(tree: Path) -> None:
    command = [sys.executable, "-I", "-S", str(tree / "spec" / "check_citations.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"{len(find_documents(tree))} documents, ")
    assert "not checked for want of the patched vLLM" in result.stdout
    assert result.stdout.endswith("all found\n")


def test_an_edit_in_place_is_noticed_at_every_claim_that_rests_on_it(tree: Path) -> None:
    edit(tree / BLOCKS, 'revision_id or ""', 'revision_id or "base"')
    assert only_problem(tree).startswith("spec/CLAIMS.md:")
    assert f"{BLOCKS}::block_extra_key was edited since this was last read" in only_problem(tree)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    block = index >> 2\n    return", "    block = index >> 2  # four to a block\n\n    return"),
        ("    return philox_block(key, (block", "    return philox_block(\n        key, (block"),
        ('"""Return the four 32-bit words', '"""Give the four 32-bit words'),
    ],
)
def test_comments_layout_and_docstrings_are_nobodys_business(tree: Path, old: str, new: str) -> None:
    edit(tree / DRAWS, old, new)
    assert problems_of(tree) == []


def test_a_moved_symbol_is_missed_and_its_new_place_named(tree: Path) -> None:
    source = (tree / BLOCKS).read_text()
    start = source.index("def block_extra_key")
    (tree / BLOCKS).write_text(source[:start])
    moved = tree / "epochless_vllm" / "protocol" / "keys.py"
    moved.write_text(source)
    assert f"{BLOCKS} has no block_extra_key; epochless_vllm/protocol/keys.py has one of that name" in only_problem(
        tree
    )


def test_a_renamed_symbol_is_missed(tree: Path) -> None:
    edit(tree / BLOCKS, "def block_extra_key(", "def block_key(")
    assert only_problem(tree).endswith(f"{BLOCKS} has no block_extra_key")


def test_a_moved_file_is_missed(tree: Path) -> None:
    (tree / BLOCKS).rename(tree / "epochless_vllm" / "protocol" / "block_keys.py")
    missing, uncited = problems_of(tree)
    assert missing.endswith("there is no file protocol/blocks.py")
    assert f"{BLOCKS}::block_extra_key is registered" in uncited


def test_a_deleted_line_is_missed(tree: Path) -> None:
    edit(
        tree / "epochless_vllm/publication/rows.py", '            connection.execute("PRAGMA synchronous = FULL")\n', ""
    )
    problem = only_problem(tree)
    assert "publication/rows.py::open_connection no longer has the line" in problem
    assert "synchronous = FULL" in problem


def test_a_line_that_became_a_comment_is_missed(tree: Path) -> None:
    edit(
        tree / "epochless_vllm/publication/rows.py", 'connection.execute("PRAGMA synchronous = F', 'pass  # execute("F'
    )
    assert "no longer has the line" in only_problem(tree)


def test_a_registered_symbol_that_nobody_cites_is_named(tree: Path) -> None:
    edit(tree / "spec/CLAIMS.md", "`protocol/blocks.py::block_extra_key`, ", "")
    assert only_problem(tree) == (
        f"spec/anchors.json: {BLOCKS}::block_extra_key is registered and no document cites it: cite it, or remove it"
    )


def test_a_citation_that_is_not_registered_is_named(tree: Path) -> None:
    edit(tree / "spec/CLAIMS.md", "`protocol/draws.py::philox_block`", "`protocol/draws.py::draw_range`")
    unregistered, uncited = problems_of(tree)
    assert f"{DRAWS}::draw_range is not registered" in unregistered
    assert f"{DRAWS}::philox_block is registered and no document cites it" in uncited


def test_writing_renews_what_is_cited_and_removes_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(tree / BLOCKS, 'revision_id or ""', 'revision_id or "base"')
    edit(tree / "spec/CLAIMS.md", "`protocol/draws.py::philox_block`", "`protocol/draws.py::draw_range`")
    arguments = ["--root", str(tree), "--site-packages", str(tree / "absent")]
    assert main([*arguments, "--write"]) == 1
    said = capsys.readouterr().out
    assert f"renewed: {BLOCKS}::block_extra_key\n" in said
    assert f"added: {DRAWS}::draw_range\n" in said
    assert "1 problems" in said  # what nobody cites is a person's to remove
    registry = json.loads((tree / "spec/anchors.json").read_text())
    del registry[f"{DRAWS}::philox_block"]
    (tree / "spec/anchors.json").write_text(json.dumps(registry))
    assert main(arguments) == 0


# The patched vLLM


def make_vllm(tree: Path, core: str) -> Report:
    """Check against a vLLM of a few files, in which the pin finds what it pins."""
    site = tree / "site"
    for path, text in {
        CORE: core,
        SERVING: "class GenerateBaseServing:\n    def annotate_choice(self):\n        '''Hook.'''\n",
    }.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    pin = json.loads((tree / "patches/pin.json").read_text())
    (tree / "patches/pin.json").write_text(json.dumps({**pin, "files": []}))
    return check(tree, site_packages=site)


ACTIVATES = "class EngineCore:\n    def __init__(self, vllm_config):\n        vllm_config.activate_epochless()\n"


def test_a_line_of_the_patched_vllm_is_looked_up_in_it(tree: Path) -> None:
    def about_core(report: Report) -> list[str]:
        return [problem for problem in report.problems if CORE in problem]

    assert about_core(make_vllm(tree, ACTIVATES)) == []
    (missing,) = about_core(make_vllm(tree, ACTIVATES.replace("vllm_config.a", "# vllm_config.a") + "        pass\n"))
    assert "no longer has the line 'vllm_config.activate_epochless()'" in missing


def test_an_edited_symbol_of_the_patched_vllm_is_noticed(tree: Path) -> None:
    report = make_vllm(tree, ACTIVATES)
    (edited,) = [problem for problem in report.problems if SERVING in problem]
    assert "annotate_choice was edited" in edited  # another signature than the patch's


def test_without_a_patched_vllm_cited_lines_are_looked_up_in_the_series(tree: Path) -> None:
    report = check(tree, site_packages=tree / "absent")
    assert report.problems == []
    assert sum(name.startswith("vllm/") for name in report.unchecked) >= 5
    edit(tree / "patches/fail-closed.patch", "+        vllm_config.activate_epochless()", "+        pass")
    assert f"no patch of the series leaves 'vllm_config.activate_epochless()' in {CORE}" in "".join(problems_of(tree))


# Everything else a document names

LEDGER = "spec/CLAIMS.md"
FOUND = {
    "a test that is gone": (
        LEDGER,
        "::test_no_salt_reaches_another_revisions_blocks",
        "::test_no_salt_reaches_a_block",
        "tests/plugin/test_revisions_engine.py has no test_no_salt_reaches_a_block",
    ),
    "a file of tests that is gone": (
        "epochless_vllm/plugin/THREATS.md",
        "`tests/plugin/test_pace.py`",
        "`tests/plugin/test_speed.py`",
        "there is no file tests/plugin/test_speed.py",
    ),
    "a command's file": (LEDGER, "`python verify_patch.py`", "`python verify.py`", "there is no file verify.py"),
    "a command's flag": (
        LEDGER,
        "tests.sampling.equality --rows",
        "tests.sampling.equality --lines",
        "tests.sampling.equality has no flag --lines",
    ),
    "a module": (LEDGER, "python -m tests.verify.campaign", "python -m tests.verify.war", "no module tests.verify.war"),
    "a target of the Makefile": (LEDGER, "`make crash`", "`make smash`", "the Makefile has no target smash"),
    "a variable of the Makefile": ("README.md", "make soak SECONDS=60", "make soak MINUTES=1", "does not read MINUTES"),
    "a verb": (LEDGER, "`epochless fsck STORE`", "`epochless check STORE`", "epochless has no verb check"),
    "a verb among others": ("README.md", "publish | revisions | retire", "publish | list | retire", "has no verb list"),
    "a verb's flag": (LEDGER, "--model DIR --store DIR", "--weights DIR", "epochless audit has no flag --weights"),
    "a verb's action": (LEDGER, "epochless patch verify", "epochless patch check", "patch has no action check"),
    "a test of pytest's": (
        LEDGER,
        "`pytest tests/publication/test_retirement.py`",
        "`pytest tests/publication/test_leaving.py`",
        "there is no tests/publication/test_leaving.py",
    ),
    "a flag of the server": (
        "README.md",
        "| `--epochless-keep N`",
        "| `--epochless-hold N`",
        "vllm serve has no flag --epochless-hold",
    ),
    "a name of the package": (
        "README.md",
        "import receipt_of, request_fields",
        "import receipt_from, request_fields",
        "epochless_vllm.client has no receipt_from",
    ),
    "a dotted name": (
        "README.md",
        "`epochless_vllm.plugin.engine.receipts(output)`",
        "`epochless_vllm.plugin.engine.proofs(output)`",
        "there is no epochless_vllm.plugin.engine.proofs",
    ),
    "a link": ("README.md", "(patches/README.md)", "(patches/INDEX.md)", "the link patches/INDEX.md leads nowhere"),
    "a heading": (LEDGER, "README.md#threats", "README.md#dangers", "#dangers leads to no heading"),
    "a citation of no known form": (
        LEDGER,
        "`protocol/draws.py::philox_block`",
        "`protocol/draws.py::philox_block()`",
        "is no citation",
    ),
    "a figure": (
        LEDGER,
        "| 2.47 | `benchmarks/results/mixed_rows",
        "| 3.47 | `benchmarks/results/mixed_rows",
        "3.47 is written",
    ),
    "a figure's last digit": (
        LEDGER,
        "| 2.47 | `benchmarks/results/mixed_rows",
        "| 2.48 | `benchmarks/results/mixed_rows",
        "2.48 is written",
    ),
    "a figure's result": (LEDGER, "::tiny/ratio", "::small/ratio", "has no number at small/ratio"),
    "a miss that is not said": (
        LEDGER,
        "at least 0.98: **missed** | 0.97 |",
        "at least 0.98 | 0.97 |",
        "misses at least 0.98: say so",
    ),
    "a claim without a command": (
        LEDGER,
        "- **Shown by**: `pytest tests/publication/test_retirement.py`.",
        "- **Shown by**: reading it.",
        "no command shows it",
    ),
    "a claim without a limit": (LEDGER, "- **Not said**: Why they were not finite.\n", "", "in this order"),
    "a claim's parts in another order": (
        LEDGER,
        "Rests on**: `verify/receipt.py::verify_receipt`, `protocol/canonical.py::decode_canonical`.\n- **Tested by",
        "Tested by**: `verify/receipt.py::verify_receipt`, `protocol/canonical.py::decode_canonical`.\n- **Rests on",
        "in this order",
    ),
    "a claim left out": (LEDGER, "### C9 ", "### C10 ", "claims are numbered"),
    "trust without a reason": (
        "spec/TRUST.md",
        "| NumPy and the BLAS under it | arithmetic within rounding | assumption |",
        "| NumPy and the BLAS under it | arithmetic within rounding | surely |",
        "name the test behind it, or say that it is an assumption",
    ),
}


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_what_a_document_names_and_is_not_there_is_named(tree: Path, case: tuple[str, str, str, str]) -> None:
    document, old, new, message = case
    edit(tree / document, old, new)
    found = [problem for problem in problems_of(tree) if message in problem]
    assert found != []
    assert found[0].startswith(f"{document}:")


def test_the_changelog_and_what_was_built_are_not_read(tree: Path) -> None:
    for name in ("CHANGELOG.md", "build/README.md", ".hidden/README.md"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("`old/file.py::gone` and `make nothing`\n")
    assert problems_of(tree) == []
    assert find_documents(tree) == [tree / path.relative_to(ROOT) for path in find_documents(ROOT)]


# The normal form


def form_of(source: str, symbol: str = "f") -> str:
    return digest_of(symbol_nodes(ast.parse(source), symbol))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(x):\n    return x", 'def f( x ) :\n    """Doc."""\n    return (x)  # why'),
        ("def f():\n    return f'a{1}b'", "def f():\n    return f'a' f'{1}' 'b'"),
        ("def f():\n    return 16, 'x'", 'def f():\n    return 0x10, "x"'),
    ],
)
def test_spellings_of_one_program_are_one(one: str, other: str) -> None:
    assert form_of(one) == form_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(x):\n    return x", "def f(y):\n    return y"),
        ("def f(x):\n    return x", "def f(x=None):\n    return x"),
        ("def f(x):\n    return {None: x}", "def f(x):\n    return {**x}"),
        ("def f(x):\n    return x < 1", "def f(x):\n    return x <= 1"),
        ("def f(x):\n    return 'x'", "def f(x):\n    return b'x'"),
        ("def f(x):\n    return 1", "def f(x):\n    return 1.0"),
        ("def f(x):\n    return 1", "def f(x):\n    return True"),
        ("def f(x):\n    return f'{x}'", "def f(x):\n    return f'{x!r}'"),
        ("def f(x):\n    return x", "async def f(x):\n    return x"),
        ("def f(x):\n    return x", "@cache\ndef f(x):\n    return x"),
        ("def f(x):\n    return x", "def f(*x):\n    return x"),
    ],
)
def test_programs_that_differ_have_forms_that_differ(one: str, other: str) -> None:
    assert form_of(one) != form_of(other)


@pytest.mark.parametrize(
    ("name", "count"),
    [("A.m", 1), ("A", 1), ("f.inner", 1), ("X", 2), ("Y", 1), ("A.b", 1), ("inner", 0), ("f.x", 1), ("A.m.n", 0)],
)
def test_symbols_are_found_by_their_dotted_names(name: str, count: int) -> None:
    source = (
        "class A:\n    b: int = 1\n    def m(self): ...\n"
        "def f():\n    if 1:\n        def inner(): ...\n    x = 1\n    inner.mark = 2\n"
        "try:\n    X, Y = 1, 2\nexcept E:\n    X = 3\n"
    )
    assert len(symbol_nodes(ast.parse(source), name)) == count


COMMANDS: dict[str, list[list[str]]] = {
    "make demo TP=2": [["make", "demo", "TP=2"]],
    "epochless patch status                   what it is": [["epochless", "patch", "status"]],
    "make setup        # .venv: packages": [["make", "setup"]],
    "epochless publish | revisions | retire --url ...": [["epochless", "publish|revisions|retire", "--url", "..."]],
    "curl localhost:8000/v1/models": [],
    "cd x && make lint; make test": [["make", "lint"], ["make", "test"]],
    "make sense of it, he said, don't": [["make", "sense", "of", "it,", "he", "said,", "don't"]],
}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_read_from_a_line(line: str) -> None:
    assert list(commands_of(line)) == COMMANDS[line]
