"""The tokenizer gives the library's tokens and text, and refuses by name what it would get wrong."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from epochless_vllm.cli.tiny_model import byte_tokenizer
from epochless_vllm.errors import TokenizerError
from epochless_vllm.reference.bpe import merge_symbols
from epochless_vllm.reference.pretokenizers import BYTE_CHARACTERS, normalize_nfc
from epochless_vllm.reference.token_patterns import compile_pattern
from epochless_vllm.reference.tokenizer import Tokenizer, read_tokenizer, tokenizer_from_bytes
from epochless_vllm.reference.unicode_tables import INERT, WHITE_SPACE, invert_ranges, numerals, points_of
from tests.reference.tokenizer_cases import CASED, GPT2, LLAMA3, NAMES, PUNCTUATED, QWEN, VECTORS, buffers

SCALARS = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]
# Beyond the third plane nothing is assigned but tags and variation selectors.
ASSIGNED = [point for point in SCALARS if point < 0x33480 or 0xE0000 <= point < 0xE0200 or point % 97 == 0]


def load(name: str) -> tuple[bytes, Tokenizer, tokenizers.Tokenizer]:
    payload = (VECTORS / f"{name}.json").read_bytes()
    return payload, tokenizer_from_bytes(payload), tokenizers.Tokenizer.from_str(payload.decode())


@pytest.mark.parametrize("name", NAMES)
def test_stored_vectors_are_met(name: str) -> None:
    tokenizer = tokenizer_from_bytes((VECTORS / f"{name}.json").read_bytes())
    vectors = json.loads((VECTORS / f"{name}.vectors.json").read_text())
    assert len(vectors) > 70
    for vector in vectors:
        assert tokenizer.encode(vector["text"]) == vector["ids"]
        assert tokenizer.encode(vector["text"], add_special_tokens=False) == vector["bare"]
        assert tokenizer.decode(vector["ids"], skip_special_tokens=True) == vector["back"]


@pytest.mark.parametrize("name", NAMES)
def test_fuzzed_buffers_give_the_librarys_tokens_and_text(name: str) -> None:
    payload, tokenizer, library = load(name)
    special = [token["content"] for token in json.loads(payload)["added_tokens"]]
    assert library.get_vocab_size() == tokenizer.size
    whole = 0
    for text in buffers(600, 11, special):
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids, ascii(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)
        bare = tokenizer.encode(text, add_special_tokens=False)
        whole += tokenizer.decode(bare) == text
    # A normal form and a space before each text change some, and are what the library does.
    assert whole > (0 if name in ("qwen", "digits") else 400)


@pytest.mark.parametrize("name", NAMES)
def test_any_tokens_decode_to_the_librarys_text(name: str) -> None:
    _, tokenizer, library = load(name)
    random_ = random.Random(3)
    for _ in range(300):
        ids = [random_.randrange(tokenizer.size) for _ in range(random_.randint(0, 30))]
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode_bytes(ids).decode("utf-8", "replace") == tokenizer.decode(ids)


def test_every_character_is_classed_as_the_library_classes_it() -> None:
    spans = {rf"\p{{{name}}}": points_of(name) for name in ("L", "N", "M", "P", "S", "Lu", "Ll")} | {r"\s": WHITE_SPACE}
    for pattern, ranges in spans.items():
        split = pre_tokenizers.Split(Regex(pattern), "removed")
        members = {point for first, last in ranges for point in range(first, last + 1)}
        for begin in range(0, len(ASSIGNED), 1 << 11):
            block = ASSIGNED[begin : begin + (1 << 11)]
            kept = "".join(piece for piece, _ in split.pre_tokenize_str("".join(map(chr, block))))
            assert kept == "".join(chr(point) for point in block if point not in members), pattern


def test_every_numeral_is_a_digit_of_the_library() -> None:
    members = {point for first, last in numerals() for point in range(first, last + 1)}
    for individual in (True, False):
        split = pre_tokenizers.Digits(individual_digits=individual)
        for point in [*members, *random.Random(0).sample(ASSIGNED, 20000)]:
            pieces = [piece for piece, _ in split.pre_tokenize_str(f"a{chr(point)}{chr(point)}a")]
            expected = 1 if point not in members else 4 if individual else 3
            assert len(pieces) == expected, hex(point)


def test_normal_form_is_the_librarys() -> None:
    library = normalizers.NFC()
    random_ = random.Random(1)
    pool = [*map(ord, INERT), *range(0x300, 0x370), *range(0x1100, 0x1200), *range(0x900, 0xE00), 0x41, 0x61, 0x20]
    pool += random_.sample(SCALARS, 5000)
    for _ in range(4000):
        text = "".join(chr(random_.choice(pool)) for _ in range(random_.randint(1, 8)))
        assert normalize_nfc(text) == library.normalize_str(text), ascii(text)


def test_ranges_invert_to_all_other_characters() -> None:
    for ranges in (WHITE_SPACE, points_of("Lu"), [(0, 5)], [(0x10FFFF, 0x10FFFF)]):
        inside, outside = (sum(last - first + 1 for first, last in each) for each in (ranges, invert_ranges(ranges)))
        assert inside + outside == 0x110000
        assert invert_ranges(invert_ranges(ranges)) == ranges


# Patterns


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3, QWEN, CASED, PUNCTUATED])
def test_patterns_in_use_cut_as_the_library_cuts(pattern: str) -> None:
    compare_cuts(pattern, list(buffers(300, 5, ["'S", "'ll", "\r\n", "  "])))


def test_random_patterns_of_the_subset_cut_as_the_library_cuts() -> None:
    random_ = random.Random(8)
    atoms = [r"\p{L}", r"\p{Lu}", r"\P{L}", r"\p{N}", r"\s", r"\S", r"\d", "a", "b", " ", "'", r"\.", r"\n", "[ab\\s]",
             "[^a\\p{N}]", "[a-c\\-x]", r"[^\r\n\p{L}]", "[.^$]", "(?i:ab)", "(?:a|b)", "(?i:'s|'t)"]  # fmt: skip
    repeats = ["", "", "", "?", "*", "+", "{2}", "{1,3}", "{2,}"]

    def branch() -> str:
        parts = []
        for _ in range(random_.randint(1, 4)):
            atom = random_.choice(atoms)
            parts.append(atom + random_.choice(["", "?"] if atom.startswith("(") else repeats))
        return "".join(parts) + random_.choice(["", "", r"(?!\S)", r"(?=a)"])

    texts = [*buffers(40, 6, ["ab", "'s", " a", "AB"]), "ab ABab 'S12.\n\n aab", "a.b^c$ --x"]
    refusals = []
    for _ in range(300):
        pattern = "|".join(branch() for _ in range(random_.randint(1, 3)))
        try:
            compile_pattern(pattern)
        except TokenizerError as error:
            refusals.append(error.message)
            continue
        compare_cuts(pattern, texts)
    assert all("empty" in message for message in refusals)
    assert len(refusals) < 200


def compare_cuts(pattern: str, texts: list[str]) -> None:
    mine, library = compile_pattern(pattern), pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    for text in texts:
        found = [match.group() for match in mine.finditer(text)]
        assert found == [piece for piece, _ in library.pre_tokenize_str(text)], (pattern, ascii(text))


@pytest.mark.parametrize(
    "pattern",
    ["a++", "a*?", "a?+", "(?:ab)+", "(?:ab){2}", "(a)", "(?<n>a)", "(?i)a", "(?s:a)", ".", "^a", "a$", r"\w", r"\b",
     r"\G", r"\h", r"\x41", r"\u0041", r"\1", r"[[:alpha:]]", "[a[b]]", "[a&&b]", "[b-a]", "[]", "[", "[a", "(?:a",
     "a)", " *(?=a)", "(?:a?|b)", "b|(?:a*)?", "a{0,3}", "]", "}", "a{", "{2}", "*", "a|", "",
     "a?", r"\p{Foo}", r"\p{L", r"\pL", r"\p{Letter}", "(?i:[ab])", "(?i:é)",
     r"(?i:\p{L})", "(?!a)*", "a{1000}", "\\", "x" * 1001, "[^\\s\\S]"],
)  # fmt: skip
def test_patterns_outside_the_subset_are_refused(pattern: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        compile_pattern(pattern)
    assert caught.value.fields["field"] == "pattern"


# Merges


def test_merges_in_any_order_end_as_the_librarys_do() -> None:
    random_ = random.Random(2)
    for _ in range(150):
        vocabulary = {character: index for index, character in enumerate("abcd")}
        merges: list[tuple[str, str]] = []
        for _ in range(random_.randint(1, 25)):
            pair = random_.choice(list(vocabulary)), random_.choice(list(vocabulary))
            if pair not in merges and len(pair[0] + pair[1]) < 8:
                merges.append(pair)
                vocabulary.setdefault(pair[0] + pair[1], len(vocabulary))
        random_.shuffle(merges)
        library = models.BPE(vocab=vocabulary, merges=merges)
        table = {(vocabulary[a], vocabulary[b]): (rank, vocabulary[a + b]) for rank, (a, b) in enumerate(merges)}
        for _ in range(30):
            word = "".join(random_.choices("abcd", k=random_.randint(0, 30)))
            found = merge_symbols([vocabulary[character] for character in word], table)
            assert found == [token.id for token in library.tokenize(word)]


def test_long_runs_merge_in_time() -> None:
    table = {(0, 0): (0, 1), (1, 1): (1, 2), (2, 2): (2, 3)}
    assert merge_symbols([0] * 100_000, table) == [3] * 12_500


# Files


def test_tiny_models_tokenizer_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    tokenizer = read_tokenizer(tmp_path)
    ids = tokenizer.encode("<s>héllo</s>")
    assert ids == [256, *"héllo".encode(), 257]
    assert tokenizer.decode(ids) == "<s>héllo</s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "héllo"
    with pytest.raises(TokenizerError):
        read_tokenizer(tmp_path / "nowhere")


def changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a copy with one member set; ``path`` is dotted, with indices."""
    copied = copy.deepcopy(document)
    *steps, last = path.split(".")
    place: Any = copied
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    place[int(last) if isinstance(place, list) else last] = value
    return copied


@pytest.mark.parametrize(
    ("name", "path", "value", "field"),
    [
        ("gpt2", "truncation", {"max_length": 5}, "truncation"),
        ("gpt2", "padding", {"strategy": "BatchLongest"}, "padding"),
        ("gpt2", "chat", 1, "chat"),
        ("gpt2", "model.type", "Unigram", "model"),
        ("gpt2", "model.novelty", True, "model"),
        ("gpt2", "model.dropout", 0.1, "dropout"),
        ("gpt2", "model.byte_fallback", True, "byte_fallback"),
        ("gpt2", "model.continuing_subword_prefix", "##", "continuing_subword_prefix"),
        ("gpt2", "model.end_of_word_suffix", "</w>", "end_of_word_suffix"),
        ("gpt2", "model.ignore_merges", "yes", "ignore_merges"),
        ("gpt2", "model", [], "model"),
        ("gpt2", "model.vocab", {"a": 0}, "vocab"),
        ("gpt2", "model.vocab.a", 5, "vocab"),
        ("gpt2", "model.vocab.a", -1, "vocab"),
        ("gpt2", "model.vocab.a", True, "vocab"),
        ("gpt2", "model.vocab.\ud800", 9999, "vocab"),
        ("gpt2", "model.merges", {"a": "b"}, "merges"),
        ("gpt2", "model.merges.0", "a b c", "merges"),
        ("gpt2", "model.merges.0", ["zz", "zz"], "merges"),
        ("gpt2", "model.merges.0", [1, 2], "merges"),
        ("gpt2", "normalizer", {"type": "Lowercase"}, "normalizer"),
        ("gpt2", "normalizer", "NFC", "normalizer"),
        ("gpt2", "pre_tokenizer", None, "pre_tokenizer"),
        ("gpt2", "pre_tokenizer", {"type": "Whitespace"}, "pre_tokenizer"),
        ("gpt2", "pre_tokenizer", {"type": "Sequence", "pretokenizers": []}, "pre_tokenizer"),
        ("gpt2", "pre_tokenizer.use_regex", "yes", "pre_tokenizer"),
        ("llama3", "pre_tokenizer.pretokenizers.0.behavior", "MergedWithNext", "pre_tokenizer"),
        ("llama3", "pre_tokenizer.pretokenizers.0.invert", True, "pre_tokenizer"),
        ("llama3", "pre_tokenizer.pretokenizers.0.pattern", {"Regex": "a++"}, "pattern"),
        ("llama3", "pre_tokenizer.pretokenizers.0.pattern", "a", "pattern"),
        ("llama3", "pre_tokenizer.pretokenizers.0", {"type": "Metaspace"}, "pre_tokenizer"),
        ("llama3", "pre_tokenizer.pretokenizers.1", {"type": "Digits"}, "pre_tokenizer"),
        ("llama3", "post_processor", {"type": "RobertaProcessing"}, "post_processor"),
        ("llama3", "post_processor.processors.1.single", [], "post_processor"),
        ("llama3", "post_processor.processors.1.single.1.Sequence.id", "B", "post_processor"),
        ("llama3", "post_processor.processors.1.special_tokens", {}, "special_tokens"),
        ("llama3", "post_processor.processors.1.special_tokens.<|begin_of_text|>.ids", [99999], "post_processor"),
        ("llama3", "decoder", {"type": "WordPiece"}, "decoder"),
        ("llama3", "decoder", None, "decoder"),
        ("llama3", "added_tokens", {}, "added_tokens"),
        ("llama3", "added_tokens.0.lstrip", True, "lstrip"),
        ("llama3", "added_tokens.0.rstrip", True, "rstrip"),
        ("llama3", "added_tokens.0.single_word", True, "single_word"),
        ("llama3", "added_tokens.0.special", 1, "added_tokens"),
        ("llama3", "added_tokens.0.content", "", "added_tokens"),
        ("llama3", "added_tokens.0.content", "<think>", "added_tokens"),
        ("llama3", "added_tokens.0.id", 7000, "added_tokens"),
        ("llama3", "added_tokens.0.content", "\udfff", "added_tokens"),
    ],
)
def test_files_that_are_not_implemented_are_refused_by_name(name: str, path: str, value: object, field: str) -> None:
    document = changed(json.loads((VECTORS / f"{name}.json").read_text()), path, value)
    with pytest.raises(TokenizerError) as caught:
        tokenizer_from_bytes(json.dumps(document).encode())
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"null", b"{", b'{"model": NaN}', b'{"a": 1, "a": 1}', b"\xff", b"[" * 100_000, b"9" * 5000,
     b'{"model": {"vocab": {}}}'],
)  # fmt: skip
def test_bytes_that_are_not_a_tokenizer_are_refused(payload: bytes) -> None:
    with pytest.raises(TokenizerError):
        tokenizer_from_bytes(payload)


def test_damaged_files_surface_as_our_own_error_only() -> None:
    payload = (VECTORS / "llama3.json").read_bytes()
    begin = payload.index(b'"normalizer"')
    random_ = random.Random(4)
    accepted = 0
    for _ in range(400):
        damaged = bytearray(payload)
        for _ in range(random_.randint(1, 3)):
            at = random_.choice([random_.randrange(len(payload)), random_.randrange(max(0, begin - 900), begin + 900)])
            damaged[at] = random_.choice(b'0"{}[],:\\a\xff ' + bytes([random_.randrange(256)]))
        cut = random_.choice([len(payload)] * 4 + [random_.randrange(len(payload))])
        try:
            tokenizer_from_bytes(bytes(damaged[:cut])).encode("some text <|end|>")
            accepted += 1
        except TokenizerError:
            continue
    assert 0 < accepted < 200


def test_tokens_and_texts_that_do_not_exist_are_refused() -> None:
    tokenizer = tokenizer_from_bytes((VECTORS / "gpt2.json").read_bytes())
    for token in (-1, tokenizer.size, 1 << 40):
        with pytest.raises(TokenizerError):
            tokenizer.decode([token])
    with pytest.raises(TokenizerError):
        tokenizer.encode("half a pair: \ud83d")
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""


def test_alphabet_gives_every_byte_a_character_of_its_own() -> None:
    assert sorted(BYTE_CHARACTERS) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(set(BYTE_CHARACTERS)) == 256
