"""Decides which gateway holds which parts of a tenant's limits (S97).

Limits are cut into parts. Each part is held by one gateway at a time, and a ledger in a shared
store says by which one. The ledger is written by compare-and-set, so no two gateways take the same
part. A gateway grants only its own parts. So all gateways together never grant more than the limit.
A limit is cut into at most `_MAX_PARTS` parts, each large enough for one open call or one request.

Parts move to the gateways that have calls. A gateway takes free parts when it needs them. If there
are none, it asks for one in the ledger, and gateways that hold more than their share hand some
over. A gateway without calls hands over all of its parts. If there are fewer parts than gateways, a
part is handed on after a while. The levels of a part's token buckets are handed over with it.

The daily quota of tokens is not cut into parts. Its tokens are leased (`quota_leases`), in the same
ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from pdmesh.core.tenancy import quota_leases
from pdmesh.core.tenancy.limits import (
    Clock,
    Part,
    Tenant,
    TenantLimits,
    Tenants,
)
from pdmesh.core.tenancy.quota_leases import Leases, QuotaLease

_MAX_PARTS: Final = 16
_IDLE_S: Final = 5.0  # after this time without a call, a gateway hands over all of its parts
_HELD_S: Final = 1.0  # if there are fewer parts than gateways, a part is held at least this long


def num_parts(limits: TenantLimits) -> int:
    """Into how many parts the limits are cut. 0 means that no limit is cut."""
    if replace(limits, tokens_per_day=None) == TenantLimits():
        return 0
    found = [_MAX_PARTS]
    if limits.max_concurrent is not None:
        found.append(limits.max_concurrent)
    if limits.requests_per_s is not None:
        found.append(int(limits.requests_per_s))
    return max(1, min(found))


@dataclass(frozen=True, slots=True)
class Ledger:
    """Which gateway holds which part of one tenant's limits.

    `holders[i]` is the gateway that holds part i, or empty if the part is free. `wanted` has the
    gateways that found no free part, the longest waiting first.
    """

    holders: tuple[str, ...]
    parts: tuple[Part, ...]
    wanted: tuple[str, ...] = ()
    leases: Leases = ()

    @classmethod
    def new(cls, num: int) -> Ledger:
        return cls(("",) * num, (Part(),) * num)

    def with_part(self, index: int, holder: str, part: Part) -> Ledger:
        holders, parts = list(self.holders), list(self.parts)
        holders[index], parts[index] = holder, part
        return replace(self, holders=tuple(holders), parts=tuple(parts))


@dataclass(slots=True)
class _Known:
    ledger: Ledger | None = None
    revision: int = 0
    leaving: dict[int, Part] = field(default_factory=dict)  # parts given up but not handed over yet
    since: float = 0.0  # when this gateway got its last part
    waiting: list[int] = field(default_factory=list)  # the tokens that each waiting call needs
    # While we give tokens back, the ledger still has our larger lease. We grant no more than this
    # smaller lease allows.
    giving: QuotaLease | None = None


@dataclass(slots=True)
class TenantParts:
    """What one gateway, `me`, knows about all ledgers, and what it writes to them.

    `seen` records any state of a ledger from the store, including what this gateway wrote. `more`,
    `more_tokens` and `due` return a ledger to write, or None. The write must fail if the store has
    another revision than the known one.
    """

    me: str
    tenants: Tenants
    alive: Collection[str] = ()  # the other gateways that are alive, and may hold parts
    _known: dict[str, _Known] = field(default_factory=dict)

    def is_leaving(self, tenant: Tenant) -> bool:
        """Whether parts must be handed over as soon as enough calls have ended."""
        return bool(self._of(tenant).leaving)

    def revision(self, tenant: Tenant) -> int:
        return self._of(tenant).revision

    def holds_all(self, tenant: Tenant) -> bool:
        num = num_parts(tenant.limits)
        return sum(index < num for index in self.tenants.held(tenant.name)) >= num

    def seen(self, tenant: Tenant, ledger: Ledger | None, revision: int, clock: Clock) -> None:
        """Record the present state of a tenant's ledger in the store."""
        known = self._of(tenant)
        if revision < known.revision:
            return  # older than what we know
        known.ledger, known.revision = ledger, revision
        if ledger is None:
            return
        self._lease_seen(tenant, ledger, clock)
        self._trim(tenant)
        ledger = _sized(ledger, num_parts(tenant.limits))
        for index, holder in enumerate(ledger.holders):
            is_held = index in self.tenants.held(tenant.name)
            if holder != self.me:
                known.leaving.pop(index, None)
                if is_held:  # another gateway took the part, because it considered us dead
                    self.tenants.give_up(tenant, index, clock)
            elif not is_held and index not in known.leaving:
                self.tenants.hold(tenant, index, ledger.parts[index], clock)
                known.since = clock.now

    def wrote(self, tenant: Tenant, ledger: Ledger, revision: int, clock: Clock) -> None:
        """The store accepted this write of ours, so it will accept none of our earlier writes."""
        known = self._of(tenant)
        known.giving = None
        if revision < known.revision and known.ledger is not None:
            self._lease_seen(tenant, known.ledger, clock)
        self.seen(tenant, ledger, revision, clock)

    def named(self, tenant: Tenant) -> set[str]:
        """The gateways that hold or want a part, or have a lease."""
        ledger = self._of(tenant).ledger
        if ledger is None:
            return set()
        return {*ledger.holders, *ledger.wanted, *(x.holder for x in ledger.leases)} - {""}

    def forget(self) -> None:
        """Forget all ledgers. The store is read again from its start, since it may be another store
        now.
        """
        for known in self._known.values():
            known.ledger, known.revision = None, 0

    def more(self, tenant: Tenant, clock: Clock) -> Ledger | None:
        """The ledger in which we take free parts or, if no part is free, ask for one.

        None if no part is free and we hold all parts, have asked already, or hand parts over.
        """
        self._trim(tenant)
        known, ledger = self._of(tenant), self._ledger(tenant, clock)
        free = [i for i, holder in enumerate(ledger.holders) if not self._is_alive(holder)]
        if free:
            others = [w for w in ledger.wanted if w != self.me and self._is_alive(w)]
            for index in free[:1] if others else free:
                ledger = ledger.with_part(index, self.me, ledger.parts[index])
            return replace(ledger, wanted=tuple(w for w in ledger.wanted if w != self.me))
        if self.me in ledger.wanted or self.holds_all(tenant) or known.leaving:
            return None
        return replace(ledger, wanted=(*ledger.wanted, self.me))

    # --- tokens of a day -------------------------------------------------------------------------

    def has_lease(self, tenant: Tenant, clock: Clock) -> bool:
        is_giving = self._of(tenant).giving is not None
        return is_giving or self.tenants.today(tenant.name, clock.day)[1] > 0

    @contextmanager
    def waiting(self, tenant: Tenant, num_tokens: int) -> Iterator[None]:
        """A call waits inside this context until `num_tokens` may be granted here."""
        waiting = self._of(tenant).waiting
        waiting.append(num_tokens)
        try:
            yield
        finally:
            waiting.remove(num_tokens)

    def more_tokens(self, tenant: Tenant, clock: Clock) -> Ledger | None:
        """The ledger in which we lease the tokens that calls wait for, or ask for them.

        None if both are done already.
        """
        quota = tenant.limits.tokens_per_day
        if quota is None:
            return None
        ledger, mine = self._ledger(tenant, clock), self._lease(tenant, clock)
        self._count_elsewhere(tenant, ledger, mine.day)
        leases, num_needed = self._tidy(ledger, mine), sum(self._of(tenant).waiting)
        asked = quota_leases.more(leases, mine, quota, num_needed)
        if asked == mine:
            return None
        return replace(ledger, leases=quota_leases.with_lease(leases, asked))

    def _with_lease_settled(
        self, tenant: Tenant, ledger: Ledger, clock: Clock, *, tells_use: bool, is_leaving: bool
    ) -> Ledger:
        """The ledger in which we give up leased tokens that others lack or that are not needed
        here.
        """
        quota, before = tenant.limits.tokens_per_day, self._lease(tenant, clock)
        told = quota_leases.lease_of(ledger.leases, self.me, before.day)
        if quota is None or (told is None and not before.allowed):
            return ledger
        num_needed = 0 if is_leaving else sum(self._of(tenant).waiting)
        leases, mine = self._tidy(ledger, before), before
        if is_leaving:
            mine = replace(mine, allowed=mine.num_used)
        elif tells_use and not num_needed:
            is_idle = self.tenants.idle_s(tenant.name, clock.now) >= _IDLE_S
            mine = quota_leases.resized(leases, mine, quota, is_idle=is_idle)
        leases, mine = quota_leases.given(leases, mine, num_needed, self._is_alive)
        mine = replace(mine, num_wanted=max(0, min(mine.num_wanted, num_needed - mine.unused)))
        if mine.allowed < before.allowed:
            self._of(tenant).giving = mine
            self.tenants.lease(tenant.name, mine.allowed)
        if told is not None and not tells_use and replace(mine, num_used=told.num_used) == told:
            return ledger
        return replace(ledger, leases=quota_leases.with_lease(leases, mine))

    def _lease_seen(self, tenant: Tenant, ledger: Ledger, clock: Clock) -> None:
        known, (day, _, num_used) = self._of(tenant), self.tenants.today(tenant.name, clock.day)
        mine = quota_leases.lease_of(ledger.leases, self.me, day)
        if mine is not None:  # None: the store lost the lease, or others considered us dead
            giving = known.giving
            if giving is None or giving.day != day or mine.allowed <= giving.allowed:
                known.giving = None
                self.tenants.lease(tenant.name, max(mine.allowed, num_used))

    def _count_elsewhere(self, tenant: Tenant, ledger: Ledger, day: int) -> None:
        others = (x for x in ledger.leases if x.holder != self.me)
        num = quota_leases.num_used_by(others, day, self._is_alive)
        self.tenants.granted_elsewhere(tenant.name, num)

    def _lease(self, tenant: Tenant, clock: Clock) -> QuotaLease:
        """Our lease as `tenants` has it. `tenants` grants tokens according to this lease."""
        day, allowed, num_used = self.tenants.today(tenant.name, clock.day)
        ledger = self._of(tenant).ledger
        told = None if ledger is None else quota_leases.lease_of(ledger.leases, self.me, day)
        return QuotaLease(self.me, day, allowed, num_used, 0 if told is None else told.num_wanted)

    def _tidy(self, ledger: Ledger, mine: QuotaLease) -> Leases:
        return quota_leases.tidied(ledger.leases, mine.day, self._is_alive)

    # --- parts -----------------------------------------------------------------------------------

    def due(
        self,
        tenant: Tenant,
        clock: Clock,
        *,
        tells_use: bool = True,
        is_leaving: bool = False,
    ) -> Ledger | None:
        """The ledger in which we hand over what others need more, and write what was used.

        None if nothing has changed. If `tells_use` is true, the use of parts and leases is also
        written. Set it only at intervals, because otherwise every call would cause a write.
        `is_leaving` means that this gateway accepts no more calls.
        """
        self._trim(tenant)
        known = self._of(tenant)
        has_lease = self.has_lease(tenant, clock)
        if known.ledger is None and not self.tenants.held(tenant.name) and not has_lease:
            return None
        before = self._ledger(tenant, clock)
        wanted = [w for w in before.wanted if w != self.me and self._is_alive(w)]
        self._begin_to_leave(tenant, before, wanted, clock, is_leaving=is_leaving)
        ledger = replace(before, wanted=tuple(w for w in before.wanted if self._is_alive(w)))
        for index, part in known.leaving.items():
            if self.tenants.num_open(tenant.name) > self.tenants.max_open(tenant):
                break  # calls that this part admitted are still open
            taker = min(wanted, key=ledger.holders.count, default="")
            ledger = ledger.with_part(index, taker, part)
            ledger = replace(ledger, wanted=tuple(w for w in ledger.wanted if w != taker))
        for index in self.tenants.held(tenant.name) if tells_use else ():
            if index < len(ledger.parts) and (
                going := self.tenants.news(tenant, ledger.parts[index], clock)
            ):
                ledger = ledger.with_part(index, self.me, going)
        ledger = self._with_lease_settled(
            tenant, ledger, clock, tells_use=tells_use, is_leaving=is_leaving
        )
        self._count_elsewhere(tenant, ledger, self.tenants.today(tenant.name, clock.day)[0])
        return ledger if ledger != known.ledger else None

    def _begin_to_leave(
        self,
        tenant: Tenant,
        ledger: Ledger,
        wanted: Collection[str],
        clock: Clock,
        *,
        is_leaving: bool,
    ) -> None:
        """Give up the parts that others should have. From now on, these parts admit nothing
        here.
        """
        known, held = self._of(tenant), sorted(self.tenants.held(tenant.name))
        keep = len(held)
        if is_leaving:
            keep = 0
        elif wanted and not known.leaving:
            having = Counter(h for h in ledger.holders if self._is_alive(h))
            share = len(ledger.holders) // len(having.keys() | set(wanted) | {self.me})
            num_missing = sum(max(0, max(1, share) - having[w]) for w in wanted)
            if self.tenants.idle_s(tenant.name, clock.now) >= _IDLE_S:
                keep = 0
            elif share:
                keep = min(keep, max(share, keep - num_missing))
            elif num_missing and clock.now - known.since >= _HELD_S:
                keep -= 1
        keep = max(0, keep)
        for index in held[keep:]:
            known.leaving[index] = self.tenants.give_up(tenant, index, clock)

    def _trim(self, tenant: Tenant) -> None:
        """Forget parts that no longer exist, because the limits are cut into fewer parts now."""
        known, num = self._of(tenant), num_parts(tenant.limits)
        self.tenants.trim(tenant)
        known.leaving = {index: part for index, part in known.leaving.items() if index < num}

    def _ledger(self, tenant: Tenant, clock: Clock) -> Ledger:
        """The known ledger, completed with the parts that we hold. The store may have lost them."""
        known, num = self._of(tenant), num_parts(tenant.limits)
        found = Ledger.new(num) if known.ledger is None else _sized(known.ledger, num)
        for index in self.tenants.held(tenant.name):
            if index < num and not found.holders[index]:
                found = found.with_part(index, self.me, found.parts[index])
        return found

    def _is_alive(self, holder: str) -> bool:
        return holder == self.me or holder in self.alive

    def _of(self, tenant: Tenant) -> _Known:
        found = self._known.get(tenant.name)
        if found is None:
            found = self._known[tenant.name] = _Known()
        return found


def _sized(ledger: Ledger, num: int) -> Ledger:
    """The ledger for limits that are cut into `num` parts. Remaining parts keep their holders."""
    more = max(0, num - len(ledger.holders))
    return replace(
        ledger,
        holders=ledger.holders[:num] + ("",) * more,
        parts=ledger.parts[:num] + (Part(),) * more,
    )
