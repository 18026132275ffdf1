"""The base digest: what a served base model is, from its files and the settings that change its mathematics.

``full`` covers every weight byte; results are cached by path, size, modification time and inode. ``fast`` replaces a
shard's bytes by its size, its header and one mebibyte at an offset derived from the header, and says so in the digest.
The server computes it at start; an auditor computes it again from its own copy, without the cache, and learns from the
digest with which settings the server ran. Knows nothing of adapters.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epochless_vllm.durable import write_file_atomic
from epochless_vllm.errors import ConfigurationError, DigestMismatchError, StoreError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.digests import Digest, digest

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CHUNK_BYTES = 4 << 20
SAMPLE_BYTES = 1 << 20
CACHE_NAME = "base-digests.json"
MODES = ("full", "fast")

# What an auditor tries: the engine's names, each a setting a server can run with.
DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (
    "auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_per_token_head",
    "int8_per_token_head", "int4_per_token_head", "nvfp4", "turboquant_k8v4", "turboquant_4bit_nc",
    "turboquant_k3v4_nc", "turboquant_3bit_nc",
)  # fmt: skip


@dataclass(frozen=True)
class BaseSettings:
    """What changes the mathematics of a base model beside its files, in the engine's words.

    Attributes:
        dtype: of the weights as loaded, such as ``float32``.
        quantization: the method, or ``None`` as text.
        overrides: those of the model's configuration; ``[]`` if there are none.
        load_format: ``files``, or ``dummy`` for random weights.
    """

    dtype: str
    quantization: str = "None"
    kv_cache_dtype: str = "auto"
    overrides: str = "[]"
    load_format: str = "files"

    def encode(self) -> dict[str, str]:
        return {
            "dtype": f"torch.{self.dtype.removeprefix('torch.')}",
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "overrides": self.overrides,
            "load_format": self.load_format,
        }


def identify_base(model: Path | str, base: str) -> BaseSettings:
    """Return the settings under which a local model has the given base digest. Reads every byte of its files.

    Raises:
        ConfigurationError: the model is not a local directory with a configuration.
        DigestMismatchError: under no setting that is tried: another model, or one whose configuration was overridden.
    """
    files = {mode: _file_digests(model, mode, _Cache(None), require_weights=True) for mode in MODES}
    for dtype in DTYPES:
        for kv_cache_dtype in KV_CACHE_DTYPES:
            settings = BaseSettings(dtype, kv_cache_dtype=kv_cache_dtype)
            if any(base == _digest(parts, settings.encode(), mode) for mode, parts in files.items()):
                return settings
    found = _digest(files["full"], BaseSettings(DTYPES[0]).encode(), "full")
    raise DigestMismatchError(
        f"model {model}: is not the base {base} under any dtype or KV dtype; in float32 it is {found}. Give the "
        "directory the server was started with; quantised models and configuration overrides are not audited",
        expected=base,
        actual=found,
        subject=str(model),
    )


def compute_base_digest(model: Path | str, settings: dict[str, str], *, mode: str, cache_directory: Path) -> Digest:
    """Return the digest of a base model.

    Args:
        model: local directory of the model.
        settings: what ``BaseSettings.encode`` returns.
        mode: ``full`` or ``fast``.
        cache_directory: where file digests of earlier starts are kept.

    Raises:
        ConfigurationError: the model is not a local directory with a configuration.
    """
    cache = _Cache(cache_directory / CACHE_NAME)
    parts = _file_digests(model, mode, cache, require_weights=settings.get("load_format") != "dummy")
    cache.write()
    return _digest(parts, settings, mode)


def _digest(parts: list[dict[str, Any]], settings: dict[str, str], mode: str) -> Digest:
    return digest(f"epochless/base/{mode}/v1", encode_canonical({"files": parts, "settings": settings}))


def _file_digests(model: Path | str, mode: str, cache: _Cache, *, require_weights: bool) -> list[dict[str, Any]]:
    directory = Path(model)
    configuration = directory / "config.json"
    if not configuration.is_file():
        raise ConfigurationError(
            f"model {model}: the base digest needs a local directory with config.json; download the model first",
            flag="model",
        )
    shards = sorted(path for path in directory.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    if not shards and require_weights:
        raise ConfigurationError(f"model {model}: no weight files found; is this a complete model?", flag="model")
    parts: list[dict[str, Any]] = []
    for path in [configuration, *shards]:
        whole = mode == "full" or path == configuration
        parts.append({"name": path.name, "sha256": cache.file_digest(path, "full" if whole else "fast")})
    return parts


class _Cache:
    """File digests by identity of the file; a lost or damaged cache costs time, never correctness."""

    def __init__(self, path: Path | None) -> None:
        """Open the cache of a file; without one, every file is hashed."""
        self._path = path
        self._changed = False
        try:
            loaded = json.loads(path.read_text()) if path is not None else {}
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
        if not self._changed or self._path is None:
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
