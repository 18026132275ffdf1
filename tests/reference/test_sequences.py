"""Whole sequences: greedy text equal to transformers', and mixtures of adapters replayed position by position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from epochless_vllm.errors import ReplayError
from epochless_vllm.reference.buffers import Limits
from epochless_vllm.reference.forward import Engine
from epochless_vllm.reference.lora import Adapter, adapter_from_directory
from epochless_vllm.reference.model import Model, load_model
from epochless_vllm.reference.sequences import generate_greedy, replay_mixture
from tests.reference.cases import SHAPES, make_tokens
from tests.reference.differential import collect, write_case

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

CASE = "gqa-2x"


@pytest.fixture(scope="module")
def model(case_directory: Path) -> Model:
    return load_model(write_case(case_directory, CASE, "none")[0])


@pytest.fixture(scope="module")
def adapters(case_directory: Path, model: Model) -> list[Adapter]:
    directories = [write_case(case_directory, CASE, axis)[1] for axis in ("alpha", "rslora")]
    return [adapter_from_directory(directory, model.config) for directory in directories if directory is not None]


@pytest.mark.parametrize(("shape", "axis"), [("full-context", "head"), ("qwen3", "alpha"), ("untied-cls", "alpha")])
def test_greedy_tokens_are_those_of_transformers(case_directory: Path, shape: str, axis: str) -> None:
    import torch

    from tests.reference.oracle import load_oracle

    directory, adapter = write_case(case_directory, shape, axis)
    prompt, count = make_tokens(SHAPES[shape])[:5], SHAPES[shape].positions - 5
    oracle = load_oracle(directory, adapter)
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = oracle.generate(torch.tensor([prompt]), **options)[0, 5:].tolist()  # type: ignore[operator]
    loaded = load_model(directory)
    factors = None if adapter is None else adapter_from_directory(adapter, loaded.config)
    engine = Engine(loaded, Limits(SHAPES[shape].positions))
    assert generate_greedy(engine, prompt, count, adapter=factors) == expected
    assert len(expected) == count
    assert len(set(expected)) > 5, "a constant text proves little"
    assert generate_greedy(engine, prompt, count, adapter=factors) == expected


def test_greedy_text_ends_with_its_stop_token(model: Model) -> None:
    engine = Engine(model, Limits(40))
    whole = generate_greedy(engine, [1, 2, 3], 20)
    stop = whole[7]
    first = whole.index(stop)
    assert generate_greedy(engine, [1, 2, 3], 20, stop={stop}) == whole[: first + 1]
    assert generate_greedy(engine, [1, 2, 3], 0) == []
    assert generate_greedy(engine, [1, 2, 3], 1) == whole[:1]
    with pytest.raises(ReplayError):
        generate_greedy(engine, [], 5)
    with pytest.raises(ReplayError):
        generate_greedy(engine, [1, 2, 3], 39)


def test_lowest_token_wins_a_tie(model: Model) -> None:
    engine = Engine(model, Limits(8))
    saved = model.norm.copy()
    model.norm[...] = 0
    try:
        assert generate_greedy(engine, [1, 2], 3) == [0, 0, 0]
    finally:
        model.norm[...] = saved


def test_mixture_of_equal_adapters_is_a_prefill(model: Model, adapters: list[Adapter]) -> None:
    tokens = make_tokens(SHAPES[CASE])
    each: list[Adapter | None] = [adapters[at // 13 % 2] for at in range(len(tokens))]
    engine = Engine(model, Limits(len(tokens), rows=9))
    plain = collect(engine.prefill(tokens, each))
    engine.rewind(0)
    assert np.array_equal(collect(replay_mixture(engine, tokens, each, each)), plain)


def test_sampled_adapter_changes_its_own_position_only(model: Model, adapters: list[Adapter]) -> None:
    tokens = make_tokens(SHAPES[CASE])
    cached: list[Adapter | None] = [adapters[0]] * len(tokens)
    sampled = list(cached)
    sampled[20] = adapters[1]
    engine = Engine(model, Limits(len(tokens), rows=9))
    plain = collect(engine.prefill(tokens, cached))
    engine.rewind(0)
    mixed = collect(replay_mixture(engine, tokens, cached, sampled))
    others = [at for at in range(len(tokens)) if at != 20]
    np.testing.assert_allclose(mixed[others], plain[others], atol=5e-5)
    assert np.abs(mixed[20] - plain[20]).max() > 1e-2


def test_mixture_gives_logits_from_the_position_asked_for(model: Model, adapters: list[Adapter]) -> None:
    tokens = make_tokens(SHAPES[CASE])
    cached: list[Adapter | None] = [adapters[0]] * len(tokens)
    sampled: list[Adapter | None] = [adapters[1] if at % 10 == 3 else adapters[0] for at in range(len(tokens))]
    engine = Engine(model, Limits(len(tokens), rows=9))
    whole = collect(replay_mixture(engine, tokens, cached, sampled))
    for wanted in (13, 14, 40):
        engine.rewind(0)
        found = collect(replay_mixture(engine, tokens, cached, sampled, logits_from=wanted), first=wanted)
        np.testing.assert_allclose(found, whole[wanted:], atol=5e-5)


def test_mixture_needs_both_adapters_for_each_token(model: Model) -> None:
    engine = Engine(model, Limits(8))
    with pytest.raises(ReplayError):
        list(replay_mixture(engine, [1, 2, 3], [None] * 3, [None] * 2))
