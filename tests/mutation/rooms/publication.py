"""Publication: its rules, the events and their chain, journal, coordinator."""

# ruff: noqa: E501 - one mutant a line reads as the table it is
from __future__ import annotations

from functools import partial

from tests.mutation.mutants import Mutant, Room

_P = partial(Mutant, "protocol/publication")
_H = partial(Mutant, "protocol/history")
_E = partial(Mutant, "protocol/events")
_N = partial(Mutant, "protocol/resolution")
_T = partial(Mutant, "protocol/names")
_J = partial(Mutant, "publication/journal")
_R = partial(Mutant, "publication/rows")
_C = partial(Mutant, "publication/coordinator")
_L = partial(Mutant, "publication/retirement")

RULES = (
    _P("epoch may skip", "event.epoch == state.epoch + 1", "event.epoch > state.epoch"),
    _P("epoch may stay", "event.epoch == state.epoch + 1", "event.epoch in (state.epoch, state.epoch + 1)"),
    _P("abort of anything", '_require(event.transaction_id in state.intents, f"transaction {event.transaction_id} is not undecided")\n        return', "return"),
    _P("abort keeps the intent", "return replace(state, intents=_without(state.intents, event.transaction_id))", "return state"),
    _P("quarantine of what is not held", '_require(event.revision_id in state.adapters, f"{event.revision_id} is not in the engine")\n    return', "return"),
    _P("transactions may skip", "intent.transaction_id == state.last_transaction_id + 1", "intent.transaction_id > state.last_transaction_id"),
    _P("engine id of one's own", "held = state.adapters.get(intent.revision_id)\n    pending", "held = None\n    pending"),
    _P("undecided ids not shared", "(pending[0] if pending else None)", "None"),
    _P("any engine id", '    _require(intent.lora_int_id == expected, f"engine id', '    _require(True, f"engine id'),
    _P("engine ids beyond 32 bits", "_require(expected <= MAX_LORA_INT_ID,", "_require(True,"),
    _P("engine ids end one early", "expected <= MAX_LORA_INT_ID", "expected < MAX_LORA_INT_ID"),
    _P("engine ids used again", "max(state.last_lora_int_id, intent.lora_int_id)", "max(state.adapters.values(), default=0)"),
    _P("step taken by other content", "taken is None or taken.revision_id == intent.revision_id", "True"),
    _P("step checked at intent only", '    _check_step(state, intent)\n    key = ', "    key = "),
    _P("sequences may skip", "event.sequence == state.sequence + 1", "event.sequence > state.sequence"),
    _P("published while it drains", "holding is None or not holding.draining", "True"),
    _P("held under two ids", "held in (None, intent.lora_int_id)", "True", equivalent="the intent's id was checked, and a held id cannot end while an intent counts on it"),
    _P("commit keeps the intent", "        intents=_without(state.intents, event.transaction_id),\n        publications", "        publications"),
    _P("binding begins anew", "Holding(holding.first if holding else event.sequence, event.sequence)", "Holding(event.sequence, event.sequence)"),
    _P("head stays", "        heads=_with(state.heads, intent.policy, publication),\n", ""),
    _P("quarantine outlives a publication", "        quarantine=_without(state.quarantine, intent.revision_id),\n", ""),
    _P("draining retired again", "status in (Status.LIVE, Status.QUARANTINED)", "status in (Status.LIVE, Status.QUARANTINED, Status.DRAINING)"),
    _P("quarantined cannot retire", "status in (Status.LIVE, Status.QUARANTINED)", "status is Status.LIVE"),
    _P("retired without draining", "holding is not None and holding.draining", "holding is not None"),
    _P("adapter goes with its first binding", "    if any(revision_id == event.revision_id for _, revision_id in holdings):\n        return state\n", ""),
    _P("retired while it is prepared", "_require(not undecided,", "_require(True,"),
    _P("quarantine outlives the adapter", "        quarantine=_without(state.quarantine, event.revision_id),\n", ""),
    _P("head of a retired binding", "    if state.heads[event.policy].revision_id != event.revision_id:\n        return state.heads\n", "    return state.heads\n"),
    _P("oldest binding becomes the head", "last = max((holding.last", "last = min((holding.last"),
    _P("head of any policy", "if policy == event.policy), default", "if True), default"),
    _P("draining counts as live", "        if holding.draining:\n            return Status.DRAINING\n", ""),
    _P("retired publication lives again with its content", "holding is not None and holding.first <= publication.sequence", "holding is not None"),
    _H("earliest for the latest", "for sequence in reversed(sequences):", "for sequence in sequences:"),
    _H("a state sees the future", "            if sequence <= self._length:\n                yield", "            if True:\n                yield"),
    _H("two futures share one past", "if following and following[0] != publication:", "if False:"),
    _H("the past is copied short", "self._shared.log[: self._length]:", "self._shared.log[: self._length - 1]:"),
    _H("policy known before it was", "line is not None and line.first <= self._length", "line is not None"),
    _H("highest step of the future", "            if sequence <= self._length:\n                return step", "            return step"),
    _H("prefix of ids that follow", 'prefix + "~", lo=begin', '"~", lo=begin'),
)  # fmt: skip

EVENTS = (
    _E("negative counts", "type(value) is int and 0 <= value <= MAX_INTEGER", "type(value) is int and value <= MAX_INTEGER"),
    _E("true for a count", "type(value) is int and 0", "isinstance(value, int) and 0"),
    _E("counts beyond exact", "0 <= value <= MAX_INTEGER", "0 <= value"),
    _E("text of any length", "type(value) is str and len(value) <= MAX_TEXT", "type(value) is str"),
    _E("any digest", "return bool(parse_digest(value))", "return bool(value)"),
    _E("unknown fields", "if value.keys() != checks.keys():", "if not value.keys() >= checks.keys():"),
    _E("second spelling", "    if not canonical:\n", "    if False:\n"),
    _E("object of any type", "    if not isinstance(value, dict):\n", "    if value is None:\n"),
    _E("unchecked when written", "    _check_fields(kind, vars(recorded))\n", ""),
    _E("chain without the row before", "    hasher.update(previous)\n", ""),
    _E("chain without the place", 'hasher.update(seq.to_bytes(8, "big") + epoch', "hasher.update(epoch"),
    _E("chain without the epoch", ' + epoch.to_bytes(8, "big"))', ")"),
    _E("chain without lengths", '        hasher.update(len(part).to_bytes(8, "big"))\n        hasher.update(part)', "        hasher.update(part)"),
    _E("chain without evidence", "payload, evidence or b\"\"):", "payload):"),
    _E("chain of another purpose", "hashlib.sha256(CHAIN_CONTEXT)", "hashlib.sha256()"),
    _E("names of kinds changed", '"retire_began": (RetireBegan', '"retire_begun": (RetireBegan'),
)  # fmt: skip

RESOLUTION = (
    _N("pin before policy", "if state.publications.knows(model):", "if parse_pin(model) is None and state.publications.knows(model):"),
    _N("pin unconstrained", "if publication is not None and constraint is not None:", "if False:"),
    _N("anything serves", "        _check_serving(state, publication, model)\n    return", "        pass\n    return"),
    _N("pin of a policy nobody knows", "if pin is None or not state.publications.knows(pin.policy):", "if pin is None:"),
    _N("exact version of the head only", "found = state.publication_at(policy, constraint.exact_version)", "found = head if head.step == constraint.exact_version else None"),
    _N("an older step may come", "retryable=constraint.exact_version > head.step", "retryable=True"),
    _N("tombstones make ambiguous", "if (pin.policy, revision_id) in state.holdings] or named", "] or named"),
    _N("first of an ambiguous prefix", "    if len(candidates) > 1:\n", "    if False:\n"),
    _N("exact version ignored for a pin", "if exact is not None and publication.step != exact:", "if False:"),
    _N("least version met one late", "publication.step < least:", "publication.step <= least:"),
    _N("waiting for a pin", "retryable=not pinned)", "retryable=True)"),
    _N("draining serves", "if status in (Status.RETIRED, Status.DRAINING):", "if status is Status.RETIRED:"),
    _N("retired publication serves with its content", "if state.is_held(publication) else Status.RETIRED", "if True else Status.RETIRED"),
    _N("quarantined serves", "    if status is Status.QUARANTINED:\n", "    if False:\n"),
    _N("lost bytes are 503", "        if rank == STORE_RANK:\n", "        if False:\n"),
    _N("two constraints at once", "len(value) != 1 or", "len(value) < 1 or"),
    _T("pins of a few digits", 'if len(match["hex"]) < MIN_PREFIX:', "if False:"),
    _T("dotted paths", 'if any(part in ("", ".", "..") for part in text.split("/")):', "if False:"),
    _T("name that begins well", "not _POLICY.fullmatch(text)", "not _POLICY.match(text)"),
    _T("true for a step", "type(value) is not int or not 0 <= value <= MAX_STEP", "not isinstance(value, int) or not 0 <= value <= MAX_STEP"),
    _T("short name inside the engine", 'if match is None or len(match["hex"]) != 64:', "if match is None:"),
    _T("steps with leading zeros", '_STEPPED = re.compile(r"(?P<policy>[^@]+)@(?P<step>0|[1-9][0-9]{0,15})")', '_STEPPED = re.compile(r"(?P<policy>[^@]+)@(?P<step>[0-9]{1,16})")'),
)  # fmt: skip

JOURNAL = (
    _J("epoch not checked", "            self._check_epoch(epoch)\n", ""),
    _J("stale state under a write", '            self._connection.execute("BEGIN IMMEDIATE")\n            self._replay = self._replay.read_new(self._connection, self.path)\n', '            self._connection.execute("BEGIN IMMEDIATE")\n'),
    _J("no abort of the undecided", "return [EpochBegan(state.epoch + 1), *aborts]", "return [EpochBegan(state.epoch + 1)]"),
    _J("half an append stays", "            if not ready:\n                self._roll_back()", "            if not ready and self._connection.in_transaction:\n                self._commit(self._connection)"),
    _J("state ahead of its commit", "        try:\n            self._commit(self._connection)", "        self._replay = after\n        try:\n            self._commit(self._connection)"),
    _J("receipts of every event", "kept = receipts if isinstance(event, Committed) else None", "kept = receipts"),
    _J("receipts outlive their revision", "            if isinstance(event, Retired) and event.revision_id not in after.state.adapters:", "            if False:"),
    _J("receipts go with the first binding", "isinstance(event, Retired) and event.revision_id not in after.state.adapters", "isinstance(event, Retired)"),
    _J("receipts unchecked", "if not isinstance(body, bytes) or hashlib.sha256(body).digest() != evidence:", "if False:"),
    _J("tip not moved", '        self._connection.execute("UPDATE tip SET seq = ?, chain = ?", (after.seq, after.chain))\n', ""),
    _J("undecided forgotten", "        self._undecided = str(error)\n", ""),
    _J("reader appends", "        if self._read_only:\n", "        if False:\n"),
    _J("lost commit counts as done", "        if found == (after.chain,):", "        if True:"),
    _J("done commit counts as lost", "        if found == (after.chain,):", "        if False:"),
    _J("outcome taken for final", "        if not final:\n", "        if False:\n"),
    _J("failed fsync taken for a failed write", 'return name in ("SQLITE_FULL", "SQLITE_IOERR_WRITE") or "full" in str(error)', "return True"),
    _J("view never reads again", "            if version != self._version:", "            if self._version == -1:"),
    _J("view always reads", "            if version != self._version:", "            if True:"),
    _J("view writes", '        self._connection.execute("PRAGMA query_only = ON")\n', ""),
    _J("log never emptied", "            self._checkpointer.request()\n", "            pass\n"),
    _R("chain unchecked", "        if chain != row.chain:\n", "        if False:\n"),
    _R("gap unchecked", "        if row.seq != self.seq + 1:\n", "        if False:\n"),
    _R("tip unchecked", "if tips != [(replay.seq, replay.chain)]:", "if False:"),
    _R("chain of the tip unchecked", "if tips != [(replay.seq, replay.chain)]:", "if [tip[0] for tip in tips] != [replay.seq]:"),
    _R("epoch of a row unchecked", "        if state.epoch != row.epoch:\n", "        if False:\n"),
    _R("rules not applied again", "            state = apply(self.state, decode_event(row.kind, row.payload))", "            state = apply(self.state, decode_event(row.kind, row.payload)) if row.kind == 'epoch_began' else self.state"),
    _R("any type in a column", "if not (type(row.epoch) is int and type(row.kind) is str and type(row.payload) is bytes):", "if False:"),
    _R("readable by all", "os.O_EXCL, 0o600)", "os.O_EXCL, 0o644)"),
    _R("other databases read", "    if application != APPLICATION_ID:\n", "    if False:\n"),
    _R("later formats read", "    if version != FORMAT:\n", "    if False:\n"),
    _R("empty file read", "    if size == 0:\n", "    if size < 0:\n"),
    _R("row of zero evidence", "evidence = None if receipts is None else hashlib.sha256(receipts).digest()", "evidence = None"),
    _R("commits not synced", "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL"),
    _R("SQLite copies the log by itself", "PRAGMA wal_autocheckpoint = 0", "PRAGMA wal_autocheckpoint = 1"),
)  # fmt: skip

COORDINATOR = (
    _L("removed while a request holds it", "            if in_flight.get(lora_int_id) != 0:\n                return False\n", ""),
    _L("not counted is not held", "in_flight.get(lora_int_id) != 0", "in_flight.get(lora_int_id, 0) != 0"),
    _L("another policy's hold is forgotten", "        if _is_last(state, key):\n", "        if True:\n"),
    _C("publications wait for the count", "        state = self._journal.refresh()\n        in_flight = self._retirement.count_holders(state)\n", "        with self._take_turn():\n            state = self._journal.refresh()\n            in_flight = self._retirement.count_holders(state)\n"),
    _C("unheard aborts are left", "if not (self._unheard or state.intents or", "if not (state.intents or"),
    _C("revision not in the store", "            if not self._store.has(revision_id):", "            if False:"),
    _C("publication made twice", "            if earlier is not None:\n                return Published(earlier, self._journal.receipts(earlier.sequence), repeated=True)\n", ""),
    _C("registry overfull", "            if len(state.adapters) >= self._capacity:", "            if False:"),
    _C("quarantined revision not loaded anew", '            order["reload"] = True\n', "            pass\n"),
    _C("loaded anew under running requests", "if draining or in_flight != 0:", "if draining:"),
    _C("no abort after a refusal", "        except BaseException as error:\n            self._abort(intent, str(error))\n", "        except BaseException:\n"),
    _C("no abort after a full disk", "        except EpochlessError as error:\n            self._abort(intent, error.message)\n            raise\n        crash_point", "        except EpochlessError:\n            raise\n        crash_point"),
    _C("abort of what may be committed", "            raise  # it may be committed", "            self._abort(intent, \"\")\n            raise  # it may be committed"),
    _C("commit before the ranks are ready", "            receipts = self._rounds.prepare(order)\n", "            receipts = {}\n"),
    _C("receipts not kept", "append(committed, *surplus, receipts=receipts)", "append(committed, *surplus)"),
    _C("surplus stays", "append(committed, *surplus, receipts=receipts)", "append(committed, receipts=receipts)"),
    _C("ranks not told of the commit", '        failures = self._rounds.tell(self._message("commit", intent))', "        failures: list[Failure] = []"),
    _C("silence at commit forgiven", "        if failures:\n            raise self._quarantine", "        if False:\n            raise self._quarantine"),
    _C("ranks not told of the abort", '        crash_point("abort")\n        self._tell_abort(intent)', '        crash_point("abort")'),
    _C("abort not recorded", "            self._journal.append(Aborted(intent.transaction_id, _clip(reason)))", "            pass"),
    _C("missed abort not repeated", "            self._unheard.append(message)\n", "            pass\n"),
    _C("head retired before its elders", "                check_retirable(state, policy, revision_id)\n", ""),
    _C("draining begun twice", "if not state.holdings[key].draining]\n            if live:", "]\n            if live:"),
)  # fmt: skip

ROOMS = (
    Room("publication rules", ("tests/protocol/test_publication.py",), RULES),
    Room("events", ("tests/protocol/test_events.py",), EVENTS),
    Room("resolution", ("tests/protocol/test_resolution.py", "tests/protocol/test_names.py"), RESOLUTION),
    Room(
        "journal",
        (
            "tests/publication/test_journal.py",
            "tests/publication/test_journal_damage.py",
            "tests/publication/test_journal_disk.py",
        ),
        JOURNAL,
    ),
    Room("coordinator", ("tests/publication/test_coordinator.py", "tests/publication/test_retirement.py"), COORDINATOR, preload=("numpy", "safetensors")),
)
