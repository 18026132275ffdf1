"""Names: policies, the engine's lora_name, and the model strings a request may use.

Pure text rules; whether a name refers to something is resolution.py's question.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from epochless_vllm.errors import InvalidRequestError
from epochless_vllm.protocol.manifest import RevisionId

MAX_STEP = (1 << 53) - 1
MIN_PREFIX = 12  # hexadecimal digits; 48 bits keep accidental ambiguity out of reach for any live set

_POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_VERSIONED = re.compile(r"(?P<policy>.+)-v(?P<step>0|[1-9][0-9]{0,15})")
_PINNED = re.compile(r"(?P<policy>[^@]+)@sha256:(?P<hex>[0-9a-f]{1,64})")
_STEPPED = re.compile(r"(?P<policy>[^@]+)@(?P<step>0|[1-9][0-9]{0,15})")


def parse_policy(text: object, *, field: str = "policy") -> str:
    """Return a valid policy name.

    Raises:
        InvalidRequestError: it is not 1-128 of letters, digits, ``. _ / -`` opening with a letter or digit, or has
            an empty, ``.`` or ``..`` path part.
    """
    if not isinstance(text, str) or not _POLICY.fullmatch(text):
        raise InvalidRequestError(
            f"{field}: {str(text)[:140]!r} is not a policy name; use 1-128 letters, digits, '.', '_', '/', '-', "
            "opening with a letter or digit",
            field=field,
        )
    if any(part in ("", ".", "..") for part in text.split("/")):
        raise InvalidRequestError(f"{field}: {text!r} has an empty or dotted path part", field=field)
    return text


def parse_step(value: object, *, field: str = "step") -> int:
    """Return a valid step, an integer from 0 to 2**53 - 1.

    Raises:
        InvalidRequestError: anything else, booleans and floats included.
    """
    if type(value) is not int or not 0 <= value <= MAX_STEP:
        raise InvalidRequestError(f"{field}: must be an integer from 0 to 2**53 - 1", field=field)
    return value


def split_versioned(text: str) -> tuple[str, int] | None:
    """Return (policy, step) of ``policy-v<digits>``, or None for another form."""
    match = _VERSIONED.fullmatch(text)
    return (match["policy"], int(match["step"])) if match else None


def lora_name_from(policy: str, revision_id: RevisionId) -> str:
    """Return the name a revision carries inside the engine: ``policy@sha256:<hex>``."""
    return f"{policy}@{revision_id}"


def split_lora_name(lora_name: str) -> tuple[str, RevisionId]:
    """Return (policy, revision_id) of a lora_name made by ``lora_name_from``.

    Raises:
        InvalidRequestError: the name was not made by this package.
    """
    match = _PINNED.fullmatch(lora_name)
    if match is None or len(match["hex"]) != 64:
        raise InvalidRequestError(
            f"lora_name: {lora_name[:200]!r} was not resolved by Epochless; obtain the LoRARequest from resolve()",
            field="lora_name",
        )
    return match["policy"], RevisionId("sha256:" + match["hex"])


@dataclass(frozen=True)
class ModelPin:
    """A model string that pins: ``hex_prefix`` of a revision, or an exact ``step``."""

    policy: str
    hex_prefix: str | None = None
    step: int | None = None


def parse_pin(text: str) -> ModelPin | None:
    """Return the pin a model string spells, or None when it spells none.

    Raises:
        InvalidRequestError: a digest prefix shorter than 12 digits.
    """
    if match := _PINNED.fullmatch(text):
        if len(match["hex"]) < MIN_PREFIX:
            raise InvalidRequestError(
                f"model: give at least {MIN_PREFIX} hexadecimal digits of the revision", field="model"
            )
        return ModelPin(match["policy"], hex_prefix=match["hex"])
    if match := _STEPPED.fullmatch(text):
        return ModelPin(match["policy"], step=int(match["step"]))
    if versioned := split_versioned(text):
        return ModelPin(versioned[0], step=versioned[1])
    return None
