"""The key material of draws: what a request carries, what is filled in, and which key that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.errors import InvalidRequestError
from epochless_vllm.plugin import draw_keys
from epochless_vllm.plugin.draw_keys import fill_material, key_of, material_of, prepare_request, set_material
from tests.plugin.draws import seeded, unseeded

pytest.importorskip("vllm.sampling_params")

HEX = "ab" * 32


def parameters(**fields: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**fields)


def request(params: Any, **fields: Any) -> Any:
    values = {"sampling_params": params, "request_id": "r-x1", "external_req_id": "r", "resumable": False}
    return SimpleNamespace(**{**values, **fields})


def test_a_client_seed_gives_the_seeded_key_whatever_the_request_id() -> None:
    keys = []
    for name in ("a", "b"):
        params = parameters(seed=7)
        prepare_request(request(params, external_req_id=name))
        assert params.seed is None
        keys.append(key_of(params))
    assert keys[0] == keys[1] == seeded(7)


def test_without_a_seed_every_request_draws_its_own_and_all_of_the_contract_is_in_the_key() -> None:
    filled = {"seed": HEX, "nonce": "n", "request": "r", "prompt": 2, "choice": 1}
    expected = unseeded(filled)
    assert key_of(parameters(extra_args={"epochless": filled})) == expected
    for name, other in (("seed", "cd" * 32), ("nonce", "m"), ("request", "q"), ("prompt", 3), ("choice", 0)):
        assert key_of(parameters(extra_args={"epochless": {**filled, name: other}})) != expected
    one, two = parameters(), parameters()
    for params in (one, two):
        fill_material(params, "r")
    assert key_of(one) != key_of(two)


def test_what_a_front_end_filled_stays_and_a_second_filling_changes_nothing() -> None:
    params = parameters(seed=3, extra_args={"epochless": {"nonce": "n", "prompt": 4}, "other": 1})
    fill_material(params, "r")
    material = material_of(params)
    assert material == {"seed": 3, "nonce": "n", "request": "r", "prompt": 4, "choice": 0}
    assert params.extra_args["other"] == 1
    prepare_request(request(params, external_req_id="another"))
    assert material_of(params) == material


def test_the_request_is_named_as_its_client_sees_it() -> None:
    for named, wanted in (("r", "r"), (None, "r-x1")):
        params = parameters()
        prepare_request(request(params, external_req_id=named))
        assert material_of(params)["request"] == wanted


def test_no_generator_is_made_even_if_the_kind_of_sampling_was_already_read() -> None:
    from vllm.sampling_params import SamplingType

    params = parameters(seed=3)
    assert params.sampling_type is SamplingType.RANDOM_SEED
    fill_material(params, "r")
    assert params.sampling_type is SamplingType.RANDOM


def test_choices_share_the_seed_and_differ_in_their_index() -> None:
    from vllm.v1.engine.parallel_sampling import ParentRequest

    draw_keys.install()
    for seed in (5, None):
        params = parameters(n=3, seed=seed)
        prepare_request(request(params))
        parent = ParentRequest(SimpleNamespace(request_id="r-x1", external_req_id="r", params=params))  # type: ignore[arg-type]
        children = [parent.get_child_info(index)[1] for index in range(3)]
        materials = [dict(material_of(child)) for child in children]
        assert [m.pop("choice") for m in materials] == [0, 1, 2]
        assert materials[0] == materials[1] == materials[2]
        assert all(child.n == 1 and child.seed is None for child in children)
        assert len({key_of(child) for child in children}) == 3
        assert material_of(params)["choice"] == 0


def test_choices_of_an_engine_without_epochless_are_left_to_vllm() -> None:
    from vllm.v1.engine.parallel_sampling import ParentRequest

    draw_keys.install()
    params = parameters(n=2, seed=5)
    parent = ParentRequest(SimpleNamespace(request_id="r-x1", external_req_id="r", params=params))  # type: ignore[arg-type]
    assert [parent.get_child_info(index)[1].seed for index in range(2)] == [5, 6]


@pytest.mark.parametrize(
    "material",
    [
        "text",
        {"seed": True},
        {"seed": "ab"},
        {"seed": HEX.upper()},
        {"seed": 1 << 63},
        {"nonce": 3},
        {"nonce": "\N{GREEK SMALL LETTER ALPHA}"},
        {"request": None},
        {"prompt": -1},
        {"choice": "0"},
        {"other": 1},
        {"other": "text"},
    ],
)
def test_malformed_material_is_refused_by_its_name(material: object) -> None:
    params = parameters(extra_args={"epochless": material})
    with pytest.raises(InvalidRequestError, match=r"extra_args\.epochless"):
        prepare_request(request(params))


def test_a_request_that_passed_no_gate_has_no_key() -> None:
    with pytest.raises(InvalidRequestError, match="missing"):
        key_of(parameters())


def test_streaming_input_and_samplers_outside_the_recipe_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="streaming input"):
        prepare_request(request(parameters(), resumable=True))
    outside = parameters()
    outside.temperature = 300.0
    with pytest.raises(InvalidRequestError, match="temperature"):
        prepare_request(request(outside))
    prepare_request(request(None))


def test_parameters_shared_with_a_caller_are_not_written_through() -> None:
    theirs = {"epochless": {"nonce": "n"}}
    params = parameters(extra_args=theirs)
    set_material(params, choice=2)
    assert theirs == {"epochless": {"nonce": "n"}}
