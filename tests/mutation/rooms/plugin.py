"""The seams in vLLM that decide which weights a request meets: block keys, admission, the gate, draw keys, labels."""

from __future__ import annotations

from functools import partial

from tests.mutation.mutants import Mutant, Room

_B = partial(Mutant, "plugin/block_keys")
_G = partial(Mutant, "plugin/core")
_D = partial(Mutant, "plugin/draw_keys")
_A = partial(Mutant, "plugin/admission")
_S = partial(Mutant, "plugin/service")
_T = partial(Mutant, "plugin/late_arrivals")
_L = partial(Mutant, "plugin/labels")
_R = partial(Mutant, "plugin/ranks")
_C = partial(Mutant, "plugin/control")
_V = partial(Mutant, "plugin/activation")

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
    _G("any revision under a served id", "if self._open.get(lora_int_id) == split_lora_name(lora_request.lora_name)[1]:", "if lora_int_id in self._open:"),
    _G("closed is unknown", "        if lora_int_id in self._closed:", "        if False:"),
    _G("late request enters", "            self._require_open(lora_request)\n            self._entering", "            self._entering"),
    _G("nobody on the way counts", "            self._entering[lora_request.lora_int_id] += 1\n", "            pass\n"),
    _G("who arrived is still on the way", "            self._entering[lora_int_id] -= 1\n", "            pass\n"),
    _G("what left is unknown", "            self._closed |= set(self._open) - set(held)\n", ""),
    _G("closed while someone is on the way", "holders = scheduled + self._entering[lora_int_id]", "holders = scheduled"),
    _G("closed while someone runs", "holders = scheduled + self._entering[lora_int_id]", "holders = self._entering[lora_int_id]"),
    _G("closed under its holders", "            if holders == 0 and self._open.pop(", "            if self._open.pop("),
    _G("removed is not told", "                self._closed.add(lora_int_id)\n            return", "                pass\n            return", only=frozenset({"test_the_gate_closes_before_the_ranks_are_told"})),
    _G("base requests hold it", "r.lora_request is not None and r.lora_request.lora_int_id == lora_int_id)", "r.lora_request is None or r.lora_request.lora_int_id == lora_int_id)"),
    _G("every adapter's requests hold it", "r.lora_request is not None and r.lora_request.lora_int_id == lora_int_id)", "r.lora_request is not None)"),
    _G("ranks told although it is in use", "        if holders:\n", "        if False:\n"),
    _G("removed without closing", "gate.close(message[\"lora_int_id\"], count_scheduled(self, message[\"lora_int_id\"]))", "count_scheduled(self, message[\"lora_int_id\"])"),
    _G("not read back when it comes again", "        forget_verified(self, message[\"lora_int_id\"])\n", ""),
    _G("gate stays after an abort", 'if message["kind"] in ("abort", "retire") or', 'if message["kind"] == "retire" or'),
    _G("gate opens with the first rank", "or all(reply.get(\"done\") for reply in replies)", "or True"),
    _G("one rank holds for all", "if all(other.get(i) == r for other in held)}", "}"),
    _G("same id is enough", "all(other.get(i) == r for other in held)", "all(i in other for other in held)"),
    _G("holders on the way forgotten", "return entering + count_scheduled(self, lora_int_id)", "return count_scheduled(self, lora_int_id)"),
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
    _A("check asks nothing", "    attest_level(served, serving, request, check_options(request))\n    resolve_request(served, serving, request)", "    return None"),
    _A("constraint ignored", 'served.service.resolve(model, field_of(request, "weight_version"))', "served.service.resolve(model)"),
    _A("base for a request that needs a revision", '        if type(serving).__name__ == "ServingTokenization":', "        if True:"),
    _A("tokenizer needs a revision", '        if type(serving).__name__ == "ServingTokenization":', "        if False:"),
    _A("bound to the base", "lora_request = None if publication is None else served.service.lora_request(publication)", "lora_request = None"),
    _A("admission forgotten", "    _admissions.set(request, admission)\n", ""),
    _A("pooling's refusal dropped", "_wrap_check(PoolingBaseServing._check_model, answers=False)", "_wrap_check(PoolingBaseServing._check_model, answers=True)"),
    _A("check left to vLLM", "    BaseServing._check_model = _wrap_check(BaseServing._check_model, answers=True)\n", ""),
    _A("binding left to vLLM", "        return admit(served, self, request)", "        return original(self, request, supports_default_mm_loras)"),
    _A("options unread", "        options = check_options(request)\n", "        options = None\n"),
    _A("several modalities take one", "        if len(matched) == 1:", "        if matched:"),
    _S("answer of an earlier state", "            self._resolved.clear()\n", "            pass\n"),
    _S("constraint answered from memory", "        if weight_version is None and model is not None:", "        if model is not None:"),
    _S("constrained answer remembered", "        if weight_version is None:\n            self._resolved[model] = publication", "        if True:\n            self._resolved[model] = publication"),
    _S("unknown names are the base", "        if publication is None:\n            raise UnknownRevisionError(\n                f\"The model", "        if publication is None:\n            return None\n            raise UnknownRevisionError(\n                f\"The model"),
    _S("base has versions", "        if weight_version is not None:\n            raise InvalidRequestError(", "        if False:\n            raise InvalidRequestError("),
    _S("base served although a revision is required", "        if self.options.require_revision:", "        if False:"),
    _S("same name for two revisions", 'key = f"{publication.lora_int_id}:{publication.lora_name}"', 'key = publication.policy'),
    _T("late arrival passed on", "                if is_refused(output) and not _is_live(admission):", "                if False:"),
    _T("every error is a late arrival", "                if is_refused(output) and not _is_live(admission):", "                if is_refused(output):"),
    _T("admitted again and again", "    return restarts_left.get() > 0", "    return True"),
    _T("never admitted again", "    return restarts_left.get() > 0", "    return False"),
    _T("streams of others watched", "if admission is None or lora_request is None or admission.lora_request is not lora_request:", "if admission is None or lora_request is None:"),
)  # fmt: skip

LABELS = (
    _L("label of the binding, not of the row", "    if lora_int_id == (0 if publication is None else publication.lora_int_id):", "    if True:"),
    _L("base row of an adapter's request", '    if lora_int_id == 0:\n        return Label(f"base:{service.base_digest}", None)\n', "    if lora_int_id == 0:\n        return label_of(admission)\n"),
    _L("step of any policy", "service.publication_of(lora_int_id, None if publication is None else publication.policy)", "service.publication_of(lora_int_id, None)"),
    _L("unknown adapter is the base", "    if found is None:\n        raise TokenRowsError(", "    if found is None:\n        return label_of(admission)\n        raise TokenRowsError("),
    _L("tokens without rows", "    if (0 if rows is None else len(rows)) != count:", "    if rows is None and count:\n        return [(label_of(admission), count)]\n    if False:"),
    _L("first row for all", "    if count == 1 or (adapters == adapters[0]).all():", "    if True:"),
    _L("runs begin one early", "(np.flatnonzero(np.diff(adapters)) + 1)", "(np.flatnonzero(np.diff(adapters)) + 0)"),
    _L("tokens of chunks not sent forgotten", "    streamed = choice is None or type(choice)", "    streamed = type(choice)"),
    _L("choices counted together", "(request_output.request_id, output.index), spans)", "(request_output.request_id, 0), spans)"),
    _L("prompts counted together", "(request_output.request_id, output.index), spans)", '("", output.index), spans)'),
    _L("first span for the last", 'choice.weight_version = spans[-1]["version"]', 'choice.weight_version = spans[0]["version"]'),
    _L("spans in every chunk", "    if not streamed or output.finish_reason is not None:", "    if True:"),
    _L("spans not merged", '        if last is not None and (last["version"], last["step"]) == label:', "        if False:"),
    _L("spans merged by revision alone", '(last["version"], last["step"]) == label', 'last["version"] == label.version'),
    _L("spans begin at nothing", 'start = last["end"] if last is not None else 0', "start = 0"),
    _L("echo labelled", "    if _is_echo_only(request):\n", "    if False:\n"),
    _R("dead engine is nobody's failure", "                if isinstance(result, BaseException):", "                if False and isinstance(result, BaseException):"),
    _R("one engine's ranks for all", "for engine in self._engines for rank in range(self._size))", "for engine in self._engines[:1] for rank in range(self._size))"),
    _R("silent engine holds nothing", "        return missing + sum(", "        return sum("),
    _R("failed engine holds nothing", "sum(1 if isinstance(a, BaseException) else int(a)", "sum(0 if isinstance(a, BaseException) else int(a)"),
    _R("reply in another's place", '    if reply.get("rank", name) != name:', "    if False:"),
)  # fmt: skip

_LOADED = ("numpy", "torch", "vllm.sampling_params", "vllm.v1.core.kv_cache_utils", "vllm.v1.engine.core")
_FRONT = ("numpy", "torch", "vllm.v1.engine.async_llm", "vllm.entrypoints.openai.api_server")

ROOMS = (
    Room("block keys", ("tests/plugin/test_block_keys.py",), BLOCK_KEYS, preload=_LOADED),
    Room("retire fence", ("tests/plugin/test_gate.py", "tests/plugin/test_control.py"), GATE, preload=_LOADED),
    Room("draw keys of requests", ("tests/plugin/test_draw_keys.py",), DRAW_KEYS, preload=_LOADED),
    Room("admission", ("tests/plugin/test_admission.py",), ADMISSION, preload=_FRONT),
    Room("labels and ranks", ("tests/plugin/test_labels.py", "tests/plugin/test_ranks.py"), LABELS, preload=_FRONT),
)
