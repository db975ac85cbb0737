"""The table of phases and events describes every transition of a request.

No event leads to a phase that the table does not list. A late event changes nothing, and an
impossible event raises an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from pdmesh.core.flight_recorder import IllegalEvent
from pdmesh.core.model import Tick
from pdmesh.core.request.events import (
    Candidate,
    ClientGone,
    DecodeTokens,
    EngineUnknown,
    EngineWorked,
    Event,
    FirstToken,
    KvAdvanced,
    KvStage,
    LegAccepted,
    LegEvent,
    LegFailed,
    LegFinished,
    LegKvReceived,
    LegLost,
    LegRejected,
    PlanFailed,
    PlanReceived,
    RequestLimits,
    SlotFreed,
    StopMatched,
    Submitted,
    TicketHeld,
    WaitRefused,
)
from pdmesh.core.request.machine import Request
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.core.request.transitions import BESIDE, IMPOSSIBLE, TRANSITIONS, RequestPhase
from pdmesh.errors import InstanceLost, InvalidRequest, NoInstance
from tests.support.request_state import state_of

LIMITS = RequestLimits(deadline_s=60, ttft_s=4, max_migrations=3)
PREFILLS = [Candidate(f"p{i}", 1, "g") for i in range(2)]
DECODES = [Candidate(f"d{i}", 1, "g") for i in range(2)]
LOST = InstanceLost("scripted")
FUSION = Candidate("f0", 1, "g", is_local=True)
IDS = [c.instance_id for c in (*PREFILLS, *DECODES, FUSION)]
# The share of usual events among all events, by phase. In other phases it is one half.
USUAL = {
    RequestPhase.PLANNING: 0.9,
    RequestPhase.PREFILL_OFFERED: 0.75,
    RequestPhase.PREFILLING: 0.6,
    RequestPhase.DECODE_OFFERED: 0.6,
    RequestPhase.WAITING_DECODE: 0.1,
}
ALWAYS = {ClientGone, StopMatched}  # from every phase, each of these leads to the same phase
Step = tuple[RequestPhase, type, RequestPhase]


class Walk:
    """A request that gets random events, most of them about its own legs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.keys: list[int] = []
        self.num_tickets = 0
        self.steps: set[Step] = set()
        self.beside: set[Step] = set()
        self.num_late = self.num_impossible = 0
        self.request = Request(
            self.random.choice((1, 2, 40, 40, 40, 40)),
            limits=LIMITS,
            budget=RetryBudget(reserve=self.random.choice((0.0, 10.0))),
            next_key=self.next_key,
        )

    def next_key(self) -> int:
        self.keys.append(len(self.keys) + 1)
        return self.keys[-1]

    def run(self, num_steps: int) -> None:
        refusal = NoInstance("full") if self.random.random() < 0.01 else None
        self.feed(Submitted(refusal) if self.random.random() < 0.98 else ClientGone())
        for _ in range(num_steps):
            if self.request.phase is RequestPhase.ENDED:
                break
            self.now += self.random.choice((0.0, 0.0, 0.0, 0.3, 0.3, 2.0, 6.0))
            self.feed(self.any_event())
        self.feed(self.any_event())

    def feed(self, event: Event) -> None:
        request, kind = self.request, type(event)
        before = request.phase
        is_beside = isinstance(event, LegEvent) and not request.is_current(event.key)
        row = (BESIDE if is_beside else TRANSITIONS)[before]
        is_impossible = self.is_impossible(event, is_beside)
        was = state_of(request) if is_beside or kind not in row or is_impossible else None
        if is_impossible:
            self.num_impossible += 1
            with pytest.raises(IllegalEvent) as raised:
                request.handle(event, self.now)
            assert state_of(request) == was, "an impossible event changed something"
            assert kind.__name__ in raised.value.__notes__[0], (
                "the recorder contains the impossible event"
            )
            return
        effects = request.handle(event, self.now)
        request.check_invariants()
        if was is not None and not effects and state_of(request) == was:
            self.num_late += 1
            return
        assert request.phase in row[kind], (before, event, request.phase)
        (self.beside if is_beside else self.steps).add((before, kind, request.phase))

    def is_impossible(self, event: Event, is_beside: bool) -> bool:
        phase = self.request.phase
        if phase is RequestPhase.ENDED:
            return False
        if is_beside:
            assert isinstance(event, LegEvent)
            return event.key not in self.keys
        if isinstance(event, PlanReceived | PlanFailed) and phase is RequestPhase.PLANNING:
            return event.plan > self.request._plan
        return type(event) in IMPOSSIBLE[phase]

    def any_event(self) -> Event:
        """The usual event, an event that the table lists for the phase, or any event."""
        pick, phase = self.random.choice, self.request.phase
        chance = self.random.random()
        if chance < USUAL.get(phase, 0.5) and (due := self.usual()) is not None:
            return due
        listed = [k for k in (*TRANSITIONS[phase], *BESIDE[phase]) if k is not ClientGone]
        kind = pick(listed) if listed and chance < 0.97 else pick(list(ANY))
        key = pick(self.keys[-1:] * 2 + self.keys * 2 + [0])
        return ANY[kind](self, key, pick)

    def ticket(self) -> TicketHeld:
        self.num_tickets += 1
        return TicketHeld(f"t{self.num_tickets}", 5.0)

    def usual(self) -> Event | None:
        """An event that usually comes next in this phase."""
        pick, request = self.random.choice, self.request
        key = self.keys[-1] if self.keys else 0
        match request.phase:
            case RequestPhase.PLANNING:
                if request.num_rejections and self.random.random() < 0.3:
                    return PlanFailed(request._plan, NoInstance("x"))
                prefills = pick((PREFILLS, PREFILLS, [], [FUSION, *PREFILLS]))
                return PlanReceived(request._plan, prefills, pick((DECODES, DECODES, [])))
            case RequestPhase.PREFILL_OFFERED:
                rejected = LegRejected(key, is_final=pick((True, False)))
                return pick((LegAccepted(key), LegAccepted(key, self.ticket()), rejected))
            case RequestPhase.PREFILLING:
                key = pick(self.keys[-2:])
                first = FirstToken(key, 7, None, self.ticket())
                return pick((first, first, LegAccepted(key), LegKvReceived(key), LegRejected(key)))
            case RequestPhase.DECODE_OFFERED:
                rejected = LegRejected(key, is_final=pick((True, False, False)))
                return pick((rejected, rejected, LegAccepted(key)))
            case RequestPhase.DECODING:
                return pick((DecodeTokens(key, (7,)), LegLost(pick(self.keys))))
            case RequestPhase.WAITING_PREFILL | RequestPhase.WAITING_DECODE:
                return SlotFreed(pick(IDS))
        return None


Pick = Callable[[Sequence[Any]], Any]
ANY: Mapping[type, Callable[[Walk, int, Pick], Event]] = {
    Tick: lambda walk, key, pick: Tick(),
    SlotFreed: lambda walk, key, pick: SlotFreed(pick(IDS)),
    PlanReceived: lambda walk, key, pick: PlanReceived(
        walk.request._plan + pick((-1, 0, 0, 1)), PREFILLS, pick((DECODES, []))
    ),
    PlanFailed: lambda walk, key, pick: PlanFailed(
        walk.request._plan, pick((NoInstance("x"), InvalidRequest("x")))
    ),
    Submitted: lambda walk, key, pick: Submitted(),
    WaitRefused: lambda walk, key, pick: WaitRefused(),
    ClientGone: lambda walk, key, pick: ClientGone(),
    StopMatched: lambda walk, key, pick: pick((StopMatched(), Tick(), Tick(), Tick())),
    LegAccepted: lambda walk, key, pick: LegAccepted(key, pick((None, walk.ticket()))),
    LegRejected: lambda walk, key, pick: LegRejected(
        key, is_final=pick((True, False)), is_too_long=pick((True, False))
    ),
    FirstToken: lambda walk, key, pick: FirstToken(
        key, 7, pick((None, None, "stop")), pick((None, walk.ticket()))
    ),
    KvAdvanced: lambda walk, key, pick: KvAdvanced(key, pick(list(KvStage))),
    LegKvReceived: lambda walk, key, pick: LegKvReceived(key),
    DecodeTokens: lambda walk, key, pick: DecodeTokens(key, (7,)),
    LegFinished: lambda walk, key, pick: LegFinished(key, "length"),
    LegFailed: lambda walk, key, pick: LegFailed(key, LOST, pick((True, True, False))),
    LegLost: lambda walk, key, pick: LegLost(key),
    EngineWorked: lambda walk, key, pick: EngineWorked(key, walk.now, pick((1, 50)), 10),
    EngineUnknown: lambda walk, key, pick: EngineUnknown(key),
}


@pytest.fixture(scope="module")
def walks() -> list[Walk]:
    walks = [Walk(seed) for seed in range(3300)]
    for walk in walks:
        walk.run(40)
    return walks


def test_any_order_of_events_stays_in_the_table(walks: list[Walk]) -> None:
    assert sum(walk.num_late for walk in walks) > 1000
    assert sum(walk.num_impossible for walk in walks) > 1000


def test_the_table_lists_no_transition_that_does_not_happen(walks: list[Walk]) -> None:
    steps = {step for walk in walks for step in walk.steps}
    beside = {step for walk in walks for step in walk.beside}
    for table, seen in ((TRANSITIONS, steps), (BESIDE, beside)):
        for phase, row in table.items():
            for kind, targets in row.items():
                listed = {(phase, kind, target) for target in targets}
                assert kind in ALWAYS or listed <= seen, listed - seen
