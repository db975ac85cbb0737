"""The fleet remembers which decode served each chat, so that the next turn returns there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.model import Role
from pdmesh.core.placement.policies import Query
from tests.support.placements import identity, load, make, pair, planned


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
    chats = placement.fleet.chats
    chats.max_chats = 10
    for i in range(30):
        planned(placement, Query(model="m", chat_id=f"c{i}"), now=float(i))
    assert len(chats) == 10
    assert chats.get("c29", now=29.0 + chats.ttl_s + 1) == ()


DECODES = {"decode-0", "decode-1"}


@pytest.mark.req("S94")
def test_a_chat_returns_to_the_decode_that_took_its_turn_not_to_the_one_planned_first() -> None:
    """The first candidate may be dead during this turn and back at the next one."""
    placement = make(*pair())
    query = Query(model="m", num_prompt_tokens=640, max_tokens=64, chat_id="c", request_id="r1")
    dead = planned(placement, query).decodes[0].instance_id
    (alive,) = DECODES - {dead}
    placement.fleet.handle(load(alive, used=1, admitted=["r0", "r1"]), now=1.0)
    for turn in range(2, 8):
        plan = planned(placement, replace(query, request_id=f"r{turn}"), now=float(turn))
        assert plan.decodes[0].instance_id == alive


@pytest.mark.req("S94")
def test_a_late_report_of_an_earlier_turn_or_of_a_failed_decode_moves_no_chat() -> None:
    placement = make(*pair())
    query = Query(model="m", num_prompt_tokens=640, max_tokens=64, chat_id="c", request_id="r1")
    first = planned(placement, query).decodes[0].instance_id
    again = replace(query, excluded=frozenset({first}))  # r1 failed on the first decode
    (second,) = {d.instance_id for d in planned(placement, again, now=0.1).decodes}
    placement.fleet.handle(load(first, admitted=["r1"]), now=0.2)
    assert placement.fleet.chats.get("c", now=0.3)[1] == second
    planned(placement, replace(query, request_id="r2"), now=0.4)
    placement.fleet.handle(load(first, admitted=["r1"]), now=0.5)
    assert placement.fleet.chats.get("c", now=0.6)[1] == second


@pytest.mark.req("S94")
def test_a_chat_follows_whichever_instance_did_both_phases() -> None:
    placement = make(*(identity(f"fusion-{i}", Role.FUSION) for i in (0, 1)))
    query = Query(model="m", num_prompt_tokens=640, max_tokens=64, chat_id="c", request_id="r")
    first = planned(placement, query).prefills[0].instance_id
    (other,) = {"fusion-0", "fusion-1"} - {first}
    placement.fleet.handle(load(other, admitted=["r"]), now=1.0)
    assert placement.fleet.chats.get("c", now=1.0) == (other,)


@pytest.mark.req("S94")
def test_what_is_kept_of_requests_is_bounded_as_the_chats_are() -> None:
    placement = make(*pair())
    chats = placement.fleet.chats
    chats.max_chats = 10
    for i in range(60):
        planned(placement, Query(model="m", chat_id=f"c{i % 20}", request_id=f"r{i}"), now=1.0)
    assert len(chats) == len(chats._chat_of) == 10
