"""The retry budget bounds retries to a fraction of the work that clients asked for."""

from __future__ import annotations

import pytest

from pdmesh.core.request.events import LegFailed
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.errors import EngineFailed
from tests.support.driven_request import Driven


def test_each_request_earns_a_part_of_a_retry_up_to_the_reserve() -> None:
    budget = RetryBudget(ratio=0.25, reserve=2.0)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        assert not budget.spend()
        budget.earn()
    assert budget.spend()
    for _ in range(100):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


@pytest.mark.fault("F38")
def test_failures_without_a_death_are_bounded_by_the_shared_retry_budget() -> None:
    budget = RetryBudget(ratio=0.0, reserve=5.0)
    requests = [Driven(budget) for _ in range(4)]
    num_moves = 0
    for driven in requests:
        while driven.error is None:
            driven.offer()
            driven.feed(LegFailed(driven.key, EngineFailed("x", reason="KV_TRANSFER_FAILED")))
        num_moves += driven.request.num_migrations
        assert driven.error is EngineFailed
    assert num_moves == 5
