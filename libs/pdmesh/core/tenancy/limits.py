"""Decides what each tenant may use: requests and tokens by token buckets, open calls, and a daily
quota of tokens.

A call pays for one request on arrival. It pays for its prompt and its longest answer once both are
known, and gets back at its end what it did not use. A call that is refused pays nothing.

With several gateways on one mesh, each grants only the parts of a limit that it holds
(`limit_parts`), and only the tokens of the day that it has leased (`quota_leases`). So together
they never grant more than the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from pdmesh.core.instance.urgency import DEFAULT_PRIORITY

_MAX_WAIT_S = 86400.0


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None: no limit. A bucket holds what one second (requests) or one minute (tokens) grants."""

    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight`: its share of calls from the waiting room. `priority`: 0 is called first.

    `models`: the models that it may use; empty: all.
    """

    name: str
    limits: TenantLimits = TenantLimits()
    weight: int = 1
    priority: int = DEFAULT_PRIORITY
    models: frozenset[str] = frozenset()
    is_disabled: bool = False

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models


ANYONE = Tenant("default")  # without API keys all clients are one tenant


class Limit(Enum):
    REQUEST_RATE = "RATE_LIMIT_EXCEEDED"
    TOKEN_RATE = "TOKEN_RATE_LIMIT_EXCEEDED"  # noqa: S105 - no secret
    CONCURRENCY = "CONCURRENCY_LIMIT_EXCEEDED"
    QUOTA = "INSUFFICIENT_QUOTA"


@dataclass(frozen=True, slots=True)
class LimitRefused:
    """`num_lacking`: how many tokens the call lacks that other gateways may give up."""

    limit: Limit
    retry_after_s: float
    num_lacking: int = 0


@dataclass(frozen=True, slots=True)
class Charge:
    """Tokens that a call has paid for."""

    num_tokens: int
    day: int


@dataclass(slots=True)
class TokenBucket:
    """Fills with `rate` per second up to `capacity`.

    A call that costs more than a full bucket leaves the bucket in debt.
    """

    rate: float
    capacity: float
    level: float
    at: float

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `take` may be called; 0: now."""
        self._fill(now)
        missing = min(amount, self.capacity) - self.level
        # A rounding error of the clock is no reason to refuse.
        return 0.0 if missing <= 1e-6 else missing / self.rate

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self.level -= amount

    def give(self, amount: float) -> None:
        self.level = min(self.capacity, self.level + amount)

    def resize(self, rate: float, capacity: float, now: float) -> None:
        self._fill(now)
        self.rate, self.capacity = rate, capacity
        self.level = min(self.level, capacity)

    def _fill(self, now: float) -> None:
        if now > self.at:
            self.level = min(self.capacity, self.level + (now - self.at) * self.rate)
            self.at = now


@dataclass(frozen=True, slots=True)
class Part:
    """What goes with a part of a limit from gateway to gateway.

    These are the levels of its buckets at the time `at`; None: full.
    """

    requests: float | None = None
    tokens: float | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Clock:
    """`now` is this process's monotonic clock, `wall` is the clock that all gateways share.

    `day` numbers the days; this day has `left_s` to go.
    """

    now: float
    wall: float
    day: int
    left_s: float = 0.0


@dataclass(slots=True)
class _Account:
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    num_open: int = 0
    day: int = 0
    num_today: int = 0
    num_leased: int = 0  # tokens of today, if limits are shared: `num_today` never exceeds it
    num_elsewhere: int = 0  # tokens that other gateways granted today, as far as is known
    held: dict[int, None] = field(default_factory=dict)  # parts, if limits are shared
    came_at: float = -math.inf


@dataclass(slots=True)
class Tenants:
    """`num_parts`: into how many parts limits are cut; only the parts that we hold count.

    If it is None, limits are not cut, and all of each limit is ours.
    """

    num_parts: Callable[[TenantLimits], int] | None = None
    _accounts: dict[str, _Account] = field(default_factory=dict)

    def enter(self, tenant: Tenant, now: float) -> LimitRefused | None:
        """Open one more call, unless it is refused; `leave` ends it."""
        limits, account = tenant.limits, self._account(tenant.name)
        account.came_at = now
        share = self._share(limits, account)
        most = self.max_open(tenant)
        if account.num_open >= most or not share:
            return LimitRefused(Limit.CONCURRENCY, 1.0)
        self._fit(account, limits, now)
        if account.requests is not None:
            if wait_s := account.requests.wait_s(1.0, now):
                return LimitRefused(Limit.REQUEST_RATE, wait_s)
            account.requests.take(1.0, now)
        account.num_open += 1
        return None

    def leave(self, tenant: Tenant) -> None:
        account = self._accounts[tenant.name]
        assert account.num_open > 0
        account.num_open -= 1

    def charge(
        self, tenant: Tenant, num_tokens: int, now: float, day: int, left_s: float
    ) -> Charge | LimitRefused:
        """Pay for a call's tokens. `day` numbers the days; this day has `left_s` to go."""
        limits, account = tenant.limits, self._account(tenant.name)
        self._begin_day(account, day)
        share = self._share(limits, account)
        if limits.tokens_per_day is not None:
            num_today = account.num_today + num_tokens
            if num_today + account.num_elsewhere > limits.tokens_per_day:
                return LimitRefused(Limit.QUOTA, min(left_s, _MAX_WAIT_S))
            if self.num_parts is not None and num_today > account.num_leased:
                return LimitRefused(Limit.TOKEN_RATE, 1.0, num_lacking=num_tokens)
        if not share:
            return LimitRefused(Limit.TOKEN_RATE, 1.0)
        self._fit(account, limits, now)
        if account.tokens is not None:
            if wait_s := account.tokens.wait_s(num_tokens, now):
                return LimitRefused(Limit.TOKEN_RATE, wait_s)
            account.tokens.take(num_tokens, now)
        account.num_today += num_tokens
        return Charge(num_tokens, account.day)

    def settle(self, tenant: Tenant, charge: Charge, num_used: int) -> None:
        """Give back what a call did not use; a call never uses more than it paid for."""
        account = self._accounts[tenant.name]
        unused = max(0, charge.num_tokens - num_used)
        if account.tokens is not None:
            account.tokens.give(unused)
        if charge.day == account.day:
            account.num_today -= unused

    def num_open(self, name: str) -> int:
        account = self._accounts.get(name)
        return 0 if account is None else account.num_open

    def forget_but(self, names: frozenset[str]) -> None:
        """Forget tenants that left the key file.

        A tenant with open calls stays until the next time. So does a tenant with leases: otherwise
        a tenant that comes back could be granted the same tokens twice.
        """
        for name, account in list(self._accounts.items()):
            if name not in names and not account.num_open and not account.num_leased:
                del self._accounts[name]

    # --- parts -----------------------------------------------------------------------------------

    def held(self, name: str) -> Collection[int]:
        account = self._accounts.get(name)
        return () if account is None else account.held

    def idle_s(self, name: str, now: float) -> float:
        """How long no call has come, admitted or not; 0 while a call is open."""
        account = self._account(name)
        return 0.0 if account.num_open else now - account.came_at

    def max_open(self, tenant: Tenant) -> float:
        """How many open calls our parts allow."""
        most, account = tenant.limits.max_concurrent, self._account(tenant.name)
        if most is None:
            return math.inf
        if self.num_parts is None or not (num := self.num_parts(tenant.limits)):
            return most
        return sum((i + 1) * most // num - i * most // num for i in account.held if i < num)

    def hold(self, tenant: Tenant, index: int, part: Part, clock: Clock) -> None:
        limits, account = tenant.limits, self._account(tenant.name)
        assert index not in account.held
        account.held[index] = None
        self._fit(account, limits, clock.now, is_empty=True)
        for bucket, level in ((account.requests, part.requests), (account.tokens, part.tokens)):
            if bucket is not None:
                bucket.give(_level_now(bucket, level, part.at, len(account.held), clock.wall))

    def give_up(self, tenant: Tenant, index: int, clock: Clock) -> Part:
        """Give a part up; it admits nothing from now on. Returns what goes with it."""
        limits, account = tenant.limits, self._account(tenant.name)
        self._fit(account, limits, clock.now)
        going = self._one_part(account, clock)
        for bucket, level in ((account.requests, going.requests), (account.tokens, going.tokens)):
            if bucket is not None and level is not None:
                bucket.take(level, clock.now)
        del account.held[index]
        self._fit(account, limits, clock.now)
        return going

    def trim(self, tenant: Tenant) -> None:
        """Drop parts that no longer exist, because the limits are cut into fewer."""
        account = self._account(tenant.name)
        num = self.num_parts(tenant.limits) if self.num_parts is not None else 0
        account.held = {index: None for index in account.held if index < num}

    def news(self, tenant: Tenant, part: Part, clock: Clock) -> Part | None:
        """What would go with one of our parts; None if it follows from the `part` told last."""
        account = self._account(tenant.name)
        self._fit(account, tenant.limits, clock.now)
        going, num = self._one_part(account, clock), len(account.held)
        is_new = False
        for bucket, told, level in (
            (account.requests, part.requests, going.requests),
            (account.tokens, part.tokens, going.tokens),
        ):
            if bucket is not None and level is not None:
                is_new |= level < _level_now(bucket, told, part.at, num, clock.wall) - 1e-3
        return going if is_new else None

    def _one_part(self, account: _Account, clock: Clock) -> Part:
        """An equal part of all that is left."""
        num = len(account.held)
        requests, tokens = (
            None if bucket is None else bucket.level / num
            for bucket in (account.requests, account.tokens)
        )
        return Part(requests, tokens, clock.wall)

    # --- leases ----------------------------------------------------------------------------------

    def today(self, name: str, day: int) -> tuple[int, int, int]:
        """The day that counts here, the tokens leased for it, and the tokens granted."""
        account = self._account(name)
        self._begin_day(account, day)
        return account.day, account.num_leased, account.num_today

    def lease(self, name: str, num_tokens: int) -> None:
        """We may grant `num_tokens` today, including the tokens that we have granted already."""
        self._account(name).num_leased = num_tokens

    def granted_elsewhere(self, name: str, num_tokens: int) -> None:
        self._account(name).num_elsewhere = num_tokens

    def _share(self, limits: TenantLimits, account: _Account) -> float:
        if self.num_parts is None or not (num := self.num_parts(limits)):
            return 1.0
        return sum(index < num for index in account.held) / num

    def _begin_day(self, account: _Account, day: int) -> None:
        if day > account.day:
            account.day, account.num_today = day, 0
            account.num_leased = account.num_elsewhere = 0

    def _account(self, name: str) -> _Account:
        found = self._accounts.get(name)
        if found is None:
            found = self._accounts[name] = _Account()
        return found

    def _fit(
        self, account: _Account, limits: TenantLimits, now: float, *, is_empty: bool = False
    ) -> None:
        """Fit the buckets to these limits and to our present share; both may have changed.

        `is_empty`: a new bucket starts empty.
        """
        share = self._share(limits, account)
        account.requests = _bucket(
            account.requests, limits.requests_per_s, 1.0, share, now, is_empty
        )
        account.tokens = _bucket(account.tokens, limits.tokens_per_min, 60.0, share, now, is_empty)

    def check_invariants(self) -> None:
        for account in self._accounts.values():
            assert account.num_open >= 0
            assert account.num_today >= 0
            for bucket in (account.requests, account.tokens):
                assert bucket is None or bucket.level <= bucket.capacity + 1e-6


def _bucket(
    bucket: TokenBucket | None,
    limit: float | None,
    period_s: float,
    share: float,
    now: float,
    is_empty: bool,
) -> TokenBucket | None:
    """A bucket for `share` of `limit` every `period_s` seconds. It holds one period's worth."""
    if limit is None:
        return None
    rate, capacity = limit / period_s * share, max(1.0, limit) * share
    if bucket is None:
        return TokenBucket(rate, capacity, 0.0 if is_empty else capacity, now)
    if (bucket.rate, bucket.capacity) != (rate, capacity):
        bucket.resize(rate, capacity, now)
    return bucket


def _level_now(bucket: TokenBucket, level: float | None, at: float, num: int, wall: float) -> float:
    """The present level of one of `num` parts that had `level` at the time `at`."""
    full = bucket.capacity / num
    if level is None:
        return full
    return min(full, level + max(0.0, wall - at) * bucket.rate / num)
