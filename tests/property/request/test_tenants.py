"""For any order of calls, no tenant exceeds its limits or pays for unused tokens.

All reservations are returned in the end.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdmesh.core.tenancy.limits import (
    Charge,
    Limit,
    Tenant,
    TenantLimits,
    Tenants,
)

LIMITS = TenantLimits(requests_per_s=4, tokens_per_min=600, max_concurrent=3, tokens_per_day=2000)
NAMES = ("acme", "beta")
DAY_S = 500.0  # a short day, so that a run spans several


class TenantMachine(RuleBasedStateMachine):
    """Two tenants with equal limits, checked against plain lists of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.tenants = Tenants()
        self.known = {name: Tenant(name, LIMITS) for name in NAMES}
        self.entered: dict[str, list[float]] = {name: [] for name in NAMES}
        self.used: dict[str, list[tuple[float, int]]] = {name: [] for name in NAMES}
        self.paid: dict[str, dict[int, int]] = {name: {} for name in NAMES}
        self.open: list[tuple[str, Charge | None]] = []

    @property
    def day(self) -> int:
        return int(self.now // DAY_S)

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(NAMES))
    def enter(self, name: str) -> None:
        num_open = sum(n == name for n, _ in self.open)
        refused = self.tenants.enter(self.known[name], self.now)
        if refused is None:
            assert num_open < 3
            self.entered[name].append(self.now)
            self.open.append((name, None))
        elif refused.limit is Limit.CONCURRENCY:
            assert num_open == 3
        else:
            assert refused.limit is Limit.REQUEST_RATE
            assert 0 < refused.retry_after_s <= 0.25 + 1e-6

    @precondition(lambda self: any(c is None for _, c in self.open))
    @rule(num_tokens=st.integers(1, 900), data=st.data())
    def charge(self, num_tokens: int, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from([i for i, (_, c) in enumerate(self.open) if c is None]))
        name = self.open[index][0]
        left_s = (self.day + 1) * DAY_S - self.now
        paid = self.paid[name].get(self.day, 0)
        charge = self.tenants.charge(self.known[name], num_tokens, self.now, self.day, left_s)
        if isinstance(charge, Charge):
            assert paid + num_tokens <= 2000
            self.paid[name][self.day] = paid + num_tokens
            self.open[index] = (name, charge)
        elif charge.limit is Limit.QUOTA:
            assert paid + num_tokens > 2000
            assert charge.retry_after_s <= left_s
        else:
            assert charge.limit is Limit.TOKEN_RATE
            assert charge.retry_after_s > 0

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.open) - 1))
        name, charge = self.open.pop(index)
        if charge is not None:
            num_used = data.draw(st.integers(0, charge.num_tokens))
            self.tenants.settle(self.known[name], charge, num_used)
            self.used[name].append((self.now, num_used))
            self.paid[name][charge.day] -= charge.num_tokens - num_used
        self.tenants.leave(self.known[name])

    @invariant()
    def no_more_than_the_rate(self) -> None:
        self.tenants.check_invariants()
        for name in NAMES:
            assert self.tenants.num_open(name) == sum(n == name for n, _ in self.open)
            times = self.entered[name]
            for i, first in enumerate(times):
                assert len(times) - i <= 4 + 4 * (self.now - first) + 1e-3
            total = sum(num for _, num in self.used[name])
            # The bucket's size, all refills, and one call that takes the full bucket into debt.
            assert total <= 600 + 10 * self.now + 900
            day, _, num_today = self.tenants.today(name, self.day)
            assert num_today == self.paid[name].get(day, 0)


TestTenantMachine = pytest.mark.req("S97")(TenantMachine.TestCase)
TestTenantMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
