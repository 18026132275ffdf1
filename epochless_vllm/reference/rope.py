"""Rotary position embedding: the frequencies a model's configuration asks for, and the table of cosines and sines.

Kinds: default, linear, dynamic, llama3, yarn; any other kind and any parameter not listed here is refused by name.
Frequencies and angles are rounded to float32 as the engines round them (at position 100,000 that rounding is part of
what a model computes); cosines and sines of those angles are taken in float64. Knows nothing of attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from epochless_vllm.errors import ModelRefusedError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": {"beta_fast": 32.0, "beta_slow": 1.0}}
# Parameters that one engine reads and another ignores, and the value at which the two agree.
_NEUTRAL = {
    "partial_rotary_factor": 1.0, "attn_factor": 1.0, "extrapolation_factor": 1.0, "apply_yarn_scaling": True,
    "attention_factor": None, "mscale": None, "mscale_all_dim": None, "alpha": None, "mrope_section": None,
    "max_trained_positions": None, "use_fope": None, "rope_dim": None,
}  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """One kind of rotary embedding with its parameters.

    Attributes:
        kind: one of KINDS.
        theta: the base of the frequencies.
        limit: the number of positions the kind is defined for.
        parameters: the numbers ``kind`` needs, by the configuration's own names.
        truncate: yarn only: whether the corrected dimensions are rounded to integers.
    """

    kind: str
    theta: float
    limit: int
    parameters: Mapping[str, float]
    truncate: bool = True

    def frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Return the float32 angle per position of each of the ``head_dim / 2`` rotated pairs."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        wavelengths = np.power(np.float32(self.theta), exponents)
        plain: NDArray[np.float32] = np.divide(np.float32(1), wavelengths)
        if self.kind == "llama3":
            return self._smooth(plain)
        if self.kind == "yarn":
            return self._ramp(plain, wavelengths, head_dim)
        # Linear scaling divides positions; a dynamic base grows only beyond ``limit``.
        return plain

    def table(self, head_dim: int, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (cosines, sines), each of shape (positions, head_dim / 2)."""
        counted = np.arange(positions, dtype=np.float32)
        if self.kind == "linear":
            counted /= np.float32(self.parameters["factor"])
        angles = np.multiply.outer(counted, self.frequencies(head_dim)).astype(np.float64)
        scale = self._magnitude()
        return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)

    def _smooth(self, plain: NDArray[np.float32]) -> NDArray[np.float32]:
        """Keep short waves, stretch long ones by ``factor``, and blend between the two cut-offs."""
        trained = self.parameters["original_max_position_embeddings"]
        low, high = self.parameters["low_freq_factor"], self.parameters["high_freq_factor"]
        turns = trained * plain.astype(np.float64) / (2 * math.pi)  # turns within the trained context
        blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
        stretched = plain / self.parameters["factor"]
        return ((1 - blend) * stretched + blend * plain).astype(np.float32)

    def _ramp(self, plain: NDArray[np.float32], wavelengths: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
        """Interpolate the slow pairs by ``factor``, keep the fast ones, with a linear ramp between."""
        trained = self.parameters["original_max_position_embeddings"]

        def pair_turning(times: float) -> float:
            return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = pair_turning(self.parameters["beta_fast"]), pair_turning(self.parameters["beta_slow"])
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        if first == last:
            last += 0.001  # the published recipe's own way out of a division by zero
        ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - first) / (last - first), 0.0, 1.0)
        interpolated: NDArray[np.float32] = np.divide(
            np.float32(1), np.float32(self.parameters["factor"]) * wavelengths
        )
        return np.asarray(interpolated * ramp + plain * (1 - ramp), dtype=np.float32)

    def _magnitude(self) -> float:
        factor = self.parameters.get("factor", 1.0)
        return 0.1 * math.log(factor) + 1.0 if self.kind == "yarn" and factor > 1 else 1.0


def rope_from_config(config: Mapping[str, Any], *, default_theta: float | None) -> Rope:
    """Return the rotary embedding of a parsed config.json, in the spelling of any transformers release.

    Args:
        default_theta: the base where the file names none; None if the family has no such default.

    Raises:
        ModelRefusedError: a kind or parameter that is not computed here, or that engines read differently.
    """
    given = _parameters(config)
    kind = given.pop("rope_type", "default")
    if kind not in KINDS:
        _refuse("rope_type", f"rope kind {str(kind)[:40]!r} is not computed; known are {', '.join(KINDS)}")
    thetas = [value for value in (given.pop("rope_theta", None), config.get("rope_theta")) if value is not None]
    if len(thetas) == 2 and thetas[0] != thetas[1]:
        _refuse("rope_theta", "rope_theta is given twice with different values")
    theta = _positive("rope_theta", thetas[0] if thetas else default_theta)
    truncate = given.pop("truncate", True)
    if not isinstance(truncate, bool) or not (truncate or kind == "yarn"):
        _refuse("truncate", "rope parameter truncate must be true or false, and belongs to yarn")
    numbers = {name: _positive(name, given.pop(name, None)) for name in _NEEDED[kind]}
    for name, usual in _OPTIONAL.get(kind, {}).items():
        numbers[name] = _positive(name, given.pop(name, None) or usual)
    for name, value in given.items():
        # The default kind has no use for a scaling factor, and configurations carry one all the same.
        if kind == "default" and name in ("factor", "original_max_position_embeddings"):
            continue
        if name not in _NEUTRAL or not (value is None or value == _NEUTRAL[name]):
            _refuse(name[:80], f"rope parameter {name[:80]} = {str(value)[:40]} is not computed for kind {kind}")
    if theta <= 1:
        _refuse("rope_theta", "rope_theta must be greater than 1")
    if kind == "llama3" and not numbers["high_freq_factor"] > numbers["low_freq_factor"]:
        _refuse("high_freq_factor", "high_freq_factor must be greater than low_freq_factor")
    return Rope(kind, theta, _limit(config, kind, numbers), numbers, truncate)


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    spellings = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
    present = [value for value in spellings if value is not None and value != {}]
    if any(not isinstance(value, dict) for value in present):
        _refuse("rope_parameters", "rope parameters must be an object")
    if len(present) == 2 and present[0] != present[1]:
        _refuse("rope_scaling", "rope_parameters and rope_scaling contradict each other")
    given = dict(present[0]) if present else {}
    kinds = {given.pop(name) for name in ("type", "rope_type") if isinstance(given.get(name), str)}
    if "type" in given or "rope_type" in given or len(kinds) > 1:
        _refuse("rope_type", "the rope kind is given twice, or is not a string")
    return given | ({"rope_type": kinds.pop()} if kinds else {})


def _limit(config: Mapping[str, Any], kind: str, numbers: Mapping[str, float]) -> int:
    trained = config.get("max_position_embeddings")
    if type(trained) is not int or not 0 < trained < 1 << 31:
        _refuse("max_position_embeddings", "max_position_embeddings must be a positive integer")
    if kind == "linear":
        return int(trained * numbers["factor"])
    if kind == "yarn":
        # Shipped configurations state either the trained or the extended length; the longer is the one served.
        return max(trained, int(numbers["original_max_position_embeddings"] * numbers["factor"]))
    return trained


def _positive(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1 << 53:
        _refuse(name, f"{name} must be a positive number")
    return float(value)


def _refuse(field: str, detail: str) -> NoReturn:
    raise ModelRefusedError(f"config.json: {detail}; audit with a release that knows it", field=field)
