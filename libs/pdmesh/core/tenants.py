"""What each tenant may take: requests and tokens by token buckets, open calls, and tokens of a day.

A call pays for one request on arrival, and for its prompt and all it may answer once they are known; what it did not use
is given back at its end. Nothing is taken by a call that is refused. With several gateways on one mesh each of them
grants its share of a limit, so that together they never grant more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

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
    """`weight`: its share of calls from the waiting room; `priority`: 0 is called first; `models` empty: all of them."""

    name: str
    limits: TenantLimits = TenantLimits()
    weight: int = 1
    priority: int = 1
    models: frozenset[str] = frozenset()
    is_disabled: bool = False


ANYONE = Tenant("default")  # without API keys everybody is the same tenant


class Limit(Enum):
    REQUEST_RATE = "RATE_LIMIT_EXCEEDED"
    TOKEN_RATE = "TOKEN_RATE_LIMIT_EXCEEDED"  # noqa: S105 - no secret
    CONCURRENCY = "CONCURRENCY_LIMIT_EXCEEDED"
    QUOTA = "INSUFFICIENT_QUOTA"


@dataclass(frozen=True, slots=True)
class Refused:
    limit: Limit
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Charge:
    """Tokens a call has paid for."""

    num_tokens: int
    day: int


@dataclass(slots=True)
class TokenBucket:
    """Fills with `rate` a second up to `capacity`. What costs more than a full bucket leaves it in debt."""

    rate: float
    capacity: float
    level: float
    at: float

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `take` may be called; 0: now."""
        self._fill(now)
        missing = min(amount, self.capacity) - self.level
        # A rounding error of the clock's is no reason to refuse.
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


@dataclass(slots=True)
class _Account:
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    num_open: int = 0
    day: int = 0
    num_today: int = 0


@dataclass(slots=True)
class Tenants:
    """`num_sharing`: gateways among which each limit is divided."""

    num_sharing: int = 1
    _accounts: dict[str, _Account] = field(default_factory=dict)

    def enter(self, tenant: Tenant, now: float) -> Refused | None:
        """One more open call, unless refused; `leave` ends it."""
        limits, account = tenant.limits, self._account(tenant.name)
        most = limits.max_concurrent
        if most is not None and account.num_open >= math.ceil(most / self.num_sharing):
            return Refused(Limit.CONCURRENCY, 1.0)
        bucket = account.requests = self._bucket(
            account.requests, limits.requests_per_s, 1.0, 1.0, now
        )
        if bucket is not None:
            if wait_s := bucket.wait_s(1.0, now):
                return Refused(Limit.REQUEST_RATE, wait_s)
            bucket.take(1.0, now)
        account.num_open += 1
        return None

    def leave(self, tenant: Tenant) -> None:
        account = self._accounts[tenant.name]
        assert account.num_open > 0
        account.num_open -= 1

    def charge(
        self, tenant: Tenant, num_tokens: int, now: float, day: int, left_s: float
    ) -> Charge | Refused:
        """Pay for a call's tokens. `day` numbers the days, this one has `left_s` to go."""
        limits, account = tenant.limits, self._account(tenant.name)
        if day > account.day:
            account.day, account.num_today = day, 0
        quota = limits.tokens_per_day
        if quota is not None and account.num_today + num_tokens > quota / self.num_sharing:
            return Refused(Limit.QUOTA, min(left_s, _MAX_WAIT_S))
        bucket = account.tokens = self._bucket(
            account.tokens, limits.tokens_per_min, 60.0, 60.0, now
        )
        if bucket is not None:
            if wait_s := bucket.wait_s(num_tokens, now):
                return Refused(Limit.TOKEN_RATE, wait_s)
            bucket.take(num_tokens, now)
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

    def used_today(self) -> Mapping[str, tuple[int, int]]:
        """By tenant: the day, and the tokens paid for on it."""
        return {name: (a.day, a.num_today) for name, a in self._accounts.items() if a.num_today}

    def restore(self, used: Mapping[str, tuple[int, int]]) -> None:
        for name, (day, num_tokens) in used.items():
            account = self._account(name)
            account.day, account.num_today = day, num_tokens

    def num_open(self, name: str) -> int:
        account = self._accounts.get(name)
        return 0 if account is None else account.num_open

    def forget_but(self, names: frozenset[str]) -> None:
        """Tenants come and go with the key file; those with open calls stay until the next time."""
        for name in [n for n, a in self._accounts.items() if n not in names and not a.num_open]:
            del self._accounts[name]

    def _account(self, name: str) -> _Account:
        found = self._accounts.get(name)
        if found is None:
            found = self._accounts[name] = _Account()
        return found

    def _bucket(
        self,
        bucket: TokenBucket | None,
        limit: float | None,
        per_s: float,
        burst_s: float,
        now: float,
    ) -> TokenBucket | None:
        """The bucket for `limit` every `per_s` seconds as it is now: limits and shares change while it lives."""
        if limit is None:
            return None
        rate = limit / per_s / self.num_sharing
        capacity = max(1.0, rate * burst_s)
        if bucket is None:
            return TokenBucket(rate, capacity, capacity, now)
        if (bucket.rate, bucket.capacity) != (rate, capacity):
            bucket.resize(rate, capacity, now)
        return bucket

    def check_invariants(self) -> None:
        for account in self._accounts.values():
            assert account.num_open >= 0
            assert account.num_today >= 0
            for bucket in (account.requests, account.tokens):
                assert bucket is None or bucket.level <= bucket.capacity + 1e-6
