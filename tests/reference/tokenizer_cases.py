"""Vocabularies and buffers of the tokenizer tests; writes the stored vectors with the tokenizers library.

python -m tests.reference.tokenizer_cases         trains anew and overwrites tests/vectors/tokenizer
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parent.parent / "vectors" / "tokenizer"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES = ("gpt2", "llama3", "qwen", "cased", "digits", "punctuated")

_SENTENCES = (
    "The quick brown fox doesn't jump; it'll walk, we've SEEN it, I'm sure they're late and he'd wait.\n",
    "def add(first: int, second: int) -> int:\n    \"\"\"Return the sum.\"\"\"\n    return first + second\n\n\n",
    "In 1998 about 12,345,678 people paid $3.50 (or 2.99€) for 100% of 7½ apples, v2.0-rc1.\r\n",
    "Größe, façade, naïve, Ångström, señor, ŁÓDŹ, İstanbul, straße, cœur, résumé.\n",
    "Быстрая лиса прыгает. Ελληνικά γράμματα. שלום עולם. مرحبا بالعالم. हिन्दी में लिखो। ภาษาไทย\n",
    "日本語のテキスト、漢字とかな。中文文本,没有空格。한국어 텍스트입니다。\n",
    "emoji 🙂🙃 👩‍👩‍👧‍👦 🇩🇪 flags, ∑ x² ≥ √2 ≠ ∞, ½ ⅓ ① Ⅷ ٣ ४ \uff19\n",
    "\t\tif (x != NULL && *p++ == '\\0') { goto end; } // comment -- TODO!!!\n\n",
    "http://example.org/path?query=value&other=1#part user@example.org {\"key\": [1, 2, 3], \"b\": null}\n",
    "thethethe aaaaaaaa abababab    eight   spaces \u00a0\u2003\u3000 odd blanks\u2028\u0085end\n",
)  # fmt: skip


def corpus() -> Iterator[str]:
    """Yield seeded sentences that share words, so that merges are deep."""
    random_ = random.Random(0)
    words = [word for sentence in _SENTENCES for word in sentence.split(" ")]
    for _ in range(400):
        yield random_.choice(_SENTENCES)
        yield " ".join(random_.choices(words, k=12))


def train(name: str, size: int = 700) -> dict[str, Any]:
    """Return a trained tokenizer.json in one of the styles in use."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=name == "digits", use_regex=name in ("gpt2", "digits"))
    pattern = {"llama3": LLAMA3, "qwen": QWEN, "cased": CASED, "punctuated": PUNCTUATED}.get(name)
    first: list[Any] = []
    if name == "digits":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif name == "punctuated":
        first = [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex(pattern), "isolated"),
        ]
    elif name == "cased":
        first = [pre_tokenizers.Split(Regex(pattern), "removed", invert=True)]
    elif pattern:
        first = [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level]) if first else byte_level
    if name in ("qwen", "punctuated"):
        tokenizer.normalizer = normalizers.NFC() if name == "qwen" else normalizers.Sequence([])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>"] if name == "gpt2" else [],
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus(), trainer)
    if name != "gpt2":
        special = ["<|begin_of_text|>", "<|end|>", "<|end|>>", "<tool é>"]
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
        tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("caf\u00e9s", normalized=True)])
    if name == "llama3":
        template = TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 700)])
        tokenizer.post_processor = Sequence([ByteLevel(trim_offsets=False), template])
    elif name == "digits":
        tokenizer.post_processor = TemplateProcessing(
            single="<|begin_of_text|> $A <|end|>", special_tokens=[("<|begin_of_text|>", 700), ("<|end|>", 701)]
        )
    elif name == "gpt2":
        tokenizer.post_processor = ByteLevel(trim_offsets=True)
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    if name == "gpt2":  # files of the first releases write a merge as one string
        document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
    return document


def buffers(count: int, seed: int, special: list[str]) -> Iterator[str]:
    """Yield texts of every kind: prose, random characters of many planes, marks, controls, near-misses of tokens."""
    random_ = random.Random(seed)
    letters = "aAbBsStTdDlLmMvVeErR'\u2019\u017f\u212a .,-_/\\0129\t\n\r\x0b\x0c\x1c\x85\xa0éßǅʰ"
    planes = [(0x20, 0x7F), (0x80, 0x250), (0x300, 0x370), (0x370, 0x600), (0x900, 0xE80), (0x1100, 0x1200),
              (0x1E00, 0x2100), (0x2150, 0x2190), (0x3000, 0x3400), (0xAC00, 0xAE00), (0x1F300, 0x1F700)]  # fmt: skip

    def anything(length: int) -> str:
        points = (
            random_.choice([random_.randrange(0xD800), random_.randrange(0xE000, 0x110000)]) for _ in range(length)
        )
        return "".join(map(chr, points))

    for index in range(count):
        length = random_.randint(0, 40)
        kind = index % 6
        if kind == 0:
            text = "".join(random_.choices(letters, k=length))
        elif kind == 1:
            text = "".join(chr(random_.randrange(*random_.choice(planes))) for _ in range(length))
        elif kind == 2:
            text = anything(length)
        elif kind == 3:
            sentence = random_.choice(_SENTENCES) + random_.choice(_SENTENCES)
            begin = random_.randrange(len(sentence))
            text = sentence[begin : begin + length]
        elif kind == 4:
            parts = [random_.choice([*special, *special, "a", " ", "\n", "<", "|>", "é", "e\u0301"]) for _ in range(6)]
            cut = random_.randint(0, 3)
            text = "".join(parts)[cut:]
        else:
            base = random_.choice("aeouAEO\u1100\u1161q ")
            text = "".join(
                base + "".join(chr(random_.randrange(0x300, 0x340)) for _ in range(3)) for _ in range(length // 4)
            )
        yield text


def main() -> None:
    """Write each vocabulary and its vectors: text, tokens with and without the template, the text they give back."""
    from tokenizers import Tokenizer

    VECTORS.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(NAMES):
        document = train(name)
        (VECTORS / f"{name}.json").write_text(json.dumps(document, ensure_ascii=True, separators=(",", ":")) + "\n")
        tokenizer = Tokenizer.from_str(json.dumps(document))
        special = [token["content"] for token in document["added_tokens"]]
        texts = [*_SENTENCES, "", " ", "'S'Ll'\u017f", *buffers(60, seed, special)]
        vectors = [
            {
                "text": text,
                "ids": tokenizer.encode(text).ids,
                "bare": tokenizer.encode(text, add_special_tokens=False).ids,
                "back": tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True),
            }
            for text in texts
        ]
        (VECTORS / f"{name}.vectors.json").write_text(
            "[\n" + ",\n".join(json.dumps(vector) for vector in vectors) + "\n]\n"
        )


if __name__ == "__main__":
    main()
