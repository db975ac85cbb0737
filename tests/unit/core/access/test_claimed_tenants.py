"""If the tokens of a tenant carry different limits, the token issued last decides."""

from __future__ import annotations

import itertools

from pdmesh.core.access.claimed_tenants import ClaimedTenants
from pdmesh.core.tenancy.limits import Tenant, TenantLimits


def acme(num: int) -> Tenant:
    return Tenant("acme", TenantLimits(max_concurrent=num))


def test_the_token_issued_last_counts_in_whatever_order_tokens_come() -> None:
    for order in itertools.permutations([(10.0, 1), (20.0, 2), (30.0, 3)]):
        claimed = ClaimedTenants()
        for issued_at, num in order:
            claimed.heed(acme(num), issued_at)
        assert claimed.tenants == {"acme": acme(3)}
        assert claimed.heed(acme(1), 10.0) == acme(3), "an older token has the same limits"


def test_a_later_token_with_the_same_limits_outlasts_other_limits_from_before_it() -> None:
    for order in itertools.permutations([(10.0, 1), (20.0, 2), (30.0, 1)]):
        claimed = ClaimedTenants()
        for issued_at, num in order:
            claimed.heed(acme(num), issued_at)
        assert claimed.tenants == {"acme": acme(1)}


def test_the_number_of_tenants_is_bounded_and_the_oldest_leaves() -> None:
    claimed = ClaimedTenants(most=2)
    for issued_at, name in enumerate("abca"):
        claimed.heed(Tenant(name), float(issued_at))
    assert sorted(claimed.tenants) == ["a", "c"]
