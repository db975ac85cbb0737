"""Decides how several gateways share a tenant's daily quota of tokens.

Each gateway grants only tokens that it has leased. All leases of a day together never exceed the
quota. Leased tokens count as used, so leases are small. When a gateway dies, only the tokens that
it had leased but not granted are lost.

A gateway that needs more leases free tokens. If there are too few, it writes into the ledger how
many it lacks, and the others give up tokens that they have not granted. So a tenant gets its whole
quota, whichever gateways its calls go to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

_SHARES: Final = 32  # a lease is a 32nd of what is left of the day's quota
_MAX_GONE: Final = 32  # if more gateways with leases are gone, most of these leases are merged
_GONE: Final = ""  # the holder of the lease that merges leases of gateways that are gone

Leases = tuple["QuotaLease", ...]


@dataclass(frozen=True, slots=True)
class QuotaLease:
    """A lease of `allowed` tokens on `day`.

    The other two numbers are from when the holder wrote the lease. `num_used` of its tokens were
    granted, and the holder lacked `num_wanted` more.
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
    """The leases with this one added or replaced.

    A holder that begins to want more tokens goes to the end of the line.
    """
    before = next((x for x in leases if x.holder == mine.holder), None)
    if before is not None and (before.num_wanted or not mine.num_wanted):
        return tuple(mine if x is before else x for x in leases)
    return (*(x for x in leases if x is not before), mine)


def num_free(leases: Leases, quota: int, day: int) -> int:
    """The tokens of the day's quota that are not leased."""
    return max(0, quota - sum(x.allowed for x in leases if x.day == day))


def num_used_by(leases: Iterable[QuotaLease], day: int, is_alive: Callable[[str], bool]) -> int:
    """The tokens that the holders of these leases have used on `day`.

    A lease of a gateway that is gone counts as fully used, because its real use is unknown.
    """
    today = (x for x in leases if x.day == day)
    return sum(x.num_used if is_alive(x.holder) else x.allowed for x in today)


def more(leases: Leases, mine: QuotaLease, quota: int, num_needed: int) -> QuotaLease:
    """Our lease, enlarged by free tokens for calls that wait for `num_needed` tokens.

    `num_wanted` of the result is the number of tokens that are still missing.
    """
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
    """Give others the tokens that they lack, the longest waiting first.

    If our own calls lack tokens, gateways before us in line may have all tokens that we did not
    grant, and gateways behind us get none. Otherwise, others get only tokens that our own calls do
    not wait for.
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
    """Our lease, resized to a share of the tokens that are left.

    If no calls come, it is resized to the tokens that are used. If a lease were larger, other
    gateways could grant less, and more tokens would be lost if this gateway died.
    """
    free = num_free(with_lease(leases, replace(mine, allowed=mine.num_used)), quota, mine.day)
    share = 0 if is_idle else free // _SHARES
    if share <= 2 * mine.unused and mine.unused <= 2 * share:
        return mine
    return replace(mine, allowed=mine.num_used + share)


def tidied(leases: Leases, day: int, is_alive: Callable[[str], bool]) -> Leases:
    """The leases, except leases of earlier days whose gateways are gone.

    If many of today's leases belong to gateways that are gone, most of these leases are merged.
    """
    kept = [x for x in leases if x.day == day or is_alive(x.holder)]
    gone = [x for x in kept if not is_alive(x.holder)]
    if len(gone) <= _MAX_GONE:
        return tuple(kept)
    # A gateway that was only cut off will write its lease again. If its old lease was merged, its
    # tokens then count twice. So the latest leases are not merged.
    gone = [x for x in gone if x.holder == _GONE] + [x for x in gone if x.holder != _GONE]
    gone = gone[: len(gone) - _MAX_GONE // 2]
    total = sum(x.allowed for x in gone)
    return (QuotaLease(_GONE, day, total, total), *(x for x in kept if x not in gone))
