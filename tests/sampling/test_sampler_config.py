from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import EncodingError, InvalidRequestError
from epochless_vllm.protocol.canonical import encode_canonical
from epochless_vllm.protocol.digests import digest
from epochless_vllm.protocol.sampler_config import (
    SamplerConfig,
    decode_sampler,
    processor_entries,
    sampler_from_parameters,
    sampler_from_value,
    scale_from_temperature,
)
from epochless_vllm.reference.sampler_plain import _integer_temperature
from epochless_vllm.sampling.rows import parameter_row

TEMPERATURES = st.floats(0.01, 256, allow_nan=False)
UNIT = st.floats(0, 1, exclude_min=True, allow_nan=False)
CONFIGS = st.one_of(
    st.just(sampler_from_parameters(temperature=0)),
    st.builds(
        lambda temperature, top_k, top_p, min_p: sampler_from_parameters(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        ),
        TEMPERATURES,
        st.integers(0, 2**31 - 1),
        UNIT,
        st.one_of(st.just(0.0), UNIT),
    ),
)


@given(CONFIGS)
def test_a_sampler_survives_its_own_bytes(config: SamplerConfig) -> None:
    assert decode_sampler(config.encode()) == config
    assert sampler_from_value(config.describe()) == config


@given(CONFIGS, CONFIGS)
def test_samplers_have_equal_digests_exactly_when_they_are_equal(one: SamplerConfig, other: SamplerConfig) -> None:
    assert (one.digest == other.digest) == (one == other)


@given(TEMPERATURES)
def test_the_integer_temperature_is_the_nearest_in_31_bits(temperature: float) -> None:
    scale = scale_from_temperature(Fraction(temperature))
    assert 2**30 <= scale.beta < 2**31
    assert abs(scale.beta / 2**scale.shift * temperature / math.log2(math.e) - 1) < 2**-30
    assert (scale.beta, scale.shift) == _integer_temperature(Fraction(temperature))


@given(CONFIGS)
def test_a_kernel_row_holds_the_sampler(config: SamplerConfig) -> None:
    beta, shift, cap, top_k, top_p, top_p_shift, min_weight, greedy = map(int, parameter_row(config))
    assert greedy == config.greedy
    if not greedy:
        assert (beta, shift, top_k) == (config.scale.beta, config.scale.shift, config.top_k)
        nearest, before = ((d * beta + (1 << (shift - 1))) >> shift for d in (cap, cap - 1))
        assert before < 41 << 16 <= nearest  # the first distance of zero weight
        assert nearest >> 16 == 41  # and shifts by it stay under 64 bits
        assert Fraction(min_weight - 1, 2**40) < config.min_p <= Fraction(min_weight, 2**40)
    if config.top_p.denominator < 2**127:
        assert Fraction(top_p, 2**top_p_shift) == config.top_p


def test_the_bytes_of_a_sampler_are_those_of_format_one() -> None:
    config = sampler_from_parameters(
        temperature=0.5, top_k=40, top_p=0.75, min_p=0.125, processors=processor_entries(presence_penalty=0.5)
    )
    assert config.encode() == (
        b'{"beta":1549082005,"min_p":"1/8","processors":[["penalties",["1/1","0/1","1/2"]]],'
        b'"recipe":"epochless/sampler/v1","shift":29,'
        b'"tables":"sha256:e6b8a89ac13c866c611af092e901cf859689e2ef75bbfdacff3564a14a82b0e5",'
        b'"temperature":"1/2","top_k":40,"top_p":"3/4"}'
    )
    assert config.digest == digest("epochless/sampler/v1", config.encode())


def test_the_engines_readings_of_edge_values_are_ours() -> None:
    greedy = sampler_from_parameters(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1)
    assert greedy == SamplerConfig(temperature=Fraction(0))
    assert greedy.greedy
    assert sampler_from_parameters(temperature=1e-9).temperature == Fraction(0.01)
    assert sampler_from_parameters(temperature=1, top_k=-1) == sampler_from_parameters(temperature=1.0)
    assert not sampler_from_parameters(temperature=1).filtered
    for filters in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert sampler_from_parameters(temperature=1, **filters).filtered


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 256.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
        ({"temperature": 1.0, "top_p": math.nan}, "top_p"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p"),
        ({"temperature": 1.0, "min_p": 1.1}, "min_p"),
        ({"temperature": 1.0, "top_k": -2}, "top_k"),
        ({"temperature": 1.0, "top_k": 2**31}, "top_k"),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        sampler_from_parameters(**parameters)
    assert refusal.value.fields["field"] == field


@pytest.mark.parametrize(
    "change",
    [
        {"beta": 1549082004},
        {"shift": 28},
        {"shift": True},
        {"temperature": "2/4"},
        {"temperature": "1/3"},
        {"temperature": "0/1"},
        {"temperature": "01/2"},
        {"temperature": "1/0"},
        {"temperature": "1"},
        {"temperature": 1},
        {"temperature": "½/1"},
        {"top_p": "5/4"},
        {"top_p": "0/1"},
        {"min_p": "2/1"},
        {"top_k": -1},
        {"top_k": "40"},
        {"top_k": True},
        {"recipe": "epochless/sampler/v2"},
        {"tables": "sha256:" + "0" * 64},
        {"processors": {}},
        {"processors": [["penalties"]]},
        {"processors": [[1, 2]]},
        {"extra": 0},
    ],
)
def test_a_value_that_is_no_samplers_is_refused(change: dict[str, Any]) -> None:
    value = sampler_from_parameters(temperature=0.5, top_k=40, top_p=0.75, min_p=0.125).describe()
    with pytest.raises(EncodingError):
        sampler_from_value({**value, **change})
    with pytest.raises(EncodingError):
        decode_sampler(encode_canonical({**value, **change}))


def test_missing_fields_and_other_shapes_are_refused() -> None:
    value = sampler_from_parameters(temperature=0.5).describe()
    for key in value:
        with pytest.raises(EncodingError):
            sampler_from_value({name: item for name, item in value.items() if name != key})
    for other in (None, [], "sampler", 1):
        with pytest.raises(EncodingError):
            sampler_from_value(other)


def test_processors_enter_in_the_order_they_act_and_only_when_they_act() -> None:
    entries = processor_entries(
        grammar=digest("epochless/v1/grammar", b"{}"),
        allowed_token_ids=[3, 1, 3],
        bad_words_token_ids=[[1, 2]],
        min_tokens=4,
        min_tokens_stop_ids=[9, 2],
        logit_bias={7: -1.5, 3: 0.25},
        custom=(("my_module:Processor", {"strength": 2}),),
        repetition_penalty=1.25,
    )
    assert [name for name, _ in entries] == [
        "grammar", "allowed_token_ids", "bad_words", "min_tokens", "logit_bias", "my_module:Processor", "penalties"
    ]  # fmt: skip
    assert dict(entries)["min_tokens"] == [4, [2, 9]]
    assert dict(entries)["logit_bias"] == [[3, "1/4"], [7, "-3/2"]]
    assert dict(entries)["allowed_token_ids"] == dict(processor_entries(allowed_token_ids=[1, 3]))["allowed_token_ids"]
    assert processor_entries() == ()
    config = sampler_from_parameters(temperature=1, processors=entries)
    assert decode_sampler(config.encode()).encode() == config.encode()
    assert config.digest != sampler_from_parameters(temperature=1, processors=entries[1:]).digest


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
def test_a_rational_beyond_every_double_is_refused_by_its_own_error(field: str) -> None:
    value = sampler_from_parameters(temperature=1.0).describe()
    value[field] = "9" * 341 + "/1"
    with pytest.raises(EncodingError, match=f"{field} of 341 digits"):
        sampler_from_value(value)
