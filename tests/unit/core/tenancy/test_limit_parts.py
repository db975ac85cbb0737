"""A tenant's limits change while gateways hold parts of them.

This happens when the key file is read again.
"""

from __future__ import annotations

import pytest

from pdmesh.core.tenancy.limit_parts import num_parts
from pdmesh.core.tenancy.limits import (
    Charge,
    Clock,
    Tenant,
    TenantLimits,
)
from tests.property.request.test_limit_parts import Gateway, Store

pytestmark = pytest.mark.req("S97")

CLOCK = Clock(now=10.0, wall=10.0, day=0)
WIDE, NARROW = (Tenant("acme", TenantLimits(max_concurrent=most)) for most in (16, 2))


def two_that_share(tenant: Tenant) -> tuple[Gateway, Gateway]:
    """Two gateways that share the parts. The second one holds the upper half."""
    store = Store()
    a, b = (Gateway(name, tenant, store) for name in ("a", "b"))
    a.parts.alive = b.parts.alive = ("a", "b")
    a.ask(CLOCK)
    assert a.enter(CLOCK), "the gateway is not idle"
    b.look(CLOCK)
    b.ask(CLOCK)
    for gateway in (a, b):
        gateway.look(CLOCK)
        gateway.settle(CLOCK)
        b.look(CLOCK)
    assert sorted(b.tenants.held("acme")) == list(range(8, 16))
    return a, b


def test_a_gateway_that_lost_its_parts_asks_for_others() -> None:
    assert num_parts(NARROW.limits) == 2
    a, b = two_that_share(WIDE)
    a.tenant = b.tenant = NARROW
    assert not b.parts.holds_all(NARROW)
    b.ask(CLOCK)
    a.look(CLOCK)
    a.settle(CLOCK)
    b.look(CLOCK)
    assert b.enter(CLOCK)
    assert not b.enter(CLOCK), "half of two"


@pytest.mark.parametrize("is_leaving", [True, False])
def test_lost_parts_are_not_handed_over(is_leaving: bool) -> None:
    _, b = two_that_share(WIDE)
    b.tenant = NARROW
    b.settle(CLOCK, is_leaving=is_leaving)
    assert b.store.ledger is not None
    assert len(b.tenants.held("acme")) == 0
    assert b.store.ledger.holders.count("b") == 0


def test_tokens_granted_today_still_count() -> None:
    limits = TenantLimits(max_concurrent=16, tokens_per_day=1600)
    _, b = two_that_share(Tenant("acme", limits))
    assert b.enter(CLOCK)
    assert isinstance(b.charge(700, CLOCK), Charge)
    b.tenant = Tenant("acme", TenantLimits(max_concurrent=2, tokens_per_day=1600))
    b.settle(CLOCK)
    _, _, num_used = b.tenants.today("acme", 0)
    assert num_used == 700
