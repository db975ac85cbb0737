"""A dispatched request counts as load until load reports include it (S93).

The count is called a booking.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pdmesh.core.placement.fleet import (
    PrefillComputed,
)
from tests.support.placements import QUERY, load, make, pair, planned


def test_a_dispatched_request_counts_until_a_later_report_includes_it() -> None:
    """Reports are 20 ms old. Without bookings, a whole burst of requests would go to one
    instance.
    """
    placement = make(*pair())
    first = [planned(placement, QUERY, now=0.0).prefills[0].instance_id for _ in range(16)]
    assert Counter(first) == {"prefill-0": 8, "prefill-1": 8}
    prefill = placement.fleet.instances["prefill-0"]
    placement.fleet.handle(load("prefill-0", used=3), now=0.01)
    assert prefill.used_slots() == 3 + 8
    # no report ever named the earlier requests, so their bookings have expired
    planned(placement, QUERY, now=5.0)
    assert placement.fleet.instances["prefill-1"].used_slots() <= 1


@pytest.mark.req("S93")
def test_a_booking_settles_when_any_instance_names_its_request() -> None:
    """If the first candidate refuses and the second one accepts, the first is free again at
    once.
    """
    placement = make(*pair())
    query = replace(QUERY, request_id="r1")
    plan = planned(placement, query)
    first, second = (placement.fleet.instances[c.instance_id] for c in plan.prefills)
    decode = placement.fleet.instances[plan.decodes[0].instance_id]
    assert (first.used_slots(), first.num_backlog_blocks, second.used_slots()) == (1, 10, 0)
    placement.fleet.handle(replace(load(second.id, used=1), admitted=("r1",)), now=0.1)
    assert (first.used_slots(), first.num_backlog_blocks) == (0, 0)
    assert (second.used_slots(), second.num_backlog_blocks) == (1, 10)
    assert second.available_at > 0.1
    assert (decode.used_slots(), decode.free_blocks()) == (1, 1000 - 11)
    placement.fleet.handle(replace(load(decode.id, used=1, free=989), admitted=("r1",)), now=0.2)
    assert (decode.used_slots(), decode.free_blocks()) == (1, 989)
    done = PrefillComputed("r1", 640, 0, 0.05)
    placement.fleet.handle(replace(load(second.id), computed=(done,)), now=0.3)
    assert (second.used_slots(), second.num_backlog_blocks, second.available_at) == (0, 0, 0.3)
    assert not len(placement.fleet.reservations)
    placement.fleet.check_invariants()


def test_a_request_that_is_planned_again_is_booked_once() -> None:
    placement = make(*pair())
    for _ in range(5):
        planned(placement, replace(QUERY, request_id="r1"))
    used = [i.used_slots() for i in placement.fleet.instances.values() if not i.is_decode]
    assert sum(used) == 1
