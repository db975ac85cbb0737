"""Sender and receiver of KV over a network that delays, repeats, reorders and loses messages.

The model knows the truth about memory. An engine may write its ticket's range until it reports the
end. A part that is announced but not sent yet reads that range. A posted receive may write its
landing range until it completes. Each side learns of a lost connection at its own time, and must be
safe before that, too. Either side may crash and come back. The sender then has a new incarnation,
and the receiver has forgotten its pulls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdmesh.core.deadlines import MAX_LEASES, SILENT_S, STOP_S
from pdmesh.core.kv.layout.buffer_layout import KvLayout
from pdmesh.core.kv.transfer import receiver_events as rx
from pdmesh.core.kv.transfer import sender_events as tx
from pdmesh.core.kv.transfer.pull_parts import KvPart
from pdmesh.core.kv.transfer.receiver import PullBook
from pdmesh.core.kv.transfer.sender import TicketBook
from pdmesh.core.kv.transfer.ticket import CloseReason
from pdmesh.core.model import Tick
from pdmesh.kv.agent import wire

FINGERPRINT = 11
LAYOUT = KvLayout(num_layers=3, num_blocks=2, block_bytes=10)
LEASE_S, DEADLINE_S, STALL_S = 10.0, 2.0, 1.5
MAX_INLINE = 10  # in bytes
NAMES = st.sampled_from("aaab")
RARELY = st.sampled_from([False] * 7 + [True])  # for events that end everything
DECODES = st.sampled_from([1, 1, 1, 2])
CHUNKS = st.sampled_from([10, 20, 40, 1000])


@dataclass
class Link:
    """A connection. Each side loses it once, by its own abort or when it learns of the loss."""

    key: int
    to_sender: list[wire.Message] = field(default_factory=list)
    to_receiver: list[wire.Message] = field(default_factory=list)
    is_dead_at_sender: bool = False
    is_dead_at_receiver: bool = False
    is_retired: bool = False  # no new pull begins on this connection
    # (pull, ticket) of the reads that run now
    sends: list[tuple[int, str]] = field(default_factory=list)
    # (pull, part) of the receives that may still write.
    posted: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class Pull:
    link: Link
    ticket_id: str
    attempt: int
    incarnation: int
    first_block: int
    num_takers: int
    decode: int = 0
    is_fetch: bool = False
    has_left: bool = False
    outcome: str = ""
    num_delivered: int = 0
    num_bytes: int = 0
    metas: list[wire.Meta] = field(default_factory=list)
    is_landing_free: bool = False
    is_silent: bool = False
    asked_at: float = 0.0


@dataclass
class Ticket:
    attempt: int
    is_written: bool = False
    num_ready: int = 0
    written_at: float = 0.0


class TransferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.incarnation = 7
        self.sender = TicketBook(self.incarnation, FINGERPRINT)
        self.receiver = PullBook()
        self.links: list[Link] = []
        self.tickets: dict[str, Ticket] = {}
        self.pulls: dict[int, Pull] = {}
        self.num_forgotten = 0  # how many pulls a crashed receiver forgot
        self.checking: set[tuple[int, int]] = set()
        self.aborts: list[tuple[Link, str]] = []

    # -- what the engines do ----------------------------------------------------------------------

    @rule(name=NAMES, attempt=st.integers(1, 2), chunk=CHUNKS, is_whole=st.booleans())
    def open(self, name: str, attempt: int, chunk: int, is_whole: bool) -> None:
        event = tx.OpenAsked(name, attempt, LAYOUT, LEASE_S, chunk)
        if name in self.tickets:
            with pytest.raises(ValueError, match="open already"):
                self.sender.handle(event, self.now)
            return
        self.tickets[name] = Ticket(attempt)
        self.at_sender(event)
        if is_whole:
            self.ready(name, LAYOUT.num_layers)

    @rule(name=NAMES, num_layers=st.integers(1, LAYOUT.num_layers))
    def ready(self, name: str, num_layers: int) -> None:
        ticket = self.tickets.get(name)
        if ticket is not None:
            ticket.num_ready = max(ticket.num_ready, num_layers)
            if num_layers == LAYOUT.num_layers and not ticket.is_written:
                ticket.is_written, ticket.written_at = True, self.now
        self.at_sender(tx.LayersReady(name, num_layers))

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        if name in self.tickets:
            self.tickets[name].is_written = True  # the engine no longer writes after a release
        self.at_sender(tx.Released(name))

    @rule(name=NAMES, happens=RARELY)
    def serving_fails(self, name: str, happens: bool) -> None:
        """Fail to compute the checksums of a ticket. Its engine may still write."""
        if happens:
            self.at_sender(tx.ServingFailed(name))

    @rule(
        name=NAMES,
        is_stale=st.sampled_from([False] * 4 + [True]),
        is_of_an_old_life=st.sampled_from([False] * 4 + [True]),
        other_link=st.booleans(),
        first_block=st.sampled_from([0, 0, 1, 2, 3]),
        num_takers=st.sampled_from([1, 1, 2]),
        decode=DECODES,
    )
    def pull(
        self,
        name: str,
        is_stale: bool,
        is_of_an_old_life: bool,
        other_link: bool,
        first_block: int,
        num_takers: int,
        decode: int,
    ) -> None:
        ticket = self.tickets.get(name)
        attempt = 3 if is_stale or ticket is None else ticket.attempt
        incarnation = self.incarnation - is_of_an_old_life
        pull = Pull(
            self.link(other_link), name, attempt, incarnation, first_block, num_takers, decode
        )
        self.ask(pull, 0 if first_block else LAYOUT.total_bytes)

    @rule(other_link=st.booleans(), is_stale=st.sampled_from([False] * 4 + [True]))
    def fetch(self, other_link: bool, is_stale: bool) -> None:
        incarnation = self.incarnation - is_stale
        pull = Pull(self.link(other_link), "", 0, incarnation, 0, 1, is_fetch=True)
        self.ask(pull, 0)

    def ask(self, pull: Pull, least: int) -> None:
        pull_id = len(self.pulls) + 1
        self.pulls[pull_id] = pull
        pull.asked_at = self.now
        deadline = self.now + DEADLINE_S
        self.at_receiver(
            rx.PullRequested(
                pull_id, pull.link.key, least, LAYOUT.total_bytes, deadline, LEASE_S, STALL_S
            )
        )

    def link(self, other: bool) -> Link:
        usable = (x for x in self.links if not (x.is_dead_at_receiver or x.is_retired))
        link = next(usable, None)
        if link is None or (other and len(self.links) < 4):
            link = Link(len(self.links) + 1)
            self.links.append(link)
        return link

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), happens=RARELY)
    def caller_leaves(self, data: st.DataObject, happens: bool) -> None:
        if not happens:
            return
        pull_id = data.draw(st.sampled_from(sorted(self.pulls)))
        if not self.pulls[pull_id].outcome:
            self.pulls[pull_id].has_left = True
        self.at_receiver(rx.CallerLeft(pull_id))

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        self.at_sender(Tick())
        self.at_receiver(rx.Tick())

    # -- crashes ----------------------------------------------------------------------------------

    @rule(happens=RARELY)
    def the_sender_crashes(self, happens: bool) -> None:
        """Crash the sender: its memory and its readers are gone. Peers learn this later, or
        never.
        """
        if not happens:
            return
        self.incarnation += 1
        self.sender = TicketBook(self.incarnation, FINGERPRINT)
        self.tickets.clear()
        for link in self.links:
            link.is_dead_at_sender = True
            link.sends.clear()

    @rule(happens=RARELY)
    def the_receiver_crashes(self, happens: bool) -> None:
        if not happens:
            return
        self.receiver = PullBook()
        self.checking.clear()
        for link in self.links:
            link.is_dead_at_receiver = True
            link.posted.clear()
        for pull in self.pulls.values():
            if not pull.is_landing_free:
                pull.is_landing_free, pull.outcome = True, pull.outcome or "crashed"

    # -- what the network does --------------------------------------------------------------------

    @precondition(lambda self: self.links)
    @rule(
        data=st.data(),
        num_steps=st.integers(1, 12),
        is_intact=st.sampled_from([True] * 9 + [False]),
    )
    def things_take_their_course(
        self, data: st.DataObject, num_steps: int, is_intact: bool
    ) -> None:
        """Run in the usual order for a while, because random rules alone rarely reach the end of a
        pull. Unless `is_intact`, parts are found corrupt.
        """
        self.go_on(data.draw(st.sampled_from(self.links)), num_steps, is_intact)

    @rule(
        name=NAMES,
        chunk=CHUNKS,
        num_layers=st.integers(0, LAYOUT.num_layers),
        first_block=st.sampled_from([0, 0, 1, 2]),
        num_takers=st.sampled_from([1, 1, 2]),
        num_steps=st.integers(0, 16),
        decode=DECODES,
        other_link=st.booleans(),
    )
    def a_request_comes(
        self,
        name: str,
        chunk: int,
        num_layers: int,
        first_block: int,
        num_takers: int,
        num_steps: int,
        decode: int,
        other_link: bool,
    ) -> None:
        """Start a prefill that computes `num_layers`, and a decode that pulls them at the same
        time.
        """
        if name not in self.tickets:
            self.open(name, 1, chunk, False)
        attempt = self.tickets[name].attempt
        link = self.link(other_link)
        pull = Pull(link, name, attempt, self.incarnation, first_block, num_takers, decode)
        self.ask(pull, 0 if first_block else LAYOUT.total_bytes)
        if num_layers:
            self.ready(name, num_layers)
        self.go_on(link, num_steps, True)

    def go_on(self, link: Link, num_steps: int, is_intact: bool) -> None:
        for _ in range(num_steps):
            if link.to_sender and not link.is_dead_at_sender:
                self.hear_at_sender(link, link.to_sender.pop(0))
            elif link.to_receiver and not link.is_dead_at_receiver:
                self.hear_at_receiver(link, link.to_receiver.pop(0))
            elif link.sends:
                pull_id, _ = link.sends.pop(0)
                self.at_sender(tx.PartSent(link.key, pull_id))
            elif link.posted and not link.is_dead_at_sender:
                part = min(link.posted)
                link.posted.remove(part)
                self.at_receiver(rx.PartArrived(*part))
            elif self.checking:
                part = min(self.checking)
                self.checking.remove(part)
                self.at_receiver(rx.PartChecked(*part, is_intact))

    @precondition(lambda self: any(x.to_sender and not x.is_dead_at_sender for x in self.links))
    @rule(data=st.data(), twice=st.booleans())
    def deliver_to_sender(self, data: st.DataObject, twice: bool) -> None:
        links = [x for x in self.links if x.to_sender and not x.is_dead_at_sender]
        link = data.draw(st.sampled_from(links))
        self.hear_at_sender(link, self.take(data, link.to_sender, twice))

    def hear_at_sender(self, link: Link, message: wire.Message) -> None:
        match message:
            case wire.Pull():
                self.at_sender(
                    tx.PullAsked(
                        link.key,
                        message.pull_id,
                        message.ticket_id,
                        message.attempt,
                        message.incarnation,
                        message.fingerprint_hash,
                        message.first_block,
                        None,
                        message.num_takers,
                        message.decode,
                    )
                )
            case wire.Fetch(pull_id, incarnation):
                self.serve_fetch(link, pull_id, incarnation)
            case wire.Ack(pull_id, is_taken):
                self.at_sender(tx.PullAcked(link.key, pull_id, is_taken))
            case wire.Renew(ticket_id, attempt, incarnation):
                self.at_sender(tx.LeaseRenewed(link.key, ticket_id, attempt, incarnation))

    def serve_fetch(self, link: Link, pull_id: int, incarnation: int) -> None:
        name = f"fetch/{link.key}/{pull_id}"
        if incarnation != self.incarnation or name in self.tickets:
            return
        self.tickets[name] = Ticket(0, True, 1, self.now)
        layout = KvLayout(1, 3, 20)
        self.at_sender(tx.OpenAsked(name, 0, layout, LEASE_S, 20, is_single=True))
        self.at_sender(tx.LayersReady(name, 1))
        self.at_sender(tx.PullAsked(link.key, pull_id, name, 0, self.incarnation, FINGERPRINT))

    @precondition(lambda self: any(x.to_receiver and not x.is_dead_at_receiver for x in self.links))
    @rule(data=st.data(), twice=st.booleans())
    def deliver_to_receiver(self, data: st.DataObject, twice: bool) -> None:
        links = [x for x in self.links if x.to_receiver and not x.is_dead_at_receiver]
        link = data.draw(st.sampled_from(links))
        self.hear_at_receiver(link, self.take(data, link.to_receiver, twice))

    def hear_at_receiver(self, link: Link, message: wire.Message) -> None:
        match message:
            case wire.Meta(pull_id, num_bytes):
                self.pulls[pull_id].metas.append(message)
                self.at_receiver(
                    rx.MetaArrived(
                        link.key,
                        pull_id,
                        num_bytes,
                        message.offset,
                        message.length,
                        message.inline is not None,
                    )
                )
            case wire.PullRefusal(pull_id, refusal):
                self.at_receiver(rx.PullRefused(link.key, pull_id, refusal.name))

    @staticmethod
    def take(data: st.DataObject, queue: list[wire.Message], twice: bool) -> wire.Message:
        """Take the next message, or sometimes a later one.

        With `twice`, the message stays in the queue and is delivered again.
        """
        at = data.draw(st.sampled_from([0, 0, 0, len(queue) - 1]))
        return queue[at] if twice else queue.pop(at)

    @precondition(lambda self: any(x.sends for x in self.links))
    @rule(data=st.data())
    def a_send_ends(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from([x for x in self.links if x.sends]))
        pull_id, _ = link.sends.pop(data.draw(st.integers(0, len(link.sends) - 1)))
        self.at_sender(tx.PartSent(link.key, pull_id))

    @precondition(lambda self: any(x.posted for x in self.links))
    @rule(data=st.data())
    def a_write_ends(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from([x for x in self.links if x.posted]))
        part = data.draw(st.sampled_from(sorted(link.posted)))
        link.posted.remove(part)
        self.at_receiver(rx.PartArrived(*part))

    @precondition(lambda self: self.checking)
    @rule(data=st.data(), intact=st.sampled_from([True, True, True, False, None]))
    def a_check_ends(self, data: st.DataObject, intact: bool | None) -> None:
        part = data.draw(st.sampled_from(sorted(self.checking)))
        self.checking.remove(part)
        failed = rx.CheckFailed(*part)
        self.at_receiver(failed if intact is None else rx.PartChecked(*part, intact))

    @precondition(lambda self: self.links)
    @rule(data=st.data(), who=st.sampled_from(["sender", "receiver"]), happens=RARELY)
    def a_side_learns_of_a_cut(self, data: st.DataObject, who: str, happens: bool) -> None:
        if happens:
            self.lose(data.draw(st.sampled_from(self.links)), who)

    def lose(self, link: Link, who: str) -> None:
        if who == "sender" and not link.is_dead_at_sender:
            link.is_dead_at_sender = True
            link.sends.clear()  # the transport guarantees that nothing reads after the abort
            self.at_sender(tx.PeerLost(link.key))
        if who == "receiver" and not link.is_dead_at_receiver:
            link.is_dead_at_receiver = True
            link.posted.clear()
            self.at_receiver(rx.PeerLost(link.key))

    # -- the sender's effects ---------------------------------------------------------------------

    def at_sender(self, event: tx.SenderEvent) -> None:
        events = [event]
        while events:
            for effect in self.sender.handle(events.pop(0), self.now):
                match effect:
                    case tx.SendPart():
                        if self.send(effect):
                            events.append(tx.PartSent(effect.peer, effect.pull_id))
                    case tx.RefusePull(peer, pull_id, refusal):
                        self.links[peer - 1].to_receiver.append(wire.PullRefusal(pull_id, refusal))
                    case tx.AbortPeer(peer):
                        self.aborts.append((self.links[peer - 1], "sender"))
                    case tx.CloseTicket(ticket_id, reason):
                        self.close_ticket(ticket_id, reason)
        self.settle()

    def send(self, effect: tx.SendPart) -> bool:
        pull, link = self.pulls[effect.pull_id], self.links[effect.peer - 1]
        ticket = self.tickets[effect.ticket_id]
        assert pull.is_fetch or pull.attempt == ticket.attempt, "another attempt's bytes"
        assert pull.incarnation == self.incarnation, "another incarnation's bytes"
        assert effect.part.end_layer <= ticket.num_ready, "bytes that are not computed yet"
        assert not link.is_dead_at_sender
        is_inline = effect.part.length <= MAX_INLINE
        if not is_inline:
            link.sends.append((effect.pull_id, effect.ticket_id))
        link.to_receiver.append(
            wire.Meta(
                effect.pull_id,
                effect.num_bytes,
                ranges_of(effect.part),
                memoryview(b"") if is_inline else None,
            )
        )
        return is_inline

    def close_ticket(self, ticket_id: str, reason: CloseReason) -> None:
        readers = [name for link in self.links for _, name in link.sends]
        assert ticket_id not in readers, "freed while a send reads it"
        ticket = self.tickets.pop(ticket_id)  # KeyError if the ticket was closed before
        assert ticket.is_written, "freed while its engine writes it"
        if reason is CloseReason.TAKEN and not ticket_id.startswith("fetch"):
            takers: dict[int, set[int]] = {1: set(), 2: set()}
            pulls = [p for p in self.pulls.values() if p.ticket_id == ticket_id]
            for pull in pulls:
                if pull.outcome == "complete":
                    takers[pull.decode].add(pull.link.key)
            assert any(
                len(takers[p.decode]) >= p.num_takers for p in pulls if p.outcome == "complete"
            ), "closed before all ranks of one decode took it"

    # -- the receiver's effects -------------------------------------------------------------------

    def at_receiver(self, event: rx.ReceiverEvent) -> None:
        for effect in self.receiver.handle(event, self.now):
            self.apply(effect)
        self.settle()

    def apply(self, effect: rx.ReceiverEffect) -> None:
        if isinstance(effect, rx.AbortPeer | rx.RetirePeer):
            self.apply_to_link(effect, self.links[effect.peer - 1])
            return
        pull_id = effect.owner if isinstance(effect, rx.FreeLanding) else effect.pull_id
        pull = self.pulls[pull_id]
        match effect:
            case rx.SendPull():
                pull.link.to_sender.append(message_of(pull, pull_id))
            case rx.ReceivePart(_, index):
                assert not pull.link.is_dead_at_receiver
                assert not pull.is_landing_free
                pull.link.posted.add((pull_id, index))
            case rx.CheckPart(_, index):
                assert (pull_id, index) not in pull.link.posted
                self.checking.add((pull_id, index))
            case rx.DeliverPart(_, index):
                assert not pull.outcome
                assert not pull.has_left, "delivered after the pull was given up"
                assert index == pull.num_delivered, "out of order"
                pull.num_delivered += 1
            case rx.SendAck(_, is_taken):
                pull.link.to_sender.append(wire.Ack(pull_id, is_taken))
            case rx.TellSilent():
                assert not pull.is_silent, "told twice"
                assert not pull.outcome, "reported for a pull that is over"
                assert self.now >= pull.asked_at + SILENT_S
                pull.is_silent = True
            case rx.RenewLease():
                renewal = wire.Renew(pull.ticket_id, pull.attempt, pull.incarnation)
                if not pull.is_fetch:
                    pull.link.to_sender.append(renewal)
            case _:
                self.apply_end(effect, pull, pull_id)

    def apply_to_link(self, effect: rx.AbortPeer | rx.RetirePeer, link: Link) -> None:
        if isinstance(effect, rx.AbortPeer):
            self.aborts.append((link, "receiver"))
        else:
            link.is_retired = True

    def apply_end(self, effect: rx.ReceiverEffect, pull: Pull, pull_id: int) -> None:
        match effect:
            case rx.CompletePull():
                assert not pull.has_left
                assert not pull.outcome
                self.end(pull, pull_id, "complete")
            case rx.FailPull():
                assert not pull.outcome, "reported twice"
                assert not pull.has_left, "reported after the pull was given up"
                pull.outcome = "failed"
            case rx.FreeLanding():
                assert pull.outcome == "failed" or pull.has_left, "freed while the caller uses it"
                self.end(pull, pull_id, pull.outcome or "left")

    def end(self, pull: Pull, pull_id: int, outcome: str) -> None:
        assert pull_id not in {p for p, _ in pull.link.posted}, "freed while a write is possible"
        assert pull_id not in {p for p, _ in self.checking}, "freed while it is read"
        assert not pull.is_landing_free, "freed twice"
        pull.is_landing_free = True
        pull.outcome = outcome

    def settle(self) -> None:
        """Report each side's own abort to that side before anything else happens."""
        while self.aborts:
            self.lose(*self.aborts.pop())

    @invariant()
    def holds(self) -> None:
        self.sender.check_invariants()
        self.receiver.check_invariants()
        assert len(self.sender) == len(self.tickets)
        assert len(self.receiver) == sum(not p.is_landing_free for p in self.pulls.values())
        for link in self.links:
            is_over = all(p.is_landing_free for p in self.pulls.values() if p.link is link)
            assert not (link.is_retired and is_over and self.receiver.is_idle) or (
                link.is_dead_at_receiver
            ), "this connection would never be closed"

    def teardown(self) -> None:
        """Check that everything is freed after some time, once the engines stop writing."""
        for part in sorted(self.checking):
            self.checking.remove(part)
            self.at_receiver(rx.PartChecked(*part, True))
        for number, name in enumerate(sorted(self.tickets)):
            if not self.tickets[name].is_written:
                self.ready(name, LAYOUT.num_layers) if number % 2 else self.release(name)
        for wait in (DEADLINE_S, STOP_S, LEASE_S * MAX_LEASES):
            self.now += wait
            self.tick()
        assert not self.tickets
        assert len(self.sender) == 0
        assert len(self.receiver) == 0
        assert all(p.is_landing_free and (p.outcome or p.has_left) for p in self.pulls.values())


def message_of(pull: Pull, pull_id: int) -> wire.Message:
    if pull.is_fetch:
        return wire.Fetch(pull_id, pull.incarnation, FINGERPRINT, (bytes(16),) * 3)
    return wire.Pull(
        pull_id,
        pull.ticket_id,
        pull.attempt,
        pull.incarnation,
        FINGERPRINT,
        pull.first_block,
        num_takers=pull.num_takers,
        decode=pull.decode,
    )


def ranges_of(part: KvPart) -> tuple[wire.Range, ...]:
    ranges, offset = [], part.offset
    for span in part.spans:
        ranges.append(wire.Range(offset, span.length, bytes(16)))
        offset += span.length
    return tuple(ranges)


TransferMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=60, deadline=None
)
TransferMachine.TestCase.pytestmark = [  # type: ignore[attr-defined]  # pytest reads it
    pytest.mark.req("S41", "S48", "S49"),
    pytest.mark.fault("F2", "F3", "F4", "F5", "F6", "F25", "F27", "F35"),
]
TestTransfer = TransferMachine.TestCase
