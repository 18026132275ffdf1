"""Damaged receipts: those of tests/verify, judged by what ever more careful readers check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from epochless_vllm.errors import ReceiptError
from epochless_vllm.protocol.verbose import decode_verbose
from epochless_vllm.verify import verify_receipt
from tests.mutation.data import Checker, DataMutant, DataRoom, Refusal
from tests.verify import campaign, golden
from tests.verify.bases import NAMES, known, verbose_of
from tests.verify.mutants import MUTANTS, VARIANTS, Mutant

FORM, ITSELF, SIGNED, CLIENT = (
    "its form alone",
    "what it says of itself: digests, relations, draws",
    "and the signature, by the server's key",
    "and what the client knows: nonce, response, request",
)


class Datum(NamedTuple):
    """A receipt to be made, and what the client knows."""

    payload: Callable[[], bytes]
    knows: dict[str, Any]


def _refusal_of(check: Callable[..., object], *arguments: Any, **pins: Any) -> Refusal | None:
    try:
        check(*arguments, **pins)
    except ReceiptError as error:
        return Refusal(str(error.fields["threat"]), error.message)
    return None


CHECKERS: dict[str, Checker] = {
    FORM: lambda datum, *_: _refusal_of(decode_verbose, datum.payload()),
    ITSELF: lambda datum, *_: _refusal_of(verify_receipt, datum.payload()),
    SIGNED: lambda datum, *_: _refusal_of(verify_receipt, datum.payload(), public_key=known()["public_key"]),
    CLIENT: lambda datum, *_: _refusal_of(verify_receipt, datum.payload(), **datum.knows),
}


def _mutant(mutant: Mutant, variant: str) -> DataMutant:
    datum = Datum(lambda: mutant.payload(variant), mutant.expectations(variant))
    return DataMutant(f"{mutant.name}, {variant}", mutant.base, datum, {CLIENT: Refusal(mutant.codes[variant])})


def _originals() -> dict[str, Datum]:
    """Return every base, and each again beside the knowledge that is to catch a mutant of it."""
    originals = {name: Datum(lambda name=name: verbose_of(name), known()) for name in NAMES}  # type: ignore[misc]
    for mutant in MUTANTS:
        # Where the receipt is the true one, it is the knowledge that is wrong.
        if mutant.known and mutant.payload("resigned") != verbose_of(mutant.base):
            payload = originals[mutant.base].payload
            originals[f"{mutant.base}, beside what catches: {mutant.name}"] = Datum(
                payload, mutant.expectations("resigned")
            )
    return originals


# Damage at random: each is many receipts, and any code of the verifier's will do; one that is accepted will not.

SHARE, SEEDS, COUNT = 120, range(1, 9), 500  # `python -m tests.verify.campaign` takes every bit, and 100,000
VERIFIER = "the verifier, with the server's key and the nonce"


def _judge_many(datum: Callable[[], Counter[str]], *_: Path) -> Refusal | None:
    codes = datum()
    for code, count in codes.items():
        if code.startswith("FOREIGN"):
            raise AssertionError(f"{code.removeprefix('FOREIGN ')}, {count} times")
    return None if codes["ACCEPTED"] else Refusal("refused", f"{sum(codes.values())} receipts, {len(codes)} codes")


def _batch(name: str, damages: str, datum: Callable[[], Counter[str]]) -> DataMutant:
    return DataMutant(name, damages, datum, {VERIFIER: Refusal("refused")})


def _undamaged() -> Counter[str]:
    corpus, knows = campaign.load_corpus()
    codes = Counter[str]()
    for formats in corpus.values():
        for payload in formats.values():
            campaign.judge(payload, knows, codes)
    return codes


ROOMS = (
    DataRoom(
        "data: receipts",
        CHECKERS,
        _originals(),
        tuple(_mutant(mutant, variant) for mutant in MUTANTS for variant in VARIANTS if variant in mutant.codes),
    ),
    DataRoom(
        "data: receipts at random",
        {VERIFIER: _judge_many},
        {"the golden receipts in every format": _undamaged},
        (
            *(
                _batch(f"one bit in {SHARE} of {path.name}", "bytes", partial(campaign.bit_flips, SHARE, 1, path.name))
                for path in sorted(golden.FOLDER.iterdir())
                if path.name != "index.json"
            ),
            *(
                _batch(f"{COUNT} edits, seed {seed}", "structure", partial(campaign.random_mutants, COUNT, seed))
                for seed in SEEDS
            ),
        ),
    ),
)
