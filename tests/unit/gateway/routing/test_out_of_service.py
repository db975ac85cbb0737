"""A gateway without a master follows cordons and faults from the registry's boards (S42)."""

from __future__ import annotations

import pytest

from pdmesh.core.health.fault_levels import Level
from pdmesh.events.v1.events_pb2 import FaultReport
from pdmesh.net.nats.board import Board
from pdmesh.net.nats.kv_bucket import KvBucket
from pdmesh.services.gateway.routing.fleet import FleetView, MeshView, Wanted
from pdmesh.services.gateway.routing.out_of_service import OutOfServiceView
from pdmesh.v1.admin_service_pb2 import LEAVE_MODE_AT_ONCE, LEAVE_MODE_DRAIN, OutOfService
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
    """Two prefills and two decodes of incarnation 1, and a gateway's view that follows both
    boards.
    """

    def __init__(self) -> None:
        self.out_of_service = Board(_bucket(entries := MemoryBucket()), OutOfService)
        self.faults = Board(_bucket(faults := MemoryBucket()), FaultReport)
        store = MemoryStore()
        for name, role in (("p", ROLE_PREFILL), ("d", ROLE_DECODE)):
            for i in range(2):
                store.records[f"{name}-{i}"] = InstanceRecord(
                    instance_id=f"{name}-{i}", incarnation=1, role=role, model="m",
                    phase=INSTANCE_PHASE_READY,
                )  # fmt: skip
        out_of_service = OutOfServiceView()
        out_of_service.watch(self.out_of_service, self.faults)
        self.fleet = FleetView(MeshView(MemoryView(store), out_of_service), "m", lambda: 0.0)
        for watch in (*entries.watches, *faults.watches):
            watch.open()

    async def cordon(self, name: str, mode: int) -> None:
        await self.out_of_service.write(name, OutOfService(instance_id=name, mode=mode))  # type: ignore[arg-type]  # an enum's number

    async def break_(
        self, name: str, level: Level, incarnation: int = 1, held_back: str = ""
    ) -> None:
        report = FaultReport(
            instance_id=name, instance_incarnation=incarnation, level=level, held_back=held_back
        )
        await self.faults.write(name, report)

    def ranked(self) -> str:
        prefills, decodes = self.fleet.least_loaded(Wanted("m"), "", (), lambda i, n: 0)
        return " ".join(c.instance_id for c in (*prefills, *decodes))


def _bucket(bucket: MemoryBucket) -> KvBucket:
    return bucket  # type: ignore[return-value]  # a fake


async def test_a_cordoned_instance_gets_no_request_even_if_it_reports_ready() -> None:
    site = Site()
    assert site.ranked() == "p-0 p-1 d-0 d-1"
    await site.cordon("p-0", LEAVE_MODE_AT_ONCE)
    assert site.ranked() == "p-1 d-0 d-1"
    # an older plan cannot use the instance either
    assert site.fleet.candidate("p-0", 1, Wanted("m")) is None
    await site.cordon("p-1", LEAVE_MODE_AT_ONCE)
    # the decodes do both phases, so that no cordoned prefill is needed
    assert site.ranked() == "d-0 d-1"
    await site.cordon("d-0", LEAVE_MODE_AT_ONCE)
    await site.cordon("d-1", LEAVE_MODE_AT_ONCE)
    assert site.ranked() == ""
    await site.out_of_service.forget("p-0")
    assert site.ranked() == "p-0"


async def test_a_leaving_instance_gets_only_requests_that_no_other_can_take() -> None:
    site = Site()
    await site.cordon("d-0", LEAVE_MODE_DRAIN)
    assert site.ranked() == "p-0 p-1 d-1"
    for name in ("p-0", "p-1", "d-1"):
        await site.cordon(name, LEAVE_MODE_DRAIN)
    assert site.ranked() == "p-0 p-1 d-0 d-1"
    assert (
        site.fleet.candidate("d-0", 1, Wanted("m")) is not None
    )  # the master may plan this instance until its substitute is there


@pytest.mark.parametrize(
    ("level", "incarnation", "held_back", "expected"),
    [
        (Level.PROCESS, 1, "", "p-1 d-0 d-1"),
        (Level.PROCESS, 2, "", "p-0 p-1 d-0 d-1"),  # the fault is of another incarnation
        (Level.PROCESS, 1, "cap", "p-0 p-1 d-0 d-1"),
        (Level.TRANSIENT, 1, "", "p-0 p-1 d-0 d-1"),
    ],
)
async def test_a_faulty_instance_is_the_last_choice(
    level: Level, incarnation: int, held_back: str, expected: str
) -> None:
    site = Site()
    await site.break_("p-0", level, incarnation, held_back)
    assert site.ranked() == expected
