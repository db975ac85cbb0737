"""Tests when a decode renews the lease of a ticket whose pull waits."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.transfer.lease_renewal import LeaseKeeper


@pytest.mark.fault("F35")
def test_a_waiting_ticket_is_renewed_three_times_a_lease_until_its_time_is_over() -> None:
    leases = LeaseKeeper()
    assert leases.keep("t", 3.0, until=3.0, now=0.0)
    assert leases.due(0.9) == ([], [])
    assert leases.due(1.0) == (["t"], [])
    assert leases.due(1.9) == ([], [])
    assert leases.due(2.0) == (["t"], [])
    assert leases.due(3.0) == ([], ["t"])
    assert len(leases) == 0
    assert not leases.keep("t", 0.0, until=3.0, now=0.0), "it has no lease to renew"
