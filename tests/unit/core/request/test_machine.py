"""The decisions of a request's state machine.

`test_transitions.py` tests the table of transitions.
`tests/property/request/test_request_machine.py` tries any order of events.
"""

from __future__ import annotations

import pytest

from pdmesh.core.model import Tick
from pdmesh.core.request.events import (
    AskPlan,
    Cancelled,
    ClientGone,
    DecodeTokens,
    EnterQueue,
    Fail,
    FirstToken,
    ForgetLeg,
    LeaveQueue,
    LeaveRoom,
    LegAccepted,
    LegLost,
    LegRejected,
    PlanReceived,
    SendPrefill,
    SlotFreed,
    Submitted,
    WaitForSlot,
)
from pdmesh.errors import Overloaded
from tests.support.driven_request import FUSIONS, Driven, new_request


def waiting() -> Driven:
    """A request whose only candidate is busy."""
    driven = Driven(ttft_s=10.0)
    driven.feed(PlanReceived(driven.plan, FUSIONS[:1], []))
    effects = driven.feed(LegRejected(driven.key))
    assert effects == [EnterQueue(), ForgetLeg(1), WaitForSlot(("f0",), 10.0)]
    return driven


@pytest.mark.req("S43", "S44")
def test_a_request_counts_in_the_queue_from_its_first_rejection_until_a_prefill_accepts_it() -> (
    None
):
    driven = waiting()
    sent = SendPrefill(2, FUSIONS[0], 0, 0, 1000)
    assert driven.feed(SlotFreed("f0")) == [LeaveRoom(), sent]
    again = [ForgetLeg(2), WaitForSlot(("f0",), 10.0)]
    assert driven.feed(LegRejected(2)) == again, "it is still in the queue, and waits again"
    assert driven.feed(SlotFreed("f0"))[0] == LeaveRoom()
    assert driven.feed(LegAccepted(3)) == [LeaveQueue()]


def test_a_request_that_asks_for_another_plan_leaves_the_room_but_not_the_queue() -> None:
    driven = waiting()
    driven.now = driven.request.wake_at
    assert driven.feed(Tick()) == [LeaveRoom(), AskPlan(2, 0, ())]


def test_a_client_that_leaves_frees_its_place_in_room_and_queue() -> None:
    assert waiting().feed(ClientGone()) == [LeaveRoom(), LeaveQueue(), Cancelled()]


def test_a_request_that_may_not_join_its_queue_never_asks_for_a_plan() -> None:
    refusal = Overloaded("too many requests are waiting")
    assert new_request().handle(Submitted(refusal), 0.0) == [Fail(refusal)]


@pytest.mark.req("S44")
def test_an_instance_that_does_not_answer_does_not_hold_a_request_beyond_its_deadline() -> None:
    driven = Driven(ttft_s=0.5, answer_s=3.0)
    driven.offer()
    assert driven.request.wake_at == 0.5
    driven.now = 0.5
    driven.feed(Tick())
    assert driven.error is Overloaded


def test_cached_tokens_are_those_of_the_first_prefill_that_answered() -> None:
    driven = Driven()
    driven.offer()
    driven.feed(LegLost(driven.key))
    driven.offer()
    driven.feed(LegAccepted(driven.key))
    driven.feed(FirstToken(driven.key, 7, num_cached_tokens=448))
    assert driven.request.num_cached_tokens == 448
    driven.feed(DecodeTokens(driven.key, [7] * 40))
    driven.feed(LegLost(driven.key))
    driven.offer()
    driven.feed(LegAccepted(driven.key))
    driven.feed(FirstToken(driven.key, 7, num_cached_tokens=512))
    assert driven.request.num_cached_tokens == 448, "the later prompt holds the answer, too"


@pytest.mark.req("S93")
def test_what_was_expected_is_what_the_first_plan_said() -> None:
    driven = Driven(ttft_s=10.0)
    driven.feed(PlanReceived(driven.plan, FUSIONS[:1], [], first_token_s=0.5))
    driven.feed(LegRejected(driven.key))
    driven.now = driven.request.wake_at
    driven.feed(Tick())
    driven.feed(PlanReceived(driven.plan, FUSIONS[:1], [], first_token_s=9.0))
    assert driven.request.expected_s == 0.5
