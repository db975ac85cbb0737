"""The times at which a request reached its stages, from the events of its legs."""

from __future__ import annotations

import pytest

from pdmesh.core.request.events import (
    Event,
    FirstToken,
    LegAccepted,
    LegKvReceived,
    TicketHeld,
)
from pdmesh.services.gateway.request.timings import Timings

TICKET = TicketHeld("t", 10.0)


PREFILL, DECODE, PREFILL_2, DECODE_2 = 1, 2, 3, 4  # the keys of the legs


def noted(*events: tuple[float, Event], kv_transfer_us: int = 0) -> Timings:
    """The timings after these events. Each decode is offered the request just before its first
    event.
    """
    timings = Timings()
    timings.kv_transfer_us = kv_transfer_us
    offered = 0
    for at, event in events:
        key = getattr(event, "key", 0)
        if key in {DECODE, DECODE_2} and key != offered:
            timings.decode_offered(key)
            offered = key
        timings.note(event, at)
    return timings


@pytest.mark.req("S2")
def test_the_wait_for_a_decode_ends_when_one_accepts() -> None:
    first = FirstToken(1, 7, None, TICKET, 0)
    timings = noted(
        (1.0, LegAccepted(1)), (2.0, first), (5.0, LegAccepted(2)), (6.0, LegKvReceived(2))
    )
    assert (timings.accepted, timings.decode_queue_s) == (1.0, 3.0)


def test_if_a_decodes_events_come_together_it_accepted_when_its_transfer_began() -> None:
    first = FirstToken(1, 7, None, TICKET, 0)
    timings = noted((2.0, first), (2.5, LegKvReceived(2)), kv_transfer_us=400_000)
    assert (timings.accepted, timings.decode_queue_s) == (2.0, pytest.approx(0.1))


def test_a_decode_that_accepted_before_token_1_caused_no_wait() -> None:
    first = FirstToken(1, 7, None, TICKET, 0)
    timings = noted(
        (1.0, LegAccepted(1)), (1.5, LegAccepted(2)), (2.0, first), (2.5, LegKvReceived(2))
    )
    assert timings.decode_queue_s == 0.0


def test_a_second_prefill_does_not_count_as_a_decode() -> None:
    """The first prefill died before a decode accepted the request, and its KV was lost. The wait
    for a decode starts again with the next token.
    """
    again = FirstToken(PREFILL_2, 8, None, TICKET, 0)
    timings = noted(
        (1.0, LegAccepted(PREFILL)),
        (2.0, FirstToken(PREFILL, 7, None, TICKET, 0)),
        (3.0, LegAccepted(PREFILL_2)),
        (9.0, again),
        (9.5, LegAccepted(DECODE_2)),
        (9.75, LegKvReceived(DECODE_2)),
    )
    assert (timings.accepted, timings.first_token, timings.decode_queue_s) == (1.0, 2.0, 0.5)


def test_a_lost_early_decode_does_not_count_as_accepted() -> None:
    timings = noted(
        (1.0, LegAccepted(PREFILL)),
        (1.5, LegAccepted(DECODE)),
        (2.0, FirstToken(PREFILL, 7, None, TICKET, 0)),
        (5.0, LegAccepted(DECODE_2)),
        (6.0, LegKvReceived(DECODE_2)),
    )
    assert timings.decode_queue_s == 3.0


def test_time_after_the_kv_arrived_does_not_count_as_a_wait_for_a_decode() -> None:
    """A stream that migrates halfway is prefilled and handed over again."""
    timings = noted(
        (1.0, LegAccepted(PREFILL)),
        (2.0, FirstToken(PREFILL, 7, None, TICKET, 0)),
        (2.5, LegKvReceived(DECODE)),
        (8.0, LegAccepted(PREFILL_2)),
        (9.0, FirstToken(PREFILL_2, 8, None, TICKET, 0)),
        (20.0, LegKvReceived(DECODE_2)),
        kv_transfer_us=400_000,
    )
    assert timings.decode_queue_s == pytest.approx(0.1)
    assert timings.kv_received == 20.0


def test_without_a_decode_there_is_no_wait_for_one() -> None:
    assert noted((1.0, LegAccepted(1))).decode_queue_s == 0.0
    assert (
        noted((1.0, LegAccepted(1)), (2.0, FirstToken(1, 7, "stop", None, 0))).decode_queue_s == 0.0
    )
