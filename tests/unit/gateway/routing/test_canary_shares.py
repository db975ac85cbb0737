"""A gateway without a master gives a canary group its share of the requests (S24).

The share is the one that the master has last written.
"""

from __future__ import annotations

import random

import pytest

from pdmesh.core.groups.revisions import canary_of
from pdmesh.net.nats.desired_store import DesiredStore
from pdmesh.services.gateway.routing.canary_shares import CanaryShares
from pdmesh.services.gateway.routing.fleet import FleetView, MeshView, Wanted
from pdmesh.v1.admin_service_pb2 import Upgrade, Upgrades
from pdmesh.v1.common_pb2 import (
    INSTANCE_PHASE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    InstanceRecord,
    Role,
)
from tests.fakes.kv.memory_kv import MemoryBucket
from tests.fakes.memory_registry import MemoryStore, MemoryView

pytestmark = [pytest.mark.req("S24"), pytest.mark.fault("F11")]
CANARY = canary_of("chat")
BOTH = (ROLE_PREFILL, ROLE_DECODE)


class Site:
    """A fleet with two pairs in group `a`, and a canary group with the roles in `canary`.

    The gateway's view of this fleet follows the record of upgrades.
    """

    def __init__(self, canary: tuple[Role.ValueType, ...] = BOTH) -> None:
        self.bucket, self.registry = MemoryBucket(), MemoryStore()
        self.store = DesiredStore(self.bucket)  # type: ignore[arg-type]  # a fake
        for number in range(2):
            for role in BOTH:
                self._add("a", role, number)
        for role in canary:
            self._add(CANARY, role, 0)
        canaries = CanaryShares(random.Random(1))
        canaries.watch(self.store)
        self.bucket.watches[0].open()
        view = MemoryView(self.registry)
        self.fleet = FleetView(MeshView(view, canaries=canaries), "m", lambda: 0.0)

    def _add(self, group_id: str, role: Role.ValueType, number: int) -> None:
        name = f"{group_id}-{role}-{number}"
        self.registry.records[name] = InstanceRecord(
            instance_id=name, incarnation=1, role=role, phase=INSTANCE_PHASE_READY,
            group_id=group_id, scenario="chat", model="m", revision=group_id,
        )  # fmt: skip

    async def write(self, upgrade: Upgrade) -> None:
        last = max((e.revision for e in self.bucket.entries.values()), default=0)
        await self.store.keep_upgrades(Upgrades(upgrades=[upgrade]), last)

    def ask(self, excluded: tuple[str, ...] = ()) -> str:
        """The group of the prefill that is ranked first."""
        prefills, decodes = self.fleet.least_loaded(Wanted("m"), "chat", excluded, lambda i, n: 0)
        assert {c.pair for c in decodes} >= {prefills[0].pair} or not decodes
        return self.registry.records[prefills[0].instance_id].group_id

    def share(self, excluded: tuple[str, ...] = ()) -> float:
        return sum(self.ask(excluded) == CANARY for _ in range(1000)) / 1000


async def test_a_canary_gets_its_share_and_nothing_while_it_leaves() -> None:
    site = Site()
    await site.write(Upgrade(scenario="chat", canary_share=0.1))
    assert site.share() == pytest.approx(0.1, abs=0.03)
    await site.write(Upgrade(scenario="chat", back="version 2: chat-0: sick"))
    assert site.share() == 0.0
    await site.write(Upgrade(scenario="other", canary_share=0.5))
    assert site.ask() == "a"  # the scenario has no shares now, so the fewest open legs decide


async def test_the_last_known_share_applies_while_the_store_is_away() -> None:
    site = Site()
    await site.write(Upgrade(scenario="chat", canary_share=0.1))
    site.bucket.lose()
    assert site.share() == pytest.approx(0.1, abs=0.03)


async def test_a_canary_gets_everything_if_it_serves_alone_and_nothing_before_it_can() -> None:
    site = Site()
    await site.write(Upgrade(scenario="chat", canary_share=0.1))
    others = tuple(i for i, r in site.registry.records.items() if r.group_id == "a")
    assert site.share(excluded=others) == 1.0
    without_decode = Site(canary=(ROLE_PREFILL,))
    await without_decode.write(Upgrade(scenario="chat", canary_share=0.9))
    assert without_decode.share() == 0.0
