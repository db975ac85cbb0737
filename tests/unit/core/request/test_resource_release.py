"""A request releases each leg and ticket once, when it leaves a leg, loses its KV, or ends."""

from __future__ import annotations

import math

import pytest

from pdmesh.core.request.early_decode import EarlyDecode, OpenLeg
from pdmesh.core.request.events import (
    AbortLeg,
    Candidate,
    ForgetLeg,
    ReleaseTicket,
    SendStart,
    TicketHeld,
)
from pdmesh.core.request.resource_release import Holdings

PREFILL, DECODE = Candidate("p0", 1), Candidate("d0", 1)
TICKET = TicketHeld("t1", 10.0)


def decoding() -> Holdings:
    """A request whose leg 1 has ended with a ticket. Leg 2 will take the ticket."""
    held = Holdings()
    held.leg = OpenLeg(1, PREFILL)
    held.turn_into_ticket(TICKET, now=5.0)
    held.leg = OpenLeg(2, DECODE)
    return held


def test_a_ticket_is_released_and_its_decode_aborted() -> None:
    held = decoding()
    assert held.ticket is not None
    assert held.ticket.until == 15.0
    assert held.holder_ids == ("p0",)
    assert held.drop_all() == [AbortLeg(2), ReleaseTicket(1, "t1")]
    assert held.drop_all() == []


@pytest.mark.fault("F3")
def test_a_ticket_of_a_lost_holder_is_only_forgotten() -> None:
    held = decoding()
    held.kv_by = 5.5
    assert held.has_lost_holder
    assert held.drop_all() == [AbortLeg(2), ForgetLeg(1)]
    assert held.kv_by == math.inf


def test_a_ticket_that_was_taken_is_not_released() -> None:
    held = decoding()
    assert held.close_ticket() == [ForgetLeg(1)]
    assert held.close_ticket() == []
    assert held.drop_all() == [AbortLeg(2)]


def test_a_leg_that_ended_by_itself_is_not_aborted() -> None:
    held = decoding()
    held.decoding_key = 2
    assert held.close_leg() == ([ForgetLeg(2)], DECODE)
    assert not held.is_active(2)
    assert held.decoding_key == 0
    assert held.drop_all() == [ReleaseTicket(1, "t1")]


@pytest.mark.req("S48")
def test_an_early_decode_goes_with_its_prefill() -> None:
    held = Holdings()
    held.leg = OpenLeg(1, PREFILL)
    held.early = EarlyDecode(
        TICKET, [DECODE], lambda ticket, to: SendStart(2, to, 0, ticket, 0, 7, is_early=True), 3.0
    )
    held.early.offer(0.0)
    assert held.drop_all() == [AbortLeg(1), AbortLeg(2)]
