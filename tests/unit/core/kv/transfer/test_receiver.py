"""The receiver's side of pulls, in cases that random tests rarely meet."""

from __future__ import annotations

import pytest

from pdmesh.core.deadlines import PULL_DRAIN_S, SILENT_S, STOP_S
from pdmesh.core.kv.transfer import receiver_events as rx
from pdmesh.core.kv.transfer.receiver import PullBook
from pdmesh.core.kv.transfer.ticket import PullFailure


@pytest.mark.fault("F23")
def test_a_pull_that_makes_no_progress_is_reported_once_and_continues() -> None:
    book = PullBook()
    book.handle(rx.PullRequested(1, 5, 100, 100, deadline=20.0, stall_s=19.0), now=0.0)
    assert book.handle(rx.Tick(), now=SILENT_S - 0.01) == []
    assert book.handle(rx.MetaArrived(5, 1, 100, 0, 60, False), now=0.2) == [rx.ReceivePart(1, 0)]
    assert book.handle(rx.Tick(), now=SILENT_S) == []
    assert book.handle(rx.Tick(), now=0.2 + SILENT_S) == [rx.TellSilent(1)]
    assert book.handle(rx.Tick(), now=0.3 + SILENT_S) == []
    assert book.handle(rx.PartArrived(1, 0), now=9.0) == [rx.CheckPart(1, 0)]
    assert book.handle(rx.Tick(), now=19.0) == []


def requested(deadline: float = 2.0) -> PullBook:
    book = PullBook()
    assert book.handle(rx.PullRequested(1, 5, 100, 100, deadline), now=0.0) == [rx.SendPull(1)]
    return book


def meta(
    offset: int = 0,
    length: int = 100,
    *,
    peer: int = 5,
    pull_id: int = 1,
    num_bytes: int = 100,
    is_inline: bool = False,
) -> rx.MetaArrived:
    return rx.MetaArrived(peer, pull_id, num_bytes, offset, length, is_inline)


def test_a_pull_completes_once_its_bytes_are_verified() -> None:
    book = requested()
    assert book.handle(meta(), now=0.1) == [rx.ReceivePart(1, 0)]
    assert book.handle(rx.PartArrived(1, 0), now=0.2) == [rx.CheckPart(1, 0)]
    assert book.handle(rx.PartChecked(1, 0, True), now=0.3) == [
        rx.DeliverPart(1, 0),
        rx.SendAck(1, True),
        rx.CompletePull(1),
    ]
    assert len(book) == 0


@pytest.mark.req("S48", "S52")
def test_parts_are_delivered_in_order_while_others_are_on_their_way() -> None:
    book = requested()
    for number in range(3):
        book.handle(meta(number * 30, 30), now=0.1)
        book.handle(rx.PartArrived(1, number), now=0.1)
    assert book.handle(rx.PartChecked(1, 1, True), now=0.2) == []
    assert book.handle(rx.PartChecked(1, 0, True), now=0.2) == [
        rx.DeliverPart(1, 0),
        rx.DeliverPart(1, 1),
    ]
    assert book.handle(rx.PartChecked(1, 2, True), now=0.2) == [rx.DeliverPart(1, 2)]
    assert book.handle(meta(90, 10, is_inline=True), now=0.3) == [rx.CheckPart(1, 3)]
    assert book.handle(rx.PartChecked(1, 3, True), now=0.3)[-1] == rx.CompletePull(1)


@pytest.mark.fault("F34")
def test_bytes_that_fail_their_checksum_are_never_completed() -> None:
    book = requested()
    book.handle(meta(is_inline=True), now=0.1)
    assert book.handle(rx.PartChecked(1, 0, False), now=0.2) == [
        rx.SendAck(1, False),
        rx.FailPull(1, PullFailure.CORRUPT),
        rx.FreeLanding(1),
    ]


@pytest.mark.fault("F34")
def test_a_corrupt_part_stops_the_rest_and_waits_for_parts_in_flight() -> None:
    book = requested()
    book.handle(meta(0, 30), now=0.1)
    book.handle(meta(30, 30), now=0.1)
    book.handle(rx.PartArrived(1, 0), now=0.1)
    assert book.handle(rx.PartChecked(1, 0, False), now=0.2) == [
        rx.SendAck(1, False),
        rx.FailPull(1, PullFailure.CORRUPT),
    ]
    assert book.handle(rx.PullRefused(5, 1, "KV_REFUSED_STOPPED"), now=0.3) == []
    assert book.handle(rx.PartArrived(1, 1), now=0.4) == [rx.FreeLanding(1)]


@pytest.mark.fault("F4")
def test_a_missed_deadline_fails_at_once_and_frees_after_the_abort() -> None:
    book = requested()
    book.handle(meta(), now=0.1)
    assert book.handle(rx.Tick(), now=2.0) == [
        rx.SendAck(1, False),
        rx.FailPull(1, PullFailure.TIMEOUT),
    ]
    assert book.handle(rx.Tick(), now=2.0 + STOP_S) == [rx.AbortPeer(5)]
    assert book.handle(rx.PeerLost(5), now=3.1) == [rx.FreeLanding(1)]


@pytest.mark.fault("F24")
def test_a_sender_that_answers_in_time_keeps_its_connection() -> None:
    """A prefill that is late for one request must not lose the transfers of other requests."""
    book = requested()
    book.handle(rx.Tick(), now=2.0)
    assert book.handle(rx.PullRefused(5, 1, "KV_REFUSED_STOPPED"), now=2.1) == [rx.FreeLanding(1)]
    assert book.handle(rx.Tick(), now=9.0) == []


@pytest.mark.fault("F27")
def test_an_abandoned_pull_is_drained_before_its_bytes_are_reused() -> None:
    book = requested()
    book.handle(meta(), now=0.1)
    assert book.handle(rx.CallerLeft(1), now=0.2) == [rx.SendAck(1, False)]
    assert book.handle(rx.PartArrived(1, 0), now=0.3) == [rx.FreeLanding(1)]


@pytest.mark.fault("F27")
def test_a_pull_given_up_before_its_first_part_ends_with_the_answer() -> None:
    book = requested()
    assert book.handle(rx.CallerLeft(1), now=0.2) == [rx.SendAck(1, False)]
    assert book.handle(rx.PullRefused(5, 1, "KV_REFUSED_STOPPED"), now=0.3) == [rx.FreeLanding(1)]


@pytest.mark.fault("F25", "F27")
def test_a_pull_given_up_long_before_its_deadline_does_not_wait_for_it() -> None:
    """The nemesis tests found this. The message that asked for the KV was lost, and the client
    left. A pull that waits for prefill has the deadline of its request, so slot and landing stayed
    taken for minutes.
    """
    book = requested(deadline=600.0)
    assert book.handle(rx.CallerLeft(1), now=1.0) == [rx.SendAck(1, False)]
    assert book.handle(rx.Tick(), now=1.1) == []
    assert book.handle(rx.Tick(), now=6.0) == []
    assert book.handle(rx.Tick(), now=1.1 + PULL_DRAIN_S + STOP_S) == [rx.AbortPeer(5)]
    assert book.handle(rx.PeerLost(5), now=7.0) == [rx.FreeLanding(1)]


def with_neighbour(deadline: float = 600.0) -> PullBook:
    """Two pulls on one connection. The caller of pull 1 leaves while a part is on its way."""
    book = requested(deadline=600.0)
    book.handle(rx.PullRequested(2, 5, 100, 100, deadline), now=0.0)
    book.handle(meta(length=60), now=0.1)
    assert book.handle(rx.CallerLeft(1), now=1.0) == [rx.SendAck(1, False)]
    assert book.handle(rx.Tick(), now=1.1) == []
    return book


OVER = 1.1 + PULL_DRAIN_S + STOP_S  # when the time to drain the abandoned pull is over


@pytest.mark.fault("F24", "F27")
def test_a_pull_that_is_not_drained_in_time_does_not_harm_other_pulls() -> None:
    """The link is slow, or the sender never sends the bytes that it announced."""
    book = with_neighbour()
    book.handle(meta(length=40, pull_id=2), now=4.0)
    assert book.handle(rx.Tick(), now=OVER) == [rx.RetirePeer(5)]
    book.handle(rx.PartArrived(2, 0), now=8.0)
    book.handle(rx.PartChecked(2, 0, True), now=8.0)
    assert book.handle(rx.Tick(), now=9.0) == [rx.RetirePeer(5)]
    book.handle(meta(40, 60, pull_id=2), now=9.5)
    book.handle(rx.PartArrived(2, 1), now=9.6)
    done = book.handle(rx.PartChecked(2, 1, True), now=9.6)
    assert done == [rx.DeliverPart(2, 1), rx.SendAck(2, True), rx.CompletePull(2)]
    assert book.handle(rx.Tick(), now=9.7) == [rx.AbortPeer(5)]
    assert book.handle(rx.PeerLost(5), now=9.8) == [rx.FreeLanding(1)]
    assert book.is_idle


@pytest.mark.fault("F24", "F27")
def test_a_retired_connection_is_closed_even_if_all_its_bytes_arrive_later() -> None:
    book = with_neighbour()
    book.handle(meta(pull_id=2), now=4.0)
    assert book.handle(rx.Tick(), now=OVER) == [rx.RetirePeer(5)]
    book.handle(rx.PullRefused(5, 1, "KV_REFUSED_STOPPED"), now=7.0)
    assert book.handle(rx.PartArrived(1, 0), now=7.0) == [rx.FreeLanding(1)]
    assert book.handle(rx.Tick(), now=7.1) == []
    book.handle(rx.PartArrived(2, 0), now=7.2)
    book.handle(rx.PartChecked(2, 0, True), now=7.2)
    assert not book.is_idle
    assert book.handle(rx.Tick(), now=7.3) == [rx.AbortPeer(5)]
    book.handle(rx.PeerLost(5), now=7.4)
    assert book.is_idle


@pytest.mark.fault("F4", "F27")
def test_a_sender_that_was_never_heard_loses_all_its_pulls() -> None:
    """The sender is frozen or the link is cut, so pull 2 need not wait for its deadline."""
    book = with_neighbour()
    assert book.handle(rx.Tick(), now=OVER) == [rx.AbortPeer(5)]


@pytest.mark.fault("F24")
def test_a_pull_that_missed_its_deadline_does_not_harm_other_pulls() -> None:
    book = with_neighbour(deadline=5.0)
    book.handle(rx.PullRequested(3, 5, 100, 100, 60.0), now=1.5)
    book.handle(meta(pull_id=3), now=4.0)
    told = book.handle(rx.Tick(), now=5.0)
    assert told == [rx.SendAck(2, False), rx.FailPull(2, PullFailure.TIMEOUT)]
    assert book.handle(rx.Tick(), now=5.0 + STOP_S) == [rx.RetirePeer(5)]


def test_a_refusal_that_comes_while_the_last_bytes_arrive_is_ignored() -> None:
    book = requested()
    book.handle(meta(), now=0.1)
    assert book.handle(rx.PullRefused(5, 1, "KV_REFUSED_TICKET_CLOSED"), now=0.2) == []
    assert book.handle(rx.PullRefused(6, 1, "KV_REFUSED_TICKET_CLOSED"), now=0.2) == []


@pytest.mark.fault("F3")
def test_a_sender_that_dies_after_its_last_byte_does_not_fail_the_pull() -> None:
    book = requested()
    book.handle(meta(is_inline=True), now=0.1)
    assert book.handle(rx.PeerLost(5), now=0.2) == []
    assert book.handle(rx.PartChecked(1, 0, True), now=0.3) == [
        rx.DeliverPart(1, 0),
        rx.CompletePull(1),
    ]


@pytest.mark.fault("F25", "F34")
@pytest.mark.parametrize(
    "second",
    [
        meta(40, 50),  # leaves a gap
        meta(20, 50),  # overlaps the part before
        meta(30, 80),  # goes past the end
        meta(30, 0),
        meta(30, 50, num_bytes=90),  # announces another total size
    ],
)
def test_parts_that_are_not_contiguous_are_a_protocol_error(second: rx.MetaArrived) -> None:
    book = requested()
    book.handle(meta(0, 30, is_inline=True), now=0.1)
    assert book.handle(second, now=0.1) == [
        rx.SendAck(1, False),
        rx.FailPull(1, PullFailure.PROTOCOL),
        rx.AbortPeer(5),
    ]


@pytest.mark.parametrize("size", [99, 101])
def test_another_size_than_the_ticket_says_is_a_protocol_error(size: int) -> None:
    book = requested()
    assert book.handle(meta(0, size, num_bytes=size), now=0.1)[1:] == [
        rx.FailPull(1, PullFailure.PROTOCOL),
        rx.AbortPeer(5),
    ]
    assert book.handle(rx.PeerLost(5), now=0.2) == [rx.FreeLanding(1)]


def test_bytes_announced_for_an_unknown_pull_end_the_connection() -> None:
    assert requested().handle(meta(pull_id=2), now=0.1) == [rx.AbortPeer(5)]
    assert requested().handle(meta(peer=6), now=0.1) == [rx.AbortPeer(6)]
    assert requested().handle(meta(pull_id=2, is_inline=True), now=0.1) == []


@pytest.mark.fault("F23", "F24")
def test_silence_ends_a_pull_long_before_its_deadline_and_progress_does_not() -> None:
    book = PullBook()
    book.handle(rx.PullRequested(1, 7, 100, 100, deadline=60.0, stall_s=2.0), now=0.0)
    assert book.handle(rx.Tick(), now=1.9) == [rx.TellSilent(1)]
    for number in range(5):  # the link is slow, but each part arrives in time
        now = 1.9 * (number + 1)
        book.handle(rx.MetaArrived(7, 1, 100, 20 * number, 20, is_inline=False), now=now)
    assert book.handle(rx.Tick(), now=9.5 + 1.9) == []
    assert rx.FailPull(1, PullFailure.TIMEOUT) in book.handle(rx.Tick(), now=9.5 + 2.0)
    assert rx.AbortPeer(7) in book.handle(rx.Tick(), now=9.5 + 2.0 + STOP_S)


@pytest.mark.fault("F23")
def test_a_pull_that_waits_for_prefill_may_be_silent_until_that_is_done() -> None:
    book = PullBook()
    book.handle(rx.PullRequested(1, 7, 100, 100, deadline=60.0), now=0.0)
    assert book.handle(rx.Tick(), now=30.0) == []
    book.handle(rx.SourceComplete(1, 2.0), now=30.0)
    assert book.handle(rx.Tick(), now=31.9) == [rx.TellSilent(1)]
    assert rx.FailPull(1, PullFailure.TIMEOUT) in book.handle(rx.Tick(), now=32.0)
