"""What the transfer machines do at once: the cases a random walk rarely meets."""

from __future__ import annotations

import pytest

from pdmesh.core import pull_book as rx
from pdmesh.core import ticket_book as tx
from pdmesh.core.ticket import CloseReason, PullFailure, Refusal


def book_with_ticket(lease_s: float = 10.0) -> tx.TicketBook:
    book = tx.TicketBook(incarnation=7, fingerprint_hash=11)
    book.handle(tx.Staged("t", 1, 4, lease_s), now=0.0)
    return book


def ask(
    pull_id: int = 1,
    *,
    peer: int = 1,
    ticket_id: str = "t",
    attempt: int = 1,
    incarnation: int = 7,
    fingerprint: int = 11,
    first_block: int = 0,
) -> tx.PullAsked:
    return tx.PullAsked(peer, pull_id, ticket_id, attempt, incarnation, fingerprint, first_block)


@pytest.mark.req("S41")
def test_a_taken_ticket_is_closed_by_the_ack_and_not_by_the_lease() -> None:
    book = book_with_ticket()
    assert book.handle(ask(), now=1.0) == [tx.StartSend(1, 1, "t", 0)]
    assert book.handle(tx.SendEnded(1, 1), now=1.1) == []
    assert book.handle(tx.PullAcked(1, 1, True), now=1.2) == [
        tx.CloseTicket("t", CloseReason.TAKEN)
    ]
    assert len(book) == 0


def test_an_ack_that_overtakes_the_end_of_its_send_waits_for_it() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=1.0)
    assert book.handle(tx.PullAcked(1, 1, True), now=1.1) == []
    assert book.handle(tx.SendEnded(1, 1), now=1.2) == [tx.CloseTicket("t", CloseReason.TAKEN)]


@pytest.mark.fault("F4", "F5", "F34", "F35")
@pytest.mark.parametrize(
    ("pull", "refusal"),
    [
        (ask(incarnation=8), Refusal.WRONG_INCARNATION),
        (ask(fingerprint=12), Refusal.WRONG_MODEL),
        (ask(ticket_id="u"), Refusal.UNKNOWN_TICKET),
        (ask(attempt=2), Refusal.WRONG_ATTEMPT),
        (ask(first_block=5), Refusal.BAD_RANGE),
    ],
)
def test_a_pull_that_means_something_else_is_refused(pull: tx.PullAsked, refusal: Refusal) -> None:
    assert book_with_ticket().handle(pull, now=1.0) == [tx.Refuse(1, 1, refusal)]


def test_a_pull_after_the_lease_is_refused_even_before_the_next_tick() -> None:
    assert book_with_ticket().handle(ask(), now=10.0) == [tx.Refuse(1, 1, Refusal.LEASE_ENDED)]


def test_pulls_of_one_ticket_are_bounded() -> None:
    book = book_with_ticket()
    for pull_id in range(tx.MAX_PULLS_PER_TICKET):
        assert isinstance(book.handle(ask(pull_id), now=1.0)[0], tx.StartSend)
    assert book.handle(ask(99), now=1.0) == [tx.Refuse(1, 99, Refusal.TOO_MANY_PULLS)]


def test_the_same_pull_again_changes_nothing() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=1.0)
    assert book.handle(ask(), now=1.1) == []
    assert book.num_sends == 1


@pytest.mark.fault("F27")
def test_release_during_a_send_frees_when_the_send_ended() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=1.0)
    assert book.handle(tx.Released("t"), now=1.1) == []
    assert book.handle(ask(2), now=1.2) == [tx.Refuse(1, 2, Refusal.TICKET_CLOSED)]
    assert book.handle(tx.SendEnded(1, 1), now=1.3) == [tx.CloseTicket("t", CloseReason.RELEASED)]


@pytest.mark.fault("F6")
def test_a_send_to_a_frozen_receiver_is_aborted_at_the_end_of_the_lease() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=5.0)
    assert book.handle(tx.Tick(), now=14.9) == [], "the pull renewed the lease"
    assert book.handle(tx.Tick(), now=15.0) == [tx.AbortPeer(1)]
    assert book.handle(tx.PeerLost(1), now=15.1) == [tx.CloseTicket("t", CloseReason.EXPIRED)]


def test_renewing_keeps_a_waiting_ticket() -> None:
    book = book_with_ticket()
    book.handle(tx.LeaseRenewed("t", 1, 7), now=9.0)
    assert book.handle(tx.Tick(), now=18.9) == []
    assert book.handle(tx.Tick(), now=19.0) == [tx.CloseTicket("t", CloseReason.EXPIRED)]


@pytest.mark.fault("F35")
@pytest.mark.parametrize("renewal", [("t", 2, 7), ("t", 1, 8), ("u", 1, 7)])
def test_a_renewal_of_something_else_keeps_nothing(renewal: tuple[str, int, int]) -> None:
    book = book_with_ticket()
    book.handle(tx.LeaseRenewed(*renewal), now=9.0)
    assert book.handle(tx.Tick(), now=10.0) == [tx.CloseTicket("t", CloseReason.EXPIRED)]


def test_a_pull_that_failed_leaves_the_ticket_for_another() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=1.0)
    book.handle(tx.SendEnded(1, 1), now=1.1)
    assert book.handle(tx.PullAcked(1, 1, False), now=1.2) == []
    assert book.handle(ask(2, peer=2), now=1.3) == [tx.StartSend(2, 2, "t", 0)]


def requested(deadline: float = 2.0) -> rx.PullBook:
    book = rx.PullBook()
    assert book.handle(rx.PullRequested(1, 5, 100, 100, deadline), now=0.0) == [rx.SendPull(1)]
    return book


def test_a_pull_completes_once_its_bytes_are_verified() -> None:
    book = requested()
    assert book.handle(rx.MetaArrived(5, 1, 100, False), now=0.1) == [rx.ReceivePayload(1)]
    assert book.handle(rx.PayloadArrived(1), now=0.2) == [rx.Check(1)]
    assert book.handle(rx.Checked(1, True), now=0.3) == [rx.SendAck(1, True), rx.Complete(1)]
    assert len(book) == 0


@pytest.mark.fault("F34")
def test_bytes_that_fail_their_checksum_are_never_completed() -> None:
    book = requested()
    book.handle(rx.MetaArrived(5, 1, 100, True), now=0.1)
    assert book.handle(rx.Checked(1, False), now=0.2) == [
        rx.SendAck(1, False),
        rx.Fail(1, PullFailure.CORRUPT),
        rx.FreeLanding(1),
    ]


@pytest.mark.fault("F4")
def test_a_missed_deadline_fails_at_once_and_frees_after_the_abort() -> None:
    book = requested()
    book.handle(rx.MetaArrived(5, 1, 100, False), now=0.1)
    assert book.handle(rx.Tick(), now=2.0) == [rx.Fail(1, PullFailure.TIMEOUT), rx.AbortPeer(5)]
    assert book.handle(rx.PeerLost(5), now=2.1) == [rx.FreeLanding(1)]


@pytest.mark.fault("F27")
def test_a_pull_nobody_waits_for_is_drained_before_its_bytes_are_reused() -> None:
    book = requested()
    book.handle(rx.MetaArrived(5, 1, 100, False), now=0.1)
    assert book.handle(rx.CallerLeft(1), now=0.2) == []
    book.handle(rx.PayloadArrived(1), now=0.3)
    assert book.handle(rx.Checked(1, True), now=0.4) == [rx.SendAck(1, False), rx.FreeLanding(1)]


def test_a_refusal_that_comes_while_bytes_arrive_is_ignored() -> None:
    book = requested()
    book.handle(rx.MetaArrived(5, 1, 100, False), now=0.1)
    assert book.handle(rx.PullRefused(5, 1, "KV_REFUSED_TICKET_CLOSED"), now=0.2) == []
    assert book.handle(rx.PullRefused(6, 1, "KV_REFUSED_TICKET_CLOSED"), now=0.2) == []


@pytest.mark.fault("F3")
def test_a_sender_that_dies_after_its_last_byte_does_not_fail_the_pull() -> None:
    book = requested()
    book.handle(rx.MetaArrived(5, 1, 100, True), now=0.1)
    assert book.handle(rx.PeerLost(5), now=0.2) == []
    assert book.handle(rx.Checked(1, True), now=0.3) == [rx.Complete(1)]


@pytest.mark.parametrize("size", [99, 101])
def test_another_size_than_the_ticket_says_is_a_protocol_error(size: int) -> None:
    book = requested()
    assert book.handle(rx.MetaArrived(5, 1, size, False), now=0.1) == [
        rx.Fail(1, PullFailure.PROTOCOL),
        rx.AbortPeer(5),
    ]
    assert book.handle(rx.PeerLost(5), now=0.2) == [rx.FreeLanding(1)]


def test_bytes_announced_for_no_pull_of_ours_end_the_connection() -> None:
    assert requested().handle(rx.MetaArrived(5, 2, 100, False), now=0.1) == [rx.AbortPeer(5)]
    assert requested().handle(rx.MetaArrived(6, 1, 100, False), now=0.1) == [rx.AbortPeer(6)]
    assert requested().handle(rx.MetaArrived(5, 2, 100, True), now=0.1) == []
