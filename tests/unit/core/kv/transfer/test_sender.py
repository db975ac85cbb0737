"""The sender's tickets, in cases that random tests rarely meet.

A ticket is the right to pull one prompt's staged KV.
"""

from __future__ import annotations

import pytest

from pdmesh.core.deadlines import MAX_LEASES
from pdmesh.core.kv.layout.buffer_layout import KvLayout, KvSpan
from pdmesh.core.kv.transfer import sender_events as tx
from pdmesh.core.kv.transfer.pull_parts import JOINED_BYTES, MAX_SPANS, KvPart, pull_parts
from pdmesh.core.kv.transfer.sender import (
    MAX_DECODES,
    MAX_PULLS_PER_TICKET,
    WINDOW,
    TicketBook,
)
from pdmesh.core.kv.transfer.ticket import CloseReason, Refusal
from pdmesh.core.model import Tick

LAYOUT = KvLayout(num_layers=4, num_blocks=4, block_bytes=10)
WHOLE = KvPart(0, 160, (KvSpan(0, 160),), 0, 4)
LAYERS = pull_parts(LAYOUT, chunk_bytes=40)  # each part is one layer


def book_with_ticket(
    lease_s: float = 10.0, *, num_ready: int = 4, chunk_bytes: int = 1000, is_single: bool = False
) -> TicketBook:
    book = TicketBook(incarnation=7, fingerprint_hash=11, group_hash=13)
    book.handle(tx.OpenAsked("t", 1, LAYOUT, lease_s, chunk_bytes, is_single), now=0.0)
    book.handle(tx.LayersReady("t", num_ready), now=0.0)
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
    heads: tuple[int, int] | None = None,
    num_takers: int = 1,
    decode: int = 0,
    group: int = 13,
) -> tx.PullAsked:
    return tx.PullAsked(
        peer,
        pull_id,
        ticket_id,
        attempt,
        incarnation,
        fingerprint,
        first_block,
        heads,
        num_takers,
        decode,
        group,
    )


def send(part: KvPart, *, peer: int = 1, pull_id: int = 1) -> tx.SendPart:
    return tx.SendPart(peer, pull_id, "t", part, LAYOUT.total_bytes)


@pytest.mark.req("S41")
def test_a_taken_ticket_is_closed_by_the_ack_and_not_by_the_lease() -> None:
    book = book_with_ticket()
    assert book.handle(ask(), now=1.0) == [send(WHOLE)]
    assert book.handle(tx.PartSent(1, 1), now=1.1) == []
    assert book.handle(tx.PullAcked(1, 1, True), now=1.2) == [
        tx.CloseTicket("t", CloseReason.TAKEN)
    ]
    assert len(book) == 0


def test_an_ack_that_overtakes_the_end_of_its_send_waits_for_it() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=1.0)
    assert book.handle(tx.PullAcked(1, 1, True), now=1.1) == []
    assert book.handle(tx.PartSent(1, 1), now=1.2) == [tx.CloseTicket("t", CloseReason.TAKEN)]


@pytest.mark.fault("F4", "F5", "F34", "F35")
@pytest.mark.parametrize(
    ("pull", "refusal"),
    [
        (ask(incarnation=8), Refusal.WRONG_INCARNATION),
        (ask(fingerprint=12), Refusal.WRONG_MODEL),
        (ask(group=14), Refusal.WRONG_GROUP),
        (ask(group=14, ticket_id="u"), Refusal.WRONG_GROUP),
        (ask(ticket_id="u"), Refusal.UNKNOWN_TICKET),
        (ask(attempt=2), Refusal.WRONG_ATTEMPT),
        (ask(first_block=5), Refusal.BAD_RANGE),
        (ask(heads=(0, 2)), Refusal.BAD_RANGE),
    ],
)
def test_a_pull_that_does_not_match_its_ticket_is_refused(
    pull: tx.PullAsked, refusal: Refusal
) -> None:
    assert book_with_ticket().handle(pull, now=1.0) == [tx.RefusePull(1, 1, refusal)]


def test_a_pull_after_the_lease_is_refused_even_before_the_next_tick() -> None:
    assert book_with_ticket().handle(ask(), now=10.0) == [tx.RefusePull(1, 1, Refusal.LEASE_ENDED)]


def test_pulls_of_one_ticket_are_bounded() -> None:
    book = book_with_ticket()
    for pull_id in range(MAX_PULLS_PER_TICKET):
        assert isinstance(book.handle(ask(pull_id), now=1.0)[0], tx.SendPart)
    assert book.handle(ask(99), now=1.0) == [tx.RefusePull(1, 99, Refusal.TOO_MANY_PULLS)]


def test_the_same_pull_again_changes_nothing() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=1.0)
    assert book.handle(ask(), now=1.1) == []
    assert book.num_sends == 1


@pytest.mark.req("S48")
def test_a_pull_waits_for_each_layer_and_is_served_as_they_come() -> None:
    book = book_with_ticket(num_ready=0, chunk_bytes=40)
    assert book.handle(ask(), now=1.0) == []
    for number, part in enumerate(LAYERS):
        assert book.handle(tx.LayersReady("t", number + 1), now=1.0) == [send(part)]
        assert book.handle(tx.PartSent(1, 1), now=1.0) == []
    assert book.handle(tx.PullAcked(1, 1, True), now=1.2) == [
        tx.CloseTicket("t", CloseReason.TAKEN)
    ]


@pytest.mark.req("S49", "S52")
def test_a_window_of_parts_is_on_its_way_at_once() -> None:
    book = book_with_ticket(chunk_bytes=40)
    assert book.handle(ask(), now=1.0) == [send(part) for part in LAYERS[:WINDOW]]
    assert book.handle(tx.PartSent(1, 1), now=1.0) == [send(LAYERS[WINDOW])]


def tapered(layout: KvLayout) -> TicketBook:
    book = TicketBook(incarnation=7, fingerprint_hash=11, group_hash=13)
    chunk_bytes = 2 * JOINED_BYTES
    book.handle(tx.OpenAsked("t", 1, layout, 10.0, chunk_bytes, is_tapered=True), now=0.0)
    return book


@pytest.mark.req("S48")
def test_short_parts_that_are_in_place_are_sent_as_one() -> None:
    layer, layout = 32 << 10, KvLayout(num_layers=32, num_blocks=1, block_bytes=32 << 10)
    book = tapered(layout)
    book.handle(tx.LayersReady("t", 15), now=0.0)

    def sent(first: int, end: int) -> list[tx.SendPart]:
        span = KvSpan(first * layer, (end - first) * layer)
        part = KvPart(span.offset, span.length, (span,), first, end)
        return [tx.SendPart(1, 1, "t", part, layout.total_bytes)]

    assert book.handle(ask(), now=1.0) == sent(0, 15)
    assert book.handle(tx.LayersReady("t", 32), now=1.0) == sent(15, 32), "three parts are left"
    assert [book.handle(tx.PartSent(1, 1), now=1.1) for _ in range(2)] == [[], []]
    taken = book.handle(tx.PullAcked(1, 1, True), now=1.2)
    assert taken == [tx.CloseTicket("t", CloseReason.TAKEN)]


@pytest.mark.parametrize(
    ("layout", "first_block", "num_parts", "num_uncut"),
    [
        (KvLayout(num_layers=32, num_blocks=2, block_bytes=32 << 10), 1, 1, 4),
        (KvLayout(num_layers=64, num_blocks=2, block_bytes=40_000), 0, 4, 5),
        # limited by the number of spans
        (KvLayout(num_layers=3000, num_blocks=2, block_bytes=64), 1, 6, 6),
    ],
)
def test_joined_parts_keep_the_bounds_of_a_part(
    layout: KvLayout, first_block: int, num_parts: int, num_uncut: int
) -> None:
    book = tapered(layout)
    book.handle(tx.LayersReady("t", layout.num_layers), now=0.0)
    found = book.handle(ask(first_block=first_block), now=1.0)
    while sends := book.handle(tx.PartSent(1, 1), now=1.0):
        found += sends
    parts = [effect.part for effect in found if isinstance(effect, tx.SendPart)]
    uncut = pull_parts(layout, first_block, None, 2 * JOINED_BYTES, True)
    assert (len(parts), len(uncut)) == (num_parts, num_uncut)
    longest = max(part.length for part in uncut)
    assert all(part.length <= max(JOINED_BYTES, longest) for part in parts)
    assert all(len(part.spans) <= MAX_SPANS for part in parts)
    ends = [part.offset + part.length for part in parts]
    assert [part.offset for part in parts] == [0, *ends[:-1]]
    assert ends[-1] == layout.num_layers * (2 - first_block) * layout.block_bytes


@pytest.mark.fault("F35")
def test_only_its_engine_ends_an_open_ticket() -> None:
    """The engine still writes the range. If the ticket ended, the range would be given to another
    ticket.
    """
    book = book_with_ticket(num_ready=3, chunk_bytes=40)
    assert book.handle(Tick(), now=1e6) == []
    assert book.handle(tx.LayersReady("t", 4), now=1e6) == []
    assert book.handle(Tick(), now=1e6 + 9.9) == []
    assert book.handle(Tick(), now=1e6 + 10) == [tx.CloseTicket("t", CloseReason.EXPIRED)]


@pytest.mark.fault("F27")
def test_releasing_an_open_ticket_informs_waiting_pulls() -> None:
    book = book_with_ticket(num_ready=0)
    book.handle(ask(), now=1.0)
    assert book.handle(tx.Released("t"), now=1.1) == [
        tx.RefusePull(1, 1, Refusal.TICKET_CLOSED),
        tx.CloseTicket("t", CloseReason.RELEASED),
    ]


@pytest.mark.fault("F6", "F27")
def test_an_open_ticket_released_under_a_frozen_reader_is_freed_within_a_lease() -> None:
    book = book_with_ticket(num_ready=1, chunk_bytes=40)
    book.handle(ask(), now=1.0)
    book.handle(tx.Released("t"), now=2.0)
    assert book.handle(Tick(), now=11.9) == []
    assert book.handle(Tick(), now=12.0) == [tx.AbortPeer(1)]
    assert book.handle(tx.PeerLost(1), now=12.1) == [tx.CloseTicket("t", CloseReason.RELEASED)]


def test_a_ticket_that_is_taken_while_it_is_written_closes_with_its_last_layer() -> None:
    book = book_with_ticket(num_ready=0)
    empty = KvPart(0, 0, (), 0, 0)
    assert book.handle(ask(first_block=4), now=1.0) == [tx.SendPart(1, 1, "t", empty, 0)]
    book.handle(tx.PartSent(1, 1), now=1.0)
    assert book.handle(tx.PullAcked(1, 1, True), now=1.0) == []
    assert book.handle(tx.LayersReady("t", 4), now=1.1) == [tx.CloseTicket("t", CloseReason.TAKEN)]


@pytest.mark.fault("F27")
def test_a_release_during_a_send_frees_the_range_when_the_send_has_ended() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=1.0)
    assert book.handle(tx.Released("t"), now=1.1) == []
    assert book.handle(ask(2), now=1.2) == [tx.RefusePull(1, 2, Refusal.TICKET_CLOSED)]
    assert book.handle(tx.PartSent(1, 1), now=1.3) == [tx.CloseTicket("t", CloseReason.RELEASED)]


@pytest.mark.fault("F27")
def test_a_receiver_that_gives_up_gets_no_further_part_and_an_answer() -> None:
    book = book_with_ticket(chunk_bytes=40)
    book.handle(ask(), now=1.0)
    assert book.handle(tx.PullAcked(1, 1, False), now=1.1) == [tx.RefusePull(1, 1, Refusal.STOPPED)]
    assert book.handle(tx.PartSent(1, 1), now=1.2) == []
    assert book.handle(tx.PartSent(1, 1), now=1.2) == []
    assert book.num_sends == 0
    assert len(book) == 1, "the ticket stays open for another pull"


@pytest.mark.fault("F6")
def test_a_send_to_a_frozen_receiver_is_aborted_at_the_end_of_the_lease() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=5.0)
    assert book.handle(Tick(), now=14.9) == [], "the pull renewed the lease"
    assert book.handle(Tick(), now=15.0) == [tx.AbortPeer(1)]
    assert book.handle(tx.PeerLost(1), now=15.1) == [tx.CloseTicket("t", CloseReason.EXPIRED)]


@pytest.mark.fault("F24", "F27")
@pytest.mark.parametrize("sign", [tx.PartSent(1, 2), tx.LeaseRenewed(1, "other", 1, 7), ask(3)])
def test_a_send_that_outlives_its_lease_does_not_cost_others_their_connection(
    sign: tx.SenderEvent,
) -> None:
    """The client has left, so nobody renews the ticket. But a peer that takes or renews other
    tickets is not frozen.
    """
    book = book_with_ticket()
    book.handle(tx.OpenAsked("other", 1, LAYOUT, 60.0, 40), now=0.0)
    book.handle(tx.LayersReady("other", 4), now=0.0)
    book.handle(ask(), now=1.0)
    book.handle(ask(2, ticket_id="other"), now=1.0)
    book.handle(tx.Released("t"), now=2.0)
    book.handle(sign, now=10.0)
    assert book.handle(Tick(), now=12.0) == []
    assert book.handle(Tick(), now=19.9) == []
    assert book.handle(Tick(), now=20.0) == [tx.AbortPeer(1)]


@pytest.mark.fault("F35")
def test_a_peer_that_takes_all_but_one_send_loses_its_connection_in_the_end() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=0.0)
    now = 0.0
    while now < MAX_LEASES * 10.0 - 9.0:
        now += 9.0
        book.handle(tx.LeaseRenewed(1, "other", 1, 7), now)
        assert book.handle(Tick(), now) == []
    assert book.handle(Tick(), now=MAX_LEASES * 10.0) == [tx.AbortPeer(1)]


@pytest.mark.fault("F24")
def test_a_slow_receiver_keeps_the_lease_as_long_as_it_takes_bytes() -> None:
    book = book_with_ticket(chunk_bytes=40)
    book.handle(ask(), now=0.0)
    for now in (9.0, 18.0, 27.0):
        book.handle(tx.PartSent(1, 1), now=now)
        assert book.handle(Tick(), now=now + 9.9) == []


def test_renewing_keeps_a_waiting_ticket() -> None:
    book = book_with_ticket()
    book.handle(tx.LeaseRenewed(1, "t", 1, 7), now=9.0)
    assert book.handle(Tick(), now=18.9) == []
    assert book.handle(Tick(), now=19.0) == [tx.CloseTicket("t", CloseReason.EXPIRED)]


@pytest.mark.fault("F35")
def test_renewing_has_an_end() -> None:
    book = book_with_ticket()
    now = 0.0
    while len(book):
        now += 5.0
        book.handle(tx.LeaseRenewed(1, "t", 1, 7), now)
        book.handle(Tick(), now)
    assert now == MAX_LEASES * 10.0


@pytest.mark.fault("F35")
@pytest.mark.parametrize("renewal", [("t", 2, 7), ("t", 1, 8), ("u", 1, 7)])
def test_a_renewal_that_does_not_match_the_ticket_does_not_keep_it(
    renewal: tuple[str, int, int],
) -> None:
    book = book_with_ticket()
    book.handle(tx.LeaseRenewed(1, *renewal), now=9.0)
    assert book.handle(Tick(), now=10.0) == [tx.CloseTicket("t", CloseReason.EXPIRED)]


def test_a_pull_that_failed_leaves_the_ticket_for_another() -> None:
    book = book_with_ticket()
    book.handle(ask(), now=1.0)
    book.handle(tx.PartSent(1, 1), now=1.1)
    assert book.handle(tx.PullAcked(1, 1, False), now=1.2) == []
    assert book.handle(ask(2, peer=2), now=1.3) == [send(WHOLE, peer=2, pull_id=2)]


@pytest.mark.req("S57")
def test_a_ticket_for_two_takers_waits_for_both() -> None:
    book = book_with_ticket()
    for peer in (1, 2):
        book.handle(ask(peer=peer, num_takers=2), now=1.0)
        book.handle(tx.PartSent(peer, 1), now=1.0)
    assert book.handle(tx.PullAcked(1, 1, True), now=1.1) == []
    assert book.handle(tx.PullAcked(1, 1, True), now=1.1) == [], "the first one again"
    assert book.handle(tx.PullAcked(2, 1, True), now=1.2) == [
        tx.CloseTicket("t", CloseReason.TAKEN)
    ]


@pytest.mark.req("S57")
def test_a_pull_by_a_rank_of_a_failed_decode_does_not_count_for_the_next_decode() -> None:
    """A decode of two ranks fails after one rank has its part. Both ranks of the next decode must
    still get their parts.
    """
    book = book_with_ticket()
    for peer, decode in ((1, 5), (3, 6), (4, 6)):
        book.handle(ask(peer=peer, num_takers=2, decode=decode), now=1.0)
        if peer != 4:  # the bytes for peer 4 are still on their way
            book.handle(tx.PartSent(peer, 1), now=1.0)
            assert book.handle(tx.PullAcked(peer, 1, True), now=1.1) == []
    book.handle(tx.PartSent(4, 1), now=1.2)
    assert book.handle(tx.PullAcked(4, 1, True), now=1.3) == [
        tx.CloseTicket("t", CloseReason.TAKEN)
    ]


def test_the_number_of_decodes_whose_takers_are_remembered_is_bounded() -> None:
    book = book_with_ticket()
    for decode in range(3 * MAX_DECODES):
        book.handle(ask(decode, num_takers=2, decode=decode), now=1.0)
        book.handle(tx.PartSent(1, decode), now=1.0)
        assert book.handle(tx.PullAcked(1, decode, True), now=1.0) == []
        book.check_invariants()


@pytest.mark.parametrize("end", [tx.PullAcked(1, 1, False), tx.PeerLost(1)])
def test_a_ticket_for_one_pull_ends_with_it(end: tx.SenderEvent) -> None:
    book = book_with_ticket(is_single=True)
    book.handle(ask(), now=1.0)
    book.handle(tx.PartSent(1, 1), now=1.0)
    assert book.handle(end, now=1.1) == [tx.CloseTicket("t", CloseReason.RELEASED)]
