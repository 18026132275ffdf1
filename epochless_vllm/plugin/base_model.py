"""The base digest: what a served base model is, from its files and the settings that change its mathematics.

``full`` covers every weight byte; results are cached by path, size, modification time and inode. ``fast`` replaces a
shard's bytes by its size, its header and one mebibyte at an offset derived from the header, and says so in the digest.
Knows nothing of adapters.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from epochless_vllm.durable import write_file_atomic
from epochless_vllm.errors import ConfigurationError, StoreError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.digests import Digest, digest

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CHUNK_BYTES = 4 << 20
SAMPLE_BYTES = 1 << 20
CACHE_NAME = "base-digests.json"


def compute_base_digest(model: Path | str, settings: dict[str, str], *, mode: str, cache_directory: Path) -> Digest:
    """Return the digest of a base model.

    Args:
        model: local directory of the model.
        settings: dtype, quantization, kv-cache dtype and overrides, as text.
        mode: ``full`` or ``fast``.
        cache_directory: where file digests of earlier starts are kept.

    Raises:
        ConfigurationError: the model is not a local directory with a configuration.
    """
    directory = Path(model)
    configuration = directory / "config.json"
    if not configuration.is_file():
        raise ConfigurationError(
            f"model {model}: the base digest needs a local directory with config.json; download the model first",
            flag="model",
        )
    shards = sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    if not shards and settings.get("load_format") != "dummy":
        raise ConfigurationError(f"model {model}: no weight files found; is this a complete model?", flag="model")
    cache = _Cache(cache_directory / CACHE_NAME)
    parts: list[dict[str, Any]] = []
    for path in [configuration, *shards]:
        whole = mode == "full" or path == configuration
        parts.append({"name": path.name, "sha256": cache.file_digest(path, "full" if whole else "fast")})
    cache.write()
    return digest(f"epochless/base/{mode}/v1", encode_canonical({"files": parts, "settings": settings}))


class _Cache:
    """File digests by identity of the file; a lost or damaged cache costs time, never correctness."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = False
        try:
            loaded = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):  # the first start, or a damaged cache: both begin empty
            loaded = {}
        self._entries: dict[str, str] = loaded if isinstance(loaded, dict) else {}

    def file_digest(self, path: Path, mode: str) -> str:
        status = path.stat()
        key = f"{mode}:{path.resolve()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"
        known = self._entries.get(key)
        if isinstance(known, str) and len(known) == 64:
            return known
        self._entries[key] = _hash_file(path) if mode == "full" else _hash_sample(path)
        self._changed = True
        return self._entries[key]

    def write(self) -> None:
        if not self._changed:
            return
        try:
            write_file_atomic(self._path, json.dumps(self._entries, indent=0).encode(), mode=0o600)
        except StoreError:  # a read-only store still serves; the next start hashes again
            return


def _hash_file(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


def _hash_sample(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        opening = file.read(8)
        header_bytes = min(int.from_bytes(opening, "little"), CHUNK_BYTES) if path.suffix == ".safetensors" else 0
        header = file.read(header_bytes)
        hasher = hashlib.sha256(opening + header + size.to_bytes(8, "big"))
        room = max(0, size - SAMPLE_BYTES)
        file.seek(int.from_bytes(hasher.digest()[:8], "big") % (room + 1))
        hasher.update(file.read(SAMPLE_BYTES))
    return hasher.hexdigest()
