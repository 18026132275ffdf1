"""The replay of receipts: rows recomputed, mixtures, findings, sums over many rows, and the command."""


from __future__ import annotations

from tests.mutation.mutants import Mutant, Room


def _mutant(name: str, module: str, old: str, new: str, *, equivalent: str = "") -> Mutant:
    return Mutant(module, name, old, new, equivalent=equivalent)


_R, _P, _F = "reference/rows", "verify/replay", "verify/findings"
_S, _C = "verify/series", "reference/contrasts"
MUTANTS = (
    _mutant("draw unchecked", _R, "*_outside(draw, (own.lower[0], own.upper[1]), spread)", "draw, 0.0"),
    _mutant("lower end unchecked", _R, "*_outside(low, own.lower, spread)", "low, 0.0"),
    _mutant("upper end unchecked", _R, "*_outside(high, own.upper, spread)", "high, 0.0"),
    _mutant("kept mass left out of the share", _R, "record.width / ONE * (record.kept / ONE), (",
           "record.width / ONE, ("),
    _mutant("kept mass unchecked", _R, "/ spread for mass in masses]", "* 0 for mass in masses]"),
    _mutant("greedy unchecked", _R, "ratio = behind / (2 * reach) if behind else 0.0", "ratio = 0.0"),
    _mutant("greedy at half the reach", _R, "behind / (2 * reach)", "behind / reach"),
    _mutant("dropped token accepted", _R, "if float(logits_V[token]) < float(", "if 0 > abs("),
    _mutant("greedy row of NaN accepted", _R, "if not ratio <= 1:  # also", "if ratio > 1:  # also"),
    _mutant("row of NaN compared", _R, "usable_B = row_statuses(logits_BV) == OK",
           "usable_B = row_statuses(logits_BV) >= OK"),
    _mutant("reach without temperature", _R, "2 * reach / float(config.temperature)", "2 * reach"),
    _mutant("ends of the kept set stay", _R, "for sign in (1, -1):", "for sign in (0, 0):"),
    _mutant("tokens near the end are sure", _R, "surely_V = logits_V > first_out + 2 * reach",
           "surely_V = logits_V > first_out"),
    _mutant("tokens near the end are out", _R, "order_V[longest - 1]]) - 2 * reach)\n    weight",
           "order_V[longest - 1]]) + 2 * reach)\n    weight"),
    _mutant("every row tells", _R, "if told else None", "if True else None"),
    _mutant("reach ignores the largest logit", _R, "self.absolute + self.relative * float(",
           "self.absolute + 0 * float("),
    _mutant("as strict for few rows", _R, "(1 + 4 / math.sqrt(rows))", "1"),
    _mutant("repetition reversed", "reference/processors", "values / repetition, values * repetition",
           "values * repetition, values / repetition"),
    _mutant("prompt not penalised", "reference/processors", "emitted | self._prompt", "emitted"),
    _mutant("min_tokens off by one", "reference/processors", "if position < least:", "if position <= least:"),
    _mutant("own token counted", "reference/processors", "output[self._counted : position]",
           "output[self._counted : position + 1]"),
    _mutant("unknown processor ignored", "reference/processors", "if name not in COMPUTED), None)",
           "if name is None), None)"),
    _mutant("rebuilt KV replayed", "verify/mixture", "Pass(tokens - 1, tokens, final.kv)", "Pass(0, tokens, final.kv)"),
    _mutant("recomputed under the first revision", "verify/mixture", "run.end - 1, run.revision", "run.end - 1, 0"),
    _mutant("rounded KV audited", _P, "        _refuse_rounded_kv(settings)\n", ""),
    _mutant("masked rows replayed", _P, 'unknown or ("masked" if self.flags & MASKED else None)', "unknown"),
    _mutant("base unchecked", _P, "if header.base != self.base:", "if False:"),
    _mutant("prompt unchecked", _P, "if len(prompt) != header.prompt_length or prompt_digest(prompt) != header.prompt:",
           "if False:"),
    _mutant("vocabulary unchecked", _P, "if header.vocab_size != self.model.config.vocab:", "if False:"),
    _mutant("tolerance ignored", _P, "tolerance or TOLERANCES[settings.dtype]", "TOLERANCES[settings.dtype]"),
    _mutant("weights not rounded", _P, "load_model(model, _ROUNDINGS[settings.dtype])", "load_model(model)"),
    _mutant("processors not applied", _P, "if processors is not None and processors.active:", "if False:"),
    _mutant("sample is a whole replay", _F, "if replay.complete else replay.receipt", "if True else replay.receipt"),
    _mutant("drift unchecked", _F, "if drift > allowed:", "if False:"),
    _mutant("together unchecked", _F, "if drift > pooled.allowed:", "if False:"),
    _mutant("together by the wrong mean", _F, "each.drift**2 * each.drift_rows", "each.drift * each.drift_rows"),
    _mutant("one fault forgiven", _F, "    if replay.faults:\n", "    if len(replay.faults) > 1:\n"),
    _mutant("KV dtype not tried", "store/base_model", "BaseSettings(dtype, kv_cache_dtype=kv_cache_dtype)",
           "BaseSettings(dtype)"),
    _mutant("audit trusts the cache", "store/base_model", "mode, _Cache(None), require",
           "mode, _Cache(Path(model).parent / CACHE_NAME), require"),
    _mutant("text of any stop", "verify/text", "(not rest.strip(UNDECODED) or finish_reason == STOP_STRING)", "True"),
    _mutant("tokenizer unchecked by the command", "cli/audit", "if verified.header.tokenizer != own:", "if not own:"),
    _mutant("tokenizer of fewer files", "store/tokenizer_files", '"merges.txt", "special_tokens_map.json"',
           '"merges.txt"'),
    _mutant("refused receipts exit 0", "cli/audit", "return 1 if refused or", "return 0 if refused or"),
    _mutant("sampled revision ignored", _P, "sampled[offset + at] = adapters.get", "cached[offset + at] = adapters.get",
           equivalent="the step that samples a token computes the KV of the position it samples from: both name one"),
    _mutant("prompt digest unchecked by the command", "cli/prompts", "prompt_digest(prompt) == header.prompt", "True",
           equivalent="the auditor compares the digest again"),
)  # fmt: skip

SERIES = (
    _mutant("sums of a response unchecked", _F, "is not None:\n        threat, said = series.lie\n        faults",
           "is ...:\n        threat, said = series.lie\n        faults"),
    _mutant("sums together unchecked", _F, "is not None:\n        threat, said = series.lie\n        raise",
           "is ...:\n        threat, said = series.lie\n        raise"),
    _mutant("sums of the last receipt only", _F, "series = series.plus(each.series)", "series = each.series"),
    _mutant("answer counted as often as given", _F, "{_text_of(each.receipt): each for each in replays}.values()",
           "replays"),
    _mutant("any sum is chance", _S, "if score <= LIMIT:", "if True:"),
    _mutant("chance counted once of three sums", _S, "math.log(3 / FALSE_REFUSALS)", "math.log(1 / FALSE_REFUSALS)"),
    _mutant("no temperature is another", _S, "-follows - allowed, follows", "-abs(follows) - allowed, follows"),
    _mutant("roundings may do twice as much", _S, "ROUGHNESS = 0.05", "ROUGHNESS = 1.0"),
    _mutant("unrounded pass rounds", _P, 'replace(self.model, rounding="float32")', "self.model"),
    _mutant("stated tolerance is not the caller's", _P, 'if tolerance or settings.dtype == "float32"',
           'if settings.dtype == "float32"'),
    _mutant("contrast of a faulty row", _C, "result.error is None or result.fault is not None", "result.error is None"),
    _mutant("heat that has the roundings in it", _C, "plain, heat = _share_and_heat", "plain, _ = _share_and_heat"),
    _mutant("heat of the whole row", _C, "weights_V[token] = float(weights_V[token]), 0.0",
           "weights_V[token] = float(weights_V[token]), float(weights_V[token])"),
)  # fmt: skip

ROOMS = (
    Room(
        "replay",
        (
            "tests/reference/test_rows.py",
            "tests/reference/test_processors.py",
            "tests/verify/test_mixture.py",
            "tests/verify/test_replay.py",
            "tests/verify/test_text.py",
            "tests/store/test_base_model.py",
            "tests/cli/test_audit.py",
        ),
        MUTANTS,
        preload=("numpy", "rich.console", "rich.progress"),
    ),
    Room(
        "series",
        (
            "tests/reference/test_contrasts.py",
            "tests/verify/test_replay_series.py",
            "tests/verify/test_series.py",
        ),
        SERIES,
        preload=("numpy",),
    ),
)
