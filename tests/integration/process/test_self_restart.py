"""Tests how an instance watches its own engine. A step of any length counts as work. But the
instance must give up an engine that stands still (S33).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, cast

import pytest

from pdmesh import failpoints
from pdmesh.core.instance.engine_watchdog import EngineWatchdog
from pdmesh.engine.base import Sampling
from pdmesh.errors import EngineFailed
from pdmesh.events.v1.events_pb2 import FaultReport, InstanceHealth
from pdmesh.instance.incarnation.self_restart import RestartVerdict, Watchdog
from pdmesh.net.grpc.canary_call import Canary, CanaryFailed, CanaryRefused
from pdmesh.net.nats.board import Board
from pdmesh.v1.common_pb2 import InstanceRecord
from tests.fakes.kv.memory_transport import MemoryTransport
from tests.fakes.sim_instances import FUSION, SimInstance, TestSession, sim_instance
from tests.support.sites.sim_pair import prompt_of

pytestmark = [pytest.mark.req("S33"), pytest.mark.fault("F4")]

HUNG_S = 2.0


class EmptyBoard:
    """A board without any fault report."""

    def watch(self, on_change: object) -> EmptyBoard:
        return self

    async def close(self) -> None: ...


def watchdog(instance: SimInstance) -> Watchdog:
    return Watchdog(
        instance.host,
        EngineWatchdog(slow_s=HUNG_S / 2, hung_s=HUNG_S),
        RestartVerdict(
            cast(Board[FaultReport], EmptyBoard()),
            instance.settings.instance_id,
            instance.settings.incarnation,
        ),
        say_now=lambda: None,
    )


async def test_an_engine_with_a_step_longer_than_the_bound_is_not_given_up() -> None:
    """A step for 200 tokens at 39 tokens/s takes more than twice the bound. The engine answers no
    ping during the step.
    """
    sampling = Sampling(max_tokens=1)
    async with sim_instance("f", FUSION, MemoryTransport, sim_law="slow-cpu") as f:
        dog = watchdog(f)
        watching = asyncio.create_task(dog.run())
        async with TestSession(f) as to_f:
            leg = await to_f.prefill(prompt_of(200), sampling, is_local=True)
            await leg.until("accepted")
            while not leg.has("first_token", "failed"):
                health = InstanceHealth()
                dog.describe(health)
                assert not health.signals, "the instance is not even suspected"
                assert not watching.done(), watching.exception()
                await asyncio.sleep(0.05)
        assert leg.has("first_token")
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


@pytest.fixture
def hang() -> Iterator[Any]:
    yield failpoints.arm
    failpoints.arm("")


async def test_an_engine_that_hangs_is_given_up_and_its_legs_fail(hang: Any) -> None:
    async with sim_instance("f", FUSION, MemoryTransport, sim_law="demo") as f:
        watching = asyncio.create_task(watchdog(f).run())
        async with TestSession(f) as to_f:
            hang("engine.step=hang@1+")
            leg = await to_f.prefill(prompt_of(20), Sampling(max_tokens=9), is_local=True)
            failed = await leg.until("failed")
        assert failed.reason == "ENGINE_DIED"
        with pytest.raises(EngineFailed):
            await watching


def canary_to(instance: SimInstance, timeout_s: float) -> Canary:
    record = InstanceRecord(
        instance_id=instance.settings.instance_id,
        incarnation=instance.settings.incarnation,
        grpc_address=instance.address,
    )
    return Canary(record, None, "monitor-0", timeout_s)


async def test_a_canary_that_waits_behind_real_work_does_not_count_against_the_instance() -> None:
    """A canary is a small request that the health-monitor sends to an idle instance. Real work came
    after the monitor had chosen this instance.

    On a slow engine, a canary of eight tokens behind a prompt of two hundred is late. It must count
    as refused, and not as failed.
    """
    async with sim_instance("f", FUSION, MemoryTransport, sim_law="slow-cpu") as f:
        async with TestSession(f) as to_f:
            leg = await to_f.prefill(prompt_of(200), Sampling(max_tokens=1), is_local=True)
            await leg.until("accepted")
            with pytest.raises(CanaryRefused):
                await canary_to(f, timeout_s=2.5).send()
            assert not leg.has("first_token"), "the real work was ahead of the canary all the time"
            await leg.until("first_token")
        await f.until_idle()


async def test_a_canary_at_a_hung_engine_fails_even_if_other_requests_wait(hang: Any) -> None:
    async with (
        sim_instance("f", FUSION, MemoryTransport, sim_law="demo") as f,
        TestSession(f) as to_f,
    ):
        hang("engine.step=hang@1+")
        await to_f.prefill(prompt_of(200), Sampling(max_tokens=9), is_local=True)
        with pytest.raises(CanaryFailed):
            await canary_to(f, timeout_s=2.5).send()
