"""The seams in vLLM that decide which weights a request meets: block keys, the gate and the fence, draw keys."""

# ruff: noqa: E501 - one mutant a line reads as the table it is
from __future__ import annotations

from functools import partial

from tests.mutation.mutants import Mutant, Room

_B = partial(Mutant, "plugin/block_keys")
_E = partial(Mutant, "plugin/early_loads")
_G = partial(Mutant, "plugin/core")
_H = partial(Mutant, "plugin/channel")
_R = partial(Mutant, "plugin/ranks")
_N = partial(Mutant, "plugin/registry")
_D = partial(Mutant, "plugin/draw_keys")
_C = partial(Mutant, "plugin/control")
_V = partial(Mutant, "plugin/activation")
_A = partial(Mutant, "plugin/admission")
_P = partial(Mutant, "plugin/spinning")
_L = partial(Mutant, "plugin/labels")

BLOCK_KEYS = (
    Mutant("protocol/blocks", "no tag", "return (TAG, base_digest", 'return ("", base_digest'),
    Mutant("protocol/blocks", "no base", "return (TAG, base_digest, revision_id", 'return (TAG, "", revision_id'),
    Mutant("protocol/blocks", "every revision is the base", 'revision_id or "")', '"")'),
    _B("base of the engine before", "    _keys_of.cache_clear()\n", ""),
    _B("policy for the revision", "revision_id = split_lora_name(lora_name)[1]", "revision_id = split_lora_name(lora_name)[0]"),
    _B("unmanaged adapter as the base", '        return [("epochless-unmanaged", _base_digest, lora_name)]', "        return [block_extra_key(_base_digest, None)]"),
    _B("no key for the base", "        return [block_extra_key(_base_digest, None)]\n    try", "        return []\n    try"),
    _B("adapter ignored", "lora_request.lora_name if lora_request is not None else None", "None"),
    _B("base requests hashed without keys", "    kv_cache_utils.need_extra_keys = lambda request: True\n", ""),
    _B("engine's own keys stay", "    kv_cache_utils._gen_lora_extra_hash_keys = extra_hash_keys\n", ""),
    _B("other engines' keys taken", "return stock(request) if _base_digest is None else generate", "return generate"),
)  # fmt: skip

GATE = (
    _G("any revision under a served id", "if self._open.get(lora_int_id) == revision_id:", "if lora_int_id in self._open:"),
    _G("closed is unknown", "        if lora_int_id in self._closed:\n", "        if False:\n"),
    _G("late request enters", "            self._require_open(lora_request)\n            self._entering", "            self._entering"),
    _G("nobody on the way counts", "            self._entering[lora_request.lora_int_id] += 1\n", "            pass\n"),
    _G("who arrived is still on the way", "            self._entering[lora_int_id] -= 1\n", "            pass\n"),
    _G("what left is let in again", "(lora_int_id not in self._closed or _latest(state, revision_id) > self._closed[lora_int_id])", "True"),
    _G("any id of a committed revision", "state.adapters.get(revision_id) == lora_int_id", "revision_id in state.adapters"),
    _G("what was published again stays out", " or _latest(state, revision_id) > self._closed[lora_int_id])", ")"),
    _G("quarantine is let in", " and revision_id not in state.quarantine", ""),
    _G("journal read at each request", "            self._open[lora_int_id] = revision_id\n", ""),
    _G("closed while someone is on the way", "holders = scheduled + self._entering[lora_int_id]", "holders = scheduled"),
    _G("closed while someone runs", "holders = scheduled + self._entering[lora_int_id]", "holders = self._entering[lora_int_id]"),
    _G("closed under its holders", "            if holders == 0:\n", "            if True:\n"),
    _G("removed is not told", "                self._closed[lora_int_id] = self._committed().sequence\n            return", "                pass\n            return"),
    _G("base requests hold it", "r.lora_request is not None and r.lora_request.lora_int_id == lora_int_id)", "r.lora_request is None or r.lora_request.lora_int_id == lora_int_id)"),
    _G("every adapter's requests hold it", "r.lora_request is not None and r.lora_request.lora_int_id == lora_int_id)", "r.lora_request is not None)"),
    _G("ranks told although it is in use", "        if holders:\n", "        if False:\n"),
    _G("removed without closing", "gate.close(message[\"lora_int_id\"], count_scheduled(self, message[\"lora_int_id\"]))", "count_scheduled(self, message[\"lora_int_id\"])"),
    _G("not read back when it comes again", "        forget_verified(self, message[\"lora_int_id\"])\n", ""),
    _G("holders on the way forgotten", "[gate.entering(lora_int_id) + count_scheduled(self, lora_int_id) for", "[count_scheduled(self, lora_int_id) for"),
    _G("failed request stays on the way", "            gate.leave(request.lora_request.lora_int_id)\n            raise", "            raise"),
    _G("refused request stays on the way", "            if gate is not None and request.lora_request is not None:\n                gate.leave", "            if False:\n                gate.leave"),
    _G("adapters enter by hand", "if options_of(self.vllm_config.additional_config) is None:\n                return original", "if True:\n                return original"),
    _V("verified without a look", "        if fresh:\n            _activate", "        if False:\n            _activate"),
    _V("memory given up is trusted", "        getattr(core, DISTRUSTED).update(verified)\n", ""),
    _V("read back at every step", "            getattr(core, VERIFIED).add(lora_int_id)\n", "            pass\n"),
    _C("any call to the workers", "    if isinstance(method, str) and method in READING:", "    if True:"),
    _C("sleep that loses the base", "    if level >= DISCARDS_WEIGHTS:", "    if level > DISCARDS_WEIGHTS:"),
    _C("engines without Epochless checked", "        if options_of(self.vllm_config.additional_config) is not None:\n            check_worker_call(method)", "        if True:\n            check_worker_call(method)"),
)  # fmt: skip

CHANNELS = (
    _H("any user", "    if user != os.geteuid():", "    if False:"),
    _H("address to guess", "secrets.token_hex(16)", "0"),
    _H("late reply is kept", "                self._connections[rank].close()\n            return replies", "                pass\n            return replies"),
    _H("frame of any length", "    if length > MAX_FRAME:", "    if False:"),
    _H("message of any kind", "    if not isinstance(message, dict):", "    if False:"),
    _R("slots touched beside a step", 'message["kind"] in BESIDE_STEPS and not message.get("reload")', 'message["kind"] in BESIDE_STEPS'),
    _R("aborts beside a step", '"prepare_poll", "commit"})', '"prepare_poll", "commit", "abort"})'),
    _R("ended channel is not replaced", "            self._channel.close()\n            self._channel = None\n", "            self._channel.close()\n"),
    _N("registry changes at once", "        self._coming[adapter.lora_int_id] = adapter\n", "        self._manager._registered_adapters[adapter.lora_int_id] = adapter.lora\n"),
    _N("not pinned", "            registry.pin(lora_int_id)\n", ""),
    _N("more than fits", "        if len(self._held) >= self._manager.capacity:", "        if False:"),
    _N("removed and still coming", "        self._coming.pop(lora_int_id, None)\n", ""),
)  # fmt: skip

DRAW_KEYS = (
    _D("client's seed ignored", "seed = draw_request_seed() if params.seed is None else params.seed", "seed = draw_request_seed()"),
    _D("one seed for all", "return secrets.token_hex(REQUEST_SEED_BYTES)", 'return "ab" * REQUEST_SEED_BYTES'),
    _D("engine's own generator stays", "    params.seed = None\n", ""),
    _D("cached kind of sampling stays", '    params.__dict__.pop("sampling_type", None)', "    pass"),
    _D("front end overruled", "set_material(params, **{**defaults, **material})", "set_material(params, **{**material, **defaults})"),
    _D("written through", "params.extra_args = {**(params.extra_args or {}), KEY: {**material_of(params), **fields}}", "params.extra_args = params.extra_args or {}\n    params.extra_args.setdefault(KEY, {}).update(fields)"),
    _D("other arguments lost", "{**(params.extra_args or {}), KEY: {**material", "{KEY: {**material"),
    _D("request id of the engine", "request.external_req_id or request.request_id)", "request.request_id)"),
    _D("missing field has a default", "        if name not in material:\n", "        if False:\n"),
    _D("choice outside the key", '"choice_index": material["choice"]}', '"choice_index": 0}'),
    _D("prompt outside the key", '"prompt_index": material["prompt"]', '"prompt_index": 0'),
    _D("nonce outside the key", 'client_nonce=material["nonce"].encode("ascii")', 'client_nonce=b""'),
    _D("request outside the key", 'external_request_id=material["request"]', 'external_request_id=""'),
    _D("streaming input drawn twice", "    if request.resumable:\n", "    if False:\n"),
    _D("sampler outside the recipe", "    sampler_of(request.sampling_params)\n", ""),
    _D("unknown field", "    if name not in FIELDS:\n", "    if False:\n"),
    _D("true for a seed", "named = type(value) is int and", "named = isinstance(value, int) and"),
    _D("seed of any size", "<= value <= MAX_SEED", "<= value"),
    _D("short seed", "_HEX_SEED.fullmatch(value)", "isinstance(value, str)"),
    _D("negative index", "if type(value) is not int or value < 0:", "if type(value) is not int:"),
    _D("nonce in any script", 'or (name == "nonce" and not value.isascii())', ""),
    _D("choices share their index", "        set_material(child, choice=index)\n", "        set_material(child)\n"),
    _D("choices of their own choices", "        child.n = 1\n", ""),
    _D("engine without Epochless changed", "        if not material_of(self.sampling_params):  # an engine", "        if False:  # an engine"),
)  # fmt: skip

ADMISSION = (
    _A("constraint ignored", 'return served.service.resolve(model, field_of(request, "weight_version"))', "return served.service.resolve(model, None)"),
    _A("checked without its model", "    resolve_request(served, serving, request)\n\n\ndef check_options", "\n\ndef check_options"),
    _A("checked without its options", "    attest_level(served, serving, request, check_options(request))\n    resolve", "    resolve"),
    _A("unrequired base for the tokenizer only", 'if type(serving).__name__ == "ServingTokenization":', "if False:"),
    _A("base where a revision is required", 'if type(serving).__name__ == "ServingTokenization":', "if True:"),
    _A("modality of any model", "(not model or model in served.service.base_names)", "True"),
    _A("modality ignored", "        if len(matched) == 1:", "        if False:"),
    _A("refused and sent on", "        if served is None:\n            return await original(self, request)\n        try:", "        if True:\n            return await original(self, request)\n        try:"),
    _A("refusal of a pooling class dropped", "            if answers:\n", "            if True:\n"),
    _A("refusal raised where it is answered", "            if answers:\n", "            if False:\n"),
    _A("binding of the engine", "        if served is None:\n            return original(self, request, supports_default_mm_loras)\n        return admit", "        if True:\n            return original(self, request, supports_default_mm_loras)\n        return admit"),
    _A("bound and forgotten", "    _admissions.set(request, admission)\n", ""),
    _A("bound to another's options", "Admission(publication, lora_request, served, options, restartable", "Admission(publication, lora_request, served, None, restartable"),
    _A("bound to the base", "    lora_request = None if publication is None else served.service.lora_request(publication)", "    lora_request = None"),
    _A("late arrivals unwatched", "    late_arrivals.current_admission.set(admission)\n", ""),
    _A("never admitted again", "restartable=late_arrivals.may_restart())", "restartable=False)"),
    _A("attested unasked", '    asked = None if options is None else options.attest\n', '    asked = "receipt" if options is None else options.attest\n'),
    _A("server's level ignored", "    level = asked or served.service.options.attest\n", '    level = asked or "none"\n'),
    _A("attested beside stock's mixed rows", ' or served.service.options.mixed_rows == "stock"', ""),
    _A("receipt in an answer without a place", '    if route in SINK_ONLY and asked == "receipt":', "    if False:"),
    _A("any route attests", "    if route not in ID_SUFFIXES and route not in SINK_ONLY:", "    if False:"),
    _A("beams attested", '    if getattr(request, "use_beam_search", False):', "    if False:"),
    _A("echo attested", '    if getattr(request, "echo", False) and getattr(request, "max_tokens", None) == 0:', "    if False:"),
    _A("prompts named alike", "    admission.id_suffix = ID_SUFFIXES.get(route, SINK_ONLY.get(route, \"\"))\n", ""),
    _A("attested and never made", '    if level != "none":\n', "    if False:\n"),
    _A("summary for a receipt", "            level=level,\n", '            level="summary",\n'),
    _A("streams taken for whole answers", 'streamed=bool(getattr(request, "stream", False))', "streamed=False"),
    _A("receipt of the base", "            lora_int_id=0 if publication is None else publication.lora_int_id,\n", "            lora_int_id=0,\n"),
    _A("another revision in the receipt", "entry=revision_entry(publication, served.service.base_digest)", "entry=revision_entry(None, served.service.base_digest)"),
)  # fmt: skip

_LOADED = ("numpy", "torch", "vllm.sampling_params", "vllm.v1.core.kv_cache_utils", "vllm.v1.engine.core")

EARLY_LOADS = (
    _E("any revision taken", "assembled is not None and assembled.stored.manifest.revision_id == revision_id", "assembled is not None"),
    _E("the first alone looked at", "                        return assembled\n        return None", "                        return assembled\n            return None"),
    _E("taken twice", "                    if load in self._loads:\n                        self._forget(load)\n                        return assembled", "                    return assembled"),
    _E("what is being written waited for", "if not load.ended.is_set() and not self._is_staged(load.staged):", "if not load.ended.is_set():"),
    _E("what is written not waited for", "                load.ended.wait(WAIT_S)\n", "                pass\n"),
    _E("waited for as long as it takes", "load.ended.wait(WAIT_S)", "load.ended.wait()"),
    _E("no thread, and its place taken", "            load.ended.set()\n            self.give_up(load)\n            raise", "            raise"),
    _E("the oldest first", "sorted(loads, key=lambda load: not load.ended.is_set())", "loads"),
    _E("any number at a time", "if len(self._loads) == MAX_LOADS:", "if False:"),
    _E("no room made", "                if not ended:\n                    return\n                self._forget(ended[0])", "                return"),
    _E("the newest makes room", "self._forget(ended[0])", "self._forget(ended[-1])"),
    _E("kept until it is asked for", "load.taken.wait(KEEP_S)", "load.taken.wait()"),
    _E("not kept", "        load.taken.wait(KEEP_S)\n", ""),
    _E("a failure takes its place for a while", "            if load.assembled is None:\n                self.give_up(load)\n", ""),
    _E("kept for ever", "    if (alive := loads()) is not None:\n        alive.give_up(load)\n", ""),
    _E("the worker kept as well", "        del alive\n", ""),
    _E("a failure is never over", "        finally:\n            load.ended.set()\n", "        finally:\n"),
    _E("every fault is a refusal", "except EpochlessError as error:\n            logger.debug(\"an adapter was not loaded early: %s\", error.message)", "except Exception as error:\n            logger.debug(\"an adapter was not loaded early: %s\", error)"),
    _E("on cores that serve", "step_aside(idle=self._is_idle())", "step_aside(idle=True)"),
    _E("never on cores that serve", "step_aside(idle=self._is_idle())", "step_aside(idle=False)"),
)  # fmt: skip

SPINNING = (
    _P("spins beside a publication", "if not is_working() and began", "if began"),
    _P("spins on a shared core", "setattr(self, _APART_UNTIL, ended + APART_S)", "pass"),
    _P("never spins again", "ended + APART_S", "1e18"),
    _P("every turn is a long one", "> SHARED_S and", "> 0 and"),
    _P("no core is shared", "> SHARED_S and", "> 60 and"),
    _P("every long wait is a shared core", "if spins and (ended", "if (ended"),
    _P("the interpreter taken for the core", "and _turns() > turns", ""),
    _P("waits for the interpreter are turns", "ru_nivcsw", "ru_nvcsw"),
    _P("waits as long as it is told", "_original(self, LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS))", "_original(self, timeout_ms)"),
    _P("waits for longer than it is told", "LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS)", "LOOK_MS"),
    _P("does not wait", "self.busy_loop_s = -1.0", "self.busy_loop_s = spins_s"),
    _P("never spins afterwards", "        self.busy_loop_s = spins_s\n", "        pass\n"),
    _P("wrapped twice", "if condition.wait is not wait:", "if True:"),
    _P("missing target unnoticed", 'condition is None or not hasattr(condition, "wait")', "False"),
)  # fmt: skip

FINITE = (
    Mutant("plugin/finite", "infinity alone", 'np.isfinite(np.frombuffer(raw, dtype="<f4"))', '~np.isinf(np.frombuffer(raw, dtype="<f4"))'),
    Mutant("plugin/finite", "bfloat16 read as float16", '"BF16": np.uint16(0x7F80)', '"BF16": np.uint16(0x7C00)'),
    Mutant("plugin/finite", "float16 read as bfloat16", '"F16": np.uint16(0x7C00)', '"F16": np.uint16(0x7F80)'),
    Mutant("plugin/finite", "negative ones missed", "(np.frombuffer(raw, dtype=\"<u2\") & _EXPONENT[dtype]) != _EXPONENT[dtype]", "np.frombuffer(raw, dtype=\"<u2\") < _EXPONENT[dtype]"),
    Mutant("plugin/service", "not given to the store", ", find_non_finite=find_non_finite)", ")"),
    Mutant("plugin/finite", "never found", "None if finite.all() else int(finite.argmin())", "None"),
    Mutant("plugin/finite", "the first for the first bad", "int(finite.argmin())", "int(finite.argmax())"),
)  # fmt: skip

LOADER = (
    Mutant("plugin/loading", "every adapter checked", "if wanted != last:", "if True:"),
    Mutant("plugin/loading", "the first adapter checked", "if wanted != last:", "if last is None:"),
    Mutant("plugin/loading", "other shapes taken for the last", "tuple((entry.name, entry.shape) for entry in tensors)", "tuple(entry.name for entry in tensors)"),
    Mutant("plugin/loading", "other names taken for the last", "tuple((entry.name, entry.shape) for entry in tensors)", "tuple(entry.shape for entry in tensors)"),
)  # fmt: skip

LABELS = (
    _L("base named by nothing", 'return Label(f"base:{admission.served.service.base_digest}", None)', 'return Label("base:", None)'),
    _L("revision without its step", "return Label(publication.revision_id, publication.step)\n", "return Label(publication.revision_id, None)\n"),
    _L("what was bound, whatever ran", "    if lora_int_id == (0 if publication is None else publication.lora_int_id):", "    if True:"),
    _L("rows of the base unknown", "    if lora_int_id == 0:\n", "    if False:\n"),
    _L("step of any policy", "service.publication_of(lora_int_id, None if publication is None else publication.policy)", "service.publication_of(lora_int_id, None)"),
    _L("unknown adapter as what was bound", "    if found is None:\n        raise TokenRowsError(", "    if found is None:\n        return label_of(admission)\n        raise TokenRowsError("),
    _L("missing rows unnoticed", "    if (0 if rows is None else len(rows)) != count:", "    if rows is None:"),
    _L("first row for all", "    if count == 1 or (adapters == adapters[0]).all():", "    if True:"),
    _L("changes one late", "np.flatnonzero(np.diff(adapters)) + 1)", "np.flatnonzero(np.diff(adapters)))"),
    _L("each run its predecessor's", "label_of_row(admission, int(adapters[start])), end - start)", "label_of_row(admission, int(adapters[start - 1])), end - start)"),
    _L("requests of others labelled", "    admission = admission_of(request)\n    if admission is None:\n        return\n", "    admission = admission_of(request)\n    assert admission is not None\n"),
    _L("opening chunk unnamed", "        choice.weight_version = label_of(admission).version\n        return\n    if _is_echo", "        return\n    if _is_echo"),
    _L("echoed token labelled", "    if _is_echo_only(request):\n", "    if False:\n"),
    _L("beams by their rows", '    elif getattr(request, "use_beam_search", False):', "    elif False:"),
    _L("chunks begin anew", "        spans = admission.progress.setdefault((request_output.request_id, output.index), spans)\n", "        pass\n"),
    _L("choices counted together", "(request_output.request_id, output.index), spans)", "(request_output.request_id, 0), spans)"),
    _L("prompts counted together", "(request_output.request_id, output.index), spans)", '("", output.index), spans)'),
    _L("unsent tokens uncounted", "    extend_spans(spans, runs)\n    if choice is None:\n        return\n", "    if choice is None:\n        return\n    extend_spans(spans, runs)\n"),
    _L("first span for the last", 'spans[-1]["version"] if spans', 'spans[0]["version"] if spans'),
    _L("spans in every chunk", "    if not streamed or output.finish_reason is not None:\n", "    if True:\n"),
    _L("no spans in a stream", "    if not streamed or output.finish_reason is not None:\n", "    if not streamed:\n"),
    _L("no receipt beside the label", "    if admission.receipts is not None:\n", "    if False:\n"),
    _L("empty runs are spans", "        if count == 0:\n            continue\n", ""),
    _L("equal neighbours apart", '            last["end"] += count\n            continue\n', "            pass\n"),
    _L("neighbours of another step together", '(last["version"], last["step"]) == label:', 'last["version"] == label.version:'),
    _L("spans begin at nothing", 'start = last["end"] if last is not None else 0', "start = 0"),
    _L("wrapped at every installation", '    if getattr(original, "_epochless", False):\n        return\n', ""),
    _L("the patch's hook stays", "    GenerateBaseServing.annotate_choice = annotate_choice\n", ""),
    _L("pooling names the base", "            context.model_name = context.lora_request.lora_name\n", "            pass\n"),
    _L("scores name the base", '"model": ctx.lora_request.lora_name}', '}'),
    _L("a Responses body unlabelled", "        response.weight_version = label_of(admission).version\n    return response", "        pass\n    return response"),
    _L("tokens uncounted", '            metrics.count_tokens("base" if', '            (lambda *_: None)("base" if'),
)  # fmt: skip

ROOMS = (
    Room("labels", ("tests/plugin/test_labels.py", "tests/plugin/test_response_receipts.py"), LABELS, preload=_LOADED),
    Room("adapters like the last", ("tests/plugin/test_loading.py",), LOADER, preload=_LOADED),
    Room("finite values in NumPy", ("tests/plugin/test_finite.py",), FINITE, preload=_LOADED),
    Room("waiting readers", ("tests/plugin/test_spinning.py",), SPINNING, preload=_LOADED),
    Room("early loads", ("tests/plugin/test_early_loads.py",), EARLY_LOADS, preload=_LOADED),
    Room("block keys", ("tests/plugin/test_block_keys.py",), BLOCK_KEYS, preload=_LOADED),
    Room("retire fence", ("tests/plugin/test_gate.py", "tests/plugin/test_control.py"), GATE, preload=_LOADED),
    Room(
        "channels and registry",
        ("tests/plugin/test_channel.py", "tests/plugin/test_ranks.py", "tests/plugin/test_registry.py"),
        CHANNELS,
        preload=_LOADED,
    ),
    Room("draw keys of requests", ("tests/plugin/test_draw_keys.py",), DRAW_KEYS, preload=_LOADED),
    Room("admission", ("tests/plugin/test_admission.py", "tests/plugin/test_response_receipts.py", "tests/plugin/test_metrics.py"), ADMISSION, preload=_LOADED),
)
