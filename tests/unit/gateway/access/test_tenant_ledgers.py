"""Each tenant's ledger records how gateways share its limits.

In these tests, the ledgers' bucket sometimes does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdmesh.core.tenancy.limit_parts import num_parts
from pdmesh.core.tenancy.limits import Tenant, TenantLimits, Tenants
from pdmesh.net.nats.kv_bucket import KvEntry, KvWatch
from pdmesh.services.gateway.access.tenant_ledgers import TenantLedgers

pytestmark = pytest.mark.req("S97")


class FreezingBucket:
    """Accepts writes until it is frozen. Then it never answers."""

    def __init__(self) -> None:
        self.is_frozen = False
        self.waiting: set[str] = set()

    async def get(self, key: str) -> KvEntry | None:
        return None

    async def put(self, key: str, value: bytes, last: int | None = None) -> int:
        if self.is_frozen:
            self.waiting.add(key)
            await asyncio.Event().wait()
        return (last or 0) + 1

    def watch(
        self,
        on_entry: Callable[[KvEntry], None],
        on_loaded: Callable[[], None],
        on_reset: Callable[[], None],
    ) -> KvWatch:
        raise NotImplementedError


async def test_ledgers_are_closed_for_all_tenants_at_once_even_if_nats_is_frozen() -> None:
    limits = TenantLimits(max_concurrent=4, tokens_per_day=1000)
    known = {name: Tenant(name, limits) for name in (f"tenant-{i}" for i in range(40))}
    bucket = FreezingBucket()
    ledgers = TenantLedgers(bucket, "g0/1", Tenants(num_parts), lambda: known)
    for tenant in known.values():
        assert await ledgers.more(tenant)
    bucket.is_frozen = True
    async with asyncio.timeout(60):  # a bug once made this wait endless
        await ledgers.close()
    assert len(bucket.waiting) == len(known), "all ledgers are asked at once"


async def test_tokens_that_were_leased_and_not_granted_are_given_back_at_the_end() -> None:
    """Leased tokens are given back even if the gateway holds no part of the tenant's limits."""
    tenant = Tenant("acme", TenantLimits(tokens_per_day=3200))
    bucket, tenants = FreezingBucket(), Tenants(num_parts)
    ledgers = TenantLedgers(bucket, "g0/1", tenants, lambda: {"acme": tenant})
    assert await ledgers.more_tokens(tenant, 10)
    num_leased = tenants.today("acme", 0)[1]
    assert num_leased == 100, "one 32nd of the daily quota"
    await ledgers.close()
    assert tenants.today("acme", 0)[1] == 0
