"""Gateways divide a tenant's limit among themselves while they start, stop and die.

Together they never grant more than the limit. Each gateway with calls gets a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pdmesh.core.tenancy.limit_parts import Ledger, TenantParts, num_parts
from pdmesh.core.tenancy.limits import (
    Charge,
    Clock,
    Limit,
    LimitRefused,
    Tenant,
    TenantLimits,
    Tenants,
)

DAY_S = 2000.0


@dataclass
class Store:
    """A store of one record with compare-and-set."""

    ledger: Ledger | None = None
    revision: int = 0

    def put(self, ledger: Ledger, last: int) -> bool:
        if last != self.revision:
            return False
        self.ledger, self.revision = ledger, self.revision + 1
        return True


@dataclass
class Gateway:
    name: str
    tenant: Tenant
    store: Store
    tenants: Tenants = field(default_factory=lambda: Tenants(num_parts))
    charges: list[Charge | None] = field(default_factory=list)  # the charges of open calls

    def __post_init__(self) -> None:
        self.parts = TenantParts(self.name, self.tenants)

    def look(self, clock: Clock) -> None:
        self.parts.seen(self.tenant, self.store.ledger, self.store.revision, clock)

    def write(self, ledger: Ledger | None, clock: Clock) -> bool:
        revision = self.parts.revision(self.tenant)
        if ledger is None or not self.store.put(ledger, revision):
            return False
        self.parts.wrote(self.tenant, ledger, revision + 1, clock)
        return True

    def ask(self, clock: Clock) -> None:
        self.write(self.parts.more(self.tenant, clock), clock)

    def settle(self, clock: Clock, *, is_leaving: bool = False) -> None:
        self.write(self.parts.due(self.tenant, clock, is_leaving=is_leaving), clock)

    def charge(self, num_tokens: int, clock: Clock) -> Charge | LimitRefused:
        """Charge a call. If tokens are lacking, ask the other gateways once and try again."""
        found = self.try_charge(num_tokens, clock)
        if isinstance(found, LimitRefused) and found.num_lacking:
            with self.parts.waiting(self.tenant, num_tokens):
                self.write(self.parts.more_tokens(self.tenant, clock), clock)
                return self.try_charge(num_tokens, clock)
        return found

    def try_charge(self, num_tokens: int, clock: Clock) -> Charge | LimitRefused:
        return self.tenants.charge(self.tenant, num_tokens, clock.now, clock.day, 9.0)

    def enter(self, clock: Clock) -> bool:
        if self.tenants.enter(self.tenant, clock.now) is not None:
            return False
        self.charges.append(None)
        return True


class PartsMachine(RuleBasedStateMachine):
    """The gateways read the shared ledger late, and write it at any time."""

    @initialize(
        concurrent=st.integers(1, 6), requests=st.integers(1, 5), quota=st.integers(100, 2000)
    )
    def begin(self, concurrent: int, requests: int, quota: int) -> None:
        self.limits = TenantLimits(
            requests_per_s=requests, max_concurrent=concurrent, tokens_per_day=quota
        )
        self.tenant = Tenant("acme", self.limits)
        self.store = Store()
        self.now = 10.0
        self.gateways: list[Gateway] = []
        self.num_made = 0
        self.entered: list[float] = []
        self.granted: dict[int, int] = {}
        self.join()

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.now, int(self.now // DAY_S))

    def draw(self, data: st.DataObject) -> Gateway:
        return data.draw(st.sampled_from(self.gateways))

    def tell_which_live(self) -> None:
        names = frozenset(g.name for g in self.gateways)
        for gateway in self.gateways:
            gateway.parts.alive = names

    @precondition(lambda self: len(self.gateways) < 4)
    @rule()
    def join(self) -> None:
        self.num_made += 1
        self.gateways.append(Gateway(f"g{self.num_made}", self.tenant, self.store))
        self.tell_which_live()

    @precondition(lambda self: len(self.gateways) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Stop a gateway in order: its calls have ended, and it hands over its parts."""
        gateway = self.draw(data)
        while gateway.charges:
            self.close(gateway, 0)
        for _ in range(8):
            gateway.look(self.clock)
            gateway.settle(self.clock, is_leaving=True)
        assert self.store.ledger is None or gateway.name not in self.store.ledger.holders
        self.gateways.remove(gateway)
        self.tell_which_live()

    @precondition(lambda self: len(self.gateways) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        gateway = self.draw(data)
        gateway.look(self.clock)
        gateway.settle(self.clock)  # as a gateway does every second
        self.gateways.remove(gateway)
        self.tell_which_live()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 5.0, 300.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        self.draw(data).look(self.clock)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        self.draw(data).ask(self.clock)

    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.draw(data).settle(self.clock)

    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        if self.draw(data).enter(self.clock):
            self.entered.append(self.now)

    @rule(data=st.data(), num_tokens=st.integers(1, 300))
    def charge(self, data: st.DataObject, num_tokens: int) -> None:
        gateway, clock = self.draw(data), self.clock
        unpaid = [i for i, charge in enumerate(gateway.charges) if charge is None]
        if unpaid:
            charge = gateway.charge(num_tokens, clock)
            if isinstance(charge, Charge):
                gateway.charges[unpaid[0]] = charge
                self.granted[clock.day] = self.granted.get(clock.day, 0) + num_tokens

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        gateway = self.draw(data)
        if gateway.charges:
            self.close(gateway, data.draw(st.integers(0, 300)))

    def close(self, gateway: Gateway, num_used: int) -> None:
        charge = gateway.charges.pop()
        if charge is not None:
            num_used = min(num_used, charge.num_tokens)
            gateway.tenants.settle(self.tenant, charge, num_used)
            self.granted[charge.day] -= charge.num_tokens - num_used
        gateway.tenants.leave(self.tenant)

    @rule()
    def all_gateways_ask(self) -> None:
        """Check fairness: while no call is open, each gateway gets a part within seconds."""
        if any(g.charges for g in self.gateways):
            return
        for gateway in self.gateways:
            for _ in range(40):
                if gateway.enter(self.clock):
                    self.entered.append(self.now)
                    self.close(gateway, 0)
                    break
                gateway.look(self.clock)
                gateway.ask(self.clock)
                for other in self.gateways:
                    other.look(self.clock)
                    other.settle(self.clock)
                    other.look(self.clock)
                self.now += 0.25
            else:
                pytest.fail(f"{gateway.name} never got in: {self.store.ledger}")

    @invariant()
    def never_more_than_the_limit(self) -> None:
        if not hasattr(self, "gateways"):
            return
        most, rate = self.limits.max_concurrent, self.limits.requests_per_s
        quota = self.limits.tokens_per_day
        assert most is not None
        assert rate is not None
        assert quota is not None
        assert sum(len(g.charges) for g in self.gateways) <= most
        times = self.entered[-40:]
        for index, first in enumerate(times):
            assert len(times) - index <= rate + rate * (self.now - first) + 1e-3
        assert all(num <= quota for num in self.granted.values())
        held = [i for g in self.gateways for i in g.tenants.held("acme")]
        assert len(held) == len(set(held)) <= num_parts(self.limits)
        for gateway in self.gateways:
            gateway.tenants.check_invariants()


TestPartsMachine = pytest.mark.req("S97")(PartsMachine.TestCase)
TestPartsMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


@given(num_gateways=st.integers(1, 7), concurrent=st.integers(1, 40))
def test_a_limit_is_granted_only_once_for_any_number_of_gateways(
    num_gateways: int, concurrent: int
) -> None:
    """With three gateways, a limit of four once became six."""
    tenant = Tenant("acme", TenantLimits(max_concurrent=concurrent))
    store, clock = Store(), Clock(5.0, 5.0, 0)
    fleet = [Gateway(f"g{i}", tenant, store) for i in range(num_gateways)]
    for gateway in fleet:
        gateway.parts.alive = frozenset(g.name for g in fleet)
    for _ in range(20):
        for gateway in fleet:
            gateway.look(clock)
            if gateway.enter(clock):
                gateway.charges.pop()
                gateway.tenants.leave(tenant)
            else:
                gateway.ask(clock)
            gateway.settle(clock)
        clock = Clock(clock.now + 0.1, clock.wall + 0.1, 0)
    admitted = [sum(g.enter(clock) for _ in range(50)) for g in fleet]
    assert sum(admitted) <= concurrent
    if concurrent >= num_gateways:
        assert min(admitted) >= 1
    if num_gateways == 1:
        assert admitted == [concurrent]


def test_an_idle_gateway_leaves_the_whole_limit_to_a_busy_one() -> None:
    tenant = Tenant("acme", TenantLimits(max_concurrent=4))
    store = Store()
    fleet = [Gateway(f"g{i}", tenant, store) for i in range(3)]
    for gateway in fleet:
        gateway.parts.alive = frozenset(g.name for g in fleet)
    now = 5.0
    for step in range(60):
        now += 0.25
        clock = Clock(now, now, 0)
        for gateway in fleet if step < 20 else fleet[:1]:
            gateway.ask(clock)
            if gateway.enter(clock):
                gateway.charges.pop()
                gateway.tenants.leave(tenant)
        for gateway in fleet:
            gateway.look(clock)
            gateway.settle(clock)
            gateway.look(clock)
        if step == 19:
            assert sorted(len(g.tenants.held("acme")) for g in fleet) == [1, 1, 2]
    assert [g.enter(Clock(now, now, 0)) for g in fleet[:1] * 5] == [True] * 4 + [False]


def test_the_tokens_that_a_gateway_used_stay_counted_after_its_end() -> None:
    """The quota is 100. One gateway grants 60 and leaves, another grants 30 and dies. 10 are
    left.
    """
    tenant = Tenant("acme", TenantLimits(tokens_per_day=100))
    store, clock = Store(), Clock(5.0, 5.0, 1)
    left, died, last = (Gateway(name, tenant, store) for name in ("left", "died", "last"))

    def grant(gateway: Gateway, num_tokens: int, clock: Clock = clock) -> bool:
        gateway.look(clock)
        return isinstance(gateway.charge(num_tokens, clock), Charge)

    assert grant(left, 60)
    left.settle(clock, is_leaving=True)
    assert not grant(died, 41)
    assert grant(died, 30)
    died.settle(clock)
    assert not grant(last, 11)
    assert grant(last, 10)
    assert not grant(last, 1)
    assert grant(last, 100, Clock(6.0, 6.0, 2))


@dataclass
class Fleet:
    """Three gateways with one quota. At most one stops or dies during the day."""

    tenant: Tenant
    gateways: list[Gateway]
    now: float = 5.0
    granted: int = 0
    lost: int = 0

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.now, 1)

    def tell_which_live(self) -> None:
        for gateway in self.gateways:
            gateway.parts.alive = [g.name for g in self.gateways]

    def settle(self) -> None:
        """Let each gateway do the work of a second."""
        for gateway in self.gateways:
            gateway.look(self.clock)
            gateway.settle(self.clock)

    def call(self, gateway: Gateway, num_tokens: int, num_used: int) -> LimitRefused | None:
        """Make a call. It waits while other gateways may hand over parts."""
        self.enter(gateway)
        gateway.tenants.leave(self.tenant)
        with gateway.parts.waiting(self.tenant, num_tokens):
            for _ in range(3):
                gateway.look(self.clock)
                charge = gateway.charge(num_tokens, self.clock)
                if isinstance(charge, Charge):
                    break
                self.hand_over()
            else:
                assert isinstance(charge, LimitRefused)
                return charge
        gateway.tenants.settle(self.tenant, charge, num_used)
        self.granted += num_used
        return None

    def enter(self, gateway: Gateway) -> None:
        """Admit a call, since only an admitted call is charged. An idle gateway may have no part
        yet.
        """
        for _ in range(3):
            gateway.look(self.clock)
            if gateway.tenants.enter(self.tenant, self.clock.now) is None:
                return
            gateway.ask(self.clock)
            self.hand_over()
        pytest.fail(f"{gateway.name} never got in: {gateway.store.ledger}")

    def hand_over(self) -> None:
        """Let each gateway react to the lack of parts at another gateway."""
        for gateway in self.gateways:
            gateway.look(self.clock)
            gateway.write(gateway.parts.due(self.tenant, self.clock, tells_use=False), self.clock)

    def exhaust(self, quota: int, routing: list[int]) -> None:
        """Make calls until every gateway refuses: first for a seventh of the remaining quota each,
        then for single tokens.
        """
        refused: set[str] = set()
        for step in count():
            place = routing[step % len(routing)] if step < 40 * len(routing) else step
            gateway = self.gateways[place % len(self.gateways)]
            left = quota - self.granted - self.lost
            num_tokens = 1 if left < 100 else left // 7 + 1
            if self.call(gateway, num_tokens, num_tokens) is not None:
                assert left == 0, f"none of {num_tokens} comes"
                refused.add(gateway.name)
            assert self.granted <= quota
            if len(refused) == len(self.gateways):
                return

    def go(self, gateway: Gateway, *, in_order: bool) -> None:
        if in_order:
            gateway.look(self.clock)
            gateway.settle(self.clock, is_leaving=True)
        else:
            _, num_leased, num_used = gateway.tenants.today("acme", 1)
            self.lost += num_leased - num_used
        self.gateways.remove(gateway)
        self.tell_which_live()


@given(
    quota=st.integers(1, 5000),
    calls=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 400), st.integers(0, 400), st.booleans()),
        max_size=60,
    ),
    goes=st.one_of(st.none(), st.tuples(st.integers(0, 59), st.booleans())),
    routing=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    is_limited_otherwise=st.booleans(),
)
@example(  # the third gateway has been idle, so the others have its parts
    quota=1,
    calls=[(0, 1, 0, True)] * 5,
    goes=None,
    routing=[2],
    is_limited_otherwise=True,
)
@settings(max_examples=60, deadline=None)
def test_a_quota_is_granted_to_the_last_token_however_calls_are_routed(
    quota: int,
    calls: list[tuple[int, int, int, bool]],
    goes: tuple[int, bool] | None,
    routing: list[int],
    is_limited_otherwise: bool,
) -> None:
    """A gateway that leaves gives back the tokens that it did not grant. If a gateway dies, only
    these tokens are lost.
    """
    limits = TenantLimits(tokens_per_day=quota, max_concurrent=9 if is_limited_otherwise else None)
    tenant, store = Tenant("acme", limits), Store()
    fleet = Fleet(tenant, [Gateway(f"g{i}", tenant, store) for i in range(3)])
    fleet.tell_which_live()
    if is_limited_otherwise:
        fleet.now += 1.0
        for gateway in fleet.gateways * 3:  # so that each gateway gets a part
            gateway.look(fleet.clock)
            gateway.ask(fleet.clock)
            if gateway.enter(fleet.clock):
                gateway.tenants.leave(tenant)
            fleet.settle()
        assert all(g.tenants.held("acme") for g in fleet.gateways)
    for index, (place, num_tokens, num_used, is_second_over) in enumerate(calls):
        if goes is not None and goes[0] == index:
            fleet.go(fleet.gateways[0], in_order=goes[1])
        gateway = fleet.gateways[place % len(fleet.gateways)]
        fleet.call(gateway, num_tokens, min(num_tokens, num_used))
        if is_second_over:
            fleet.now += 1.0
            fleet.settle()
        assert fleet.granted <= quota
    fleet.exhaust(quota, routing)
    assert fleet.granted == quota - fleet.lost
    fleet.settle()
    fleet.settle()
    for gateway in fleet.gateways:
        found = fleet.call(gateway, 1, 1)
        assert found is not None
        assert found.limit is Limit.QUOTA, "every gateway knows that the quota is used up"
        gateway.tenants.check_invariants()


def test_a_gateway_that_dies_loses_only_a_small_part_of_the_quota() -> None:
    tenant, store = Tenant("acme", TenantLimits(tokens_per_day=100_000)), Store()
    fleet = Fleet(tenant, [Gateway(f"g{i}", tenant, store) for i in range(3)])
    fleet.tell_which_live()
    for _ in range(20):
        # used 1,000 of 20,000 tokens, so most of the charge is returned
        fleet.call(fleet.gateways[0], 20_000, 1_000)
    fleet.settle()
    fleet.go(fleet.gateways[0], in_order=False)
    assert 0 < fleet.lost <= 100_000 / 32


def test_a_gateway_without_calls_holds_no_tokens_of_the_quota() -> None:
    tenant, store = Tenant("acme", TenantLimits(tokens_per_day=100_000)), Store()
    fleet = Fleet(tenant, [Gateway(f"g{i}", tenant, store) for i in range(3)])
    fleet.tell_which_live()
    fleet.call(fleet.gateways[0], 100, 100)
    fleet.now += 6.0
    fleet.settle()
    fleet.go(fleet.gateways[0], in_order=False)
    assert fleet.lost == 0


def test_a_write_without_an_answer_grants_nothing_twice() -> None:
    """The write may arrive late. Until the result of the write is known, no gateway grants the
    tokens in it.
    """
    tenant, store = Tenant("acme", TenantLimits(tokens_per_day=3200)), Store()
    giver, taker = (Gateway(name, tenant, store) for name in ("giver", "taker"))
    giver.parts.alive = taker.parts.alive = ("giver", "taker")
    clock = Clock(5.0, 5.0, 1)
    assert giver.enter(clock)
    assert isinstance(giver.charge(3200, clock), Charge)
    giver.tenants.settle(tenant, Charge(3200, 1), 100)
    giver.settle(clock)
    giver.look(clock)
    _, num_leased, _ = giver.tenants.today("acme", 1)
    unused = num_leased - 100
    assert unused > 0
    taker.look(clock)
    with taker.parts.waiting(tenant, 3100):
        taker.write(taker.parts.more_tokens(tenant, clock), clock)
        giver.look(clock)
        lost = giver.parts.due(tenant, clock, tells_use=False)
        assert lost is not None
        assert isinstance(giver.try_charge(1, clock), LimitRefused)
        giver.look(clock)
        assert isinstance(giver.try_charge(1, clock), LimitRefused), "although the ledger allows it"
        store.put(lost, store.revision)  # the lost write arrives late
        taker.look(clock)
        assert isinstance(taker.try_charge(3100, clock), Charge)
    giver.look(clock)
    assert isinstance(giver.try_charge(1, clock), LimitRefused)


def test_a_reduced_quota_applies_from_then_on() -> None:
    tenant, store = Tenant("acme", TenantLimits(tokens_per_day=3200)), Store()
    fleet = Fleet(tenant, [Gateway(f"g{i}", tenant, store) for i in range(3)])
    fleet.tell_which_live()
    for gateway in fleet.gateways:
        fleet.call(gateway, 100, 100)
    fleet.tenant = Tenant("acme", TenantLimits(tokens_per_day=310))
    for gateway in fleet.gateways:
        gateway.tenant = fleet.tenant
    fleet.settle()
    for gateway in fleet.gateways * 20:
        fleet.call(gateway, 1, 1)
    assert fleet.granted == 310
