"""The identity of a sampler: everything that turns a row of logits and a draw into a token, in exact numbers.

The recipe named here is: logits processors in float32; ``q = rint(clamp(logit, -8192, 8192) * 2**16)``; distance
``d = qmax - q``; ``k = (d * beta + 2**(shift - 1)) >> shift`` in units of 2**-16 octaves; weight
``2**40 * 2**(-k / 2**16)`` from two integer tables; min-p on weights; top-k by (float32 value descending, token id
ascending); exact rational top-p in the same order; the cumulative of the kept weights in ascending token id; one
32-bit draw. ``-inf`` has no weight.

Promises that equal configurations have equal bytes, and that nothing which moves a probability is left implicit.
Does not know logits: sampling/ and reference/ carry the recipe out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from epochless_vllm.errors import EncodingError, InvalidRequestError
from epochless_vllm.protocol.canonical import decode_canonical, encode_canonical
from epochless_vllm.protocol.digests import Digest, digest

RECIPE = "epochless/sampler/v1"
TABLES_DIGEST = Digest("sha256:e6b8a89ac13c866c611af092e901cf859689e2ef75bbfdacff3564a14a82b0e5")
"""Digest of the coarse and the fine table: 2 x 256 big-endian 64-bit words, ``rint(2**31 * 2**(-i / 2**8))`` then
``rint(2**31 * 2**(-i / 2**16))``; a weight is their product shifted right by 22 and by the whole octaves."""

FRACTION_BITS = 16  # of a quantised logit and of an octave
WEIGHT_BITS = 40  # the likeliest token weighs 2**40
RECORD_BITS = 32  # the recorded cumulative is out of 2**32
SATURATION = 8192  # keeps every distance within 31 bits; beyond it logits only compete in top-k order
MIN_TEMPERATURE = 0.01  # the engine raises a lower one to it; a weight is then never shifted beyond 63 bits
MAX_TEMPERATURE = 256  # above it a saturated logit could keep weight

# log2(e) rounded to 127 bits after the point.
_LOG2_E = Fraction(245461841629398282873184673143046618761, 1 << 127)
_RATIONAL = re.compile(r"(0|[1-9][0-9]{0,340})/([1-9][0-9]{0,340})")
_KEYS = frozenset({"beta", "min_p", "processors", "recipe", "shift", "tables", "temperature", "top_k", "top_p"})


@dataclass(frozen=True)
class TemperatureScale:
    """``beta * 2**-shift`` is log2(e) / temperature, with ``2**30 <= beta < 2**31``."""

    beta: int
    shift: int


@dataclass(frozen=True)
class SamplerConfig:
    """One sampler. Rationals are the exact values of the request's doubles; temperature 0 is greedy.

    ``processors`` lists what changed the logits before sampling, as (name, canonical value) in order of application.
    """

    temperature: Fraction
    top_k: int = 0
    top_p: Fraction = Fraction(1)
    min_p: Fraction = Fraction(0)
    processors: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.temperature and not Fraction(MIN_TEMPERATURE) <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidRequestError(
                f"temperature {_spell(self.temperature)} is neither 0 nor in {MIN_TEMPERATURE} .. {MAX_TEMPERATURE}",
                field="temperature",
            )
        if self.top_k < 0 or self.top_k >= 1 << 31:
            raise InvalidRequestError(f"top_k {self.top_k} is not 0 (off) or a count", field="top_k")
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p {_spell(self.top_p)} is not in (0, 1]", field="top_p")
        if not 0 <= self.min_p <= 1:
            raise InvalidRequestError(f"min_p {_spell(self.min_p)} is not in [0, 1]", field="min_p")
        for value in (self.temperature, self.top_p, self.min_p):
            if value.denominator & (value.denominator - 1):
                raise InvalidRequestError(f"{value} is not the value of a double", field="temperature, top_p or min_p")
        if self.greedy and self.filtered:
            raise InvalidRequestError("a greedy sampler has no filters; send none or a temperature", field="top_k")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether some tokens of nonzero weight may be left out, so that the record carries the kept mass."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0

    @cached_property
    def scale(self) -> TemperatureScale:
        return scale_from_temperature(self.temperature) if self.temperature else TemperatureScale(0, 0)

    @property
    def digest(self) -> Digest:
        return digest(RECIPE, self.encode())

    def describe(self) -> dict[str, Any]:
        """Return the canonical value, as embedded in a receipt's sampler table."""
        return {
            "beta": self.scale.beta,
            "min_p": _encode_rational(self.min_p),
            "processors": [list(entry) for entry in self.processors],
            "recipe": RECIPE,
            "shift": self.scale.shift,
            "tables": TABLES_DIGEST,
            "temperature": _encode_rational(self.temperature),
            "top_k": self.top_k,
            "top_p": _encode_rational(self.top_p),
        }

    def encode(self) -> bytes:
        return encode_canonical(self.describe())


def sampler_from_parameters(
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    processors: tuple[tuple[str, Any], ...] = (),
) -> SamplerConfig:
    """Return the sampler of a request's doubles, with the engine's readings of the edge values.

    Temperature 0 is greedy and drops the filters, one under 0.01 is 0.01; ``top_k`` 0 and -1 are off.

    Raises:
        InvalidRequestError: a parameter is out of range or not finite.
    """
    for field, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        if not float("-inf") < value < float("inf"):
            raise InvalidRequestError(f"{field} {value} is not finite", field=field)
    config = _unprocessed_sampler(temperature, top_k, top_p, min_p)
    return replace(config, processors=processors) if processors else config


@lru_cache(maxsize=256, typed=True)  # a deployment's requests name few samplers, and rationals are slow to make
def _unprocessed_sampler(temperature: float, top_k: int, top_p: float, min_p: float) -> SamplerConfig:
    if temperature == 0:
        return SamplerConfig(temperature=Fraction(0))
    return SamplerConfig(
        temperature=Fraction(max(temperature, MIN_TEMPERATURE) if temperature > 0 else temperature),
        top_k=0 if top_k == -1 else top_k,
        top_p=Fraction(top_p),
        min_p=Fraction(min_p),
    )


def sampler_from_value(value: object) -> SamplerConfig:
    """Return the sampler a canonical value describes, strictly.

    Raises:
        EncodingError: the value is not what ``describe`` returns for any sampler of this recipe.
    """
    if not isinstance(value, dict) or set(value) != _KEYS:
        raise EncodingError("not a sampler: wrong keys", reason="sampler_keys")
    processors = value["processors"]
    well_formed = isinstance(processors, list) and all(
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in processors
    )
    if not well_formed or type(value["top_k"]) is not int:
        raise EncodingError("not a sampler: wrong types", reason="sampler_types")
    try:
        config = SamplerConfig(
            temperature=_decode_rational(value["temperature"]),
            top_k=value["top_k"],
            top_p=_decode_rational(value["top_p"]),
            min_p=_decode_rational(value["min_p"]),
            processors=tuple((name, item) for name, item in processors),
        )
    except InvalidRequestError as error:
        raise EncodingError(f"not a sampler: {error.message}", reason="sampler_range") from error
    if encode_canonical(value) != config.encode():
        raise EncodingError("not a sampler of this recipe: a derived field disagrees", reason="sampler_derived")
    return config


def decode_sampler(payload: bytes) -> SamplerConfig:
    """Return the sampler of canonical bytes, strictly.

    Raises:
        EncodingError: the bytes are not canonical, or not a sampler of this recipe.
    """
    return sampler_from_value(decode_canonical(payload))


def scale_from_temperature(temperature: Fraction) -> TemperatureScale:
    """Return the integer scale of a positive temperature: beta is rounded half to even."""
    factor = _LOG2_E / temperature
    shift = 30
    while factor * (1 << shift) >= 1 << 31:
        shift -= 1
    while factor * (1 << shift) < 1 << 30:
        shift += 1
    beta = round(factor * (1 << shift))
    if beta == 1 << 31:  # rounding may leave the range by one
        shift -= 1
        beta = round(factor * (1 << shift))
    return TemperatureScale(beta, shift)


def processor_entries(
    *,
    grammar: Digest | None = None,
    allowed_token_ids: list[int] | None = None,
    bad_words_token_ids: list[list[int]] | None = None,
    min_tokens: int = 0,
    min_tokens_stop_ids: list[int] | None = None,
    logit_bias: Mapping[int, float] | None = None,
    custom: tuple[tuple[str, Any], ...] = (),
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> tuple[tuple[str, Any], ...]:
    """Return the ``processors`` of a request, in the order the engine applies them; what changes nothing is absent.

    Long lists enter as digests, floats as exact rationals. ``custom`` names processors the operator installed.
    """
    entries: list[tuple[str, Any]] = []
    if grammar is not None:
        entries.append(("grammar", grammar))
    if allowed_token_ids:
        ids = sorted(set(allowed_token_ids))
        entries.append(("allowed_token_ids", digest("epochless/v1/token-ids", encode_canonical(ids))))
    if bad_words_token_ids:
        entries.append(("bad_words", digest("epochless/v1/bad-words", encode_canonical(bad_words_token_ids))))
    if min_tokens:
        entries.append(("min_tokens", [min_tokens, sorted(set(min_tokens_stop_ids or []))]))
    if logit_bias:
        entries.append(
            ("logit_bias", [[token, _encode_rational(Fraction(logit_bias[token]))] for token in sorted(logit_bias)])
        )
    entries.extend(custom)
    if (repetition_penalty, frequency_penalty, presence_penalty) != (1.0, 0.0, 0.0):
        penalties = (repetition_penalty, frequency_penalty, presence_penalty)
        entries.append(("penalties", [_encode_rational(Fraction(value)) for value in penalties]))
    return tuple(entries)


def _spell(value: Fraction) -> str:
    """Return a rational for a message: as a double where it is one, else its size."""
    try:
        return str(float(value))
    except OverflowError:  # a stranger's rational has up to 341 digits
        return f"of {len(str(abs(value.numerator) // value.denominator))} digits"


def _encode_rational(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


def _decode_rational(text: object) -> Fraction:
    matched = _RATIONAL.fullmatch(text) if isinstance(text, str) else None
    if not matched:
        raise EncodingError(f"not an exact rational: {str(text)[:40]!r}", reason="rational")
    return Fraction(int(matched[1]), int(matched[2]))
