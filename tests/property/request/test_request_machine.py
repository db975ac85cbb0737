"""A request's state machine under events in any order, even late and repeated ones.

The request ends once, and no token or resource is lost, duplicated or leaked.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pdmesh.core.model import Tick
from pdmesh.core.request.events import (
    AbortLeg,
    AskPlan,
    Cancelled,
    Candidate,
    ClientGone,
    Complete,
    DecodeTokens,
    Effect,
    EmitTokens,
    EngineWorked,
    Event,
    Fail,
    FirstToken,
    KvAdvanced,
    KvStage,
    LegAccepted,
    LegFailed,
    LegFinished,
    LegKvReceived,
    LegLost,
    LegRejected,
    PlanFailed,
    PlanReceived,
    ReleaseTicket,
    RequestLimits,
    SendJoin,
    SendPrefill,
    SendStart,
    SlotFreed,
    StopMatched,
    Submitted,
    TicketHeld,
    WaitForSlot,
    WaitRefused,
)
from pdmesh.core.request.machine import Request
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.errors import InstanceLost, NoInstance

LIMITS = RequestLimits(deadline_s=60, ttft_s=10, max_migrations=2)
PREFILLS = [Candidate(f"p{i}", 1, "g/fp") for i in range(2)]
DECODES = [Candidate(f"d{i}", 1, "g/fp") for i in range(2)]
FUSION = Candidate("f0", 1, "g/fp", is_local=True)


@dataclass
class Leg:
    """A leg as its instance sees it."""

    key: int
    to: Candidate
    is_decode: bool
    # how many tokens of the answer the leg knows, and thus the number of the next token
    num_known: int
    num_left: int
    is_open: bool = True  # sent to the instance, and not yet ended, aborted or lost
    has_first: bool = False
    ticket_id: str = ""
    is_accepted: bool = False
    knows_first: bool = True  # False for an early decode until it gets token 1


class RequestMachine(RuleBasedStateMachine):
    """Token number n of the answer has the id n, so the emitted tokens must be 0, 1, 2, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.legs: dict[int, Leg] = {}
        self.tickets: dict[str, str] = {}  # each ticket's state: open, taken, released or lost
        self.plan: AskPlan | None = None
        self.shown: list[int] = []
        self.outcomes: list[Effect] = []
        self.ended_at = 0.0
        self.waits_for: tuple[str, ...] = ()
        self.num_computed = 0

    legs_seen = Bundle("legs_seen")

    @initialize(
        max_tokens=st.integers(1, 8),
        reserve=st.sampled_from([10.0, 10.0, 10.0, 0.0]),
        num_steps=st.integers(0, 8),
        data=st.data(),
    )
    def submit(self, max_tokens: int, reserve: float, num_steps: int, data: st.DataObject) -> None:
        keys = itertools.count(1)
        self.max_tokens = max_tokens
        self.request = Request(
            max_tokens,
            limits=LIMITS,
            budget=RetryBudget(reserve=reserve),
            next_key=lambda: next(keys),
        )
        self.feed(Submitted())
        for _ in range(num_steps):
            self.take_usual_step(data)

    def feed(self, event: Event) -> None:
        was_over = bool(self.outcomes)
        effects = self.request.handle(event, self.now)
        assert not (was_over and effects), "an ended request does nothing more"
        for effect in effects:
            self.apply(effect)
        self.request.check_invariants()

    def apply(self, effect: Effect) -> None:
        """Apply an effect. ForgetLeg has no consequence for the instance."""
        match effect:
            case AskPlan():
                self.plan = effect
            case SendPrefill():
                assert effect.num_replayed == len(self.shown)
                assert effect.max_tokens == self.max_tokens - len(self.shown) >= 1
                self.open(Leg(effect.key, effect.to, False, effect.num_replayed, effect.max_tokens))
            case SendStart():
                assert self.tickets[effect.ticket.ticket_id] == "open"
                assert effect.num_replayed == len(self.shown)
                self.open(self.decode_leg(effect))
            case SendJoin():
                self.join(self.legs[effect.key], effect.token_id)
            case AbortLeg():
                assert self.legs[effect.key].is_open, "only a running leg is aborted"
                self.legs[effect.key].is_open = False
                self.end_ticket(effect.key, "released")
            case ReleaseTicket():
                assert self.tickets[effect.ticket_id] == "open"
                self.tickets[effect.ticket_id] = "released"
            case EmitTokens():
                self.shown.extend(effect.token_ids)
            case WaitForSlot():
                self.waits_for = effect.instance_ids
            case Complete() | Fail() | Cancelled():
                self.outcomes.append(effect)
                self.ended_at = self.now

    def decode_leg(self, effect: SendStart) -> Leg:
        leg = Leg(effect.key, effect.to, True, effect.num_replayed, effect.max_tokens)
        leg.ticket_id = effect.ticket.ticket_id
        if effect.is_early:
            assert effect.max_tokens == self.max_tokens - len(self.shown) - 1 >= 1
            leg.num_known += 1
            leg.knows_first = False
        return leg

    def join(self, leg: Leg, token_id: int) -> None:
        assert leg.is_decode
        assert not leg.knows_first, "joined once"
        assert token_id == leg.num_known - 1 == self.shown[-1]
        leg.knows_first = True

    def open(self, leg: Leg) -> None:
        assert leg.key not in self.legs, "a key is never used again"
        self.legs[leg.key] = leg

    def end_ticket(self, key: int, how: str) -> None:
        """End the ticket of the prefill leg `key`, unless a decode took it."""
        if self.tickets.get(f"t{key}") == "open":
            self.tickets[f"t{key}"] = how

    def pick(self, data: st.DataObject) -> Leg | None:
        """Pick any leg, even one that has ended, because its instance may report late."""
        if not self.legs:
            return None
        recent = sorted(self.legs, reverse=True)
        return self.legs[data.draw(st.sampled_from(recent))]

    # --- the master ------------------------------------------------------------------------------

    @precondition(lambda self: self.plan is not None)
    @rule(num_p=st.integers(0, 2), num_d=st.integers(1, 2), has_fusion=st.booleans())
    def plan_arrives(self, num_p: int, num_d: int, has_fusion: bool) -> None:
        assert self.plan is not None
        prefills = PREFILLS[:num_p] + ([FUSION] if has_fusion else [])
        self.feed(PlanReceived(self.plan.plan, prefills, DECODES[:num_d]))

    @rule(data=st.data(), num_steps=st.integers(1, 6))
    def all_goes_well_for_a_while(self, data: st.DataObject, num_steps: int) -> None:
        """Run some events in their usual order, which random rules alone would rarely produce."""
        for _ in range(num_steps):
            self.take_usual_step(data)

    def take_usual_step(self, data: st.DataObject) -> None:
        leg = self.legs.get(max(self.legs, default=0))
        match self.request.phase.value:
            case "planning" if self.plan is not None:
                self.feed(PlanReceived(self.plan.plan, PREFILLS, DECODES))
            case "prefill_offered" if leg is not None:
                self.accept(leg, data.draw(st.booleans()))
            case "decode_offered" if leg is not None:
                self.accept(leg, False)
            case "prefilling" if leg is not None and leg.is_decode and not leg.is_accepted:
                self.accept(leg, False)
            case "prefilling":
                self.end_prefill(self.running_prefill(), data.draw(st.booleans()))
            case "decoding" if leg is not None and leg.is_open:
                if self.tickets.get(leg.ticket_id) == "open":
                    self.take_ticket(leg)
                    self.feed(LegKvReceived(leg.key))
                else:
                    self.draw(leg, 1, data.draw(st.booleans()))

    @precondition(lambda self: self.plan is not None and self.plan.plan > 1)
    @rule()
    def planning_fails(self) -> None:
        assert self.plan is not None
        self.feed(PlanFailed(self.plan.plan, NoInstance("none")))

    # --- instances -------------------------------------------------------------------------------

    @rule(data=st.data())
    def a_leg_is_accepted(self, data: st.DataObject) -> None:
        if leg := self.pick(data):
            self.accept(leg, data.draw(st.booleans()))

    def accept(self, leg: Leg, is_per_layer: bool) -> None:
        """Accept a leg. In per-layer mode, a prefill opens its ticket now."""
        leg.is_accepted = True
        ticket_id = f"t{leg.key}"
        can_open = leg.is_open and not (leg.is_decode or leg.to.is_local or leg.has_first)
        if is_per_layer and can_open and leg.num_left > 1 and ticket_id not in self.tickets:
            self.tickets[ticket_id] = "open"
            self.feed(LegAccepted(leg.key, TicketHeld(ticket_id, 5.0)))
        else:
            self.feed(LegAccepted(leg.key))

    def running_prefill(self) -> Leg:
        return max(
            (leg for leg in self.legs.values() if not leg.is_decode), key=lambda leg: leg.key
        )

    @rule(data=st.data(), is_final=st.booleans(), is_too_long=st.booleans())
    def a_leg_is_rejected(self, data: st.DataObject, is_final: bool, is_too_long: bool) -> None:
        leg = self.pick(data)
        is_asked = leg and leg.is_open and not leg.has_first and not leg.is_accepted
        if leg and is_asked and not self.is_running(leg):
            leg.is_open = False
            self.feed(LegRejected(leg.key, is_final=is_final, is_too_long=is_too_long))

    def is_running(self, leg: Leg) -> bool:
        return self.request.is_current(leg.key) and self.request.phase.value in {
            "prefilling",
            "decoding",
        }

    @rule(data=st.data(), ago_s=st.sampled_from([0.0, 0.4, 7.0]), num=st.integers(0, 40))
    def an_engine_works(self, data: st.DataObject, ago_s: float, num: int) -> None:
        """Report work of a leg's engine, on this leg or on others. The leg may be abandoned."""
        self.num_computed += num
        if leg := self.pick(data):
            at = self.now - ago_s
            self.feed(EngineWorked(leg.key, at, self.num_computed, data.draw(st.integers(0, 20))))

    @rule(data=st.data())
    def prefill_ends(self, data: st.DataObject) -> None:
        leg = self.pick(data)
        if leg is not None and not leg.is_decode and not leg.has_first:
            self.end_prefill(leg, data.draw(st.booleans()))

    def end_prefill(self, leg: Leg, is_stop: bool = False) -> None:
        if leg.has_first:
            return
        leg.has_first = True
        leg.num_left -= 1
        token, leg.num_known = leg.num_known, leg.num_known + 1
        if leg.num_left == 0 or (is_stop and token == 3):
            leg.is_open = False
            # No decode needed the ticket, so the prefill closes it.
            self.end_ticket(leg.key, "released")
            self.feed(FirstToken(leg.key, token, "stop" if leg.num_left else "length"))
        elif leg.to.is_local:
            self.feed(FirstToken(leg.key, token))
        else:
            ticket_id = f"t{leg.key}"
            # If a leg was given up before it ended, its instance has freed the staged KV at the
            # abort.
            is_wanted, leg.is_open = leg.is_open, False
            self.tickets.setdefault(ticket_id, "open" if is_wanted else "released")
            self.feed(FirstToken(leg.key, token, None, TicketHeld(ticket_id, 5.0)))

    @rule(data=st.data(), stage=st.sampled_from(list(KvStage)))
    def kv_comes_further(self, data: st.DataObject, stage: KvStage) -> None:
        """Report KV progress of any leg in any order, because its instance may be late or wrong."""
        leg = self.pick(data)
        if leg and leg.is_decode:
            leg.is_accepted = leg.is_accepted or leg.is_open
            self.feed(KvAdvanced(leg.key, stage))

    @rule(data=st.data())
    def kv_arrives(self, data: st.DataObject) -> None:
        leg = self.pick(data)
        if leg and leg.is_decode and leg.is_open:
            leg.is_accepted = True
            self.take_ticket(leg)
            self.feed(LegKvReceived(leg.key))

    def take_ticket(self, leg: Leg) -> None:
        if self.tickets.get(leg.ticket_id) == "open":
            self.tickets[leg.ticket_id] = "taken"

    @rule(data=st.data(), num=st.integers(1, 3), hot=st.booleans())
    def tokens_are_drawn(self, data: st.DataObject, num: int, hot: bool) -> None:
        """Draw tokens on a leg, even on an abandoned one: a frozen decode continues when it wakes
        up.
        """
        leg = self.pick(data)
        if leg is None or leg.num_left == 0 or not (leg.is_decode or leg.has_first):
            return
        if not leg.knows_first:
            return
        if leg.is_decode and leg.is_open:
            self.take_ticket(leg)
        if leg.is_decode or leg.to.is_local:
            self.draw(leg, num, hot)

    def draw(self, leg: Leg, num: int, hot: bool) -> None:
        num = min(num, leg.num_left)
        if num == 0:
            return
        tokens = tuple(range(leg.num_known, leg.num_known + num))
        leg.num_known += num
        leg.num_left -= num
        if hot and self.request.push_token(leg.key, tokens[0], self.now):
            self.shown.append(tokens[0])
            tokens = tokens[1:]
        if tokens:
            self.feed(DecodeTokens(leg.key, tokens))

    @rule(data=st.data())
    def a_leg_finishes(self, data: st.DataObject) -> None:
        leg = self.pick(data)
        if leg and leg.num_left == 0 and leg.is_open and (leg.is_decode or leg.to.is_local):
            self.take_ticket(leg)
            leg.is_open = False
            self.feed(LegFinished(leg.key, "length"))

    @rule(data=st.data(), is_retryable=st.booleans())
    def a_leg_fails(self, data: st.DataObject, is_retryable: bool) -> None:
        leg = self.pick(data)
        if leg and leg.is_open:
            leg.is_open = False
            self.end_ticket(leg.key, "lost")
            self.feed(LegFailed(leg.key, InstanceLost("scripted"), is_retryable))

    @rule(instance=st.sampled_from([*PREFILLS, *DECODES, FUSION]))
    def an_instance_dies(self, instance: Candidate) -> None:
        """Break the sessions of an instance. Its legs and its open tickets are lost."""
        self.kill(instance)

    @precondition(lambda self: bool(self.legs))
    @rule(data=st.data(), num_steps=st.integers(0, 6))
    def the_instance_at_work_dies_and_another_goes_on(
        self, data: st.DataObject, num_steps: int
    ) -> None:
        self.kill(self.legs[max(self.legs)].to)
        for _ in range(num_steps):
            self.take_usual_step(data)

    def kill(self, instance: Candidate) -> None:
        for leg in list(self.legs.values()):
            if leg.to != instance:
                continue
            leg.is_open = False
            self.end_ticket(leg.key, "lost")
            self.feed(LegLost(leg.key))

    # --- everything else -------------------------------------------------------------------------

    @rule(instance=st.sampled_from([*PREFILLS, *DECODES, FUSION]))
    def a_slot_comes_free(self, instance: Candidate) -> None:
        self.feed(SlotFreed(instance.instance_id))

    @precondition(lambda self: self.request.phase.value in {"waiting_prefill", "waiting_decode"})
    @rule()
    def the_waiting_room_is_full(self) -> None:
        self.feed(WaitRefused())

    @rule(seconds=st.sampled_from([0.05, 0.3, 2.5, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @precondition(lambda self: len(self.shown) >= 2)
    @rule()
    def a_stop_string_matches(self) -> None:
        self.feed(StopMatched())

    @precondition(lambda self: len(self.legs) >= 2)
    @rule()
    def the_client_leaves(self) -> None:
        self.feed(ClientGone())

    # --- what must hold --------------------------------------------------------------------------

    @invariant()
    def the_client_sees_an_exact_prefix(self) -> None:
        assert self.shown == list(range(len(self.shown)))
        if hasattr(self, "request"):
            assert self.request.emitted == self.shown
            assert len(self.shown) <= self.max_tokens

    @invariant()
    def nothing_is_held_after_the_end(self) -> None:
        assert len(self.outcomes) <= 1
        if self.outcomes:
            assert not [leg for leg in self.legs.values() if leg.is_open], "a leg was left running"
            assert "open" not in self.tickets.values(), "a ticket was neither taken nor released"
            if (
                isinstance(self.outcomes[0], Complete)
                and self.outcomes[0].finish_reason == "length"
            ):
                assert len(self.shown) == self.max_tokens

    @invariant()
    def a_living_request_wakes_up(self) -> None:
        if hasattr(self, "request") and not self.outcomes:
            assert self.now < self.request.wake_at <= 160.0 or self.request.wake_at <= self.now

    def teardown(self) -> None:
        """Check that the request ends by its deadline in any state, even if nothing else
        happens.
        """
        if not hasattr(self, "request"):
            return
        for _ in range(200):
            if self.outcomes:
                break
            self.now = max(self.now, self.request.wake_at)
            self.feed(Tick())
        assert len(self.outcomes) == 1
        assert self.ended_at <= 160.0 + 6.0, "the deadline plus the longest delay of a tick"
        self.nothing_is_held_after_the_end()


RequestMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestRequestMachine = pytest.mark.req("S40", "S43", "S44", "S48", "S51")(
    pytest.mark.fault("F7", "F8", "F27")(RequestMachine.TestCase)
)
