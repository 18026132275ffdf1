"""Mutants in order: a true receipt, one change, and the code it is refused with.

Each stands in up to three variants. ``stale``: the change alone, by someone who cannot hash. ``rehashed``: every
digest recomputed, the old signature kept, by someone without the key. ``resigned``: signed again, by a server that
lies; what it lies about is then caught by a relation inside the receipt, or by something the client knows.
"""

# ruff: noqa: E501 - one mutant a line reads as the table it is
from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from tests.protocol.receipt_factory import NUCLEUS, SAMPLED, named_digest
from tests.verify.bases import base_receipt, known, tokens_of, verbose_of
from tests.verify.forge import Doc, canonical, edited, rehash, resign
from tests.verify.philox_oracle import draw, key_of

ONE = 1 << 32
VARIANTS = ("stale", "rehashed", "resigned")


@dataclass(frozen=True)
class Mutant:
    """``codes`` maps a variant to the code it is refused with.

    ``known`` is what a client needs to know, besides key and nonce, to catch the signer itself.
    """

    name: str
    threat: str
    base: str
    edit: Callable[[Doc], object]
    codes: dict[str, str]
    known: dict[str, Any] = field(default_factory=dict)
    count: bool = True  # whether rehashing also recomputes the totals

    def expectations(self, variant: str) -> dict[str, Any]:
        return {**known(), **(self.known if variant == "resigned" else {})}

    def payload(self, variant: str) -> bytes:
        doc = edited(verbose_of(self.base), self.edit)
        if variant == "rehashed":
            doc = rehash(doc, count=self.count)
        elif variant == "resigned":
            doc = resign(doc, count=self.count)
        return canonical(doc)


def always(code: str) -> dict[str, str]:
    """The change is refused for what it says, whoever hashed and signed."""
    return dict.fromkeys(VARIANTS, code)


def bound(code: str, *, stale: str = "root_mismatch") -> dict[str, str]:
    """The change is consistent: digests catch it, then the signature, then what the client knows."""
    return {"stale": stale, "rehashed": "signature", "resigned": code}


def in_final(code: str) -> dict[str, str]:
    """The change is in the final record, which the statement repeats."""
    return {"stale": "statement_mismatch", "rehashed": code, "resigned": code}


def row(doc: Doc, position: int) -> tuple[Doc, int]:
    return doc["blocks"][position // 64], position % 64


def set_row(doc: Doc, position: int, **values: int) -> None:
    block, place = row(doc, position)
    for name, value in values.items():
        block[name][place] = value


def move_up(doc: Doc) -> None:
    """Take the last row of the first block, and place the blocks behind it one position earlier."""
    first, *others = doc["blocks"]
    first.update(runs=[[63, 0, 0, 0]])
    for column in ("tokens", "low", "width"):
        first[column].pop()
    for block in others:
        block["first"] -= 1


def swap_tokens(doc: Doc, one: int, other: int) -> None:
    first, i = row(doc, one)
    second, j = row(doc, other)
    first["tokens"][i], second["tokens"][j] = second["tokens"][j], first["tokens"][i]


def lengthen(doc: Doc, by: int) -> None:
    """Make totals outside the blocks agree with ``by`` more rows in the last block."""
    doc["header"]["max_tokens"] += by
    doc["final"]["sampling"][-1][1] += by
    doc["final"]["kv"][-1][1] += by
    doc["blocks"][-1]["runs"][-1][0] += by


def insert_token(doc: Doc) -> None:
    block = doc["blocks"][-1]
    block["tokens"].append(77)
    block["low"].append(0)
    block["width"].append(ONE)
    lengthen(doc, 1)


def delete_token(doc: Doc) -> None:
    block = doc["blocks"][-1]
    for name in ("tokens", "low", "width"):
        block[name].pop()
    lengthen(doc, -1)


def drop_last_block(doc: Doc) -> None:
    dropped = len(doc["blocks"].pop()["tokens"])
    doc["blocks"][-1]["runs"][-1][0] += dropped  # undone by lengthen
    lengthen(doc, -dropped)


def misdraw(start: int, **fault: Any) -> Callable[[Doc], None]:
    """Rows from ``start`` on take wrong draws, each the only one its interval allows."""

    def edit(doc: Doc) -> None:
        shift, choice = fault.get("shift", 0), fault.get("choice_index")
        options = {name: value for name, value in fault.items() if name in ("rounds", "purpose", "mirror")}
        key = key_of(doc["header"], doc["final"]["seed"], choice_index=choice)
        for position in range(start, doc["final"]["tokens"]):
            set_row(doc, position, low=draw(key, position + shift, **options), width=1)

    return edit


def swap_blocks(doc: Doc, one: int, other: int) -> None:
    doc["blocks"][one], doc["blocks"][other] = doc["blocks"][other], doc["blocks"][one]


def set_at(path: str, value: Any) -> Callable[[Doc], None]:
    """Set the value at a dotted path; digits index arrays."""

    def edit(doc: Doc) -> None:
        target: Any = doc
        *ahead, last = (int(part) if part.lstrip("-").isdigit() else part for part in path.split("."))
        for part in ahead:
            target = target[part]
        target[last] = value

    return edit


def add_entry(doc: Doc, *, use: bool) -> None:
    doc["header"]["revisions"].append({"policy": "math", "revision": named_digest("another"), "step": 8})
    if use:
        doc["header"]["revisions"][1]["revision"] = doc["header"]["revisions"][0]["revision"]


def true_logprobs(name: str) -> list[Decimal]:
    whole = Decimal(ONE).ln()
    return [Decimal(most + 1).ln() - whole for block in base_receipt(name).blocks for most in block.width_less_one]


def _response(name: str) -> dict[str, Any]:
    return {"token_ids": tokens_of(name)}


REVISION = base_receipt("sampled").header.revisions[0].revision
OTHER = named_digest("another revision")
A_WIDTH = base_receipt("sampled").blocks[0].width_less_one[5] + 1

MUTANTS: tuple[Mutant, ...] = (
    # Tokens
    Mutant("token swapped", "T01", "sampled", set_at("blocks.0.tokens.5", 77), bound("token_swapped"), _response("sampled")),
    Mutant("token beyond the vocabulary", "T02", "sampled", set_at("blocks.1.tokens.0", 151_936), always("token_out_of_vocabulary")),
    Mutant("token negative", "T02", "sampled", set_at("blocks.1.tokens.0", -1), {"stale": "token_out_of_vocabulary"}),
    Mutant("adjacent tokens transposed", "T03", "sampled", lambda d: swap_tokens(d, 8, 9), bound("tokens_transposed"), _response("sampled")),
    Mutant("tokens transposed across blocks", "T03", "sampled", lambda d: swap_tokens(d, 63, 64), bound("token_swapped"), _response("sampled")),
    Mutant("token inserted", "T04", "sampled", insert_token, bound("token_inserted", stale="statement_mismatch"), _response("sampled")),
    Mutant("token deleted", "T05", "sampled", delete_token, bound("token_deleted", stale="statement_mismatch"), _response("sampled")),
    # Probabilities
    Mutant("width edited", "T06", "sampled", lambda d: set_row(d, 5, low=0, width=ONE), bound("logprob_mismatch"), {"logprobs": true_logprobs("sampled")}),
    Mutant("kept mass edited", "T06", "nucleus", set_at("blocks.0.kept.3", ONE), {"stale": "root_mismatch", "rehashed": "signature"}),
    Mutant("total edited in the sampler", "T07", "sampled", set_at("header.samplers.0.beta", 1 << 30), always("sampler_form")),
    Mutant("width and total scaled", "T08", "sampled", lambda d: d["blocks"][0].update(total=ONE // 2), always("unknown_field")),
    Mutant("interval beyond the whole", "T09", "sampled", lambda d: set_row(d, 5, low=ONE - 1, width=2), always("interval_bounds")),
    Mutant("low negative", "T09", "sampled", set_at("blocks.0.low.5", -1), {"stale": "interval_bounds"}),
    Mutant("draw not below width", "T09", "sampled", misdraw(149, shift=999), always("draw_outside_interval")),
    Mutant("width zero", "T10", "sampled", set_at("blocks.0.width.5", 0), always("probability_zero")),
    Mutant("width above one", "T11", "sampled", set_at("blocks.0.width.5", ONE + 1), always("probability_above_one")),
    Mutant("total of zero", "T12", "sampled", set_at("blocks.0.total", 0), always("unknown_field")),
    # Revisions
    Mutant("revision swapped", "T14", "sampled", set_at("header.revisions.0.revision", OTHER), bound("revision_mismatch", stale="header_mismatch"), {"revisions": [REVISION]}),
    Mutant("step edited", "T14", "sampled", set_at("header.revisions.0.step", 6), {"stale": "header_mismatch", "rehashed": "signature"}),
    Mutant("revision of another base model", "T14", "sampled", set_at("header.revisions.0", {"policy": None, "revision": "base:" + OTHER, "step": None}), always("table_entry")),
    Mutant("revision index out of the table", "T15", "sampled", set_at("blocks.0.runs.0.1", 1), always("revision_index")),
    Mutant("sampler index out of the table", "T15", "sampled", set_at("blocks.0.runs.0.2", 1), always("sampler_index")),
    Mutant("kv revision out of the table", "T15", "sampled", set_at("final.kv.0.2", 1), in_final("revision_index")),
    Mutant("unused table entry", "T16", "sampled", lambda d: add_entry(d, use=False), {"stale": "header_mismatch", "rehashed": "table_unused", "resigned": "table_unused"}),
    Mutant("duplicate table entry", "T16", "sampled", lambda d: add_entry(d, use=True), always("table_duplicate")),
    Mutant("added entry repeats the first", "T16", "continued", set_at("blocks.1.revisions.0.revision", REVISION), always("table_duplicate")),
    Mutant("added entries differ", "T16", "continued", set_at("final.added.0.1.step", 5), in_final("table_entry")),
    # Spans
    Mutant("kv gap", "T17", "continued", set_at("final.kv.1.0", 77), in_final("kv_gap")),
    Mutant("kv overlap", "T18", "continued", set_at("final.kv.1.0", 75), in_final("kv_overlap")),
    Mutant("kv span empty", "T19", "continued", lambda d: d["final"]["kv"].insert(1, [76, 76, 2]), in_final("kv_empty")),
    Mutant("kv span reversed", "T19", "continued", set_at("final.kv.1.1", 70), in_final("kv_empty")),
    Mutant("kv spans not merged", "T20", "sampled", set_at("final.kv", [[0, 9, 0], [9, 156, 0]]), in_final("kv_not_merged")),
    Mutant("kv ends early", "T21", "sampled", set_at("final.kv.0.1", 155), in_final("kv_total")),
    Mutant("kv ends late", "T21", "sampled", set_at("final.kv.0.1", 157), in_final("kv_total")),
    Mutant("kv newer than its revision", "T22", "continued", set_at("final.kv", [[0, 70, 0], [70, 136, 1], [136, 206, 2]]), in_final("kv_not_active")),
    Mutant("kv of a pinned request by another", "T22", "continued", set_at("header.on_publish", "pin"), {"stale": "header_mismatch", "rehashed": "revision_moved", "resigned": "revision_moved"}),
    Mutant("recomputed kv not of the last revision", "T22", "recomputed", set_at("final.kv", [[0, 76, 0], [76, 206, 2]]), in_final("kv_not_active")),
    Mutant("recompute passed off as continue", "T24", "recomputed", set_at("header.on_publish", "continue"), {"stale": "header_mismatch", "rehashed": "kv_not_active", "resigned": "kv_not_active"}),
    Mutant("rebuilt kv of a revision that had stopped", "T24", "continued", lambda d: d["final"].update(kv_rebuilds=1, kv=[[0, 206, 1]]), in_final("kv_not_active")),
    Mutant("sampling spans moved", "T14", "continued", set_at("final.sampling", [[0, 71, 0, 0], [71, 130, 1, 0], [130, 200, 2, 0]]), in_final("sampling_mismatch")),
    Mutant("sampling gap", "T17", "continued", set_at("final.sampling.1.0", 71), in_final("sampling_gap")),
    Mutant("sampling overlap", "T18", "continued", set_at("final.sampling.1.0", 69), in_final("sampling_overlap")),
    Mutant("sampling spans not merged", "T20", "sampled", set_at("final.sampling", [[0, 9, 0, 0], [9, 150, 0, 0]]), in_final("sampling_not_merged")),
    Mutant("run empty", "T19", "sampled", lambda d: d["blocks"][0]["runs"].insert(0, [0, 0, 0, 2]), always("span_empty")),
    Mutant("runs not merged", "T20", "sampled", set_at("blocks.0.runs", [[30, 0, 0, 0], [34, 0, 0, 0]]), always("span_not_merged")),
    Mutant("runs shorter than the block", "T21", "sampled", set_at("blocks.0.runs", [[63, 0, 0, 0]]), always("span_total")),
    # Sampler and finish
    Mutant("sampler swapped", "T25", "nucleus", set_at("header.samplers.0.top_k", 50), bound("sampler_mismatch", stale="header_mismatch"), {"sampler": NUCLEUS}),
    Mutant("filter hidden", "T25", "nucleus", set_at("header.samplers.0", SAMPLED.describe()), always("filter_flag")),
    Mutant("greedy claimed for a sampled row", "T26", "greedy", lambda d: set_row(d, 70, width=ONE - 1), always("greedy_width")),
    Mutant("forced claimed for a sampled row", "T26", "sampled", set_at("blocks.0.runs.0.3", 4), always("greedy_width")),
    Mutant("greedy with draws", "T26", "greedy", set_at("header.draws.kind", "unseeded"), always("draw_kind")),
    Mutant("sampler contradicts itself", "T27", "nucleus", set_at("header.samplers.0.temperature", "1/1"), always("sampler_form")),
    Mutant("length claimed for a stop", "T28", "stopped", set_at("final.finish_reason", "length"), in_final("finish_reason")),
    Mutant("stop claimed for a length", "T28", "sampled", set_at("final.finish_reason", "stop"), in_final("finish_reason")),
    Mutant("abort claimed for a length", "T28", "sampled", set_at("final.finish_reason", "abort"), bound("finish_mismatch", stale="statement_mismatch"), {"finish_reason": "length"}),
    Mutant("tokens after a stop token", "T28", "stopped", set_at("blocks.0.tokens.63", 2), always("token_after_stop")),
    Mutant("tokens after a stop token inside a block", "T28", "stopped", set_at("blocks.1.tokens.3", 2), always("token_after_stop")),
    Mutant("more tokens than allowed", "T28", "sampled", set_at("header.max_tokens", 149), {"stale": "header_mismatch", "rehashed": "finish_reason", "resigned": "finish_reason"}),
    # Draws
    Mutant("draw reused", "T29", "sampled", misdraw(100, shift=-1), always("draw_reused")),
    Mutant("draw skipped", "T30", "sampled", misdraw(100, shift=1), always("draw_skipped")),
    Mutant("draws of another choice", "T32", "sampled", misdraw(0, choice_index=3), always("draw_key")),
    Mutant("draw outside its interval", "T33", "sampled", misdraw(100, shift=777), always("draw_outside_interval")),
    Mutant("words of a block reversed", "T34", "sampled", misdraw(0, mirror=True), always("draw_word_order")),
    Mutant("seven rounds", "T35", "sampled", misdraw(0, rounds=7), always("draw_rounds")),
    Mutant("seed changed", "T36", "sampled", set_at("final.seed", "00" * 32), {"stale": "statement_mismatch", "rehashed": "draw_outside_interval", "resigned": "draw_outside_interval"}),
    Mutant("seed of another kind", "T36", "sampled", set_at("final.seed", "1234"), in_final("seed_kind")),
    Mutant("seed withheld", "T36", "sampled", set_at("final.seed", None), in_final("seed_kind")),
    Mutant("commitment to another seed", "T36", "sampled", set_at("header.draws.commitment", OTHER), always("seed_commitment")),
    Mutant("seed not the request's", "T36", "seeded", lambda d: None, {"resigned": "seed_mismatch"}, {"seed": 99}),
    Mutant("draws of the draft stream", "T38", "sampled", misdraw(0, purpose=1), always("draw_purpose")),
    # Structure
    Mutant("last block dropped and signed anew", "T40", "sampled", drop_last_block, bound("token_deleted", stale="statement_mismatch"), _response("sampled")),
    Mutant("last block dropped", "T40", "two_blocks", lambda d: d["blocks"].pop(), {"stale": "count_mismatch"}),
    Mutant("blocks reordered", "T41", "two_blocks", lambda d: swap_blocks(d, 0, 1), always("block_order")),
    Mutant("block repeated", "T42", "two_blocks", lambda d: d["blocks"].append(d["blocks"][1]), always("block_repeated")),
    Mutant("block spliced from another request", "T43", "greedy", set_at("blocks.0.tokens", tokens_of("sampled")[:64]), {"stale": "root_mismatch", "rehashed": "signature"}),
    Mutant("tokens miscounted", "T44", "sampled", set_at("final.tokens", 149), {"stale": "statement_mismatch", "rehashed": "count_mismatch", "resigned": "count_mismatch"}, count=False),
    Mutant("blocks miscounted", "T44", "sampled", set_at("final.blocks", 4), {"stale": "statement_mismatch", "rehashed": "count_mismatch", "resigned": "count_mismatch"}, count=False),
    Mutant("first token of a block misplaced", "T44", "sampled", set_at("blocks.1.first", 65), always("block_order")),
    Mutant("short block inside", "T44", "sampled", lambda d: (d["blocks"][0].update(runs=[[63, 0, 0, 0]]), [d["blocks"][0][n].pop() for n in ("tokens", "low", "width")]), always("block_order")),
    Mutant("short block inside, the others moved up", "T44", "sampled", move_up, always("block_order")),
    Mutant("nonce of another request", "T47", "sampled", set_at("header.nonce", "nonce-of-another-one"), always("nonce_mismatch")),
    Mutant("nonce removed", "T47", "sampled", set_at("header.nonce", None), always("nonce_mismatch")),
    Mutant("header of another request", "T48", "sampled", set_at("header.request_id", "cmpl-other"), always("draw_outside_interval")),
    Mutant("header of another greedy request", "T48", "greedy", set_at("header.request_id", "cmpl-other"), bound("request_id_mismatch", stale="header_mismatch"), {"request_id": "cmpl-3f1a"}),
    Mutant("prompt swapped", "T49", "sampled", set_at("header.prompt.digest", OTHER), bound("prompt_mismatch", stale="header_mismatch"), {"prompt_token_ids": [1, 2, 3, 5, 8, 13, 21]}),
    Mutant("tree size changed under one root", "T54", "two_blocks", set_at("final.blocks", 3), {"stale": "statement_mismatch", "rehashed": "count_mismatch"}, count=False),
    Mutant("statement extended", "T55", "sampled", lambda d: d["envelope"].update(payload=base64.b64encode(base64.b64decode(d["envelope"]["payload"]) + b" ").decode()), {"stale": "statement_mismatch"}),
    Mutant("boundary between two fields shifted", "T56", "sampled", lambda d: d["header"].update(request_id="cmpl-3f1an", nonce="once-of-the-client-0001"), {"stale": "nonce_mismatch", "rehashed": "nonce_mismatch", "resigned": "nonce_mismatch"}),
    Mutant("sha1 digest", "T57", "sampled", set_at("header.base", "sha1:" + "ab" * 20), always("digest_form")),
    Mutant("digest of 31 bytes", "T57", "sampled", set_at("header.base", "sha256:" + "ab" * 31), always("digest_form")),
    Mutant("digest of 33 bytes", "T57", "sampled", set_at("header.base", "sha256:" + "ab" * 33), always("digest_form")),
    Mutant("digest in capitals", "T57", "sampled", set_at("header.base", "sha256:" + "AB" * 32), always("digest_form")),
    Mutant("digest prefix in capitals", "T57", "sampled", set_at("header.base", "SHA256:" + "ab" * 32), always("digest_form")),
    Mutant("root in capitals", "T57", "sampled", lambda d: d["final"].update(root=d["final"]["root"].upper()), {"stale": "digest_form"}),
    Mutant("digest of nothing", "T58", "sampled", set_at("header.base", "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"), always("digest_placeholder")),
    Mutant("digest of zeros", "T58", "sampled", set_at("header.base", "sha256:" + "0" * 64), always("digest_placeholder")),
    Mutant("more entries than a table holds", "T59", "sampled", lambda d: d["header"].update(revisions=d["header"]["revisions"] * 5000), always("limit_exceeded")),
    Mutant("sum beyond 64 bits", "T61", "sampled", set_at("blocks.0.low.5", (1 << 53) - 1), {"stale": "interval_bounds"}),
    Mutant("prompt length near 2**53", "T61", "sampled", set_at("header.prompt.length", (1 << 53) - 1), always("limit_exceeded")),
    # Envelope
    Mutant("another payload type", "S1", "sampled", set_at("envelope.payloadType", "application/json"), {"stale": "payload_type"}),
    Mutant("statement of another receipt", "S3", "sampled", lambda d: d["envelope"].update(edited(verbose_of("seeded"), lambda e: None)["envelope"]), {"stale": "statement_mismatch"}),
    Mutant("two signatures", "S7", "sampled", lambda d: d["envelope"].update(signatures=d["envelope"]["signatures"] * 2), {"stale": "signature_count"}),
    Mutant("no signature", "S7", "sampled", set_at("envelope.signatures", []), {"stale": "signature_count"}),
    Mutant("key id of another key", "S4", "sampled", set_at("envelope.signatures.0.keyid", OTHER), {"stale": "key_mismatch"}),
)  # fmt: skip
