"""The mutation campaign: ``python -m tests.verify.campaign`` flips every bit of the golden receipts and makes
100,000 structure-aware mutants; ``--share N`` does one in N, as the fast suite does. Prints counts; exit 1 on any
acceptance or foreign exception.

A mutant knows the structure it breaks: fields, rows, frames and sections are edited, moved, doubled, dropped or taken
from another receipt, and half of the time every digest is recomputed under the old signature.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from epochless_vllm.errors import ReceiptError
from epochless_vllm.verify import Expected, verify_disclosure, verify_receipt
from tests.verify.forge import Doc, canonical, header_digest, rehash
from tests.verify.golden import FOLDER, FORMATS

Corpus = dict[str, dict[str, bytes]]
INTEGERS = (0, 1, -1, 2, 63, 64, 65, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) - 1, 1 << 53, 10**20)
VALUES: tuple[Any, ...] = (None, True, False, "", "0", "sha256:" + "0" * 64, [], {}, 0, 1.5)


def load_corpus() -> tuple[Corpus, dict[str, Any]]:
    """Return the golden receipts by name and format, and what a client of them knows."""
    index = json.loads((FOLDER / "index.json").read_text())
    corpus = {}
    for name in index["receipts"]:
        corpus[name] = {suffix: (FOLDER / f"{name}.{suffix}").read_bytes() for suffix in FORMATS}
    return corpus, {"public_key": bytes.fromhex(index["public_key"]), "nonce": index["nonce"]}


# JSON


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate_json(rng: random.Random, doc: Doc, donor: Doc) -> Doc:
    """Return a copy of a document with one place changed; ``donor`` is another document of its kind."""
    doc = json.loads(json.dumps(doc))
    path = rng.choice([path for path in paths(doc) if path])
    parent, key = at(doc, path[:-1]), path[-1]
    value = parent[key]
    choice = rng.randrange(8)
    if choice == 0 and isinstance(value, list) and value:
        rng.choice((value.pop, lambda: value.append(value[-1]), lambda: rng.shuffle(value), value.reverse))()
    elif choice == 1 and isinstance(parent, dict):
        parent[rng.choice(("zz", key + "_", key.upper()))] = parent.pop(key) if rng.random() < 0.5 else value
    elif choice == 2 and isinstance(parent, dict):
        del parent[key]
    elif choice == 3:
        parent[key] = rng.choice(VALUES)
    elif choice == 4:
        try:
            parent[key] = at(donor, path)
        except (KeyError, IndexError, TypeError):
            parent[key] = rng.choice(INTEGERS)
    elif isinstance(value, int) and not isinstance(value, bool):
        parent[key] = rng.choice((value + 1, value - 1, value ^ 1 << rng.randrange(33), rng.choice(INTEGERS)))
    elif isinstance(value, str) and value:
        place = rng.randrange(len(value))
        letter = chr(rng.choice((ord(value[place]) ^ 1, rng.randrange(32, 127), 0x130)))
        exchanged = value[:place] + letter + value[place + 1 :]
        parent[key] = rng.choice((exchanged, value[:place], value + "0", value.upper()))
    else:
        parent[key] = rng.choice(VALUES)
    return doc


def mutate_verbose(rng: random.Random, original: bytes, other: bytes) -> bytes:
    doc = mutate_json(rng, json.loads(original), json.loads(other))
    if rng.random() < 0.5:
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, struct.error):
            doc = rehash(doc)  # where the forger's own encoder has no form for it, the stale variant remains
    return canonical(doc)


# Frames and sections


def split_frames(payload: bytes) -> list[bytes]:
    found, position = [], 4
    while position < len(payload):
        end = position + 5 + struct.unpack_from(">I", payload, position + 1)[0]
        found.append(payload[position:end])
        position = end
    return found


def mutate_text(rng: random.Random, text: bytes, other: bytes) -> bytes:
    return canonical(mutate_json(rng, json.loads(text), json.loads(other)))


def mutate_words(rng: random.Random, body: bytes) -> bytes:
    """Change one 32-bit word, byte or bit of a binary part, or its length."""
    if not body:
        return b"\0"
    edited, place = bytearray(body), rng.randrange(len(body))
    choice = rng.randrange(5)
    if choice == 0:
        edited[place] ^= 1 << rng.randrange(8)
    elif choice == 1:
        edited[place] = rng.randrange(256)
    elif choice == 2:
        del edited[place]
    elif choice == 3:
        edited.insert(place, rng.randrange(256))
    elif len(body) >= 4:
        place = place // 4 * 4 if place // 4 * 4 + 4 <= len(body) else 0
        word = struct.unpack_from("<I", edited, place)[0]
        struct.pack_into("<I", edited, place, (word + rng.choice((1, -1, 1 << 31, 7))) & 0xFFFFFFFF)
    return bytes(edited)


def mutate_stream(rng: random.Random, original: bytes, other: bytes) -> bytes:
    frames, donor = split_frames(original), split_frames(other)
    place, choice = rng.randrange(len(frames)), rng.randrange(7)
    kind, body = frames[place][:1], frames[place][5:]
    if choice == 0:
        del frames[place]
    elif choice == 1:
        frames.insert(rng.randrange(len(frames) + 1), frames[place])
    elif choice == 2:
        rng.shuffle(frames)
    elif choice == 3:
        frames[place] = rng.choice(donor)
    elif choice == 4:
        size = struct.pack(">I", max(0, len(body) + rng.choice((1, -1, 4, 1 << 16))))
        frames[place] = kind + size + body
    elif kind == b"B":
        body = mutate_words(rng, body)
        frames[place] = kind + struct.pack(">I", len(body)) + body
    else:
        skip = 96 if kind == b"F" else 0  # key id and signature
        if rng.random() < 0.2 and skip:
            body = mutate_words(rng, body[:skip])[:skip].ljust(skip, b"\0") + body[skip:]
        else:
            donor_body = donor[0][5:] if kind == b"H" else donor[-1][5 + skip :]
            body = body[:skip] + mutate_text(rng, body[skip:], donor_body)
            body = body if kind == b"F" or rng.random() < 0.5 else _rebind(frames, body)
        frames[place] = kind + struct.pack(">I", len(body)) + body
    return original[:4] + b"".join(frames)


def _rebind(frames: list[bytes], header: bytes) -> bytes:
    """Make the final record name a changed header."""
    final = json.loads(frames[-1][5 + 96 :])
    final["header"] = "sha256:" + header_digest(json.loads(header)).hex()
    body = frames[-1][5 : 5 + 96] + canonical(final)
    frames[-1] = b"F" + struct.pack(">I", len(body)) + body
    return header


def split_compact(payload: bytes) -> list[bytes]:
    """Return header, final record, key id with signature, flag runs, blocks."""
    parts, position = [], 4
    for _ in range(2):
        size = struct.unpack_from(">I", payload, position)[0]
        parts.append(payload[position + 4 : position + 4 + size])
        position += 4 + size
    flags = position + 96
    blocks = flags + 4 + 9 * struct.unpack_from(">I", payload, flags)[0]
    return [*parts, payload[position:flags], payload[flags:blocks], payload[blocks:]]


def mutate_compact(rng: random.Random, original: bytes, other: bytes) -> bytes:
    parts, donor = split_compact(original), split_compact(other)
    place = rng.choice((0, 1, 2, 3, 4, 4, 4))
    if rng.random() < 0.15:
        parts[place] = donor[place]
    elif place < 2:
        parts[place] = mutate_text(rng, parts[place], donor[place])
    else:
        parts[place] = mutate_words(rng, parts[place])
    header, final, signature, flags, blocks = parts
    lengths = [struct.pack(">I", len(text)) for text in (header, final)]
    return original[:4] + lengths[0] + header + lengths[1] + final + signature + flags + blocks


MUTATORS: dict[str, Callable[[random.Random, bytes, bytes], bytes]] = {
    "json": mutate_verbose,
    "stream": mutate_stream,
    "compact": mutate_compact,
}


def judge(payload: bytes, known: dict[str, Any], codes: Counter[str], suffix: str = "") -> None:
    """Count what the verifier says: its code, ``ACCEPTED``, or ``FOREIGN`` and the exception's name."""
    try:
        if suffix == ".disclosure":
            verify_disclosure(payload, 65, Expected(**known))  # the token its name says
        else:
            verify_receipt(payload, **known)
    except ReceiptError as error:
        codes[str(error.fields["threat"])] += 1
    except Exception as error:  # noqa: BLE001 - that any other exception escapes is the fault looked for
        codes[f"FOREIGN {type(error).__name__}"] += 1
    else:
        codes["ACCEPTED"] += 1


def random_mutants(count: int, seed: int) -> Counter[str]:
    corpus, known = load_corpus()
    names, codes, rng = sorted(corpus), Counter[str](), random.Random(seed)
    while sum(codes.values()) < count:
        name, other, suffix = rng.choice(names), rng.choice(names), rng.choice(sorted(MUTATORS))
        original = corpus[name][suffix]
        mutant = MUTATORS[suffix](rng, original, corpus[other][suffix])
        if mutant not in (original, corpus[other][suffix]):
            judge(mutant, known, codes)
    return codes


def bit_flips(share: int, seed: int, name: str = "") -> Counter[str]:
    """Flip one bit in ``share`` of every golden file whose name contains ``name``."""
    _, known = load_corpus()
    codes, rng = Counter[str](), random.Random(seed)
    for path in sorted(FOLDER.iterdir()):
        if path.name == "index.json" or name not in path.name:
            continue
        original = path.read_bytes()
        for bit in range(rng.randrange(share), 8 * len(original), share):
            flipped = bytearray(original)
            flipped[bit >> 3] ^= 1 << (bit & 7)
            judge(bytes(flipped), known, codes, path.suffix)
    return codes


def failures(codes: Counter[str]) -> int:
    return sum(count for code, count in codes.items() if code == "ACCEPTED" or code.startswith("FOREIGN"))


def report(name: str, codes: Counter[str]) -> None:
    print(json.dumps({name: sum(codes.values()), "failed": failures(codes), "codes": dict(codes.most_common())}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=int, default=1, help="do one in this many")
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("flips", "mutants"))
    parser.add_argument("--name", default="", help="flip only golden files whose name contains this")
    options = parser.parse_args()
    failed = 0
    if options.only != "mutants":
        flips = bit_flips(options.share, options.seed, options.name)
        failed += failures(flips)
        report("flips", flips)
    if options.only != "flips":
        mutants = random_mutants(options.mutants // options.share, options.seed)
        failed += failures(mutants)
        report("mutants", mutants)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
