"""Calls that could change weights behind publication's back are refused, with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epochless_vllm.errors import InvalidRequestError
from epochless_vllm.plugin import activation, control

ON = {"epochless": {"store": "/tmp"}}


@pytest.mark.parametrize("method", sorted(control.READING))
def test_calls_that_read_are_admitted(method: str) -> None:
    control.check_worker_call(method)


@pytest.mark.parametrize(
    "method",
    [
        "update_weights",
        "reload_weights",
        "load_model",
        "add_lora",
        "epochless_call",
        "apply_model",
        "x" * 9000,
        print,
        7,
    ],
)
def test_every_other_call_is_refused(method: object) -> None:
    with pytest.raises(InvalidRequestError, match="base digest") as raised:
        control.check_worker_call(method)
    assert raised.value.fields["field"] == "method"
    assert len(raised.value.message) < 500


def test_a_sleep_that_loses_the_base_model_is_refused() -> None:
    control.check_sleep(0)
    control.check_sleep(1)
    with pytest.raises(InvalidRequestError, match="level"):
        control.check_sleep(2)


@pytest.mark.parametrize("config", [ON, {}])
def test_only_a_deployment_with_epochless_checks(config: dict[str, Any]) -> None:
    calls: list[Any] = []
    client = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=config))
    call = control._checked_call(lambda self, *arguments, **keywords: calls.append((arguments, keywords)))
    sleep = control._checked_sleep(lambda self, *arguments, **keywords: calls.append((arguments, keywords)))
    if config:
        with pytest.raises(InvalidRequestError):
            call(client, "update_weights", kwargs={"update_info": {}})
        with pytest.raises(InvalidRequestError):
            sleep(client, level=2)
        assert calls == []
    else:
        call(client, "update_weights", kwargs={"update_info": {}})
        sleep(client, 2, "keep")
        assert calls == [(("update_weights",), {"kwargs": {"update_info": {}}}), ((2, "keep"), {})]


class Core:
    """An engine core whose executor notes what it activates."""

    def __init__(self) -> None:
        self.activated: list[list[int]] = []
        self.model_executor = SimpleNamespace(execute_model=lambda output, non_block: "ran")
        self.scheduler = SimpleNamespace(requests={})
        activation.guard_executor(self)

    def collective_rpc(self, method: str, args: tuple[list[int], list[int]]) -> list[dict[str, Any]]:
        fresh, in_step = args
        assert method == "epochless_activate"
        assert set(fresh) <= set(in_step)
        self.activated.append(fresh)
        return [{"rank": "engine0/rank0", "results": {str(i): {"ok": True} for i in fresh}}]

    def step(self, *running: int, new: tuple[int, ...] = ()) -> None:
        def request(adapter: int) -> Any:
            return SimpleNamespace(lora_request=SimpleNamespace(lora_int_id=adapter) if adapter else None)

        self.scheduler.requests = {str(n): request(adapter) for n, adapter in enumerate([*running, *new])}
        scheduled = dict.fromkeys(self.scheduler.requests, 1)
        fresh = [request(adapter) for adapter in new]
        output = SimpleNamespace(scheduled_new_reqs=fresh, num_scheduled_tokens=scheduled)
        assert self.model_executor.execute_model(output) == "ran"


@pytest.fixture
def core() -> Core:
    return Core()


def test_after_a_sleep_every_adapter_is_read_back_before_its_next_step(core: Core) -> None:
    core.step(new=(1, 2, 0))
    core.step(1, 2, 0)
    assert core.activated == [[1, 2]]
    activation.distrust_slots(core)
    core.step(1, 0)
    core.step(1, 0)
    assert core.activated == [[1, 2], [1]]
    core.step(1, 0, new=(2,))
    core.step(1, 2)
    assert core.activated == [[1, 2], [1], [2]]


def test_an_adapter_that_left_is_not_waited_for(core: Core) -> None:
    core.step(new=(1,))
    activation.distrust_slots(core)
    activation.forget_verified(core, 1)
    core.step(0)
    assert core.activated == [[1]]
