"""When more revisions are asked for than a step has slots for, on vLLM's own scheduler without a model behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epochless_vllm.plugin import fairness
from tests.plugin.schedulers import Arrival, Life, Simulation, make_config
from tests.tiny_model import make_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = tmp_path_factory.mktemp("model")
    make_model(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        fairness.install()
        fairness.install()
        yield make_config(model)


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler as vLLM has it: nothing is held back."""
    monkeypatch.setattr(fairness, "choose_held", lambda *arguments: ([], []))


# One adapter never stops arriving; another asks once.
STREAM = [Arrival(step, 1, 8) for step in range(0, 200, 4)]
ONE = Arrival(5, 2, 4)


def begun(lives: list[Life], arrival: Arrival) -> int:
    (life,) = [life for life in lives if life.arrival == arrival]
    assert life.begun is not None
    return life.begun


def test_stock_starves_a_revision_without_a_slot(config: Any, stock: None) -> None:
    assert begun(Simulation(config, slots=1, seats=8).run([*STREAM, ONE]), ONE) > 200


def test_a_revision_without_a_slot_waits_for_what_ran_when_it_came(config: Any) -> None:
    # The last that ran then arrived at 4 and ended at 11.
    assert begun(Simulation(config, slots=1, seats=8).run([*STREAM, ONE]), ONE) == 12


def test_only_as_many_adapters_drain_as_are_waited_for(config: Any) -> None:
    streams = [Arrival(step, adapter, 6) for step in range(0, 60, 3) for adapter in (1, 2, 3)]
    late = Arrival(10, 4, 3)
    lives = Simulation(config, slots=3, seats=16).run([*streams, late])
    assert begun(lives, late) <= 16
    waited = {life.arrival.adapter for life in lives if life.arrival.step == 12 and life.begun != 12}
    assert len(waited) == 1


def test_interleaved_arrivals_still_run_in_batches(config: Any) -> None:
    arrivals = [Arrival(0, adapter, 10) for _ in range(8) for adapter in (1, 2, 3)]
    lives = Simulation(config, slots=1, seats=16).run(arrivals)
    assert max(life.ended or 0 for life in lives) == 29  # three turns of ten steps


def test_requests_of_the_base_model_are_never_held_back(config: Any) -> None:
    base = [Arrival(step, 0, 3) for step in range(0, 40, 2)]
    lives = Simulation(config, slots=1, seats=16).run([*STREAM[:10], ONE, *base])
    assert all(life.begun == life.arrival.step for life in lives if life.arrival.adapter == 0)


def test_a_request_that_is_aborted_while_it_waits_lets_the_others_go_on(config: Any) -> None:
    from vllm.v1.request import RequestStatus

    simulation = Simulation(config, slots=1, seats=8)
    scheduler = simulation.scheduler
    simulation.add(Arrival(0, 1, 50))
    simulation.step(0)
    simulation.add(Arrival(1, 2, 4))
    simulation.step(1)
    simulation.add(Arrival(2, 1, 4))
    simulation.step(2)
    assert simulation.lives["2"].begun is None
    scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    simulation.step(3)
    assert simulation.lives["2"].begun == 3
    assert set(fairness.in_use(scheduler)) == {1}


def test_nothing_is_looked_at_while_the_adapters_fit(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(fairness, "choose_held", fail)
    simulation = Simulation(config, slots=2, seats=2)
    simulation.run([Arrival(step, step % 3, 5) for step in range(20)])  # adapters 1 and 2, and the base model
    assert not fairness.in_use(simulation.scheduler)


arrivals = st.lists(st.builds(Arrival, st.integers(0, 40), st.integers(0, 5), st.integers(1, 9)), max_size=60)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals, st.integers(1, 3), st.integers(1, 8), st.sampled_from(["fcfs", "priority"]))
def test_who_finds_nobody_waiting_waits_for_those_who_ran_and_nobody_waits_for_ever(
    config: Any, arrivals: list[Arrival], slots: int, seats: int, policy: str
) -> None:
    lives = Simulation(config, slots=slots, seats=seats, policy=policy).run(arrivals)
    for life in lives:
        assert life.begun is not None
        if not life.waiting:
            latest = max((lives[other].ended or 0 for other in life.running), default=life.arrival.step - 1)
            assert life.begun <= max(latest + 1, life.arrival.step)
        # Turns ahead: each request before it, and each adapter's turn between, once.
        ahead = len(life.waiting) + len(life.running) + 1
        assert life.begun - life.arrival.step <= 10 * 2 * ahead
