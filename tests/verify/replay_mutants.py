"""Source mutants of the replay and the tests that catch them.

    python -m tests.verify.replay_mutants [NAME ...]      one line a mutant, last line `N passed, N failed`

Each mutant is one edit of one module in a copy of package and tests, where the tests of replaying then run. It passes
when a named test fails; one that does not import, or whose text is not found once, is an error of the campaign and
fails. Equivalent mutants are listed apart with the argument and must pass every test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = ("tests/reference/test_rows.py", "tests/reference/test_processors.py", "tests/verify/test_mixture.py")
REPLAY = (
    "tests/verify/test_replay.py",
    "tests/verify/test_text.py",
    "tests/store/test_base_model.py",
    "tests/cli/test_audit.py",
)


@dataclass(frozen=True)
class Mutant:
    """One edit: ``old`` occurs exactly once in ``module``."""

    name: str
    module: str
    old: str
    new: str
    equivalent: str = ""  # the argument, for a mutant that does the same


_R, _P, _F = "reference/rows", "verify/replay", "verify/findings"
MUTANTS = (
    Mutant("draw unchecked", _R, "*_outside(draw, (own.lower[0], own.upper[1]), spread)", "draw, 0.0"),
    Mutant("lower end unchecked", _R, "*_outside(low, own.lower, spread)", "low, 0.0"),
    Mutant("upper end unchecked", _R, "*_outside(high, own.upper, spread)", "high, 0.0"),
    Mutant("kept mass left out of the share", _R, "record.width / ONE * (record.kept / ONE), (",
           "record.width / ONE, ("),
    Mutant("kept mass unchecked", _R, "/ spread for mass in masses]", "* 0 for mass in masses]"),
    Mutant("greedy unchecked", _R, "ratio = behind / (2 * reach) if behind else 0.0", "ratio = 0.0"),
    Mutant("greedy at half the reach", _R, "behind / (2 * reach)", "behind / reach"),
    Mutant("dropped token accepted", _R, "if float(logits_V[token]) < float(", "if 0 > abs("),
    Mutant("greedy row of NaN accepted", _R, "if not ratio <= 1:  # also", "if ratio > 1:  # also"),
    Mutant("row of NaN compared", _R, "usable_B = row_statuses(logits_BV) == OK",
           "usable_B = row_statuses(logits_BV) >= OK"),
    Mutant("reach without temperature", _R, "2 * reach / float(config.temperature)", "2 * reach"),
    Mutant("ends of the kept set stay", _R, "for sign in (1, -1):", "for sign in (0, 0):"),
    Mutant("tokens near the end are sure", _R, "surely_V = logits_V > first_out + 2 * reach",
           "surely_V = logits_V > first_out"),
    Mutant("tokens near the end are out", _R, "order_V[longest - 1]]) - 2 * reach)\n    weight",
           "order_V[longest - 1]]) + 2 * reach)\n    weight"),
    Mutant("every row tells", _R, "if told else None", "if True else None"),
    Mutant("reach ignores the largest logit", _R, "self.absolute + self.relative * float(",
           "self.absolute + 0 * float("),
    Mutant("as strict for few rows", _R, "(1 + 4 / math.sqrt(rows))", "1"),
    Mutant("repetition reversed", "reference/processors", "values / repetition, values * repetition",
           "values * repetition, values / repetition"),
    Mutant("prompt not penalised", "reference/processors", "emitted | self._prompt", "emitted"),
    Mutant("min_tokens off by one", "reference/processors", "if position < least:", "if position <= least:"),
    Mutant("own token counted", "reference/processors", "output[self._counted : position]",
           "output[self._counted : position + 1]"),
    Mutant("unknown processor ignored", "reference/processors", "if name not in COMPUTED), None)",
           "if name is None), None)"),
    Mutant("rebuilt KV replayed", "verify/mixture", "Pass(tokens - 1, tokens, final.kv)", "Pass(0, tokens, final.kv)"),
    Mutant("recomputed under the first revision", "verify/mixture", "run.end - 1, run.revision", "run.end - 1, 0"),
    Mutant("rounded KV audited", _P, "        _refuse_rounded_kv(settings)\n", ""),
    Mutant("masked rows replayed", _P, 'unknown or ("masked" if self.flags & MASKED else None)', "unknown"),
    Mutant("base unchecked", _P, "if header.base != self.base:", "if False:"),
    Mutant("prompt unchecked", _P, "if len(prompt) != header.prompt_length or prompt_digest(prompt) != header.prompt:",
           "if False:"),
    Mutant("vocabulary unchecked", _P, "if header.vocab_size != self.model.config.vocab:", "if False:"),
    Mutant("tolerance ignored", _P, "tolerance or TOLERANCES[settings.dtype]", "TOLERANCES[settings.dtype]"),
    Mutant("weights not rounded", _P, "load_model(model, _ROUNDINGS[settings.dtype])", "load_model(model)"),
    Mutant("processors not applied", _P, "if processors is not None and processors.active:", "if False:"),
    Mutant("sample is a whole replay", _F, "if replay.complete else replay.receipt", "if True else replay.receipt"),
    Mutant("drift unchecked", _F, "if drift > allowed:", "if False:"),
    Mutant("together unchecked", _F, "if drift > pooled.allowed:", "if False:"),
    Mutant("together by the wrong mean", _F, "each.drift**2 * each.drift_rows", "each.drift * each.drift_rows"),
    Mutant("one fault forgiven", _F, "    if replay.faults:\n", "    if len(replay.faults) > 1:\n"),
    Mutant("KV dtype not tried", "store/base_model", "BaseSettings(dtype, kv_cache_dtype=kv_cache_dtype)",
           "BaseSettings(dtype)"),
    Mutant("audit trusts the cache", "store/base_model", "mode, _Cache(None), require",
           "mode, _Cache(Path(model).parent / CACHE_NAME), require"),
    Mutant("text of any stop", "verify/text", "(not rest.strip(UNDECODED) or finish_reason == STOP_STRING)", "True"),
    Mutant("tokenizer unchecked by the command", "cli/audit", "if verified.header.tokenizer != own:", "if not own:"),
    Mutant("tokenizer of fewer files", "store/tokenizer_files", '"merges.txt", "special_tokens_map.json"',
           '"merges.txt"'),
    Mutant("refused receipts exit 0", "cli/audit", "return 1 if refused or", "return 0 if refused or"),
    Mutant("sampled revision ignored", _P, "sampled[offset + at] = adapters.get", "cached[offset + at] = adapters.get",
           equivalent="the step that samples a token computes the KV of the position it samples from: both name one"),
    Mutant("prompt digest unchecked by the command", "cli/prompts", "prompt_digest(prompt) == header.prompt", "True",
           equivalent="the auditor compares the digest again"),
)  # fmt: skip


def run_mutant(mutant: Mutant, tree: Path) -> tuple[bool, str]:
    """Return whether a mutant passes, and what caught it. The tree is as before afterwards."""
    path = tree / "epochless_vllm" / f"{mutant.module}.py"
    source = path.read_text()
    if source.count(mutant.old) != 1:
        return False, f"campaign error: its text occurs {source.count(mutant.old)} times"
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        caught = _first_failure(tree, ROWS) or _first_failure(tree, REPLAY)
    finally:
        path.write_text(source)
    if mutant.equivalent:
        return not caught, f"NOT EQUIVALENT: {caught}" if caught else f"equivalent: {mutant.equivalent}"
    return "::" in caught, caught or "caught by nothing"


def make_tree(directory: Path) -> Path:
    """Copy what the tests need; return the copy."""
    tree = directory / "tree"
    shutil.copytree(ROOT / "epochless_vllm", tree / "epochless_vllm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__", "corpus"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def _first_failure(tree: Path, modules: tuple[str, ...]) -> str:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *modules]
    environment = {**os.environ, **threads, "PYTHONPATH": str(tree)}
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return ""
    failed = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("FAILED ")]
    return failed[0] if result.returncode == 1 and failed else f"campaign error: {result.stdout[-200:]!r}"


def main(names: list[str]) -> int:
    """Run the campaign; return the exit status."""
    passed = failed = 0
    with tempfile.TemporaryDirectory() as directory:
        tree = make_tree(Path(directory))
        honest = _first_failure(tree, ROWS) or _first_failure(tree, REPLAY)
        if honest:
            print(f"the tests fail without a mutant: {honest}")
            return 1
        for mutant in MUTANTS:
            if names and mutant.name not in names:
                continue
            passes, detail = run_mutant(mutant, tree)
            passed, failed = passed + passes, failed + (not passes)
            print(f"{'ok  ' if passes else 'FAIL'} {mutant.name:40} {detail}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
