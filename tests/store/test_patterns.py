"""Module patterns against Python's own engine, used as PEFT uses it; and patterns written to be expensive."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from epochless_vllm.errors import AdapterConfigError
from epochless_vllm.store import patterns
from epochless_vllm.store.patterns import MAX_PATTERN_LENGTH, PatternSet

MODULES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.10.mlp.down_proj",
    "model.layers.3.mlp.gate_up_proj",
    "lm_head",
    "q_proj",
    "x.q_proj",
    "xq_proj",
    "a-b.c",
]


def peft_first_match(keys: Iterable[str], module: str) -> str | None:
    return next((key for key in keys if re.match(rf"(.*\.)?({key})$", module)), None)


def our_first_match(keys: Iterable[str], module: str) -> str | None:
    return PatternSet(keys, field="alpha_pattern").first_match(module)


@pytest.mark.parametrize(
    "key",
    [
        "q_proj",
        "self_attn.q_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0",
        "proj",
        "^lm_head",
        "^q_proj$",
        r"model\.layers\.0\.self_attn\.q_proj",
        r"^model\.layers\.10\.mlp\.down_proj",
        ".*",
        ".+",
        ".*q_proj",
        r"layers\.\d+\.self_attn\.q_proj",
        r"layers\.[0-2]\..*",
        r"(q|k|v)_proj",
        r".*\.(?:mlp|self_attn)\.(gate_up|down|q)_proj",
        r"layers\.(0|1)\.self_attn\.q_proj|lm_head",
        r"[^.]*q_proj",
        r"\w+_proj",
        r"x?q_proj",
        "",
        "...",
        "a-b.c",
        r"a\-b\.c",
    ],
)
def test_key_matches_the_modules_that_peft_matches(key: str) -> None:
    if not key:
        with pytest.raises(AdapterConfigError):
            our_first_match([key], "a")
        return
    assert [our_first_match([key], module) for module in MODULES] == [peft_first_match([key], m) for m in MODULES]


atoms = st.sampled_from([*"ab.0_", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[a-c0]", r"[\d.]"])


def with_more(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        inner.map(lambda body: f"(?:{body})"),
        st.tuples(inner.map(lambda body: f"({body})"), st.sampled_from(["*", "+", "?", "*?", "+?", "??"])).map("".join),
        st.tuples(atoms, st.sampled_from(["*", "+", "?"])).map("".join),
        inner.map(lambda body: f"^{body}"),
        inner.map(lambda body: f"{body}$"),
        st.tuples(inner, inner).map("|".join),
    )


keys = st.recursive(atoms, with_more, max_leaves=8)


@given(keys, st.text("ab.0_", max_size=9))
@example("(a|ab)(c|bcd)*", "abcd")
@example("(a*)*b", "aab")
@example("^a|b$", "a.b")
@example("a||b", "a.")
@example("(a$)?b$", "ab")
@example("a$b", "ab")
@example("a$.b", "a.b")
def test_any_supported_key_matches_exactly_when_peft_says_so(key: str, module: str) -> None:
    try:
        ours = our_first_match([key], module)
    except AdapterConfigError:
        assume(False)
    assert ours == peft_first_match([key], module)


@given(st.lists(keys, max_size=3), st.text("ab.0_", max_size=6))
def test_the_first_key_in_order_counts(listed: list[str], module: str) -> None:
    try:
        ours = our_first_match(listed, module)
    except AdapterConfigError:
        assume(False)
    assert ours == peft_first_match(listed, module)


@given(st.text(max_size=30))
@example("[")
@example("(" * 100)
@example("\\")
@example("(?")
@example("a{2}")
def test_any_text_is_a_key_or_a_configuration_error(key: str) -> None:
    try:
        ours = our_first_match([key], "model.layers.0.q_proj")
    except AdapterConfigError:
        return
    assert ours == peft_first_match([key], "model.layers.0.q_proj")


@pytest.mark.parametrize(
    "key",
    ["a**", "a+*", "a++", "*a", "(", ")", "(a", "a)", "[", "[]", "[a", "[z-a]", "a{1,}", r"\b", r"a\1", "(?=a)",
     "(?P<n>a)", "(?i)a", "\u00e9", "^*", "a" * (MAX_PATTERN_LENGTH + 1), "(" * 20 + "a" + ")" * 20],
)  # fmt: skip
def test_unsupported_syntax_is_refused_by_the_name_of_its_field(key: str) -> None:
    with pytest.raises(AdapterConfigError) as caught:
        PatternSet([key], field="rank_pattern")
    assert caught.value.fields["field"] == "rank_pattern"
    assert "name the modules in full" in caught.value.message


@pytest.mark.parametrize("key", ["(a+)+$b", "(a|a)*b", "(.*)*x", "(a|aa)+c", ".*.*.*.*.*x"])
def test_key_that_would_hold_a_backtracking_engine_for_hours_is_decided_within_the_budget(key: str) -> None:
    assert our_first_match([key], "a" * 500) is None


def test_key_list_that_costs_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_STEPS", 100_000)
    expensive = PatternSet([f".*{'a?' * 200}x{i}" for i in range(50)], field="alpha_pattern")
    modules = (f"{'a' * 400}.{index}" for index in range(1000))
    with pytest.raises(AdapterConfigError, match="too long to match"):
        list(map(expensive.first_match, modules))


@pytest.mark.parametrize("shape", ["model.layers.{0}.self_attn.{1}", r"^model\.layers\.{0}\.self_attn\.{1}"])
def test_pattern_for_each_of_nine_hundred_modules_is_within_the_budget(shape: str) -> None:
    modules = [(layer, target) for layer in range(128) for target in "qkvogud"]
    listed = [shape.format(layer, target) for layer, target in modules]
    ours = PatternSet(listed, field="rank_pattern")
    for key, (layer, target) in zip(listed, modules, strict=True):
        assert ours.first_match(f"model.layers.{layer}.self_attn.{target}") == key
