"""A tenant's tokens of a day over several gateways: each grants what it leased before, and a lease counts as used.

All leases of a day come to no more than the quota. A lease is small, so that a gateway that dies loses little of the day: what
it had leased and not granted. One that finds too few takes of those that nobody leased; if there are none it says in
the ledger what it lacks, and the others give up what they have not granted. So a tenant gets all of a quota wherever calls go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

_SHARES: Final = 32  # one lease is such a share of what is left of the day
_MAX_GONE: Final = 32
_GONE: Final = ""  # holds what gateways had that are no more, beyond the last `_MAX_GONE` of them

Leases = tuple["QuotaLease", ...]


@dataclass(frozen=True, slots=True)
class QuotaLease:
    """Of `allowed` tokens on `day`. The holder had granted `num_used` of them when it wrote this, and lacks `num_wanted` more."""

    holder: str
    day: int
    allowed: int
    num_used: int = 0
    num_wanted: int = 0

    @property
    def unused(self) -> int:
        return self.allowed - self.num_used


def lease_of(leases: Leases, holder: str, day: int) -> QuotaLease | None:
    return next((x for x in leases if x.holder == holder and x.day == day), None)


def with_lease(leases: Leases, mine: QuotaLease) -> Leases:
    """One that begins to want waits longest last."""
    before = next((x for x in leases if x.holder == mine.holder), None)
    if before is not None and (before.num_wanted or not mine.num_wanted):
        return tuple(mine if x is before else x for x in leases)
    return (*(x for x in leases if x is not before), mine)


def num_free(leases: Leases, quota: int, day: int) -> int:
    """Tokens that nobody leased."""
    return max(0, quota - sum(x.allowed for x in leases if x.day == day))


def num_used_by(leases: Iterable[QuotaLease], day: int, is_alive: Callable[[str], bool]) -> int:
    """What one that is gone leased counts as used: nobody knows how much of it was granted."""
    today = (x for x in leases if x.day == day)
    return sum(x.num_used if is_alive(x.holder) else x.allowed for x in today)


def more(leases: Leases, mine: QuotaLease, quota: int, num_needed: int) -> QuotaLease:
    """Take what nobody leased, for calls that wait for `num_needed` tokens; and say how many are lacking then."""
    num_lacking = num_needed - mine.unused
    if num_lacking <= 0:
        return mine
    free = num_free(with_lease(leases, mine), quota, mine.day)
    taken = min(free, max(num_lacking, free // _SHARES))
    return replace(
        mine, allowed=mine.allowed + taken, num_wanted=num_lacking - min(taken, num_lacking)
    )


def given(
    leases: Leases, mine: QuotaLease, num_needed: int, is_alive: Callable[[str], bool]
) -> tuple[Leases, QuotaLease]:
    """What others lack, the longest waiting first: those before us may have all that we did not grant, those behind us what
    our own calls do not wait for."""
    spare = max(0, mine.unused - num_needed)
    is_lacking = num_needed > mine.unused
    for other in leases:
        if other.holder == mine.holder:
            if is_lacking and mine.num_wanted:
                break
        elif other.day == mine.day and other.num_wanted and is_alive(other.holder):
            num = min(mine.unused if is_lacking else spare, other.num_wanted)
            spare -= num
            mine = replace(mine, allowed=mine.allowed - num)
            taker = replace(other, allowed=other.allowed + num, num_wanted=other.num_wanted - num)
            leases = tuple(taker if x is other else x for x in leases)
    return leases, mine


def resized(leases: Leases, mine: QuotaLease, quota: int, *, is_idle: bool) -> QuotaLease:
    """A share of what is left: more is nobody else's to grant, and lost if we die. None without calls."""
    free = num_free(with_lease(leases, replace(mine, allowed=mine.num_used)), quota, mine.day)
    share = 0 if is_idle else free // _SHARES
    if share <= 2 * mine.unused and mine.unused <= 2 * share:
        return mine
    return replace(mine, allowed=mine.num_used + share)


def tidied(leases: Leases, day: int, is_alive: Callable[[str], bool]) -> Leases:
    """Without those of other days whose holders are gone. Most of those gone today count as one."""
    kept = [x for x in leases if x.day == day or is_alive(x.holder)]
    gone = [x for x in kept if not is_alive(x.holder)]
    if len(gone) <= _MAX_GONE:
        return tuple(kept)
    # A gateway that was only cut off writes its lease again, which then counts twice: so the last ones stay.
    gone = [x for x in gone if x.holder == _GONE] + [x for x in gone if x.holder != _GONE]
    gone = gone[: len(gone) - _MAX_GONE // 2]
    total = sum(x.allowed for x in gone)
    return (QuotaLease(_GONE, day, total, total), *(x for x in kept if x not in gone))
