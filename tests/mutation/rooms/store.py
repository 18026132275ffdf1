"""The inspector of adapters: safetensors headers, PEFT's configuration, factors, values."""

# ruff: noqa: E501 - one mutant a line reads as the table it is
from __future__ import annotations

from functools import partial

from tests.mutation.mutants import Mutant, Room

_S = partial(Mutant, "store/safetensors")
_A = partial(Mutant, "store/adapters")
_C = partial(Mutant, "store/lora_config")
_F = partial(Mutant, "store/finite")
_B = partial(Mutant, "store/blobs")
_H = partial(Mutant, "store/beside")
_R = partial(Mutant, "store/revisions")
_T = partial(Mutant, "store/staged")
_I = partial(Mutant, "store/incoming")

SAFETENSORS = (
    _S("empty header read", "if not 0 < length <= max_header_bytes:", "if not 0 <= length <= max_header_bytes:"),
    _S("header of any length read", "if not 0 < length <= max_header_bytes:", "if not 0 < length:"),
    _S("header beyond the file", "if file_bytes is not None and length > file_bytes - 8:", "if False:"),
    _S("header's own length forgotten", "length > file_bytes - 8", "length > file_bytes"),
    _S("data length by eight more", "file_bytes - 8 - length", "file_bytes - length"),
    _S("space before the object", 'if not text.startswith("{"):', 'if not text.lstrip().startswith("{"):'),
    _S("text after the object", 'if text[cursor.position :].strip(" "):', "if False:"),
    _S("any space after the object", '.strip(" ")', ".strip()"),
    _S("any number of tensors", "elif len(records) == MAX_TENSORS:", "elif False:"),
    _S("any name", "if not _NAME.fullmatch(name):", "if False:"),
    _S("name that begins well", "if not _NAME.fullmatch(name):", "if not _NAME.match(name):"),
    _S("unknown field skipped", "            refuse(\"unknown_field\", f\"tensor {shown} has the unknown field {key[:80]!a}\")", "            cursor.string()"),
    _S("missing shape is a scalar", "dtype, shape, offsets = None, None, None", "dtype, shape, offsets = None, (), None"),
    _S("more dimensions than eight", "cursor.integers(MAX_DIMENSIONS,", "cursor.integers(MAX_DIMENSIONS + 1,"),
    _S("offsets in reverse", "len(offsets) != 2 or offsets[0] > offsets[1]", "len(offsets) != 2"),
    _S("one offset", "len(offsets) != 2 or offsets", "len(offsets) < 1 or offsets"),
    _S("overflow hidden by a zero", "math.prod(max(size, 1) for size in shape)", "math.prod(shape)"),
    _S("overflow unchecked", "* ITEM_BYTES[dtype] >= LIMIT:", "* ITEM_BYTES[dtype] < 0:"),
    _S("size unchecked", "if size != offsets[1] - offsets[0]:", "if False:"),
    _S("size at most its offsets", "if size != offsets[1] - offsets[0]:", "if size > offsets[1] - offsets[0]:"),
    _S("overlap accepted", "if record.begin < reached:", "if False:"),
    _S("hole accepted", "if record.begin > reached:", "if False:"),
    _S("tiling in the file's order", "key=lambda record: (record.begin, record.end))\n    reached", "key=lambda record: 0)\n    reached"),
    _S("short data accepted", "reached > data_length:", "False:"),
    _S("trailing bytes accepted", "reached < data_length:", "False:"),
    _S("key given twice", "            if key in seen:", "            if False:"),
    _S("lone surrogates accepted", 'any("\\ud800" <= character', 'any("\\udfff" < character'),
    _S("leading zeros", 'or (self._text[start] == "0" and end - start > 1)', ""),
    _S("fractions cut", 'if self._text[end : end + 1] in (".", "e", "E") or', "if"),
    _S("integer of any size", "if end - start > 19 or (value := int(match.group())) >= LIMIT:", "if (value := int(match.group())) < 0:"),
    _S("long integer parsed first", "if end - start > 19 or (value", "if (value"),
    _S("short read taken for a whole one", "    while missing > 0:", "    for _ in range(1):"),
    _S("data not aligned", 'text += b" " * (-len(text) % ALIGNMENT)', "pass"),
    _S("narrow items first", "key=lambda tensor: (-ITEM_BYTES[tensor[1]], tensor[0])", "key=lambda tensor: (ITEM_BYTES[tensor[1]], tensor[0])"),
    _S("order of data by width alone", "(-ITEM_BYTES[tensor[1]], tensor[0])", "-ITEM_BYTES[tensor[1]]"),
    _S("ends forgotten in the order", "key=lambda record: (record.begin, record.end)", "key=lambda record: record.begin"),
    _S("read in pieces of a byte", "min(missing, 1 << 20)", "1"),
)  # fmt: skip

ADAPTERS = (
    _A("integers served", 'DTYPES = ("F32", "F16", "BF16")', 'DTYPES = ("F32", "F16", "BF16", "I8")'),
    _A("any number of dimensions", "if len(shape) != 2 or 0 in shape:", "if len(shape) < 2 or 0 in shape:"),
    _A("empty factor", "if len(shape) != 2 or 0 in shape:", "if len(shape) != 2:"),
    _A("look-alike module", "folded.setdefault(module.casefold(), module) != module or ", ""),
    _A("factor given twice", " or factor in factors.setdefault(module, {})", " or factors.setdefault(module, {}) is None"),
    _A("adapter of nothing", "    if not factors:\n", "    if False:\n"),
    _A("module outside the base", "    if unmatched:\n", "    if False:\n"),
    _A("size of the base unchecked", "if wanted is not None and wanted != (shape.outputs, shape.inputs):", "if False:"),
    _A("outputs and inputs exchanged", "wanted != (shape.outputs, shape.inputs)", "wanted != (shape.inputs, shape.outputs)"),
    _A("coverage unchecked", "    if missing:\n", "    if False:\n"),
    _A("coverage of every layer", "        and (wanted_layers is None or layer_of(name) in wanted_layers)\n", ""),
    _A("coverage despite exclusions", ' or document.get("exclude_modules")', ""),
    _A("coverage under other names", " or not set(adapter.modules) <= set(base)", ""),
    _A("configuration of any length", "if source.config.byte_size > MAX_BYTES:", "if False:", equivalent="the parser refuses what is longer in the same words; the check spares the reading"),
    _A("factor inside a name", "match = _FACTOR.fullmatch(name)", "match = _FACTOR.match(name)"),
    _A("prefix twice", 'if "base_model." in module + ".":', "if False:"),
    _A("embeddings served", "if parts[-1] in _EMBEDDINGS:", "if False:"),
    _A("experts served", 'if "experts" in parts:', "if False:"),
    _A("single factor", "if len(factors) != 2:", 'if len(factors) != 2 and factors.setdefault("A" if "B" in factors else "B", (1, 1)) is None:'),
    _A("ranks differ", "if rank != other_rank:", "if False:"),
    _A("inputs for outputs", "return ModuleShape(rank, inputs, outputs)", "return ModuleShape(rank, outputs, inputs)"),
    _A("document shared", "MappingProxyType(dict(document))", "document"),
    _A("modules unsorted", "for module in sorted(factors)}", "for module in factors}"),
)  # fmt: skip

CONFIG = (
    _C("rsLoRA ignored", "math.sqrt(found.rank) if self.use_rslora else found.rank", "found.rank"),
    _C("rsLoRA of any truth", "if use_rslora is not True and use_rslora is not False:", "if False:"),
    _C("rank unchecked", "if declared != ranks[name]:", "if False:"),
    _C("alpha pattern ignored", "usual_alpha if alpha_key is None else alpha_of[alpha_key]", "usual_alpha"),
    _C("rank pattern ignored", "declared = usual_rank if rank_key is None else rank_of[rank_key]", "declared = usual_rank"),
    _C("targets unchecked", "    check_declared(document, ranks)\n", ""),
    _C("zero scaling", "if scaling == 0 or not math.isfinite(scaling):", "if False:"),
    _C("zero alpha", "or value == 0 or abs(value) > MAX_EXACT:  # type", "or abs(value) > MAX_EXACT:  # type"),
    _C("alpha beyond exact", "value == 0 or abs(value) > MAX_EXACT:  # type", "value == 0:  # type"),
    _C("true for a rank", "if type(value) is not int or not 0 < value <= MAX_RANK:", "if not isinstance(value, int) or not 0 < value <= MAX_RANK:"),
    _C("rank of zero", "not 0 < value <= MAX_RANK", "not 0 <= value <= MAX_RANK"),
    _C("any PEFT type", 'if document.get("peft_type", "LORA") != "LORA":', "if False:"),
    _C("trained biases", 'if document.get("bias", "none") not in ("none", None):', "if False:"),
    _C("initialisation that moved the base", "if initialisation is not None and str(", "if initialisation is None and str("),
    _C("unknown field ignored", "if key not in _IGNORED and value:", "if key in _WHY and value:"),
    _C("DoRA ignored", 'if key not in _IGNORED and value:', 'if key not in (*_IGNORED, "use_dora") and value:'),
    _C("list of targets unchecked", "if selected and not is_selected(module, selected):", "if False:"),
    _C("exclusions unchecked", "if is_selected(module, left_out):", "if False:"),
    _C("layers unchecked", "if layers is not None and layer_of(module) not in layers:", "if False:"),
    _C("ending without its dot", 'any(".".join(parts[begin:]) in names for begin in range(len(parts)))', "any(module.endswith(name) for name in names)"),
    _C("endings alone", "for begin in range(len(parts))", "for begin in range(1, len(parts))"),
    _C("every name looked at", 'any(".".join(parts[begin:]) in names for begin in range(len(parts)))', 'any(module == name or module.endswith("." + name) for name in names)'),
    _C("first index for the layer", "int(indices[-1])", "int(indices[0])"),
    _C("prefix kept", "or self.modules.get(module.removeprefix(PREFIX))", "or self.modules.get(module)"),
    _C("patterns not anchored", 'return "^" + re.escape(name)', "return re.escape(name)"),
    _C("ties to the greatest", "(-counts[value], value)", "(-counts[value], -value)"),
    _C("rarest for the commonest", "(-counts[value], value)", "(counts[value], value)"),
    _C("second spelling of a manifest", "if resolved.manifest_config() != dict(config):", "if False:"),
    _C("manifest names a module without tensors", " or not set(exceptions) <= set(ranks)", ""),
    _C("manifest's rsLoRA of any truth", 'if type(config["use_rslora"]) is not bool:', "if False:"),
    _C("alpha by its digits alone", " or _number_text(value) != text:", ":"),
    _C("alpha rounded", "str(int(value)) if value == int(value) else repr(value)", "str(int(value))"),
)  # fmt: skip

VALUES = (
    _F("infinity unseen", "0x7F800000", "0x7F000000"),
    _F("bfloat16 read as float16", '"BF16": 0x7F80,', '"BF16": 0x7C00,'),
    _F("negative infinity unseen", 'return b"\\x7f" in top or b"\\xff" in top', 'return b"\\x7f" in top'),
    _F("first chunk only", "for begin in range(0, len(raw), CHUNK_BYTES):", "for begin in range(0, min(len(raw), 1), CHUNK_BYTES):"),
    _F("index in its chunk", "return begin // width + index", "return index"),
    _F("last for the first", "(marked & -marked).bit_length()", "marked.bit_length()"),
    _F("every fourth of float16", "(byte & 0x7C) == 0x7C", "(byte & 0x7F) == 0x7C"),
    _B("values unchecked on the way in", "if index is not None:\n        element", "if False:\n        element"),
    _B("bytes after the last tensor", "if read_into(buffers[0][:1]):", "if False:"),
    _B("size of the file unchecked", "if actual_size != size:", "if False:"),
    _B("header of the file unchecked", "if file.read(len(header)) != header:", "if file.read(len(header)) is None:"),
    _B("digest unchecked on the way out", "if actual != expected[name]:", "if False:"),
    _B("digest of the first piece", "hashers[record.name].update(view)", "hashers[record.name] = hashlib.sha256(view)"),
    _B("every piece at the tensor's start", "begins[record.name] + offset)", "begins[record.name])"),
    _B("buffer filled while it is hashed", "helper.wait(CHUNKS - 1)", "helper.wait(CHUNKS)"),
    _B("pieces that cut an element", "room // width * width", "room"),
    _B("short write taken for a whole one", "view, offset = view[count:], offset + count", "view = view[:0]"),
    _B("symbolic link followed", "flags | os.O_NOFOLLOW | os.O_NONBLOCK", "flags | os.O_NONBLOCK"),
    _R("a short write is success", "blobs.write_whole(file, memoryview(payload), 0)", "file.write(payload)"),
    _R("manifest unchecked", "        if actual != revision_id:\n            raise blobs.mismatch(self._directory(revision_id) / MANIFEST_NAME", "        if False:\n            raise blobs.mismatch(self._directory(revision_id) / MANIFEST_NAME"),
    _R("stored configuration unchecked", "        if actual != expected:\n", "        if False:\n"),
    _R("file that changes while it is read", "            check_unchanged()\n            manifest", "            manifest"),
    _R("damaged copy kept", "            if self._is_sound(revision_id):", "            if True:"),
    _R("any size", "if byte_length > self._max_adapter_bytes:", "if False:"),
    _R("full disk", "        if byte_length > free:", "        if False:"),
    _R("kept revision collected", "if revision_id in keep or directory", "if directory"),
    _R("young revision collected", "if revision_id in keep or directory.stat().st_mtime > horizon:", "if revision_id in keep:"),
    _R("coverage unchecked on the way in", "        adapters.check_coverage(adapter, self._base_modules)\n", ""),
)  # fmt: skip

BESIDE = (
    _B("every order taken for the store's", "return [record.name for record in layout] == [record.name for record in records]", "return bool(layout)"),
    _H("what was given is not waited for", "            if kind is None:\n                self.wait()\n", "            pass\n"),
    _H("what was given runs after the block", "            with self._turn:  # nothing runs now, and nothing will\n                self._alone = True\n", ""),
    _H("the action in progress not waited for", "            with self._turn:  # nothing runs now, and nothing will\n                self._alone = True\n", "            self._alone = True\n"),
    _H("a thread without a core waited for at the end", "            self._wakes.put(False)\n", "            self._wakes.put(False)\n            [each.join() for each in threading.enumerate() if each.name == 'epochless-helper']\n"),
    _H("an end of the thread forgotten", "except BaseException as error", "except Exception as error"),
    _H("thread waited for as long as it takes", "acquire(timeout=PATIENCE_S)", "acquire()"),
    _H("thread that stopped goes on", "                if self._alone:\n                    return\n", ""),
    _H("who is alone leaves some", "0 if self._alone else left", "left"),
    _H("nothing done by who waits", "            if not self._turn.acquire(timeout=PATIENCE_S):", "            import time; time.sleep(0.001); continue\n            if not self._turn.acquire(timeout=PATIENCE_S):"),
    _H("last given first", "self._actions.popleft()", "self._actions.pop()"),
    _H("two at a time", "            with self._turn:\n                if self._alone", "            with contextlib.suppress(KeyError):\n                if self._alone"),
    _H("failures forgotten", "            self._failure = error", "            pass"),
    _H("work after a failure", "            if self._failure is None:\n                action()", "            action()"),
    _H("as important as who is helped", "min(19, niceness + NICENESS)", "niceness"),
    _T("read before it is written", "            self._wait_for(end)\n", ""),
    _T("a tensor later than it might", "for group in group_views([(name, self.tensors[name]) for name in records]):", "for group in [[(name, self.tensors[name]) for name in records]]:"),
    _T("every group from the start", "            offset = end\n", ""),
    _T("hash of the size", "hashlib.sha256(view)", "hashlib.sha256(str(len(view)).encode())"),
    _T("a removed file waited for", "if not status.st_nlink or time.monotonic() > end:", "if time.monotonic() > end:"),
    _T("a stopped writer waited for", "if not status.st_nlink or time.monotonic() > end:", "if not status.st_nlink:"),
    _T("patience from the beginning", "                end, seen, pause = time.monotonic() + self._patience_s, status.st_size, LOOK_S", "                seen = status.st_size"),
    _I("any name", "if not _NAME.fullmatch(name):", "if False:"),
    _I("name that begins well", "if not _NAME.fullmatch(name):", "if not _NAME.match(name):"),
    _R("every source announced", "if announce is not None and blobs.is_canonical(adapter.tensors):", "if announce is not None:"),
    _R("no source announced", "if announce is not None and blobs.is_canonical(adapter.tensors):", "if False:"),
    _R("announced when it is written", "            entries = blobs.copy_tensors(read_into, adapter.tensors, target, watcher=watcher)\n", "            entries = blobs.copy_tensors(read_into, adapter.tensors, target, watcher=watcher)\n            announce is None or announce(directory.name)\n"),
)  # fmt: skip

ROOMS = (
    Room(
        "safetensors reader",
        ("tests/store/test_safetensors.py",),
        SAFETENSORS,
        without=(
            "tests/store/test_safetensors.py::test_twenty_thousand_hostile_buffers_give_records_or_an_inspect_error",
            "tests/store/test_safetensors.py::test_what_the_writer_wrote_is_what_the_parser_reads",
        ),
        preload=("numpy", "safetensors"),
    ),
    Room("adapter inspector", ("tests/store/test_adapters.py",), ADAPTERS, preload=("numpy", "safetensors")),
    Room(
        "adapter configuration",
        ("tests/store/test_lora_config.py", "tests/store/test_patterns.py"),
        CONFIG,
        without=(
            "tests/store/test_lora_config.py::test_peft_computes_the_same_scaling_from_the_file_and_from_the_stored_configuration",
        ),
    ),
    Room(
        "stored bytes",
        ("tests/store/test_finite.py", "tests/store/test_revisions.py"),
        VALUES,
        preload=("numpy", "safetensors"),
    ),
    Room(
        "read while written",
        ("tests/store/test_beside.py", "tests/store/test_staged.py"),
        BESIDE,
        preload=("numpy", "safetensors"),
    ),
)
