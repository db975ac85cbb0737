"""The master's view of loads does not depend on the order or the repetition of load reports (F22).

tests/property/kv/test_prefix_index.py tests the same for KV blocks. Registry records and verdicts
need no such test, because their store numbers the writes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import Fleet, InstanceRecorded
from pdmesh.core.placement.instance import Identity
from pdmesh.core.placement.plan import Placement, Plan
from pdmesh.core.placement.policies import Query
from pdmesh.core.placement.reservations import ADMISSION_S
from pdmesh.events.v1.events_pb2 import InstanceLoad
from pdmesh.net import subjects
from pdmesh.net.bus import Message
from pdmesh.net.events import EventPublisher
from pdmesh.services.master_scheduler.placement.fleet_feed import FleetFeed
from tests.fakes.memory_bus import MemoryBus

NAMES = ("prefill-0", "prefill-1", "decode-0")
NUM_REQUESTS = 6


@dataclass(frozen=True)
class Report:
    name: str
    used: int
    free: int
    is_draining: bool
    admitted: Sequence[int]
    computed: Sequence[int]


requests = st.lists(st.integers(0, NUM_REQUESTS - 1), max_size=3, unique=True)
reports = st.lists(
    st.builds(
        Report, st.sampled_from(NAMES), st.integers(0, 8), st.integers(0, 100), st.booleans(),
        requests, requests,
    ),
    max_size=12,
)  # fmt: skip


class Recorder(MemoryBus):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Message] = []

    async def publish(self, subject: str, data: bytes, headers: Any = None) -> None:
        self.sent.append(Message(subject, data, dict(headers or {})))


def messages_of(told: Sequence[Report]) -> list[Message]:
    """Turn the reports into numbered messages. At the end, each instance reports that it is
    idle.
    """
    bus = Recorder()
    publishers = {name: EventPublisher(bus, name, 1) for name in NAMES}

    async def publish() -> None:
        idle = [Report(name, 0, 100, False, (), ()) for name in NAMES]
        for report in (*told, *idle):
            event = InstanceLoad(
                num_slots=8,
                num_slots_used=report.used,
                num_kv_blocks_free=report.free,
                is_draining=report.is_draining,
                admitted_request_ids=[f"r{i}" for i in report.admitted],
                computed=[
                    InstanceLoad.Computed(request_id=f"r{i}", num_tokens=64, seconds=0.1)
                    for i in report.computed
                ],
            )
            await publishers[report.name].publish(subjects.instance_load(report.name), event)

    asyncio.run(publish())
    return bus.sent


class Master:
    """A fleet and the feed that updates it. Some requests are planned before any report arrives."""

    def __init__(self) -> None:
        self.fleet, self.now = Fleet(), 0.0
        unused: Any = None
        self._feed = FleetFeed(self.fleet, MemoryBus(), unused, unused, clock=lambda: self.now)
        for name in NAMES:
            role = Role(name.partition("-")[0])
            identity = Identity(name, 1, role, "g", "default", "m", "f", 64, 8, 100, 4096)
            self.fleet.handle(InstanceRecorded(identity), 0.0)
        placement = Placement(self.fleet, random.Random(1))
        for i in range(NUM_REQUESTS):
            query = Query(model="m", num_prompt_tokens=64, request_id=f"r{i}")
            assert isinstance(placement.plan(query, {}, 0.0), Plan)

    def hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.now += 0.001
            asyncio.run(self._feed._on_load(message))
            self.fleet.check_invariants()
        self.now += ADMISSION_S
        self.fleet.settle(self.now)

    def view(self) -> dict[str, tuple[object, ...]]:
        return {
            i.id: (
                i.num_slots_used, i.num_kv_blocks_free, i.is_draining, i.is_usable,
                i.num_booked, i.num_booked_blocks, i.num_backlog_blocks, i.backlog_s,
            )
            for i in self.fleet.instances.values()
        }  # fmt: skip


@pytest.mark.fault("F22")
@settings(max_examples=40, deadline=None)
@given(reports, st.randoms(use_true_random=False), st.integers(1, 3))
def test_any_order_of_load_reports_with_repetitions_gives_the_same_view(
    told: list[Report], rng: random.Random, times: int
) -> None:
    messages = messages_of(told)
    in_order, shuffled = Master(), Master()
    in_order.hear(messages)
    many = messages * times
    rng.shuffle(many)
    # Instances repeat their last report every second, so these repetitions come last.
    shuffled.hear([*many, *messages_after(messages)])
    assert shuffled.view() == in_order.view()


@pytest.mark.fault("F20", "F22")
@settings(max_examples=40, deadline=None)
@given(reports, st.randoms(use_true_random=False))
def test_the_next_report_makes_up_for_lost_reports(told: list[Report], rng: random.Random) -> None:
    """A prompt whose end was never reported used to count as backlog for two minutes."""
    messages = messages_of(told)
    in_order, lossy = Master(), Master()
    in_order.hear(messages)
    kept = [m for m in messages[: -len(NAMES)] if rng.random() < 0.5]
    lossy.hear([*kept, *messages_after(messages)])
    assert lossy.view() == in_order.view()


def messages_after(messages: Sequence[Message]) -> Sequence[Message]:
    """Each instance's last report with the next number, as LoadPublisher repeats it."""
    again = []
    for message in messages[-len(NAMES) :]:
        event = InstanceLoad.FromString(message.data)
        event.header.sequence += 1
        again.append(Message(message.subject, event.SerializeToString(), message.headers))
    return again
