"""Gateways share a tenant's daily tokens by leases.

A lease is a number of tokens that one gateway may grant. The property test tries whole fleets of
gateways.
"""

from __future__ import annotations

import pytest

from pdmesh.core.tenancy.quota_leases import (
    Leases,
    QuotaLease,
    given,
    lease_of,
    more,
    num_free,
    num_used_by,
    resized,
    tidied,
    with_lease,
)

pytestmark = pytest.mark.req("S97")

DAY = 7


def lease(holder: str, allowed: int, used: int = 0, wanted: int = 0, day: int = DAY) -> QuotaLease:
    return QuotaLease(holder, day, allowed, used, wanted)


def alive(holder: str) -> bool:
    return not holder.startswith("gone")


def test_only_leases_of_the_day_count() -> None:
    leases: Leases = (lease("a", 300), lease("b", 900, day=DAY - 1))
    assert num_free(leases, 1000, DAY) == 700
    assert num_free(leases, 200, DAY) == 0, "the quota shrank"
    assert (lease_of(leases, "a", DAY), lease_of(leases, "b", DAY)) == (leases[0], None)


def test_the_whole_lease_of_a_vanished_gateway_counts_as_used() -> None:
    assert num_used_by((lease("a", 300, 120), lease("gone", 50, 1)), DAY, alive) == 120 + 50


@pytest.mark.parametrize(
    ("others", "needed", "allowed", "wanted"),
    [
        # a share of the free tokens, so that the next calls need no new lease
        (0, 10, 1000 // 32, 0),
        (0, 500, 500, 0),
        (900, 500, 100, 400),  # the ledger records how many tokens are lacking
        (1000, 0, 0, 0),
    ],
)
def test_a_gateway_leases_free_tokens_and_asks_for_the_rest(
    others: int, needed: int, allowed: int, wanted: int
) -> None:
    leases: Leases = (lease("b", others),)
    assert more(leases, lease("a", 0), 1000, needed) == lease("a", allowed, wanted=wanted)


def test_the_longest_waiting_gateways_get_ungranted_tokens_first() -> None:
    leases: Leases = (lease("gone", 0, wanted=9), lease("b", 0, wanted=30), lease("c", 0, wanted=9))
    after, mine = given(leases, lease("a", 100, 65), 0, alive)
    assert mine == lease("a", 65, 65)
    assert after == (leases[0], lease("b", 30), lease("c", 5, wanted=4))


def test_a_gateway_that_lacks_tokens_gives_to_those_ahead_of_it_and_not_to_those_behind() -> None:
    mine = lease("a", 20, wanted=5)
    leases: Leases = (lease("b", 0, wanted=8), mine, lease("c", 0, wanted=8))
    after, left = given(leases, mine, 25, alive)
    assert left.allowed == 12
    assert [x.allowed for x in after if x.holder != "a"] == [8, 0]


def test_a_gateway_that_begins_to_wait_goes_to_the_end_of_the_queue() -> None:
    leases: Leases = (lease("a", 5), lease("b", 5))
    wanting = with_lease(leases, lease("a", 5, wanted=1))
    assert [x.holder for x in wanting] == ["b", "a"]
    again = with_lease((*wanting, lease("c", 5)), lease("a", 5, wanted=2))
    assert [x.holder for x in again] == ["b", "a", "c"], "it keeps its place"


def test_an_idle_gateway_returns_its_lease_and_a_busy_one_keeps_about_a_share() -> None:
    leases: Leases = (lease("a", 500, 20),)
    assert resized(leases, leases[0], 1000, is_idle=True) == lease("a", 20, 20)
    assert resized(leases, leases[0], 1000, is_idle=False) == lease("a", 20 + 980 // 32, 20)
    about = lease("a", 40, 20)
    assert resized((about,), about, 1000, is_idle=False) is about


def test_leases_of_vanished_gateways_are_dropped_after_their_day_and_merged_on_it() -> None:
    old: Leases = (lease("gone", 5, day=DAY - 1), lease("a", 5, day=DAY - 1))
    assert tidied(old, DAY, alive) == (old[1],)
    many = tuple(lease(f"gone-{n}", 2) for n in range(40))
    kept = tidied(many, DAY, lambda holder: False)
    assert len(kept) == 1 + 16
    assert kept[1:] == many[-16:], "a gateway that was only cut off writes its own lease again"
    assert sum(x.allowed for x in kept) == 80
