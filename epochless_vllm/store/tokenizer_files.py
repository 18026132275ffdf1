"""The tokenizer digest: which tokenizer turned a receipt's prompt into token ids and its token ids into text.

It covers names and bytes of the files that a Hugging Face tokenizer is made of. The server computes it at start; an
auditor computes it again from its own copy. Knows no tokenizer: see reference/tokenizer.py for one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from epochless_vllm.errors import ConfigurationError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.digests import Digest, digest

# A chat template decides which tokens a prompt has, not what they mean: it is none of them.
TOKENIZER_FILES = (
    "added_tokens.json", "merges.txt", "special_tokens_map.json", "spiece.model", "tekken.json", "tiktoken.model",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip


def find_tokenizer_files(directory: Path | str) -> list[Path]:
    """Return the files of the tokenizer in a directory, by name; none where there is no tokenizer."""
    return [path for name in sorted(TOKENIZER_FILES) if (path := Path(directory) / name).is_file()]


def compute_tokenizer_digest(directory: Path | str) -> Digest:
    """Return the digest of the tokenizer in a directory.

    Raises:
        ConfigurationError: it is no local directory.
    """
    if not Path(directory).is_dir():
        raise ConfigurationError(
            f"--tokenizer {directory}: receipts name a tokenizer by its files; give a local directory", flag="tokenizer"
        )
    files = find_tokenizer_files(directory)
    listing = [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
    return digest("epochless/v1/tokenizer", encode_canonical(listing))
