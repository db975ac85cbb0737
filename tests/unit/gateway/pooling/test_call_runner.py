"""A call for vectors is divided into batches.

The tests cover failures of batches, charges, and how long a call is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdmesh.core.request.events import LegAccepted, LegFailed, LegLost
from pdmesh.errors import Draining, EngineFailed, MeshError, NoInstance, Overloaded, PoisonRequest
from pdmesh.services.gateway.pooling import call_runner
from pdmesh.services.gateway.pooling.call_runner import CallerGone, CallRunner
from pdmesh.services.gateway.pooling.spec import PoolingAnswer, PoolingSpec
from tests.support.waiting import until
from tests.unit.gateway.pooling.shared import FakeFrontend, FakePermit, Said, answered, spec_of


class RunnerUnderTest:
    def __init__(self, script: Callable[[str, Any, int], Said]) -> None:
        self.frontend = FakeFrontend(script)
        self.shared = self.frontend.shared
        self.runner = CallRunner(self.frontend)  # type: ignore[arg-type]
        self.permit = FakePermit()
        self.leave: list[Callable[[], None]] = []

    def answered(self, spec: PoolingSpec) -> Any:
        self.permit = FakePermit()
        return self.runner.answered(spec, self.permit, "req-1", "", self.leave.append)  # type: ignore[arg-type]

    async def ask(self, spec: PoolingSpec) -> PoolingAnswer:
        async with self.answered(spec) as answer:
            assert isinstance(answer, PoolingAnswer)
            return answer


TWO_BATCHES = spec_of(16_000, 16_000)


async def test_a_call_is_open_until_its_answer_is_written() -> None:
    """While a client reads slowly, the answer still takes memory."""
    runner = RunnerUnderTest(lambda _, pool, key: answered(pool, key))
    async with runner.answered(spec_of(3, 4)) as answer:
        assert len(answer.vectors()) == 2
        assert len(runner.frontend.calls) == 1
        assert runner.runner.num_open_bytes == 4 * (2 * 4 + 7)
        assert (runner.permit.charged, runner.permit.used) == (7, 7)
    assert runner.frontend.calls == []
    assert runner.runner.num_open_bytes == 0


async def test_the_open_answers_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_runner, "MAX_OPEN_BYTES", 100)
    runner = RunnerUnderTest(lambda _, pool, key: answered(pool, key))
    async with runner.answered(spec_of(10)):
        with pytest.raises(Overloaded):
            await runner.ask(spec_of(10))
    await runner.ask(spec_of(10))


async def test_a_call_that_waits_for_its_charge_does_not_begin_at_a_gateway_that_drains() -> None:
    runner = RunnerUnderTest(lambda _, pool, key: answered(pool, key))
    asking = runner.answered(spec_of(3))

    async def drained() -> bool:
        runner.frontend.is_draining, runner.permit.is_refusing = True, False
        return True

    runner.permit.is_refusing = True
    runner.permit.has_more = drained  # type: ignore[method-assign]
    with pytest.raises(Draining):
        await asking.__aenter__()
    assert (runner.permit.charged, runner.frontend.calls, runner.shared.asked) == (0, [], [])
    assert runner.runner.num_open_bytes == 0


async def test_numbers_that_are_not_finite_are_no_answer() -> None:
    def script(instance_id: str, pool: Any, key: int) -> Said:
        return answered(pool, key, float("nan") if instance_id == "a" else 2.0)

    runner = RunnerUnderTest(script)
    answer = await runner.ask(spec_of(3))
    assert [i for i, _ in runner.shared.asked] == ["a", "b"]
    assert set(answer.vectors()[0].cast("f")) == {2.0}
    runner.shared.instance_ids = ["a"]
    runner.shared.budget = runner.shared.budget.__class__(reserve=0.5)
    with pytest.raises(EngineFailed):
        await runner.ask(spec_of(3))


async def test_inputs_that_two_engines_die_of_are_refused_next_time() -> None:
    """It makes no difference whether the instance can still report the death of its engine."""

    def script(instance_id: str, pool: Any, key: int) -> Said:
        died = LegFailed(key, EngineFailed("x", reason="ENGINE_DIED"))
        return [(LegAccepted(key), None), (died, None)]

    runner = RunnerUnderTest(script)
    for _ in range(2):
        with pytest.raises(PoisonRequest):
            await runner.ask(spec_of(3))
    assert [i for i, _ in runner.shared.asked] == ["a", "b"]


async def test_deaths_under_several_batches_of_a_call_are_not_added_up() -> None:
    """Each batch saw the death of another instance. One death per batch does not make the inputs
    poison.
    """
    victims = {1: "a", 2: "b"}

    def script(instance_id: str, pool: Any, key: int) -> Said:
        if victims.pop(pool.inputs[0][0], ""):
            return [(LegAccepted(key), None), (LegLost(key), None)]
        return [(LegAccepted(key), None), (LegFailed(key, MeshError("no"), False), None)]

    runner = RunnerUnderTest(script)
    for _ in range(2):
        with pytest.raises(MeshError) as caught:
            await runner.ask(TWO_BATCHES)
        assert not isinstance(caught.value, PoisonRequest)


async def test_an_answered_batch_is_not_to_blame_though_its_call_failed() -> None:
    deaths = iter(["a"])

    def script(instance_id: str, pool: Any, key: int) -> Said:
        if pool.inputs[0][0] == 1:
            return [(LegLost(key), None)] if next(deaths, "") else answered(pool, key)
        return (
            [] if len(runner.shared.asked) < 3 else [(LegFailed(key, MeshError("no"), False), None)]
        )

    runner = RunnerUnderTest(script)
    call = asyncio.create_task(runner.ask(TWO_BATCHES))
    await until(lambda: runner.shared.num_told == 3)
    runner.frontend.calls[0].cancel(Overloaded("enough"))
    with pytest.raises(Overloaded):
        await call
    assert not runner.shared.poison


async def test_a_client_that_leaves_pays_for_what_was_begun() -> None:
    """Otherwise a client could leave just before each answer and never pay."""

    def script(instance_id: str, pool: Any, key: int) -> Said:
        return [(LegAccepted(key), None)] if pool.inputs[0][0] == 1 else []

    runner = RunnerUnderTest(script)
    call = asyncio.create_task(runner.ask(TWO_BATCHES))
    await until(lambda: len(runner.shared.asked) == 2)
    runner.leave[0]()
    with pytest.raises(CallerGone):
        await call
    assert (runner.permit.charged, runner.permit.used) == (32_000, 16_000)
    assert runner.shared.num_aborts == 2
    assert [event.outcome for event in runner.frontend.events] == ["cancelled"]


async def test_a_call_that_fails_costs_nothing() -> None:
    runner = RunnerUnderTest(lambda _, pool, key: [(LegFailed(key, MeshError("no"), False), None)])
    with pytest.raises(MeshError):
        await runner.ask(spec_of(3))
    assert runner.permit.used == 0


async def test_all_inputs_of_a_call_are_computed_by_one_revision_of_the_model() -> None:
    """Vectors of two revisions cannot be compared. If the model is replaced, all inputs are
    computed again.
    """
    revisions: list[tuple[int, str]] = []

    def script(instance_id: str, pool: Any, key: int) -> Said:
        first = pool.inputs[0][0]
        revisions.append((first, runner.shared.fingerprint))
        if first == 2 and runner.shared.fingerprint == "new":
            runner.shared.fingerprint = "newer"
            return [(LegAccepted(key), None), (LegLost(key), None)]
        return answered(pool, key)

    runner = RunnerUnderTest(script)
    await runner.ask(TWO_BATCHES)
    assert revisions == [(1, "new"), (2, "new"), (1, "newer"), (2, "newer")]
    assert runner.permit.used == 32_000


async def test_a_model_that_is_replaced_again_and_again_ends_the_call() -> None:
    def script(instance_id: str, pool: Any, key: int) -> Said:
        runner.shared.fingerprint += "er"
        return [(LegAccepted(key), None), (LegLost(key), None)]

    runner = RunnerUnderTest(script)
    with pytest.raises(NoInstance):
        await runner.ask(spec_of(3))
    assert len(runner.shared.asked) == 3
