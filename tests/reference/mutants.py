"""Source mutants of the reference engine and the configurations whose logits betray them.

    python -m tests.reference.mutants [NAME ...]      one line a mutant, last line `N passed, N failed`

Each mutant is one edit of one module, run in a process of its own against logits that transformers and peft computed
once. It passes when at least one configuration differs from the oracle and, where ``only`` is given, exactly those do.
Text that is not found once, or a mutant that does not import, is an error of the campaign and fails. Equivalent mutants
are listed apart with the argument and must agree everywhere.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.reference.cases import SHAPES, make_mixture, make_tokens
from tests.reference.differential import (
    MIXTURE_RUNS,
    compare,
    engine_logits,
    mixture_by_engine,
    write_case,
    write_mixture,
)

ROOT = Path(__file__).parent.parent.parent
COPIED = ("__init__.py", "errors.py", "durable.py", "protocol", "store", "reference")
MIXTURE = "mixture"
CONFIGURATIONS = (
    "tiny none", "gqa-2x none", "gqa-4x none", "mqa none", "untied-cls none", "full-context none", "tiny r8",
    "gqa-4x alpha", "mqa rslora", "full-context patterns", "untied-cls head", "qwen2 none", "qwen3 none",
    "llama-biases none", "bf16 none", "fp16-shards none", "rope-linear none", "rope-llama3 none", "rope-yarn none",
    MIXTURE,
)  # fmt: skip
_ADAPTED = "tiny r8, gqa-4x alpha, mqa rslora, full-context patterns, untied-cls head, mixture"
_GROUPED = (
    "gqa-2x none, gqa-4x none, gqa-4x alpha, qwen2 none, qwen3 none, llama-biases none, bf16 none, fp16-shards none, "
    "rope-linear none, rope-llama3 none, rope-yarn none"
)


@dataclass(frozen=True)
class Mutant:
    """One edit: ``old`` occurs exactly once in ``module``. ``only`` lists the configurations that may catch it."""

    name: str
    module: str
    old: str
    new: str
    only: str = ""
    equivalent: str = ""  # the argument, for a mutant that computes the same


MUTANTS = (
    Mutant(
        "gqa-modulo, by position", "forward", "head // (config.heads // config.kv_heads)", "head % config.kv_heads",
        only=_GROUPED + ", mixture",
    ),
    Mutant(
        "gqa-modulo, batched", "forward", "x[:count].reshape(count, config.kv_heads, -1, size)",
        "x[:count].reshape(count, -1, config.kv_heads, size).swapaxes(1, 2)", only=_GROUPED + ", mixture",
    ),
    Mutant(
        "ignore-untied", "model", 'Linear("lm_head", embedding, None) if config.tied else',
        'Linear("lm_head", embedding, None) if True else',
        only="untied-cls none, untied-cls head, qwen3 none, fp16-shards none",
    ),
    Mutant(
        "keys rotated one position early", "forward", "self._place_heads(k, layer.k_norm, config.kv_heads)",
        "self._length, there = max(self._length - 1, 0), self._length\n"
        "        self._place_heads(k, layer.k_norm, config.kv_heads)\n        self._length = there",
    ),
    Mutant("rotation the other way", "arithmetic", "    first_THF -= second_THF", "    first_THF += second_THF"),
    Mutant(
        "neighbouring pairs rotated", "arithmetic", "left, right = x_THD[:, :, :half], x_THD[:, :, half:]",
        "left, right = x_THD[:, :, ::2], x_THD[:, :, 1::2]",
    ),
    Mutant("values rotated too", "forward", "        begin, end, size = self._length",
           "        self._place_heads(v, None, config.kv_heads)\n        begin, end, size = self._length"),
    Mutant("theta of another model", "rope", "np.float32(self.theta), exponents", "np.float32(9000), exponents"),
    Mutant("frequencies by half the exponent", "rope", "/ np.float32(head_dim)", "/ np.float32(2 * head_dim)"),
    Mutant("linear factor ignored", "rope", 'counted /= np.float32(self.parameters["factor"])', "pass",
           only="rope-linear none"),
    Mutant("llama3 blend reversed", "rope", "((1 - blend) * stretched + blend * plain)",
           "(blend * stretched + (1 - blend) * plain)", only="rope-llama3 none"),
    Mutant("llama3 trained length ignored", "rope", "turns = trained * plain", "turns = plain",
           only="rope-llama3 none"),
    Mutant("yarn magnitude ignored", "rope", 'if self.kind == "yarn" and factor > 1', "if False",
           only="rope-yarn none"),
    Mutant("yarn ramp reversed", "rope", "interpolated * ramp + plain * (1 - ramp)",
           "interpolated * (1 - ramp) + plain * ramp", only="rope-yarn none"),
    Mutant("final norm's gain ignored", "forward", "self.model.norm, epsilon",
           "np.ones_like(self.model.norm), epsilon"),
    Mutant("second norm uses the first's gain", "forward", "hidden, layer.post_norm", "hidden, layer.input_norm"),
    Mutant("head norms left out", "forward", "if norm is not None:", "if False:", only="qwen3 none"),
    Mutant("head norm of the queries on the keys", "forward", "layer.k_norm", "layer.q_norm", only="qwen3 none"),
    Mutant("norm without its epsilon", "arithmetic", "scale_T += np.float32(epsilon)", "pass"),
    Mutant("norm by the sum, not the mean", "arithmetic", "scale_T /= np.float32(x_TI.shape[1])", "pass"),
    Mutant("biases left out", "forward", "if linear.bias is not None:", "if False:",
           only="qwen2 none, llama-biases none, rope-yarn none"),
    Mutant("scale by alpha alone", "lora", "config.scaling_for(name)", "float(config.modules[name].alpha)"),
    Mutant("adapter unscaled", "forward", "low *= np.float32(factors.scaling)", "pass",
           only="gqa-4x alpha, mqa rslora, full-context patterns, untied-cls head, mixture"),
    Mutant("rsLoRA and patterns ignored", "lora", "config.scaling_for(name)", "float(config.lora_alpha) / config.r",
           only="mqa rslora, full-context patterns, mixture"),
    Mutant("adapter of the head ignored", "forward", "self._linear(self.model.head, normed, inside, logits)",
           "self._linear(self.model.head, normed, [], logits)", only="untied-cls head, mixture"),
    Mutant("adapter replaces the base", "forward", "out_TO[begin:end] += delta", "out_TO[begin:end] = delta",
           only=_ADAPTED),
    Mutant("first run of rows only", "forward", "for begin, end, adapter in spans:",
           "for begin, end, adapter in spans[:1]:", only=MIXTURE),
    Mutant("runs not cut to the rows of logits", "forward", "(max(a, begin) - begin, min(z, end) - begin, each)",
           "(a, z, each)", only=MIXTURE),
    Mutant("sampled adapter in the cache", "sequences", "engine.extend([token], cached)  #",
           "engine.extend([token], sampled)  #", only=MIXTURE),
    Mutant("scores scaled by hidden size", "forward", "model.config.head_dim**-0.5", "model.config.hidden**-0.5"),
    Mutant("one later position seen", "buffers", "-np.inf, np.float32), 1)", "-np.inf, np.float32), 2)"),
    Mutant("no mask", "forward", "scores[:, known:] += b.mask[:count, :count]", "pass"),
    Mutant("own position not seen", "forward", "seen = self._length + count\n        scores = b.scores[:seen]",
           "seen = max(1, self._length)\n        scores = b.scores[:seen]"),
    Mutant("values in reverse order", "forward", "b.values[index, shared, :seen].T, b.context",
           "b.values[index, shared, :seen][::-1].T, b.context"),
    Mutant("no residual round attention", "forward", "spans, normed)\n        hidden += normed\n\n    def _place",
           "spans, normed)\n        hidden[...] = normed\n\n    def _place"),
    Mutant("no residual round the mlp", "forward", "spans, normed)\n        hidden += normed\n\n    def _logits",
           "spans, normed)\n        hidden[...] = normed\n\n    def _logits"),
    Mutant("gate and up exchanged", "forward", "gate(gates, ups,", "gate(ups, gates,"),
    Mutant("relu for silu", "arithmetic", "    gate_TI /= scratch_TI", "    np.maximum(gate_TI, 0, out=gate_TI)"),
    Mutant("softmax not normalized", "arithmetic", "    scores_TN /= scale_T[:, None]", "    pass"),
    Mutant("last partial block of outputs skipped", "arithmetic", "range(0, outputs, BLOCK)",
           "range(0, outputs - outputs % BLOCK, BLOCK)"),
    Mutant("fp16 read twice as large", "weights", '"<f4" if dtype == "F32" else "<f2", piece.size)',
           '"<f4" if dtype == "F32" else "<f2", piece.size) * (2 - (dtype == "F32"))', only="fp16-shards none"),
    Mutant("bf16 in the low half", "weights", "<<= np.uint32(16)", "<<= np.uint32(15)", only="bf16 none"),
    Mutant("layers in reverse", "model", "tuple(map(layer, range(config.layers)))",
           "tuple(map(layer, reversed(range(config.layers))))"),
    Mutant("every position one later", "rope", "np.arange(positions, dtype", "np.arange(1, positions + 1, dtype",
           equivalent="scores depend on differences of positions only"),
    Mutant("softmax without its maximum", "arithmetic", "    scores_TN -= scale_T[:, None]", "    pass",
           equivalent="a shift of all scores cancels in the quotient; only scores beyond 88 would overflow"),
)  # fmt: skip


@contextmanager
def sandbox() -> Iterator[Path]:
    """Yield a directory with a copy of the package's lower rooms and the tests beside it."""
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "epochless_vllm"
        package.mkdir()
        for name in COPIED:
            source = ROOT / "epochless_vllm" / name
            if source.is_dir():
                shutil.copytree(source, package / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, package / name)
        (Path(scratch) / "tests").symlink_to(ROOT / "tests")
        yield Path(scratch)


def write_oracles(directory: Path, configurations: Iterable[str]) -> None:
    """Write the files and the oracle's logits of each configuration."""
    from tests.reference.oracle import mixture_logits, oracle_logits

    for configuration in configurations:
        if configuration == MIXTURE:
            model, adapters, tokens = write_mixture(directory)
            logits = mixture_logits(model, adapters, tokens, *make_mixture(len(tokens)))
        else:
            shape, axis = configuration.split()
            model, adapter = write_case(directory, shape, axis)
            logits = oracle_logits(model, adapter, make_tokens(SHAPES[shape]))
        np.save(directory / f"{configuration}.npy", logits)


def run_mutant(mutant: Mutant | None, box: Path, oracles: Path, configurations: Iterable[str]) -> dict[str, str]:
    """Return the verdict of each configuration on a mutant, or on the engine as it is.

    Raises:
        ValueError: the mutant's text is not there once, or it does not import.
    """
    path = original = None
    if mutant is not None:
        path = box / "epochless_vllm" / "reference" / f"{mutant.module}.py"
        original = path.read_text()
        if original.count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: its text occurs {original.count(mutant.old)} times in {mutant.module}.py")
        path.write_text(original.replace(mutant.old, mutant.new))
    try:
        command = [sys.executable, "-B", "-m", "tests.reference.mutants", "--child", str(oracles), *configurations]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=box, env=environment, capture_output=True, text=True, timeout=600)
    finally:
        if path is not None and original is not None:
            path.write_text(original)
    if result.returncode != 0:
        raise ValueError(f"{mutant and mutant.name}: does not run: {result.stderr[-400:]}")
    verdicts: dict[str, str] = json.loads(result.stdout)
    return verdicts


def run_child(oracles: Path, configurations: Iterable[str]) -> None:
    """Print the verdict of each configuration on the package beside the working directory."""
    import epochless_vllm

    assert epochless_vllm.__file__ is not None
    assert Path(epochless_vllm.__file__).parent.parent == Path.cwd()
    print(json.dumps({configuration: _judge(oracles, configuration) for configuration in configurations}))


def _judge(oracles: Path, configuration: str) -> str:
    oracle = np.load(oracles / f"{configuration}.npy")
    try:
        if configuration == MIXTURE:
            model, adapters, tokens = write_mixture(oracles)
            found = [mixture_by_engine(model, adapters, tokens, rows, first) for rows, first in MIXTURE_RUNS]
            oracles_of = [oracle[first:] for _, first in MIXTURE_RUNS]
        else:
            shape, axis = configuration.split()
            model, adapter = write_case(oracles, shape, axis)
            found = [logits for _, logits in engine_logits(model, adapter, make_tokens(SHAPES[shape]))]
            oracles_of = [oracle] * len(found)
    except Exception as error:  # noqa: BLE001  a mutant may fail in any way; the kind is the verdict
        return f"raises {type(error).__name__}"
    with np.errstate(all="ignore"):
        return "agrees" if all(map(_agrees, found, oracles_of)) else "differs"


def _agrees(logits: np.ndarray, oracle: np.ndarray) -> bool:
    return compare(logits, oracle).agrees


def judge(mutant: Mutant, verdicts: dict[str, str]) -> tuple[bool, str]:
    """Return whether a mutant passes, and what caught it."""
    caught = [name for name, verdict in verdicts.items() if verdict != "agrees"]
    if mutant.equivalent:
        return not caught, "agrees everywhere: " + mutant.equivalent if not caught else "NOT EQUIVALENT: " + ", ".join(
            caught
        )
    if mutant.only:
        allowed = set(mutant.only.split(", ")) & set(verdicts)
        if set(caught) != allowed:
            return False, f"caught by {', '.join(caught) or 'nothing'}; expected {', '.join(sorted(allowed))}"
    text = "all" if len(caught) == len(verdicts) else ", ".join(caught)
    kinds = sorted({verdict for verdict in verdicts.values() if verdict.startswith("raises")})
    return bool(caught), f"{text} ({len(caught)} of {len(verdicts)}{'; ' + ', '.join(kinds) if kinds else ''})"


def main(names: list[str]) -> int:
    """Run the campaign; return the exit status."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    passed = failed = 0
    with sandbox() as box, tempfile.TemporaryDirectory() as directory:
        oracles = Path(directory)
        write_oracles(oracles, CONFIGURATIONS)
        honest = run_mutant(None, box, oracles, CONFIGURATIONS)
        if set(honest.values()) != {"agrees"}:
            print(f"the engine itself fails: {honest}")
            return 1
        for mutant in sorted(chosen, key=lambda mutant: bool(mutant.equivalent)):
            try:
                passes, detail = judge(mutant, run_mutant(mutant, box, oracles, CONFIGURATIONS))
            except ValueError as error:
                passes, detail = False, f"campaign error: {error}"
            passed, failed = passed + passes, failed + (not passes)
            kind = "equivalent" if mutant.equivalent else "caught by"
            print(f"{'ok  ' if passes else 'FAIL'} {mutant.name:38} {kind} {detail}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_child(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
