"""The pulls of a simulated engine, without a transport.

The tests cover which pulls run, which pulls wait, and the reports about them.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pdmesh.core.instance.arena import ArenaRange
from pdmesh.core.kv.transfer.source_exclusions import KvSource, KvSources
from pdmesh.core.kv.transfer.ticket import PullFailure, Ticket
from pdmesh.engine.base import DecodeJob, Failed, KvPulling, LandingFreed, Output, Sampling
from pdmesh.engine.sim.block_pool import BlockPool
from pdmesh.engine.sim.memory import PagedMemory, SimKv
from pdmesh.engine.sim.model import SimModel, SimParams
from pdmesh.engine.sim.retrieval import Retriever
from tests.support.waiting import until

NUM_BLOCKS = 16
LONG_S = 600.0


class Agent:
    """Stands in for a KV agent. Its pulls never end."""

    def __init__(self) -> None:
        self.pulled: list[str] = []
        self.not_renewed: list[str] = []

    async def pull(self, ticket: Ticket, *_: object, **__: object) -> None:
        self.pulled.append(ticket.ticket_id)
        await asyncio.Event().wait()

    async def keep(self, ticket: Ticket, for_s: float) -> None: ...

    def stop_renewing(self, ticket_id: str) -> None:
        self.not_renewed.append(ticket_id)


class Half:
    """The decode's side of a hand-over. All its pulls are from one sender."""

    def __init__(self, max_pulls: int) -> None:
        params = SimParams(block_size=4)
        model = SimModel(params)
        self.agent, self.said = Agent(), list[Output]()
        self.pool = BlockPool(NUM_BLOCKS)
        self.deaths: list[BaseException] = []
        agent: Any = self.agent
        self.retriever = Retriever(
            SimKv(PagedMemory(model, NUM_BLOCKS), self.pool),
            agent,
            max_pulls,
            self.said.append,
            lambda _: None,
            self.deaths.append,
        )

    def begin(self, leg: int, num_mib: int, deadline_s: float) -> None:
        prompt = array("I", range(8))
        ticket = Ticket(
            f"t{leg}", "r", 0, "prefill-0", 7, "fp", 8, num_mib << 20, ("address",), 5000
        )
        landing = ArenaRange(4096 * leg, 4096)
        self.retriever.begin(
            DecodeJob(leg, "r", 0, prompt, 5, ticket, landing, Sampling(4), deadline_s)
        )

    @property
    def failed(self) -> list[Failed]:
        return [output for output in self.said if isinstance(output, Failed)]


@pytest_asyncio.fixture
async def half() -> AsyncIterator[Half]:
    half = Half(max_pulls=8)
    yield half
    await half.retriever.stop()
    assert not half.deaths


@pytest.mark.fault("F23", "F24")
async def test_all_overdue_pulls_leave_the_queue_and_none_of_them_begins(
    half: Half,
) -> None:
    """When pull 2 leaves the queue, there is room for pull 3, which is overdue, too. Neither pull
    counts against the source.
    """
    for leg, num_mib, deadline_s in ((1, 40, LONG_S), (2, 40, 0.0), (3, 10, 0.0), (4, 10, LONG_S)):
        half.begin(leg, num_mib, deadline_s)
    await until(lambda: len(half.failed) == 2 and len(half.agent.pulled) == 2)
    assert half.agent.pulled == ["t1", "t4"]
    assert [failed.leg for failed in half.failed] == [2, 3]
    assert [output.leg for output in half.said if isinstance(output, LandingFreed)] == [2, 3]
    assert half.agent.not_renewed == ["t2", "t3"]
    sources = KvSources()
    for failed in half.failed:
        assert failed.cause == PullFailure.OVERDUE
        assert sources.failed(KvSource("prefill-0", 7), failed.cause, 0.0) is None
    assert half.retriever.num_queued == 0


async def test_the_start_of_a_pull_is_reported_once_and_only_if_it_starts(
    half: Half,
) -> None:
    def turns() -> list[int]:
        return [output.leg for output in half.said if isinstance(output, KvPulling)]

    for leg in (1, 2, 3):
        half.begin(leg, 60, LONG_S)
    assert turns() == [1]
    half.retriever.abort(2)
    half.retriever.abort(1)
    await until(lambda: "t3" in half.agent.pulled)
    assert turns() == [1, 3]
