"""Names: what is a policy, a step, a pin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochless_vllm.errors import InvalidRequestError
from epochless_vllm.protocol.manifest import RevisionId
from epochless_vllm.protocol.names import (
    MAX_STEP,
    ModelPin,
    lora_name_from,
    parse_pin,
    parse_policy,
    parse_step,
    split_lora_name,
    split_versioned,
)

HEX = "0123456789abcdef" * 4
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"


@pytest.mark.parametrize("name", ["a", "0", "policy", "team/run-3.1_x", "a" * 128, "p-v3", "A.b", "v..1"])
def test_policy_names_of_the_alphabet_are_taken(name: str) -> None:
    assert parse_policy(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 129,
        "-a",
        ".a",
        "/a",
        "_a",
        "a//b",
        "a/",
        "a/..",
        "a/./b",
        "a b",
        "a@b",
        "a\n",
        "a\0",
        "ä",
        "a:b",
        "a\\b",
        None,
        3,
        b"a",
        ["a"],
        True,
    ],
)
def test_other_policy_names_are_refused_naming_the_field(name: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_policy(name, field="lora_name")
    assert caught.value.fields["field"] == "lora_name"


@given(st.text(max_size=140))
def test_policy_names_follow_the_alphabet_exactly(name: str) -> None:
    inside = all(c in LETTERS + DIGITS + "._/-" for c in name) and name[:1] in tuple(LETTERS + DIGITS)
    expected = 1 <= len(name) <= 128 and inside and not {"", ".", ".."} & set(name.split("/"))
    try:
        parse_policy(name)
        accepted = True
    except InvalidRequestError:
        accepted = False
    assert accepted == expected


@pytest.mark.parametrize("value", [0, 1, MAX_STEP])
def test_steps_are_exact_json_integers(value: int) -> None:
    assert parse_step(value) == value


@pytest.mark.parametrize("value", [-1, MAX_STEP + 1, 1.0, "1", True, None, [1], float("nan")])
def test_other_steps_are_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError):
        parse_step(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p-v3", ("p", 3)),
        ("p-v0", ("p", 0)),
        ("a-v1-v2", ("a-v1", 2)),
        ("p-v03", None),
        ("p-v", None),
        ("p-vx", None),
        ("p-v-1", None),
        ("-v3", None),
        ("p-v12345678901234567", None),
        ("p-v3\n", None),
        ("p-v٣", None),
    ],
)
def test_versioned_names_split_at_the_last_version(text: str, expected: tuple[str, int] | None) -> None:
    assert split_versioned(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"p@sha256:{HEX}", ModelPin("p", hex_prefix=HEX)),
        (f"p@sha256:{HEX[:12]}", ModelPin("p", hex_prefix=HEX[:12])),
        ("p@7", ModelPin("p", step=7)),
        ("p-v7", ModelPin("p", step=7)),
        ("p@7-v8", ModelPin("p@7", step=8)),
        ("p", None),
        ("p@", None),
        ("p@07", None),
        (f"p@sha256:{HEX}0", None),
        (f"p@sha256:{HEX[:12].upper()}", None),
        (f"p@sha512:{HEX}", None),
        (f"@sha256:{HEX}", None),
        ("", None),
    ],
)
def test_pins_are_read_from_model_strings(text: str, expected: ModelPin | None) -> None:
    assert parse_pin(text) == expected


def test_pin_of_fewer_than_twelve_digits_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="12"):
        parse_pin(f"p@sha256:{HEX[:11]}")


@given(st.text())
def test_any_model_string_is_a_pin_none_or_refused(text: str) -> None:
    try:
        pin = parse_pin(text)
    except InvalidRequestError:
        return
    assert pin is None or (pin.step is None) != (pin.hex_prefix is None)


def test_lora_names_carry_the_whole_revision() -> None:
    revision_id = RevisionId("sha256:" + HEX)
    assert lora_name_from("team/p", revision_id) == f"team/p@sha256:{HEX}"
    assert split_lora_name(f"team/p@sha256:{HEX}") == ("team/p", revision_id)


@pytest.mark.parametrize("text", ["p", "p@3", f"p@sha256:{HEX[:63]}", f"p@sha256:{HEX}x", f"sha256:{HEX}", ""])
def test_lora_names_made_by_hand_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="resolve"):
        split_lora_name(text)
