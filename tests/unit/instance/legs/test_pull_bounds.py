"""Tests how long the host of a decode lets an early decode pull KV.

The time of a pull counts from the decode's turn on. This test sets no bound on the wait for that
turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from pdmesh.core.instance.admission import Admission, Capacity, Work
from pdmesh.core.kv.prefix.block_hash import tokens_to_bytes
from pdmesh.core.kv.transfer.source_exclusions import SourceFault
from pdmesh.engine.base import (
    DecodeJob,
    Engine,
    EngineStats,
    KvArrived,
    KvPulling,
    Output,
)
from pdmesh.instance.legs.host import HostConfig, InstanceHost
from pdmesh.instance.legs.leg_life import PullLimits
from pdmesh.instance.legs.outbox import Outbox
from pdmesh.v1 import common_pb2
from pdmesh.v1 import instance_service_pb2 as pb
from tests.support.waiting import until

pytestmark = [pytest.mark.req("S48"), pytest.mark.fault("F8", "F23", "F24")]

PULL_S = 0.05


class ToldEngine:
    """An engine whose outputs the test supplies."""

    def __init__(self) -> None:
        self.say: asyncio.Queue[list[Output]] = asyncio.Queue()
        self.aborted: list[int] = []

    def decode(self, job: DecodeJob) -> None: ...

    def join(self, leg: int, first_token: int) -> None: ...

    def abort(self, leg: int) -> None:
        self.aborted.append(leg)

    async def outputs(self) -> AsyncIterator[list[Output]]:
        while True:
            yield await self.say.get()

    def stats(self) -> EngineStats:
        return EngineStats()


class Site:
    def __init__(self) -> None:
        self.engine = ToldEngine()
        capacity = Capacity(
            works=frozenset({Work.DECODE}),
            num_slots=8,
            num_blocks=64,
            block_size=4,
            block_bytes=64,
            max_model_len=128,
            staging_bytes=0,
            landing_bytes=1 << 16,
            max_retrievals=8,
        )
        config = HostConfig(PullLimits(PULL_S))
        self.host = InstanceHost(
            cast(Engine, self.engine), Admission(capacity), time.monotonic, config
        )
        self.outbox: Outbox = self.host.open("gateway-0")
        self.events: list[pb.SessionEvent] = []

    async def read(self) -> None:
        while (response := await self.outbox.next()) is not None:
            self.events.extend(response.events)

    def start(self, key: int, *, is_early: bool) -> None:
        ticket = common_pb2.Ticket(
            ticket_id=f"t{key}",
            instance_id="prefill-0",
            incarnation=7,
            num_tokens=3,
            kv_bytes=64,
            addresses=["address"],
        )
        start = pb.Start(
            key=key,
            request_id="r",
            prompt_token_ids=tokens_to_bytes([1, 2, 3]),
            sampling=common_pb2.SamplingParams(max_tokens=4, top_p=1.0),
            remaining_ms=600_000,
            ticket=ticket,
            awaits_first_token=is_early,
        )
        self.host.apply(self.outbox, [pb.Command(start=start)])

    def join(self, key: int) -> None:
        self.host.apply(self.outbox, [pb.Command(join=pb.Join(key=key, first_token_id=5))])

    def failed(self) -> list[int]:
        return [event.key for event in self.events if event.WhichOneof("event") == "failed"]

    def stages(self) -> list[tuple[int, int]]:
        return [
            (event.key, event.kv_advanced.stage)
            for event in self.events
            if event.WhichOneof("event") == "kv_advanced"
        ]


@asynccontextmanager
async def running() -> AsyncIterator[Site]:
    site = Site()
    tasks = [asyncio.create_task(site.host.run()), asyncio.create_task(site.read())]
    try:
        yield site
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    site.host.check_invariants()


async def test_the_deadline_of_an_early_pull_runs_from_its_turn_until_its_kv_has_arrived() -> None:
    """Three legs get token 1 one after another. The first one has no turn yet, and the second one
    already has all its KV.
    """
    async with running() as site:
        for key in (1, 2, 3):
            site.start(key, is_early=True)
            site.join(key)
        await site.engine.say.put([KvPulling(2), KvArrived(2), KvPulling(3)])
        await until(lambda: site.failed())
        assert site.failed() == site.engine.aborted == [3]
        assert site.host.excluded_sources() == []
        await site.engine.say.put([KvPulling(1)])
        await until(lambda: len(site.failed()) == 2)
        assert site.failed() == site.engine.aborted == [3, 1]
        assert [held.fault for held in site.host.excluded_sources()] == [SourceFault.UNREACHABLE]


async def test_the_deadline_of_a_pull_that_begins_before_prefill_ends_runs_from_that_end() -> None:
    async with running() as site:
        for key in (1, 2):
            site.start(key, is_early=True)
        await site.engine.say.put([KvPulling(1), KvPulling(2)])
        site.join(2)
        await until(lambda: site.failed())
        assert site.failed() == [2]
        site.join(1)
        await until(lambda: len(site.failed()) == 2)


async def test_the_host_reports_a_turn_after_a_wait_and_that_the_leg_is_accepted() -> None:
    """A gateway of an older release does not know the stages, and waits for the acceptance."""
    async with running() as site:
        site.start(1, is_early=False)
        await site.engine.say.put([KvPulling(1)])
        site.start(2, is_early=False)
        accepted = [1, 2]

        def are_accepted() -> bool:
            kinds = {event.key: event.WhichOneof("event") for event in site.events}
            return [key for key in accepted if kinds.get(key) == "accepted"] == accepted

        await until(are_accepted)
        assert site.stages() == [], "the second pull did not wait for a turn"
        await site.engine.say.put([KvPulling(2)])
        await until(lambda: site.stages())
        assert site.stages() == [(2, pb.KV_STAGE_PULLING)]
        site.start(3, is_early=False)
        await site.engine.say.put([KvArrived(2), KvArrived(3)])
        accepted.append(3)
        await until(
            lambda: (
                len(site.stages()) == 3
                and "accepted"
                in [event.WhichOneof("event") for event in site.events if event.key == 3]
            )
        )
        assert site.stages()[1:] == [(2, pb.KV_STAGE_ARRIVED), (3, pb.KV_STAGE_ARRIVED)]
