"""Seam: the key material of a request's draws, on its way from the front end to the ranks.

``SamplingParams.extra_args["epochless"]`` is the contract: ``seed`` (an int the client named, or 64 hexadecimal digits
drawn for this request), ``nonce``, ``request`` (the request id the client sees), ``prompt`` and ``choice`` (indices).
What is absent is filled where vLLM turns a prompt into a request, once for all choices, and again as a backstop where
an engine core takes it in; what a front end filled before stays. vLLM's own ``seed`` is emptied: it would make a
``torch.Generator`` per request, whose stream moves with preemption, and whose rewind on CPU ends the engine. Dies when
upstream draws by key and position.

Knows no logits: see attestation.py. Does not know what a client may choose of it: the front end overwrites that.
"""

from __future__ import annotations

import re
import secrets
from copy import copy
from typing import Any

from epochless_vllm.errors import InvalidRequestError, SeamError
from epochless_vllm.plugin.options import KEY, options_of
from epochless_vllm.protocol.draws import REQUEST_SEED_BYTES, DrawKey, seeded_key, unseeded_key
from epochless_vllm.protocol.sampler_config import SamplerConfig, sampler_from_parameters

FIELDS = ("seed", "nonce", "request", "prompt", "choice")
MAX_SEED = (1 << 63) - 1  # what a receipt can reveal

_HEX_SEED = re.compile(rf"[0-9a-f]{{{2 * REQUEST_SEED_BYTES}}}")


def draw_request_seed() -> str:
    """Return a fresh seed of a request whose client named none, as the contract carries it."""
    return secrets.token_hex(REQUEST_SEED_BYTES)


def material_of(params: Any) -> dict[str, Any]:
    """Return what a request's SamplingParams carry of the contract so far; do not write to it.

    Raises:
        InvalidRequestError: it is malformed.
    """
    material = (params.extra_args or {}).get(KEY)
    if material is None:
        return {}
    if not isinstance(material, dict):
        raise _refusal("", f"is an object with the keys {', '.join(FIELDS)}")
    for name, value in material.items():
        _check(name, value)
    return material


def set_material(params: Any, **fields: Any) -> None:
    """Set fields of the contract on SamplingParams that this request owns, and empty vLLM's own seed.

    The dictionaries are replaced, never written to: a clone of the parameters shares them.
    """
    params.extra_args = {**(params.extra_args or {}), KEY: {**material_of(params), **fields}}
    params.seed = None
    params.__dict__.pop("sampling_type", None)  # a cached reading of the seed


def fill_material(params: Any, request_id: str) -> None:
    """Fill the absent fields of the contract on SamplingParams that this request owns.

    Args:
        request_id: the id its client sees, used where the front end named none.

    Raises:
        InvalidRequestError: a field that is present, or the client's seed, is malformed.
    """
    material = material_of(params)
    seed = draw_request_seed() if params.seed is None else params.seed
    defaults = {"seed": seed, "nonce": "", "request": request_id, "prompt": 0, "choice": 0}
    for name, value in defaults.items():
        _check(name, value)
    set_material(params, **{**defaults, **material})


def key_of(params: Any) -> DrawKey:
    """Return the draw key of a request whose contract is filled.

    Raises:
        InvalidRequestError: a field is missing or malformed.
    """
    material = material_of(params)
    for name in FIELDS:
        if name not in material:
            raise _refusal(name, "is missing: the request did not pass the engine core's gate")
    indices = {"prompt_index": material["prompt"], "choice_index": material["choice"]}
    if isinstance(material["seed"], int):
        return seeded_key(seed=material["seed"], **indices)
    return unseeded_key(
        request_seed=bytes.fromhex(material["seed"]),
        client_nonce=material["nonce"].encode("ascii"),
        external_request_id=material["request"],
        **indices,
    )


def sampler_of(params: Any) -> SamplerConfig:
    """Return the sampler of a request's parameters, its logits processors left out: they change no draw.

    Raises:
        InvalidRequestError: a parameter is outside what the exact sampler takes; names it.
    """
    return sampler_from_parameters(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )


def prepare_request(request: Any) -> None:
    """Check an EngineCoreRequest's sampling and fill its contract; a second call changes nothing.

    Raises:
        InvalidRequestError: its draws could not be made, or not be told apart.
    """
    if request.sampling_params is None:  # pooling
        return
    if request.resumable:
        raise InvalidRequestError(
            "streaming input is refused while Epochless is on: each part would draw from the same positions again; "
            "send the whole prompt",
            field="prompt",
        )
    sampler_of(request.sampling_params)
    fill_material(request.sampling_params, request.external_req_id or request.request_id)


def _check(name: str, value: object) -> None:
    if name not in FIELDS:
        raise _refusal(name, f"is unknown; the keys are {', '.join(FIELDS)}")
    if name == "seed":
        named = type(value) is int and -MAX_SEED - 1 <= value <= MAX_SEED
        if not named and not (isinstance(value, str) and _HEX_SEED.fullmatch(value)):
            raise _refusal(name, f"is a 64-bit integer or {2 * REQUEST_SEED_BYTES} hexadecimal digits")
    elif name in ("prompt", "choice"):
        if type(value) is not int or value < 0:
            raise _refusal(name, "is an index from 0")
    elif not isinstance(value, str) or (name == "nonce" and not value.isascii()):
        raise _refusal(name, "is text, and a nonce is ASCII")


def _refusal(name: str, detail: str) -> InvalidRequestError:
    field = f"extra_args.{KEY}" + (f".{name}" if name else "")
    return InvalidRequestError(f"{field}: {detail}", field=field)


def install() -> None:
    """Wrap what makes requests of prompts, of choices, and what takes them into an engine core.

    Raises:
        SeamError: a target is missing.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    targets = {
        (InputProcessor, "process_inputs"): _wrap_processing,
        (ParentRequest, "_get_child_sampling_params"): _wrap_children,
        (EngineCore, "preprocess_add_request"): _wrap_entry,
    }
    for (owner, name), wrap in targets.items():
        original = vars(owner).get(name)
        if original is None:
            raise SeamError(f"{owner.__name__} has no {name}", target=name)
        if not getattr(original, "_epochless_draws", False):
            wrapper = wrap(original)
            wrapper._epochless_draws = True
            setattr(owner, name, wrapper)


def _wrap_processing(original: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    def process_inputs(self: Any, *arguments: Any, **keywords: Any) -> Any:
        request = original(self, *arguments, **keywords)
        if options_of(self.vllm_config.additional_config) is not None:
            try:
                prepare_request(request)
            except InvalidRequestError as error:  # the engine's streams answer 400 for vLLM's own kind alone
                raise VLLMValidationError(error.message, parameter=error.fields["field"]) from error
        return request

    return process_inputs


def _wrap_entry(original: Any) -> Any:
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if options_of(self.vllm_config.additional_config) is not None:
            prepare_request(request)
        return original(self, request)

    return preprocess_add_request


def _wrap_children(original: Any) -> Any:
    """One seed for all choices of a request, told apart by their index; vLLM counts the seed up instead."""

    def _get_child_sampling_params(self: Any, index: int) -> Any:
        if not material_of(self.sampling_params):  # an engine without Epochless
            return original(self, index)
        child = copy(self.sampling_params)
        child.n = 1
        set_material(child, choice=index)
        return child

    return _get_child_sampling_params
