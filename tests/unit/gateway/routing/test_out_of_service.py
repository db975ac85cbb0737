"""A gateway that ranks by itself heeds holds and faults as the boards in the registry say them
(S42).
"""

from __future__ import annotations

import pytest

from pdmesh.core.health.fault_levels import Level
from pdmesh.events.v1.events_pb2 import FaultReport
from pdmesh.net.nats.board import Board
from pdmesh.net.nats.kv_bucket import KvBucket
from pdmesh.services.gateway.routing.fleet import FleetView
from pdmesh.services.gateway.routing.out_of_service import KeptOut
from pdmesh.v1.admin_service_pb2 import HOLD_KIND_DRAIN, HOLD_KIND_ISOLATE, Hold
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    InstanceRecord,
)
from tests.fakes.kv.memory_kv import MemoryBucket
from tests.fakes.memory_registry import MemoryStore, MemoryView

pytestmark = pytest.mark.req("S42", "S36")


class Site:
    """Two prefills and two decodes of incarnation 1, and a gateway's fleet that follows both
    boards.
    """

    def __init__(self) -> None:
        self.holds = Board(_bucket(holds := MemoryBucket()), Hold)
        self.faults = Board(_bucket(faults := MemoryBucket()), FaultReport)
        store = MemoryStore()
        for name, role in (("p", ROLE_PREFILL), ("d", ROLE_DECODE)):
            for i in range(2):
                store.records[f"{name}-{i}"] = InstanceRecord(
                    instance_id=f"{name}-{i}", incarnation=1, role=role, model="m",
                    phase=INSTANCE_PHASE_READY,
                )  # fmt: skip
        kept_out = KeptOut()
        kept_out.watch(self.holds, self.faults)
        self.fleet = FleetView(MemoryView(store), "m", lambda: 0.0, kept_out=kept_out)
        for watch in (*holds.watches, *faults.watches):
            watch.open()

    async def hold(self, name: str, kind: int) -> None:
        await self.holds.write(name, Hold(instance_id=name, kind=kind))  # type: ignore[arg-type]  # an enum's number

    async def break_(
        self, name: str, level: Level, incarnation: int = 1, held_back: str = ""
    ) -> None:
        report = FaultReport(
            instance_id=name, instance_incarnation=incarnation, level=level, held_back=held_back
        )
        await self.faults.write(name, report)

    def ranked(self) -> str:
        prefills, decodes = self.fleet.least_loaded("m", "", (), lambda i, n: 0)
        return " ".join(c.instance_id for c in (*prefills, *decodes))


def _bucket(bucket: MemoryBucket) -> KvBucket:
    return bucket  # type: ignore[return-value]  # a fake


async def test_an_isolated_instance_gets_nothing_though_it_says_that_it_is_ready() -> None:
    site = Site()
    assert site.ranked() == "p-0 p-1 d-0 d-1"
    await site.hold("p-0", HOLD_KIND_ISOLATE)
    assert site.ranked() == "p-1 d-0 d-1"
    assert site.fleet.candidate("p-0", 1) is None  # nor by a plan that was made just before
    await site.hold("p-1", HOLD_KIND_ISOLATE)
    assert site.ranked() == "d-0 d-1"  # both phases, rather than an isolated one
    await site.hold("d-0", HOLD_KIND_ISOLATE)
    await site.hold("d-1", HOLD_KIND_ISOLATE)
    assert site.ranked() == ""
    await site.holds.forget("p-0")
    assert site.ranked() == "p-0"


async def test_one_that_is_to_leave_gets_what_nobody_else_can_take() -> None:
    site = Site()
    await site.hold("d-0", HOLD_KIND_DRAIN)
    assert site.ranked() == "p-0 p-1 d-1"
    for name in ("p-0", "p-1", "d-1"):
        await site.hold(name, HOLD_KIND_DRAIN)
    assert site.ranked() == "p-0 p-1 d-0 d-1"
    assert (
        site.fleet.candidate("d-0", 1) is not None
    )  # the master may plan it until its substitute is there


@pytest.mark.parametrize(
    ("level", "incarnation", "held_back", "expected"),
    [
        (Level.PROCESS, 1, "", "p-1 d-0 d-1"),
        (Level.PROCESS, 2, "", "p-0 p-1 d-0 d-1"),  # of another life
        (Level.PROCESS, 1, "cap", "p-0 p-1 d-0 d-1"),
        (Level.TRANSIENT, 1, "", "p-0 p-1 d-0 d-1"),
    ],
)
async def test_a_faulty_one_is_the_last_choice(
    level: Level, incarnation: int, held_back: str, expected: str
) -> None:
    site = Site()
    await site.break_("p-0", level, incarnation, held_back)
    assert site.ranked() == expected
