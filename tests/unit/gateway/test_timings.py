"""When a request reached its stages, from the events of its legs."""

from __future__ import annotations

import pytest

from pdmesh.core.request_types import Event, FirstToken, KvReceived, LegAccepted, TicketHeld
from services.gateway.timings import Timings

TICKET = TicketHeld("t", 10.0)


def noted(*events: tuple[float, Event], kv_transfer_us: int = 0) -> Timings:
    timings = Timings()
    for at, event in events:
        timings.note(event, at)
    timings.kv_transfer_us = kv_transfer_us
    return timings


@pytest.mark.req("S2")
def test_the_wait_for_a_decode_ends_when_one_accepts() -> None:
    first = FirstToken(1, 7, None, TICKET, 0)
    timings = noted(
        (1.0, LegAccepted(1)), (2.0, first), (5.0, LegAccepted(2)), (6.0, KvReceived(2))
    )
    assert (timings.accepted, timings.decode_queue_s) == (1.0, 3.0)


def test_a_decode_that_says_all_at_once_accepted_when_its_transfer_began() -> None:
    first = FirstToken(1, 7, None, TICKET, 0)
    timings = noted((2.0, first), (2.5, KvReceived(2)), kv_transfer_us=400_000)
    assert (timings.accepted, timings.decode_queue_s) == (2.0, pytest.approx(0.1))


def test_a_decode_that_had_accepted_before_token_1_kept_nobody_waiting() -> None:
    first = FirstToken(1, 7, None, TICKET, 0)
    timings = noted(
        (1.0, LegAccepted(1)), (1.5, LegAccepted(2)), (2.0, first), (2.5, KvReceived(2))
    )
    assert timings.decode_queue_s == 0.0


def test_without_a_decode_there_is_no_wait_for_one() -> None:
    assert noted((1.0, LegAccepted(1))).decode_queue_s == 0.0
    assert (
        noted((1.0, LegAccepted(1)), (2.0, FirstToken(1, 7, "stop", None, 0))).decode_queue_s == 0.0
    )
