"""Request bodies: what is taken, what is refused, and that a refusal names the field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import InvalidRequestError
from epochless_vllm.wire import (
    LoadAdapterRequest,
    PublishReply,
    PublishRequest,
    RequestOptions,
    UnloadAdapterRequest,
    decode_body,
    parse_request_options,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
BODIES = (LoadAdapterRequest, UnloadAdapterRequest, PublishRequest, RequestOptions)


def refusal_of(body_type: type, payload: bytes) -> InvalidRequestError | None:
    try:
        decode_body(body_type, payload)
    except InvalidRequestError as error:
        return error
    return None


@given(st.sampled_from(BODIES), st.binary(max_size=200))
def test_arbitrary_bytes_are_a_body_or_an_invalid_request(body_type: type, payload: bytes) -> None:
    error = refusal_of(body_type, payload)
    assert error is None or error.fields["field"]


@given(
    st.sampled_from(BODIES),
    st.dictionaries(
        st.sampled_from(["lora_name", "lora_path", "step", "path", "attest", "nonce", "on_publish", "x"]), JSON
    ),
)
def test_arbitrary_json_is_a_body_or_an_invalid_request(body_type: type, value: dict[str, object]) -> None:
    error = refusal_of(body_type, json.dumps(value).encode())
    assert error is None or error.message.startswith(error.fields["field"])


def test_extra_keys_of_other_servers_pass_on_the_stock_route_and_nowhere_else() -> None:
    stock = {"lora_name": "p", "lora_path": "/x", "base_model_name": "b", "lora_int_id": 7}
    assert decode_body(LoadAdapterRequest, json.dumps(stock).encode()).lora_name == "p"
    with pytest.raises(InvalidRequestError, match=r"stpe: is not a field of this request; known: path, step"):
        decode_body(PublishRequest, b'{"path": "/x", "stpe": 3}')


@pytest.mark.parametrize("step", [True, 1.0, "1", -1, 2**53, [], {}])
def test_a_step_is_an_integer_and_nothing_that_looks_like_one(step: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"step: must be an integer from 0 to 2\*\*53 - 1"):
        decode_body(PublishRequest, json.dumps({"path": "/x", "step": step}).encode())


def test_an_absent_options_field_is_no_options() -> None:
    assert parse_request_options(None) is None
    assert parse_request_options({}) == RequestOptions()


def test_what_this_release_does_not_serve_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="not available in this release") as raised:
        parse_request_options({"on_publish": "continue"})
    assert raised.value.fields["field"] == "epochless.on_publish"
    assert parse_request_options({"on_publish": "pin"}) == RequestOptions(on_publish="pin")


def test_a_reply_of_a_newer_server_is_read_with_its_new_fields() -> None:
    reply = PublishReply.model_validate(
        {
            "policy": "p",
            "lora_name": "p@sha256:0",
            "lora_int_id": 1,
            "weight_version": "sha256:0",
            "step": 1,
            "sequence": 1,
            "receipts": {},
            "signed_by": "k1",
        }
    )
    assert reply.model_dump()["signed_by"] == "k1"
