"""Faults in each phase of a request with an early decode.

An early decode is chosen when the prefill accepts, so that KV is handed on layer by layer.
"""

from __future__ import annotations

import itertools

import pytest

from pdmesh.core.model import Tick
from pdmesh.core.request.events import (
    AbortLeg,
    AskPlan,
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
    ForgetLeg,
    LegAccepted,
    LegFailed,
    LegKvReceived,
    LegLost,
    LegRejected,
    PlanReceived,
    ReleaseTicket,
    RequestLimits,
    SendJoin,
    SendPrefill,
    SendStart,
    Submitted,
    TicketHeld,
)
from pdmesh.core.request.machine import Request
from pdmesh.core.request.retry_budget import RetryBudget
from pdmesh.core.request.transitions import RequestPhase
from pdmesh.errors import EngineFailed, KvTransferFailed

pytestmark = pytest.mark.req("S48", "S51")

P0, P1 = (Candidate(f"p{i}", 1, "g") for i in range(2))
D0, D1 = (Candidate(f"d{i}", 1, "g") for i in range(2))
TICKET = TicketHeld("t1", 10.0)
PREFILL, DECODE, NEXT = 1, 2, 3  # the keys of the legs in the order in which they are sent
LIMITS = RequestLimits(ttft_s=10, stall_s=5, answer_s=3)


class Life:
    """A request of 100 prompt tokens that p0 accepted at time 0 in per-layer mode.

    The request has then been offered to d0.
    """

    def __init__(self) -> None:
        keys = itertools.count(1)
        self.request = Request(
            8,
            limits=LIMITS,
            budget=RetryBudget(reserve=10),
            next_key=lambda: next(keys),
            num_prompt_tokens=100,
        )
        self.now = 0.0
        self.say(Submitted())
        self.say(PlanReceived(1, [P0, P1], [D0, D1]))
        start = SendStart(DECODE, D0, 0, TICKET, 0, 7, is_early=True)
        assert self.say(LegAccepted(PREFILL, TICKET)) == [start]

    def say(self, event: Event) -> list[Effect]:
        effects = self.request.handle(event, self.now)
        self.request.check_invariants()
        return effects

    def first_token(self) -> list[Effect]:
        return self.say(FirstToken(PREFILL, 7, ticket=TICKET))


def test_the_waiting_decode_continues_from_token_1() -> None:
    life = Life()
    assert life.say(LegAccepted(DECODE)) == []
    assert life.first_token() == [EmitTokens((7,)), SendJoin(DECODE, 7)]
    assert life.request.phase is RequestPhase.DECODING
    assert life.request.decode_id == "d0"
    assert life.say(LegKvReceived(DECODE)) == [ForgetLeg(PREFILL)]
    assert life.say(DecodeTokens(DECODE, (8,))) == [EmitTokens((8,))]


@pytest.mark.fault("F3")
def test_a_prefill_that_dies_when_all_its_kv_was_sent_is_not_replaced() -> None:
    """The news of the prefill's death arrives before the decode reports that it has the KV."""
    life = Life()
    life.say(LegAccepted(DECODE))
    life.first_token()
    assert life.say(LegLost(PREFILL)) == []
    assert life.say(LegKvReceived(DECODE)) == [ForgetLeg(PREFILL)]
    life.now = 2.0
    assert life.say(Tick()) == []
    assert life.request.num_migrations == 0
    assert life.request.push_token(DECODE, 8, life.now)


@pytest.mark.fault("F2")
def test_a_prefill_that_dies_is_replaced_unless_the_decode_reports_that_it_has_the_kv() -> None:
    life = Life()
    life.say(LegAccepted(DECODE))
    life.first_token()
    life.say(LegLost(PREFILL))
    assert life.request.wake_at == 0.5
    life.now = 0.5
    assert life.say(Tick()) == [ForgetLeg(PREFILL), AbortLeg(DECODE), AskPlan(2, 1, ("p0",))]


@pytest.mark.fault("F2")
@pytest.mark.parametrize(
    "word",
    [
        LegRejected(DECODE),
        LegRejected(DECODE, is_final=True),
        LegFailed(DECODE, KvTransferFailed("gone", reason="KV_PEER_LOST")),
        LegLost(DECODE),
    ],
)
def test_the_wait_ends_once_the_decode_reports_that_it_lacks_the_kv(word: Event) -> None:
    life = Life()
    life.first_token()
    life.say(LegLost(PREFILL))
    effects = life.say(word)
    assert isinstance(effects[-1], AskPlan)
    assert set(effects[-1].excluded) == {"p0"} | ({"d0"} if word != LegRejected(DECODE) else set())
    assert ForgetLeg(PREFILL) in effects


def test_the_kv_may_be_there_before_token_1() -> None:
    life = Life()
    assert life.say(LegKvReceived(DECODE)) == []
    assert life.first_token() == [EmitTokens((7,)), SendJoin(DECODE, 7), ForgetLeg(PREFILL)]
    assert life.request.push_token(DECODE, 8, life.now)


def test_token_1_may_come_before_the_decode_answers() -> None:
    life = Life()
    assert life.first_token() == [EmitTokens((7,)), SendJoin(DECODE, 7)]
    assert life.request.phase is RequestPhase.DECODE_OFFERED
    again = SendStart(NEXT, D1, 0, TICKET, 1, 7)
    assert life.say(LegRejected(DECODE, is_final=True)) == [ForgetLeg(DECODE), again]


def test_a_decode_that_refuses_is_followed_by_the_next() -> None:
    life = Life()
    start = SendStart(NEXT, D1, 0, TICKET, 0, 7, is_early=True)
    assert life.say(LegRejected(DECODE)) == [ForgetLeg(DECODE), start]
    life.say(LegAccepted(NEXT))
    assert life.first_token() == [EmitTokens((7,)), SendJoin(NEXT, 7)]
    assert life.request.num_rejections == 1


def test_when_all_decodes_refuse_the_kv_is_handed_on_whole() -> None:
    life = Life()
    life.say(LegRejected(DECODE))
    assert life.say(LegRejected(NEXT)) == [ForgetLeg(NEXT)]
    assert life.first_token() == [EmitTokens((7,)), SendStart(4, D0, 0, TICKET, 1, 7)]


@pytest.mark.fault("F6", "F11")
def test_the_only_decodes_are_not_planned_again_once_they_cannot_be_reached() -> None:
    """Until the master knows that these decodes are dead, each plan would name them again. That
    would use up all migrations.
    """
    life = Life()
    life.say(LegRejected(DECODE, is_final=True))
    life.say(LegRejected(NEXT, is_final=True))
    effects = life.first_token()
    released = ReleaseTicket(PREFILL, "t1")
    assert effects == [EmitTokens((7,)), released, AskPlan(2, 1, ("d0", "d1"))]


@pytest.mark.fault("F6")
def test_a_decode_that_fell_silent_is_not_planned_again() -> None:
    life = Life()
    life.now = 3.0
    life.say(Tick())
    assert life.say(LegLost(PREFILL)) == [ForgetLeg(PREFILL), AskPlan(2, 1, ("d0", "p0"))]


@pytest.mark.fault("F6")
@pytest.mark.parametrize("loss", [LegLost(DECODE), LegFailed(DECODE, EngineFailed("x"))])
def test_a_decode_lost_while_prefill_computes_costs_nothing(loss: Event) -> None:
    life = Life()
    life.say(LegAccepted(DECODE))
    assert life.say(loss) == [ForgetLeg(DECODE)]
    assert life.first_token() == [EmitTokens((7,)), SendStart(NEXT, D1, 0, TICKET, 1, 7)]
    assert life.request.num_migrations == 0


@pytest.mark.fault("F6")
def test_a_decode_lost_with_the_kv_takes_the_ticket_with_it() -> None:
    life = Life()
    life.say(LegKvReceived(DECODE))
    effects = life.say(LegLost(DECODE))
    assert effects == [ForgetLeg(DECODE), AbortLeg(PREFILL), AskPlan(2, 1, ("d0",))]


@pytest.mark.fault("F2", "F6")
def test_a_decode_lost_after_token_1_costs_a_migration() -> None:
    life = Life()
    life.say(LegKvReceived(DECODE))
    life.first_token()
    assert life.say(LegLost(DECODE)) == [ForgetLeg(DECODE), AskPlan(2, 1, ("d0",))]


@pytest.mark.fault("F2")
@pytest.mark.parametrize("loss", [LegLost(PREFILL), LegFailed(PREFILL, EngineFailed("x"))])
def test_the_death_of_a_prefill_ends_both_legs_and_the_request_migrates(loss: Event) -> None:
    life = Life()
    life.say(LegAccepted(DECODE))
    effects = life.say(loss)
    assert effects == [ForgetLeg(PREFILL), AbortLeg(DECODE), AskPlan(2, 1, ("p0",))]
    again = life.say(PlanReceived(2, [P1], [D0, D1]))
    assert again == [SendPrefill(NEXT, P1, 1, 0, 8)]


def test_a_first_token_that_ends_the_answer_frees_the_early_decode() -> None:
    life = Life()
    life.say(LegAccepted(DECODE))
    effects = life.say(FirstToken(PREFILL, 7, "stop"))
    assert effects == [EmitTokens((7,)), ForgetLeg(PREFILL), AbortLeg(DECODE), Complete("stop")]


@pytest.mark.fault("F27")
@pytest.mark.parametrize("is_accepted", [False, True])
def test_a_client_that_leaves_frees_both_legs(is_accepted: bool) -> None:
    life = Life()
    if is_accepted:
        life.say(LegAccepted(DECODE))
    aborts = life.say(ClientGone())[:-1]
    assert aborts == [AbortLeg(PREFILL), AbortLeg(DECODE)]


def test_a_decode_that_does_not_answer_is_given_up_and_prefill_continues() -> None:
    life = Life()
    assert life.request.wake_at == 3.0
    life.now = 3.0
    assert life.say(Tick()) == [AbortLeg(DECODE)]
    assert life.first_token() == [EmitTokens((7,)), SendStart(NEXT, D1, 0, TICKET, 1, 7)]


@pytest.mark.fault("F4")
def test_a_prefill_whose_engine_hangs_is_left_with_its_decode() -> None:
    """The process of the prefill answers keepalives, so the session stays. Only the silence of the
    engine shows the fault.
    """
    life = Life()
    life.say(LegAccepted(DECODE))
    life.say(EngineWorked(PREFILL, 4.0, 512, 100))
    assert life.request.wake_at == 4.0 + LIMITS.stall_s
    life.now = life.request.wake_at
    assert life.say(Tick()) == [AbortLeg(PREFILL), AbortLeg(DECODE), AskPlan(2, 1, ("p0",))]


def test_a_failure_that_would_recur_anywhere_ends_the_request() -> None:
    life = Life()
    error = EngineFailed("x")
    effects = life.say(LegFailed(DECODE, error, is_retryable=False))
    assert effects == [AbortLeg(PREFILL), Fail(error)]
