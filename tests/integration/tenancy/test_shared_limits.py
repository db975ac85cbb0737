"""Shares a tenant's limits among several gateways on one NATS.

Each gateway holds a part of each limit. Together the gateways must never grant more than the limit,
and none may stay without a part forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdmesh import api_keys
from pdmesh.api_keys import KeyFile
from pdmesh.core.tenancy.tenant import TenantEntry
from pdmesh.net.nats.bus import NatsBus
from pdmesh.services.gateway.access.access_control import (
    KeyedAccess,
    Permit,
    RateLimited,
    charged,
)
from pdmesh.services.gateway.access.tenant_ledgers import tenant_bucket
from tests.support.sites.servers import TestServer
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.req("S97")


@dataclass
class Fleet:
    """The access controls of several gateways, each with its own task. The keys of both
    dictionaries are the gateways' names and incarnations, as in the registry.
    """

    bus: NatsBus
    path: Path
    token: str
    accesses: dict[str, KeyedAccess] = field(default_factory=dict)
    loops: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def add(self, name: str) -> KeyedAccess:
        access = self.accesses[name] = KeyedAccess(self.path)
        access.join(tenant_bucket(self.bus), name)
        self.loops[name] = asyncio.create_task(access.run())
        self.tell()
        return access

    async def stop(self, name: str) -> None:
        """Stop a gateway in the regular way."""
        access = await self.kill(name)
        await access.close()

    async def kill(self, name: str) -> KeyedAccess:
        access, loop = self.accesses.pop(name), self.loops.pop(name)
        async with asyncio.timeout(PATIENCE_S):
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
        self.tell()
        return access

    def tell(self) -> None:
        for access in self.accesses.values():
            access.share(frozenset(self.accesses))

    async def enter(self, access: KeyedAccess) -> Permit | None:
        try:
            return await access.enter(f"Bearer {self.token}")
        except RateLimited:
            return None

    async def entered(self, access: KeyedAccess) -> Permit:
        """Wait until the gateway admits a call, and return the call's permit. The gateway may have
        to ask the others for a part of the limit first, which may take long.
        """
        permits: list[Permit] = []

        async def has_entered() -> bool:
            permit = await self.enter(access)
            permits.extend([permit] if permit is not None else [])
            return permit is not None

        await until(has_entered)
        return permits[0]

    async def enters(self, access: KeyedAccess) -> bool:
        """Whether the gateway admits a call. The call ends at once."""
        permit = await self.enter(access)
        if permit is not None:
            permit.leave()
        return permit is not None

    async def grants(self, access: KeyedAccess, num_tokens: int) -> bool:
        permit = await self.enter(access)
        assert permit is not None
        try:
            await charged(permit, lambda: permit.charge(num_tokens))
        except RateLimited:
            return False
        else:
            permit.settle(num_tokens)
            return True
        finally:
            permit.leave()


@asynccontextmanager
async def fleet(bus: NatsBus, directory: Path, tenant: TenantEntry) -> AsyncIterator[Fleet]:
    file = KeyFile(tenants={"acme": tenant})
    token = api_keys.issue(file, "acme")
    api_keys.save(directory / "keys.json", file)
    found = Fleet(bus, directory / "keys.json", token)
    try:
        yield found
    finally:
        for name in list(found.accesses):
            await found.stop(name)


async def test_three_gateways_together_admit_exactly_four_open_calls(
    tmp_path: Path, bus: NatsBus
) -> None:
    async with fleet(bus, tmp_path, TenantEntry(max_concurrent=4)) as f:
        accesses = [f.add(f"g{i}/1") for i in range(3)]
        for access in accesses:  # after a call, each gateway has its part of the limit
            await until(lambda access=access: f.enters(access))
        permits = await asyncio.gather(*(f.enter(d) for d in accesses for _ in range(8)))
        let_in = [v for v in permits if v is not None]
        assert 3 <= len(let_in) <= 4
        for permit in let_in:
            permit.leave()
        for access in accesses:
            await until(lambda access=access: f.enters(access))


async def test_a_single_gateway_has_the_whole_limit_at_once(tmp_path: Path, bus: NatsBus) -> None:
    async with fleet(bus, tmp_path, TenantEntry(max_concurrent=4, requests_per_s=100)) as f:
        access = f.add("g0/1")
        await f.entered(access)
        assert sum(v is not None for v in [await f.enter(access) for _ in range(5)]) == 3
        await f.kill("g0/1")
        again = f.add("g0/2")  # the next incarnation need not wait for the end of the earlier one
        await f.entered(again)


async def test_a_limit_smaller_than_the_number_of_gateways_is_passed_around(
    tmp_path: Path, bus: NatsBus
) -> None:
    async with fleet(bus, tmp_path, TenantEntry(max_concurrent=2)) as f:
        accesses = [f.add(f"g{i}/1") for i in range(3)]
        for _ in range(2):
            for access in accesses:
                await until(lambda access=access: f.enters(access))
        # An open call holds one of the two parts. The gateways must get the other part one after
        # another.
        first = await f.enter(accesses[0])
        while first is None:
            first = await f.enter(accesses[0])
        for access in (accesses[1], accesses[2], accesses[1]):
            await until(lambda access=access: f.enters(access))
        first.leave()


async def test_used_daily_tokens_stay_used_when_gateways_end(tmp_path: Path, bus: NatsBus) -> None:
    async with fleet(bus, tmp_path, TenantEntry(tokens_per_day=100)) as f:
        assert await f.grants(f.add("g0/1"), 60)
        await f.stop("g0/1")
        second = f.add("g1/1")
        assert not await f.grants(second, 41)
        assert await f.grants(second, 30)
        third = f.add("g2/1")
        assert not await f.grants(third, 11)
        await f.stop("g1/1")
        await until(lambda: f.grants(third, 10), within_s=10)
        assert not await f.grants(third, 1)


async def test_a_starting_gateway_takes_nothing_from_gateways_that_it_has_not_seen_yet(
    tmp_path: Path, bus: NatsBus
) -> None:
    async with fleet(bus, tmp_path, TenantEntry(max_concurrent=1)) as f:
        permit = await f.entered(f.add("g0/1"))
        late = f.accesses["g1/1"] = KeyedAccess(f.path)
        late.join(tenant_bucket(bus), "g1/1")
        f.loops["g1/1"] = asyncio.create_task(late.run())
        assert await f.enter(late) is None
        f.tell()
        assert await f.enter(late) is None
        permit.leave()
        await until(lambda: f.enters(late))


async def test_the_parts_of_a_dead_gateway_are_taken_over(tmp_path: Path, bus: NatsBus) -> None:
    async with fleet(bus, tmp_path, TenantEntry(max_concurrent=1)) as f:
        dead, heir = f.add("g0/1"), f.add("g1/1")
        await f.entered(dead)
        assert await f.enter(heir) is None
        await f.kill("g0/1")
        await until(lambda: f.enters(heir), within_s=15)


async def test_without_nats_a_gateway_continues_with_its_part(
    tmp_path: Path, server: TestServer, bus: NatsBus
) -> None:
    async with fleet(bus, tmp_path, TenantEntry(max_concurrent=2)) as f:
        first, second = f.add("g0/1"), f.add("g1/1")
        for access in (first, second):
            await until(lambda access=access: f.enters(access))
        server.kill()
        permits = [await f.enter(access) for access in (first, first, second, second)]
        assert [v is not None for v in permits] == [True, False, True, False]
        for permit in permits:
            if permit is not None:
                permit.leave()
        await server.start()
        await until(lambda: f.enters(first))


async def test_unused_daily_tokens_of_another_gateway_are_granted_here(
    tmp_path: Path, bus: NatsBus
) -> None:
    """Once, each gateway held half of the parts, and refused until midnight after it had used its
    half.
    """
    async with fleet(bus, tmp_path, TenantEntry(tokens_per_day=100)) as f:
        first, second = f.add("g0/1"), f.add("g1/1")
        assert await f.grants(first, 5)
        busy = await f.enter(first)  # keeps the first gateway from being idle
        assert busy is not None
        await until(lambda: f.grants(second, 5))
        granted = 10
        for _ in range(30):
            granted += 5 * await f.grants(second, 5)
        assert granted == 100
        assert not await f.grants(first, 1)
        busy.leave()
