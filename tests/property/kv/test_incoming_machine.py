"""A rank's loads: ranges, copies, late writes, cancellations and first tokens in any order.

A load pulls KV into a landing range and copies it into the engine's blocks. The model knows the
truth about memory: which blocks each request holds, which copies into them are running, and which
landing ranges the network may still write. The engine learns of a cancelled pull before the KV
agent does. So ranges may be delivered after the end of a pull, and writes may arrive even later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdmesh.core.kv.transfer import incoming_events as events
from pdmesh.core.kv.transfer.incoming_blocks import IncomingBlocks
from pdmesh.core.kv.transfer.receiver_events import FreeLanding
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.core.model import Tick

LOST = events.LoadFailure(PullFailure.PEER_LOST, "gone")
CANCELLED = events.LoadFailure(PullFailure.CLOSING, "cancelled")
PICK = st.integers(0, 1 << 16)
TIMEOUT_S = 5.0


@dataclass
class Load:
    is_early: bool
    has_blocks: bool
    landings: list[int]
    holds_blocks: bool
    is_pulling: bool = False  # until the engine learns that the pull has ended
    is_cancel_asked: bool = False
    has_deliverer: bool = False  # True while the agent may still deliver ranges
    writable: set[int] = field(default_factory=set)  # offsets that a late write may still reach
    num_copying: int = 0
    has_token: bool = False
    is_cancelled: bool = False
    succeeded: bool = False
    keeps_lease: bool = False
    num_reports: int = 0
    num_freed: int = 0
    ended_as: str = ""


class IncomingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.blocks = IncomingBlocks(max_pulls=2)
        self.loads: dict[int, Load] = {}
        self.tokens: set[int] = set()  # legs whose token 1 came before their load was added

    # -- the engine -------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(["turn", "turn", "early", "pieces", "ack"]),
        source=st.sampled_from("ab"),
        num_bytes=st.sampled_from([10, 1 << 26]),
        num_pieces=st.integers(1, 3),
    )
    def start(self, kind: str, source: str, num_bytes: int, num_pieces: int) -> None:
        leg = len(self.loads)
        pieces = num_pieces if kind == "pieces" else 1
        landings = [1000 * leg + n for n in range(pieces)]
        load = Load(kind == "early", kind != "ack", landings, kind != "ack")
        load.has_token = not load.is_early or leg in self.tokens
        self.loads[leg] = load
        queue = source if kind == "turn" else None
        self.tell(
            events.LoadStarted(
                leg,
                tuple(landings),
                queue,
                num_bytes,
                TIMEOUT_S,
                load.is_early,
                load.has_blocks,
            )
        )
        assert load.is_pulling or load.keeps_lease, "it neither pulls nor waits"

    @rule(pick=PICK, is_soon=st.booleans())
    def first_token(self, pick: int, is_soon: bool) -> None:
        if is_soon:  # token 1 of the next load
            self.tokens.add(len(self.loads))
            self.tell(events.FirstTokenKnown(len(self.loads)))
        elif self.loads:
            leg = pick % len(self.loads)
            self.loads[leg].has_token = True
            self.tell(events.FirstTokenKnown(leg))

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        leg = pick % (len(self.loads) + 1)
        self.tokens.discard(leg)
        if leg in self.loads and self.loads[leg].has_blocks and not self.loads[leg].ended_as:
            self.loads[leg].is_cancelled = True
        self.tell(events.LoadCancelled(leg))

    # -- the network and the agent ----------------------------------------------------------------

    @precondition(lambda self: any(load.has_deliverer for load in self.loads.values()))
    @rule(pick=PICK)
    def verified(self, pick: int) -> None:
        """Deliver a range. The engine may have cancelled the pull before the agent learns of it."""
        delivering = [leg for leg, load in self.loads.items() if load.has_deliverer]
        self.tell(events.RangeVerified(delivering[pick % len(delivering)]))

    @precondition(lambda self: any(load.num_copying for load in self.loads.values()))
    @rule(pick=PICK)
    def scattered(self, pick: int) -> None:
        copying = [leg for leg, load in self.loads.items() if load.num_copying]
        leg = copying[pick % len(copying)]
        self.loads[leg].num_copying -= 1
        self.tell(events.RangeScattered(leg))

    @precondition(lambda self: any(load.is_pulling for load in self.loads.values()))
    @rule(pick=PICK, is_success=st.booleans(), num_ours=st.integers(0, 2))
    def pull_ends(self, pick: int, is_success: bool, num_ours: int) -> None:
        pulling = [leg for leg, load in self.loads.items() if load.is_pulling]
        leg = pulling[pick % len(pulling)]
        self.end_pull(leg, is_success, num_ours)

    def end_pull(self, leg: int, is_success: bool, num_ours: int) -> None:
        """End a pull. If it failed, late writes may still reach its landings, except for the first
        `num_ours` of them.
        """
        load = self.loads[leg]
        load.is_pulling = False
        ours = load.landings if is_success else load.landings[:num_ours]
        load.writable -= set(ours)
        load.succeeded = is_success
        if is_success:
            load.has_deliverer = False
        failure = None if is_success else CANCELLED if load.is_cancel_asked else LOST
        self.tell(events.PullEnded(leg, failure, tuple(ours)))

    @precondition(lambda self: any(load.writable for load in self.loads.values()))
    @rule(pick=PICK)
    def landing_freed(self, pick: int) -> None:
        """Free a landing: no late write is possible any more.

        The engine may not have ended the pull yet.
        """
        written = [(leg, at) for leg, load in self.loads.items() for at in sorted(load.writable)]
        leg, offset = written[pick % len(written)]
        load = self.loads[leg]
        if load.is_pulling and len(load.writable) == 1:
            self.end_pull(leg, False, 0)
        load.writable.discard(offset)
        if not load.writable:
            load.has_deliverer = False
        self.tell(events.AgentLandingFreed(offset))

    @precondition(lambda self: any(load.is_pulling for load in self.loads.values()))
    @rule(pick=PICK)
    def falls_silent(self, pick: int) -> None:
        pulling = [leg for leg, load in self.loads.items() if load.is_pulling]
        self.tell(events.PullFellSilent(pulling[pick % len(pulling)]))

    @rule(seconds=st.sampled_from([0.1, 1.0, TIMEOUT_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick())

    # -- what the core orders ---------------------------------------------------------------------

    def tell(self, event: events.IncomingEvent) -> None:
        for effect in self.blocks.handle(event, self.now):
            self.obey(effect)

    def obey(self, effect: events.IncomingEffect) -> None:
        load = self.loads[effect.owner if isinstance(effect, FreeLanding) else effect.leg]
        match effect:
            case events.StartPull(_, awaits_prefill):
                assert not load.ended_as
                assert not load.is_cancelled
                assert not load.has_deliverer, "the load was started before"
                assert awaits_prefill == (not load.has_token)
                load.is_pulling = load.has_deliverer = True
                load.keeps_lease = False
                load.writable = set(load.landings)
            case events.CancelPull():
                assert load.is_pulling
                assert load.is_cancelled
                load.is_cancel_asked = True
            case events.KeepLease():
                load.keeps_lease = True
            case events.StopRenewing():
                assert load.keeps_lease
                load.keeps_lease = False
            case events.BoundSilence():
                assert load.has_token
            case events.Scatter():
                assert load.holds_blocks, "a scatter into blocks of another request"
                assert load.is_pulling, "its pull is over"
                load.num_copying += 1
            case events.ReportLoad():
                assert load.has_blocks
                assert not load.is_cancelled
                assert (effect.failure is None) == load.succeeded
                assert not load.num_copying, "reported before all its bytes were in the blocks"
                load.num_reports += 1
            case events.CompleteLoad() | events.ReleaseBlocks():
                self.settle(load, isinstance(effect, events.CompleteLoad))
            case FreeLanding():
                assert not load.writable, "a late write may land in it"
                assert not load.num_copying, "a copy reads it"
                assert not load.is_pulling
                load.num_freed += 1

    def settle(self, load: Load, is_complete: bool) -> None:
        assert load.holds_blocks, "blocks are given back only once"
        assert not load.num_copying, "a copy writes into them"
        assert not load.is_pulling, "the pull may still deliver"
        if is_complete:
            assert load.has_token
            assert load.succeeded
            assert not load.is_cancelled
        load.holds_blocks = False
        load.ended_as = "complete" if is_complete else "released"

    @invariant()
    def holds(self) -> None:
        self.blocks.check_invariants()
        for load in self.loads.values():
            assert load.num_reports <= 1
            assert load.num_freed <= 1

    def teardown(self) -> None:
        """Check that all loads end once the running operations have ended."""
        while any(
            load.num_copying or load.is_pulling or load.writable for load in self.loads.values()
        ):
            for leg, load in self.loads.items():
                self.end_all(leg, load)
        for leg, load in self.loads.items():
            load.has_token = True
            self.tell(events.FirstTokenKnown(leg))
            assert load.num_freed == 1, "its landing was never freed"
            assert load.ended_as or not load.has_blocks, "its blocks were never given back"
            if load.has_blocks and not load.is_cancelled:
                assert load.num_reports == 1, "its outcome was never reported"
        assert not self.blocks.num_waiting
        assert not self.blocks._loads, "ended loads are forgotten"

    def end_all(self, leg: int, load: Load) -> None:
        while load.num_copying:
            load.num_copying -= 1
            self.tell(events.RangeScattered(leg))
        if load.is_pulling:
            self.end_pull(leg, False, 0)
        for offset in sorted(load.writable):
            load.writable.discard(offset)
            self.tell(events.AgentLandingFreed(offset))


IncomingMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None
)
IncomingMachine.TestCase.pytestmark = [  # type: ignore[attr-defined]  # pytest reads it
    pytest.mark.req("S48", "S53", "S57"),
    pytest.mark.fault("F3", "F27"),
]
TestIncoming = IncomingMachine.TestCase
