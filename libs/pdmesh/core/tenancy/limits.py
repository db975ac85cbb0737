"""Decides what each tenant may use: a rate of requests, a rate of tokens, open calls, and tokens a
day.

The two rates are limited by token buckets. On arrival, a call pays for one request. Once the
lengths of its prompt and its longest answer are known, it pays for these tokens. At its end it gets
back the tokens that it did not use. A call that is refused on arrival pays nothing, and a call that
is refused later pays for no tokens.

If several gateways serve one mesh, each grants only its own parts of a limit (`limit_parts`), and
only the daily tokens that it has leased (`quota_leases`). So together they never grant more than
the limit.
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
    """A tenant's limits. None means no limit.

    A bucket's capacity is the grant of one second for requests, and of one minute for tokens.
    """

    requests_per_s: float | None = None
    tokens_per_min: float | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """A customer that keys, limits and a priority belong to.

    Tenants whose calls wait for a free slot take turns in proportion to their `weight`. Calls with
    `priority` 0 come first. `models` has the models that the tenant may use; empty means all.
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
    """A limit refuses a call.

    `num_lacking` counts the tokens that other gateways may give up for this call.
    """

    limit: Limit
    retry_after_s: float
    num_lacking: int = 0


@dataclass(frozen=True, slots=True)
class Charge:
    """The tokens that a call has paid for, and the day whose quota they count in."""

    num_tokens: int
    day: int


@dataclass(slots=True)
class TokenBucket:
    """Fills with `rate` per second up to `capacity`.

    A call may cost more than a full bucket holds. It then leaves the bucket in debt.
    """

    rate: float
    capacity: float
    level: float
    at: float

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `take` may be called; 0 means now."""
        self._fill(now)
        missing = min(amount, self.capacity) - self.level
        # A rounding error must not refuse a call.
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
    """The levels of a part's token buckets at the time `at`. None means that the bucket is full.

    When a gateway hands a part of a limit over, these levels go to the next gateway.
    """

    requests: float | None = None
    tokens: float | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Clock:
    """`now` is this process's monotonic clock. `wall` is the clock that all gateways share.

    `day` is the number of the current day, which ends in `left_s` seconds.
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
    num_leased: int = 0  # if gateways share limits: the most that `num_today` may be
    num_elsewhere: int = 0  # tokens that other gateways are known to have granted today
    held: dict[int, None] = field(default_factory=dict)  # if gateways share limits: our parts
    came_at: float = -math.inf


@dataclass(slots=True)
class Tenants:
    """The use of limits by all tenants, in this gateway.

    `num_parts` computes into how many parts limits are cut. This gateway grants only the parts that
    it holds. If `num_parts` is None, limits are not cut, and this gateway grants all of each limit.
    """

    num_parts: Callable[[TenantLimits], int] | None = None
    _accounts: dict[str, _Account] = field(default_factory=dict)

    def enter(self, tenant: Tenant, now: float) -> LimitRefused | None:
        """Open one more call, unless a limit refuses it. `leave` closes the call."""
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
        """Pay for a call's tokens. `day` is the number of the current day, which ends in `left_s`
        seconds.
        """
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
        """Give back the tokens that a call did not use. A call never uses more than it paid for."""
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
        """Forget all tenants except `names`, the tenants in the key file.

        A tenant with open calls is forgotten later, by another call of this method. A tenant with
        leased tokens is also kept. Otherwise, if it came back, the same tokens could be granted
        twice.
        """
        for name, account in list(self._accounts.items()):
            if name not in names and not account.num_open and not account.num_leased:
                del self._accounts[name]

    # --- parts -----------------------------------------------------------------------------------

    def held(self, name: str) -> Collection[int]:
        account = self._accounts.get(name)
        return () if account is None else account.held

    def idle_s(self, name: str, now: float) -> float:
        """Seconds since the last call arrived, admitted or not. While a call is open, this is 0."""
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
        """Give a part up, so that it admits nothing from now on. Return the levels to hand over
        with it.
        """
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
        """Drop parts that no longer exist, because the limits are cut into fewer parts now."""
        account = self._account(tenant.name)
        num = self.num_parts(tenant.limits) if self.num_parts is not None else 0
        account.held = {index: None for index in account.held if index < num}

    def news(self, tenant: Tenant, part: Part, clock: Clock) -> Part | None:
        """The present levels of one of our parts, if they are news to the other gateways.

        None if the levels follow from `part`, the levels that were written last.
        """
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
        """The levels of one part, if each held part gets an equal share of the buckets' levels."""
        num = len(account.held)
        requests, tokens = (
            None if bucket is None else bucket.level / num
            for bucket in (account.requests, account.tokens)
        )
        return Part(requests, tokens, clock.wall)

    # --- leases ----------------------------------------------------------------------------------

    def today(self, name: str, day: int) -> tuple[int, int, int]:
        """The current day, the tokens leased for it, and the tokens granted in it."""
        account = self._account(name)
        self._begin_day(account, day)
        return account.day, account.num_leased, account.num_today

    def lease(self, name: str, num_tokens: int) -> None:
        """Allow `num_tokens` today, including the tokens that this gateway has granted already."""
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
        """Fit the buckets to the limits and to our present share, because both may have changed.

        With `is_empty`, a new bucket starts empty.
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
    """A bucket for `share` of `limit` every `period_s` seconds. Its capacity is one
    period's grant.
    """
    if limit is None:
        return None
    rate, capacity = limit / period_s * share, max(1.0, limit) * share
    if bucket is None:
        return TokenBucket(rate, capacity, 0.0 if is_empty else capacity, now)
    if (bucket.rate, bucket.capacity) != (rate, capacity):
        bucket.resize(rate, capacity, now)
    return bucket


def _level_now(bucket: TokenBucket, level: float | None, at: float, num: int, wall: float) -> float:
    """The present level of one of `num` equal parts that had `level` at the time `at`."""
    full = bucket.capacity / num
    if level is None:
        return full
    return min(full, level + max(0.0, wall - at) * bucket.rate / num)
