"""A tenant's rate buckets and daily tokens. The property test tries any order of calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.tenancy.limits import (
    Charge,
    Tenant,
    TenantLimits,
    Tenants,
    TokenBucket,
)

LIMITS = TenantLimits(requests_per_s=4, tokens_per_min=600, max_concurrent=3, tokens_per_day=2000)


@given(
    amounts=st.lists(st.floats(0.1, 50), min_size=1, max_size=30),
    rate=st.floats(0.1, 100),
    capacity=st.floats(1, 40),
)
def test_the_advised_wait_is_just_long_enough(
    amounts: list[float], rate: float, capacity: float
) -> None:
    bucket, now = TokenBucket(rate, capacity, capacity, 0.0), 0.0
    for amount in amounts:
        wait_s = bucket.wait_s(amount, now)
        if wait_s > 0.001:
            assert bucket.wait_s(amount, now + wait_s * 0.9) > 0
        now += wait_s
        assert bucket.wait_s(amount, now) == 0.0
        bucket.take(amount, now)
    assert sum(amounts) <= capacity + rate * now + max(amounts) + 1e-3


def test_limits_may_change_while_calls_are_open_and_a_day_may_pass() -> None:
    tenants, tenant = Tenants(), Tenant("acme", LIMITS)
    assert tenants.enter(tenant, 0.0) is None
    charge = tenants.charge(tenant, 500, 0.0, 1, 10.0)
    assert isinstance(charge, Charge)
    unlimited = Tenant("acme")
    assert all(tenants.enter(unlimited, 0.0) is None for _ in range(50))
    assert isinstance(tenants.charge(unlimited, 10_000, 0.0, 2, 10.0), Charge)
    tenants.settle(tenant, charge, 100)
    assert tenants.today("acme", 2) == (2, 0, 10_000), "yesterday's refund is not today's"
    tenants.forget_but(frozenset())
    assert tenants.num_open("acme") == 51
    for _ in range(51):
        tenants.leave(tenant)
    tenants.forget_but(frozenset())
    assert tenants.today("acme", 2) == (2, 0, 0)
