"""Sender and receiver together over a network that delays, repeats and loses, in any interleaving.

The model is the truth about bytes: a send that has started and not ended reads its ticket's range, a posted
receive that has not completed may still write its landing range. Each side learns of a lost
connection in its own time; what it believes before that must be safe anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdmesh.core import pull_book as rx
from pdmesh.core import ticket_book as tx
from pdmesh.core.ticket import Refusal
from pdmesh.kv import wire

INCARNATION, FINGERPRINT, BLOCKS, BYTES = 7, 11, 4, 1000
LEASE_S, DEADLINE_S = 10.0, 2.0
NAMES = st.sampled_from("aaab")


@dataclass
class Link:
    """One connection. Each side loses it once, by its own abort or when the news arrives."""

    key: int
    to_sender: list[wire.Message] = field(default_factory=list)
    to_receiver: list[wire.Message] = field(default_factory=list)
    is_dead_at_sender: bool = False
    is_dead_at_receiver: bool = False
    sends: dict[int, str] = field(default_factory=dict)  # pull -> ticket read right now
    arrived: set[int] = field(default_factory=set)  # pulls whose bytes left the sender
    posted: set[int] = field(default_factory=set)  # pulls with a receive posted

    @property
    def is_broken(self) -> bool:
        return self.is_dead_at_sender or self.is_dead_at_receiver


@dataclass
class Pull:
    link: Link
    ticket_id: str
    attempt: int
    has_left: bool = False
    outcome: str = ""
    is_landing_free: bool = False


class TransferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sender = tx.TicketBook(INCARNATION, FINGERPRINT)
        self.receiver = rx.PullBook()
        self.links: list[Link] = []
        self.tickets: dict[str, int] = {}  # open: id -> attempt
        self.num_staged = 0
        self.num_closed = 0
        self.pulls: dict[int, Pull] = {}
        self.checking: set[int] = set()
        self.aborts: list[tuple[Link, str]] = []

    # -- what people and time do ------------------------------------------------------------------

    @rule(name=NAMES, attempt=st.integers(1, 2))
    def stage(self, name: str, attempt: int) -> None:
        if name in self.tickets:
            with pytest.raises(ValueError, match="open already"):
                self.sender.handle(tx.Staged(name, attempt, BLOCKS, LEASE_S), self.now)
            return
        self.tickets[name] = attempt
        self.num_staged += 1
        self.at_sender(tx.Staged(name, attempt, BLOCKS, LEASE_S))

    @rule(name=NAMES, is_stale=st.sampled_from([False] * 4 + [True]), old=st.booleans())
    def pull(self, name: str, is_stale: bool, old: bool) -> None:
        attempt = 3 if is_stale else self.tickets.get(name, 1)
        link = next((x for x in self.links if not x.is_dead_at_receiver), None)
        if link is None or (old and len(self.links) < 3):
            link = Link(len(self.links) + 1)
            self.links.append(link)
        pull_id = len(self.pulls) + 1
        self.pulls[pull_id] = Pull(link, name, attempt)
        self.at_receiver(rx.PullRequested(pull_id, link.key, BYTES, BYTES, self.now + DEADLINE_S))

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        self.at_sender(tx.Released(name))

    @rule(name=NAMES, attempt=st.integers(1, 2), inc=st.sampled_from([7, 8]))
    def renew(self, name: str, attempt: int, inc: int) -> None:
        self.at_sender(tx.LeaseRenewed(name, attempt, inc))

    @precondition(lambda self: self.pulls)
    @rule(data=st.data())
    def caller_leaves(self, data: st.DataObject) -> None:
        pull_id = data.draw(st.sampled_from(sorted(self.pulls)))
        if not self.pulls[pull_id].outcome:
            self.pulls[pull_id].has_left = True
        self.at_receiver(rx.CallerLeft(pull_id))

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        self.at_sender(tx.Tick())
        self.at_receiver(rx.Tick())

    # -- what the network does --------------------------------------------------------------------

    @precondition(lambda self: any(x.to_sender and not x.is_dead_at_sender for x in self.links))
    @rule(data=st.data(), twice=st.booleans())
    def deliver_to_sender(self, data: st.DataObject, twice: bool) -> None:
        link = data.draw(
            st.sampled_from([x for x in self.links if x.to_sender and not x.is_dead_at_sender])
        )
        message = link.to_sender[0] if twice else link.to_sender.pop(0)
        match message:
            case wire.Pull(pull_id, ticket_id, attempt, incarnation, fingerprint, first):
                self.at_sender(
                    tx.PullAsked(
                        link.key, pull_id, ticket_id, attempt, incarnation, fingerprint, first
                    )
                )
            case wire.Ack(pull_id, is_taken):
                self.at_sender(tx.PullAcked(link.key, pull_id, is_taken))

    @precondition(lambda self: any(x.to_receiver and not x.is_dead_at_receiver for x in self.links))
    @rule(data=st.data(), twice=st.booleans(), inline=st.booleans())
    def deliver_to_receiver(self, data: st.DataObject, twice: bool, inline: bool) -> None:
        link = data.draw(
            st.sampled_from([x for x in self.links if x.to_receiver and not x.is_dead_at_receiver])
        )
        message = link.to_receiver[0] if twice else link.to_receiver.pop(0)
        match message:
            case wire.Meta(pull_id, num_bytes):
                self.at_receiver(rx.MetaArrived(link.key, pull_id, num_bytes, inline))
            case wire.Refused(pull_id, refusal):
                self.at_receiver(rx.PullRefused(link.key, pull_id, refusal.name))

    @precondition(lambda self: any(x.sends for x in self.links))
    @rule(data=st.data())
    def a_send_ends(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from([x for x in self.links if x.sends]))
        pull_id = data.draw(st.sampled_from(sorted(link.sends)))
        del link.sends[pull_id]
        link.arrived.add(pull_id)
        self.at_sender(tx.SendEnded(link.key, pull_id))

    @precondition(lambda self: any(x.posted for x in self.links))
    @rule(data=st.data())
    def a_write_ends(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from([x for x in self.links if x.posted]))
        pull_id = data.draw(st.sampled_from(sorted(link.posted)))
        link.posted.remove(pull_id)
        self.at_receiver(rx.PayloadArrived(pull_id))

    @precondition(lambda self: self.checking)
    @rule(data=st.data(), intact=st.booleans())
    def a_check_ends(self, data: st.DataObject, intact: bool) -> None:
        pull_id = data.draw(st.sampled_from(sorted(self.checking)))
        self.checking.remove(pull_id)
        self.at_receiver(rx.Checked(pull_id, intact))

    @precondition(lambda self: self.links)
    @rule(data=st.data(), who=st.sampled_from(["sender", "receiver"]))
    def a_side_learns_of_a_cut(self, data: st.DataObject, who: str) -> None:
        self.lose(data.draw(st.sampled_from(self.links)), who)

    def lose(self, link: Link, who: str) -> None:
        if who == "sender" and not link.is_dead_at_sender:
            link.is_dead_at_sender = True
            link.sends.clear()  # the transport's promise: nothing reads after this
            self.at_sender(tx.PeerLost(link.key))
        if who == "receiver" and not link.is_dead_at_receiver:
            link.is_dead_at_receiver = True
            link.posted.clear()
            self.at_receiver(rx.PeerLost(link.key))

    # -- effects ----------------------------------------------------------------------------------

    def at_sender(self, event: tx.SenderEvent) -> None:
        for effect in self.sender.handle(event, self.now):
            match effect:
                case tx.StartSend(peer, pull_id, ticket_id):
                    pull = self.pulls[pull_id]
                    assert pull.attempt == self.tickets[ticket_id], "another attempt's bytes"
                    link = self.links[peer - 1]
                    assert not link.is_dead_at_sender
                    link.sends[pull_id] = ticket_id
                    link.to_receiver.append(wire.Meta(pull_id, BYTES, ()))
                case tx.Refuse(peer, pull_id, refusal):
                    assert isinstance(refusal, Refusal)
                    self.links[peer - 1].to_receiver.append(wire.Refused(pull_id, refusal))
                case tx.AbortPeer(peer):
                    self.aborts.append((self.links[peer - 1], "sender"))
                case tx.CloseTicket(ticket_id):
                    for link in self.links:
                        assert ticket_id not in link.sends.values(), "freed while a send reads it"
                    del self.tickets[ticket_id]  # KeyError if closed twice
                    self.num_closed += 1
        self.settle()

    def at_receiver(self, event: rx.ReceiverEvent) -> None:
        for effect in self.receiver.handle(event, self.now):
            self.apply(effect)
        self.settle()

    def apply(self, effect: rx.ReceiverEffect) -> None:
        if isinstance(effect, rx.AbortPeer):
            self.aborts.append((self.links[effect.peer - 1], "receiver"))
            return
        pull = self.pulls[effect.pull_id]
        match effect:
            case rx.SendPull(pull_id):
                pull.link.to_sender.append(
                    wire.Pull(pull_id, pull.ticket_id, pull.attempt, INCARNATION, FINGERPRINT, 0)
                )
            case rx.ReceivePayload(pull_id):
                assert not pull.link.is_dead_at_receiver
                assert not pull.is_landing_free
                pull.link.posted.add(pull_id)
            case rx.Check(pull_id):
                self.checking.add(pull_id)
            case rx.SendAck(pull_id, is_taken):
                pull.link.to_sender.append(wire.Ack(pull_id, is_taken))
            case rx.Complete(pull_id):
                assert not pull.has_left
                self.end(pull, pull_id, "complete")
            case rx.Fail():
                assert not pull.outcome, "told twice"
                assert not pull.has_left, "told nobody"
                pull.outcome = "failed"
            case rx.FreeLanding(pull_id):
                assert pull.outcome == "failed" or pull.has_left, "freed under the caller"
                self.end(pull, pull_id, pull.outcome or "left")

    def end(self, pull: Pull, pull_id: int, outcome: str) -> None:
        assert pull_id not in pull.link.posted, "let go while a write is possible"
        assert not pull.is_landing_free, "let go twice"
        pull.is_landing_free = True
        pull.outcome = outcome

    def settle(self) -> None:
        """A side's own abort tells it of the loss before anything else can happen to it."""
        while self.aborts:
            self.lose(*self.aborts.pop())

    @invariant()
    def holds(self) -> None:
        self.sender.check_invariants()
        self.receiver.check_invariants()
        assert len(self.sender) == len(self.tickets)
        assert len(self.receiver) == sum(not p.is_landing_free for p in self.pulls.values())

    def teardown(self) -> None:
        """Whatever happened, time alone brings everything back."""
        for pull_id in sorted(self.checking):
            self.at_receiver(rx.Checked(pull_id, True))
        self.checking.clear()
        for _ in range(2):
            self.now += LEASE_S + DEADLINE_S
            self.tick()
        assert len(self.sender) == 0
        assert self.num_closed == self.num_staged
        assert len(self.receiver) == 0
        assert all(p.is_landing_free and (p.outcome or p.has_left) for p in self.pulls.values())


TransferMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TransferMachine.TestCase.pytestmark = [
    pytest.mark.req("S41", "S49"),
    pytest.mark.fault("F2", "F3", "F4", "F5", "F6", "F25", "F27", "F35"),
]
TestTransfer = TransferMachine.TestCase
