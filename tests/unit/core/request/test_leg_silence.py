"""Tests when a gateway gives up an accepted leg.

A leg counts as dead if its engine stands still or has passed the leg over. A slow leg is not given
up.
"""

from __future__ import annotations

import pytest

from pdmesh.core.model import Tick
from pdmesh.core.request.events import (
    AbortLeg,
    AskPlan,
    Candidate,
    Complete,
    DecodeTokens,
    EngineWorked,
    FirstToken,
    KvAdvanced,
    KvStage,
    LegAccepted,
    LegKvReceived,
    PlanReceived,
    SendStart,
    TicketHeld,
)
from pdmesh.core.request.transitions import RequestPhase
from tests.support.driven_request import Driven

pytestmark = [pytest.mark.req("S9", "S33"), pytest.mark.fault("F4", "F8")]

SLOW = 40  # tokens per second of a CPU without instructions for bf16


def accepted(stall_s: float, ttft_s: float = 10.0) -> Driven:
    driven = Driven(stall_s=stall_s, ttft_s=ttft_s)
    driven.offer()
    driven.feed(LegAccepted(driven.key))
    assert driven.request.phase is RequestPhase.PREFILLING
    return driven


def test_a_short_prompt_waits_for_the_long_ones_that_were_admitted_before_it() -> None:
    """The prompts have 3,900, 3,900, 3,300 and 20 tokens. On a slow engine, the last prompt ends
    after 278 s, although it takes only half a second by itself.
    """
    driven = accepted(ttft_s=0.5, stall_s=5.0)
    to_compute = 3900 + 3900 + 3300 + 20
    while driven.now < to_compute / SLOW:
        driven.now += 0.5
        heard = EngineWorked(driven.key, driven.now - 0.4, int(driven.now * SLOW), to_compute)
        assert driven.feed(heard) == []
        assert driven.feed(Tick()) == []
    driven.feed(FirstToken(driven.key, 7, finish_reason="stop"))
    assert isinstance(driven.request.outcome, Complete)
    assert driven.request.num_migrations == 0


@pytest.mark.parametrize("ttft_s", [0.01, 100.0])
def test_an_engine_that_stands_still_is_left_after_the_stall_whatever_the_target(
    ttft_s: float,
) -> None:
    driven = accepted(ttft_s=ttft_s, stall_s=5.0)
    assert driven.request.wake_at == 5.0
    driven.now = 5.0
    for _ in range(2):  # a repeated report is no sign of work
        driven.feed(EngineWorked(driven.key, 3.0, 512, 4000))
    assert driven.feed(Tick()) == []
    assert driven.request.wake_at == 8.0
    driven.now = 8.0
    driven.feed(EngineWorked(driven.key, 3.0, 512, 4000))
    assert driven.feed(Tick()) == [AbortLeg(1), AskPlan(2, 1, ("f0",))]


def test_a_leg_that_its_engine_has_passed_over_is_left() -> None:
    """The engine works, but has forgotten this leg. It has computed more than twice the tokens that
    all open legs need, and none of this leg.
    """
    driven = accepted(stall_s=5.0)
    num_open = 1000
    for num_tokens in (100, 1100, 2100):
        driven.now += 5.0
        driven.feed(EngineWorked(driven.key, driven.now, num_tokens, num_open))
        assert driven.feed(Tick()) == []
    driven.now += 5.0
    driven.feed(EngineWorked(driven.key, driven.now, 2101, num_open))
    assert driven.feed(Tick()) == [AbortLeg(1), AskPlan(2, 1, ("f0",))]


def test_a_decode_waits_while_its_engine_computes_anothers_prompt() -> None:
    """On a fusion instance, a long step may come between two tokens of an answer."""
    driven = Driven(stall_s=5.0)
    driven.decode(num_tokens=1)
    for number in range(1, 4):
        driven.now = 4.9 * number
        driven.feed(EngineWorked(driven.key, driven.now, 500 * number, 4000))
        assert driven.feed(Tick()) == []
    driven.feed(DecodeTokens(driven.key, [7]))
    assert driven.request.num_migrations == 0


def test_each_drawn_token_restarts_the_count_of_computed_tokens() -> None:
    driven = Driven(stall_s=5.0)
    driven.decode(num_tokens=1)
    for number in range(1, 10):
        driven.now += 4.0
        driven.feed(EngineWorked(driven.key, driven.now, 150 * number, 100))
        driven.now += 1.0
        assert driven.feed(Tick()) == []
        assert driven.request.push_token(driven.key, 7, driven.now)
    assert driven.request.num_migrations == 0


def test_news_of_an_abandoned_leg_does_not_count_for_the_next() -> None:
    driven = accepted(stall_s=5.0)
    first = driven.key
    driven.now = 5.0
    driven.feed(Tick())
    driven.offer()
    driven.feed(LegAccepted(driven.key))
    driven.now = 9.0
    driven.feed(EngineWorked(first, 9.0, 10, 10))
    assert driven.request.wake_at == 10.0


PREFILL, DECODE = Candidate("p0", 1, "g"), Candidate("d0", 1, "g")


def handed_on(stall_s: float) -> tuple[Driven, int]:
    """A request whose decode leg was accepted at time 0 and has no KV yet, and the key of that
    leg.
    """
    driven = Driven(stall_s=stall_s)
    driven.feed(PlanReceived(driven.plan, [PREFILL], [DECODE]))
    driven.feed(LegAccepted(driven.key))
    effects = driven.feed(FirstToken(driven.key, 7, ticket=TicketHeld("t1", 10.0)))
    start = next(e for e in effects if isinstance(e, SendStart))
    driven.feed(LegAccepted(start.key))
    assert driven.request.phase is RequestPhase.DECODING
    return driven, start.key


def test_a_decode_that_waits_for_its_turn_to_pull_is_not_silent() -> None:
    """The decode waits 4.4 s in the queue, 4.4 s for its pull, and 4.4 s for a place in a step. The
    engine is idle all this time.
    """
    driven, key = handed_on(stall_s=5.0)
    for event in (
        KvAdvanced(key, KvStage.PULLING),
        KvAdvanced(key, KvStage.ARRIVED),
        LegKvReceived(key),
    ):
        driven.now += 4.4
        assert driven.feed(Tick()) == []
        driven.feed(event)
    driven.feed(DecodeTokens(key, [8]))
    assert driven.request.num_migrations == 0


@pytest.mark.parametrize("stage", [KvStage.PULLING, KvStage.ARRIVED])
def test_repeated_reports_of_one_stage_do_not_hide_a_hung_engine(stage: KvStage) -> None:
    driven, key = handed_on(stall_s=5.0)
    for now in (1.0, 3.0, 5.0):
        driven.now = now
        assert driven.feed(KvAdvanced(key, stage)) == []
        driven.feed(KvAdvanced(key, KvStage.PULLING))  # a late message about an earlier stage
    assert driven.request.wake_at == 6.0
    driven.now = 6.0
    assert driven.feed(Tick())[-1] == AskPlan(2, 1, ("d0",))


def test_a_late_stage_report_changes_nothing_once_the_kv_is_there() -> None:
    driven, key = handed_on(stall_s=5.0)
    driven.now = 1.0
    driven.feed(LegKvReceived(key))
    driven.now = 3.0
    driven.feed(KvAdvanced(key, KvStage.ARRIVED))
    assert driven.request.wake_at == 6.0


def test_only_tokens_computed_after_the_kv_arrived_count_as_passing_the_leg_over() -> None:
    """While the leg waits for its KV, the engine cannot compute it. Tokens of other legs are no
    sign that this leg was passed over.
    """
    driven, key = handed_on(stall_s=5.0)
    driven.feed(EngineWorked(key, 0.0, 0, 100))
    driven.now = 4.0
    driven.feed(EngineWorked(key, 4.0, 500, 100))
    driven.feed(KvAdvanced(key, KvStage.PULLING))
    driven.now = 8.0
    driven.feed(EngineWorked(key, 8.0, 1000, 100))
    assert driven.request.wake_at == 13.0


def test_a_stage_report_counts_as_acceptance_too() -> None:
    driven = Driven(stall_s=5.0, answer_s=3.0)
    driven.feed(PlanReceived(driven.plan, [PREFILL], [DECODE]))
    driven.feed(LegAccepted(driven.key))
    effects = driven.feed(FirstToken(driven.key, 7, ticket=TicketHeld("t1", 10.0)))
    key = next(e.key for e in effects if isinstance(e, SendStart))
    driven.now = 2.0
    driven.feed(KvAdvanced(key, KvStage.PULLING))
    assert driven.request.phase is RequestPhase.DECODING
    assert driven.feed(LegAccepted(key)) == []
    assert driven.request.wake_at == 7.0
