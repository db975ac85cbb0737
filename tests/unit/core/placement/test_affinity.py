"""The memory of chats."""

from __future__ import annotations

import pytest

from pdmesh.core.placement.policies import Query
from tests.support.placements import load, make, pair, planned


@pytest.mark.req("S94")
def test_a_chat_returns_to_its_decode_while_that_has_room() -> None:
    placement = make(*pair())
    query = Query(model="m", num_prompt_tokens=640, max_tokens=64, chat_id="c")
    home = planned(placement, query).decodes[0].instance_id
    for i in range(20):
        plan = planned(placement, query, now=2.0 * i)
        assert plan.decodes[0].instance_id == home
    placement.fleet.handle(load(home, free=5), now=100.0)
    assert planned(placement, query, now=101.0).decodes[0].instance_id != home


@pytest.mark.req("S94")
def test_the_memory_of_chats_is_bounded_by_number_and_age() -> None:
    placement = make(*pair())
    placement.chats.max_chats = 10
    for i in range(30):
        planned(placement, Query(model="m", chat_id=f"c{i}"), now=float(i))
    assert len(placement.chats) == 10
    assert placement.chats.get("c29", now=29.0 + placement.chats.ttl_s + 1) == ()
