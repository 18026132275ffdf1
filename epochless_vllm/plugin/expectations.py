"""What a rank must report for a revision, computed from the store's bytes with NumPy and no engine code.

``registered_digest`` covers an adapter as the engine's CPU registry holds it: every tensor in the LoRA dtype, B scaled.
``slot_digest`` covers one rank's device slots. The rounding rules are the engine's: convert to the LoRA dtype, then
multiply B by its scaling in float32 and round once more. Knows no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.plugin.module_plan import ModulePlan, SlicePlan
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.digests import Digest, digest
from epochless_vllm.protocol.manifest import Manifest, TensorEntry

REGISTERED = "epochless/registered/v1"
SLOTS = "epochless/slots/v1"
Bits = NDArray[Any]
SlotShards = dict[str, list[tuple[str, str] | None]]

_RAW = {"F32": "<u4", "BF16": "<u2", "F16": "<u2"}
DTYPE_OF_TORCH = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}


def convert_bits(raw: Bits, source: str, target: str, scaling: float = 1.0) -> Bits:
    """Return the raw bits of a tensor after conversion and scaling.

    Args:
        raw: uint32 (F32) or uint16 (BF16, F16) bits, any shape.
        source, target: ``F32``, ``BF16`` or ``F16``.
        scaling: multiplied in float32 after the conversion, then rounded to ``target``.
    """
    if source != target:
        raw = _bits_of(_floats_of(raw, source), target)
    if scaling != 1.0:
        raw = _bits_of(_floats_of(raw, target) * np.float32(scaling), target)
    return raw


def _floats_of(raw: Bits, dtype: str) -> NDArray[np.float32]:
    if dtype == "F32":
        return raw.view(np.float32)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bits_of(values: NDArray[np.float32], dtype: str) -> Bits:
    if dtype == "F32":
        return values.view(np.uint32)
    if dtype == "F16":
        with np.errstate(over="ignore"):  # an overflow to infinity is refused as non-finite by the rank
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    # Round to nearest, ties to even, on the upper half; non-finite values never get here.
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def raw_tensor(view: memoryview, dtype: str, shape: tuple[int, ...]) -> Bits:
    """Return a tensor's raw bits as an array over the given bytes."""
    return np.frombuffer(view, dtype=_RAW[dtype]).reshape(shape)


def registered_digest(entries: Iterable[tuple[str, tuple[int, ...], str]], dtype: str) -> Digest:
    """Return the digest of (tensor name, shape, sha256 hex of the registered bytes) in a LoRA dtype."""
    listed = [{"name": name, "sha256": sha256, "shape": list(shape)} for name, shape, sha256 in sorted(entries)]
    return digest(REGISTERED, encode_canonical({"dtype": dtype, "tensors": listed}))


def expect_registered(stored: Any, dtype: str) -> Digest:
    """Return the registered digest a stored revision must have in a LoRA dtype.

    Args:
        stored: a StoredRevision.
    """
    entries = [(entry.name, entry.shape, expect_sha256(stored, entry, dtype)) for entry in stored.manifest.tensors]
    return registered_digest(entries, dtype)


class RegisteredExpectation:
    """The same digest, computed from an adapter's bytes while a store copies them in: a Watcher of the store's."""

    def __init__(self, dtype: str) -> None:
        """Expect a registry in a LoRA dtype: ``F32``, ``BF16`` or ``F16``."""
        self._dtype = dtype
        self._config: Any = None
        self._hashers: dict[str, Any] = {}

    def __call__(self, config: Any) -> RegisteredExpectation:
        """Start over with an adapter of this configuration."""
        self._config = config
        self._hashers.clear()
        return self

    def update(self, record: Any, piece: memoryview) -> None:
        """Take the next bytes of a tensor."""
        scaling = scaling_of(self._config, record.name)
        if record.dtype == self._dtype and scaling == 1.0:
            return  # the manifest will have this hash
        raw = np.frombuffer(piece, dtype=_RAW[record.dtype])
        hasher = self._hashers.setdefault(record.name, hashlib.sha256())
        hasher.update(convert_bits(raw, record.dtype, self._dtype, scaling))

    def digest_of(self, manifest: Manifest) -> Digest:
        """Return the registered digest of the adapter that was watched, under the manifest it got."""
        entries = [
            (
                entry.name,
                entry.shape,
                self._hashers[entry.name].hexdigest() if entry.name in self._hashers else _bare(entry.sha256),
            )
            for entry in manifest.tensors
        ]
        return registered_digest(entries, self._dtype)


def scaling_of(config: Any, tensor: str) -> float:
    """Return the factor a tensor carries in the registry: B has its module's scaling, A has one."""
    if not tensor.endswith(".lora_B.weight"):
        return 1.0
    return float(config.scaling_for(tensor.removesuffix(".lora_B.weight")))


def _bare(sha256: Digest) -> str:
    return sha256.removeprefix("sha256:")


def sha256_of(bits: Bits) -> str:
    """Return the hexadecimal SHA-256 of an array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(bits)).hexdigest()


@dataclass(frozen=True)
class ExpectedPair:
    """A module's A and B in the LoRA dtype, B scaled: the SHA-256 of each whole, and how to make its bits.

    A rank that keeps a whole tensor needs its hash alone: that of the registry, which the coordinator has compared.
    """

    sha256_a: str
    sha256_b: str
    make_a: Callable[[], Bits]
    make_b: Callable[[], Bits]


def expect_bits(stored: Any, entry: TensorEntry, dtype: str) -> Bits:
    """Return the bits a stored tensor has in the registry."""
    raw = raw_tensor(stored.tensors[entry.name], entry.dtype, entry.shape)
    return convert_bits(raw, entry.dtype, dtype, scaling_of(stored.config, entry.name))


def expect_sha256(stored: Any, entry: TensorEntry, dtype: str) -> str:
    """Return the SHA-256 of the bits a stored tensor has in the registry; bytes left as they are keep theirs."""
    if entry.dtype == dtype and scaling_of(stored.config, entry.name) == 1.0:
        return _bare(entry.sha256)
    return sha256_of(expect_bits(stored, entry, dtype))


def expect_slots(plans: tuple[ModulePlan, ...], pairs: Mapping[str, ExpectedPair]) -> SlotShards:
    """Return, per module and slice, the SHA-256 of this rank's A and B shards; None for a slice without adapter.

    Args:
        pairs: by source module.
    """
    expected: SlotShards = {}
    for plan in plans:
        if any(item.source in pairs for item in plan.slices):
            expected[plan.name] = [
                _expect_shard(item, pairs[item.source]) if item.source in pairs else None for item in plan.slices
            ]
    return expected


def _expect_shard(item: SlicePlan, pair: ExpectedPair) -> tuple[str, str]:
    begin, end = item.columns
    sha256_a = pair.sha256_a if (begin, end) == (0, item.input_size) else sha256_of(pair.make_a()[:, begin:end])
    if item.rows == ((0, item.output_size),):
        return sha256_a, pair.sha256_b
    b = pair.make_b()
    return sha256_a, sha256_of(np.concatenate([b[begin:end] for begin, end in item.rows]))


def slot_digest(shards: SlotShards, dtype: str) -> Digest:
    """Return the digest of one rank's slots from the shard digests of every module the adapter touches."""
    listed = [
        {"module": name, "slices": [list(pair) if pair else None for pair in shards[name]]} for name in sorted(shards)
    ]
    return digest(SLOTS, encode_canonical({"dtype": dtype, "modules": listed}))
