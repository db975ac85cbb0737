"""Decides how several gateways share a tenant's daily tokens: each grants only what it has leased.

All leases of a day together never exceed the quota. A lease counts as used, but is small: when a
gateway dies, only the tokens that it had leased but not granted are lost. A gateway that needs more
takes tokens that are not leased. If there are none, it says in the ledger how many it lacks, and
the others give up tokens that they have not granted. So a tenant gets all of its quota, wherever
its calls go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

_SHARES: Final = 32  # a lease is a 32nd of what is left of the day's quota
_MAX_GONE: Final = 32
_GONE: Final = ""  # the holder of old leases of gateways that are gone, merged into one

Leases = tuple["QuotaLease", ...]


@dataclass(frozen=True, slots=True)
class QuotaLease:
    """A lease of `allowed` tokens on `day`.

    When its holder wrote it, `num_used` of them were granted, and the holder lacked `num_wanted`.
    """

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
    """The leases with this one. A holder that begins to want more goes to the end of the line."""
    before = next((x for x in leases if x.holder == mine.holder), None)
    if before is not None and (before.num_wanted or not mine.num_wanted):
        return tuple(mine if x is before else x for x in leases)
    return (*(x for x in leases if x is not before), mine)


def num_free(leases: Leases, quota: int, day: int) -> int:
    """Tokens that are not leased."""
    return max(0, quota - sum(x.allowed for x in leases if x.day == day))


def num_used_by(leases: Iterable[QuotaLease], day: int, is_alive: Callable[[str], bool]) -> int:
    """Tokens used.

    A lease of a gateway that is gone counts fully: how much it granted is unknown.
    """
    today = (x for x in leases if x.day == day)
    return sum(x.num_used if is_alive(x.holder) else x.allowed for x in today)


def more(leases: Leases, mine: QuotaLease, quota: int, num_needed: int) -> QuotaLease:
    """Lease free tokens for calls that wait for `num_needed`; `num_wanted` has what is missing."""
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
    """Give others what they lack, the longest waiting first.

    Gateways ahead of us in line may have all that we did not grant. Gateways behind us may have
    what our own calls do not wait for.
    """
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
    """Our lease, resized to a share of what is left, or to what is used if no calls come.

    If it were larger, other gateways could grant less, and more would be lost if this one dies.
    """
    free = num_free(with_lease(leases, replace(mine, allowed=mine.num_used)), quota, mine.day)
    share = 0 if is_idle else free // _SHARES
    if share <= 2 * mine.unused and mine.unused <= 2 * share:
        return mine
    return replace(mine, allowed=mine.num_used + share)


def tidied(leases: Leases, day: int, is_alive: Callable[[str], bool]) -> Leases:
    """The leases without old ones of gateways that are gone.

    If many of today's leases are of such gateways, most of these are merged.
    """
    kept = [x for x in leases if x.day == day or is_alive(x.holder)]
    gone = [x for x in kept if not is_alive(x.holder)]
    if len(gone) <= _MAX_GONE:
        return tuple(kept)
    # A gateway that was only cut off writes its lease again, and a merged lease would then count
    # twice. So the latest ones stay separate.
    gone = [x for x in gone if x.holder == _GONE] + [x for x in gone if x.holder != _GONE]
    gone = gone[: len(gone) - _MAX_GONE // 2]
    total = sum(x.allowed for x in gone)
    return (QuotaLease(_GONE, day, total, total), *(x for x in kept if x not in gone))
