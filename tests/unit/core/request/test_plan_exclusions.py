"""An instance that is too small for a request is not asked again.

The other instances are asked, and a stream does not end because of the small one.
"""

from __future__ import annotations

import pytest

from pdmesh.core.model import Tick
from pdmesh.core.request.events import (
    Candidate,
    DecodeTokens,
    Fail,
    FirstToken,
    LegAccepted,
    LegLost,
    LegRejected,
    PlanReceived,
)
from pdmesh.core.request.transitions import RequestPhase
from pdmesh.errors import InvalidRequest, NoInstance
from tests.support.driven_request import FUSIONS, Driven

pytestmark = pytest.mark.req("S43", "S51")


def too_long(driven: Driven) -> None:
    driven.feed(LegRejected(driven.key, is_too_long=True, detail="larger than the arena"))


@pytest.mark.fault("F7")
def test_a_stream_that_migrates_continues_on_an_instance_with_room() -> None:
    """The prompt now includes the emitted tokens, so some instances can no longer take it."""
    driven = Driven()
    driven.decode(num_tokens=40)
    driven.feed(LegLost(driven.key))
    driven.offer()
    too_long(driven)
    assert driven.error is None
    driven.feed(LegAccepted(driven.key))
    driven.feed(FirstToken(driven.key, 7))
    driven.feed(DecodeTokens(driven.key, [7]))
    assert driven.request.prefill_id == "f2"
    assert driven.request.num_migrations == 1


def test_a_stream_that_fits_no_instance_now_waits_for_those_that_may_return() -> None:
    driven = Driven(ttft_s=10.0)
    driven.decode(num_tokens=40)
    driven.feed(LegLost(driven.key))
    driven.offer()
    for _ in FUSIONS[1:]:
        too_long(driven)
    for _ in range(2):  # all other instances are too small, and the lost one is gone
        driven.feed(PlanReceived(driven.plan, [], []))
    assert driven.request.phase is RequestPhase.WAITING_PLAN
    driven.now = driven.request.wake_at
    driven.feed(Tick())
    assert driven.excluded == ("f1", "f2", "f3"), "they are not asked again"
    driven.feed(PlanReceived(driven.plan, FUSIONS[:1], []))
    driven.feed(LegAccepted(driven.key))
    assert driven.request.phase is RequestPhase.PREFILLING


def test_a_stream_that_fits_no_instance_ends_with_that_reason_at_its_deadline() -> None:
    driven = Driven(ttft_s=10.0)
    driven.decode(num_tokens=40)
    driven.feed(LegLost(driven.key))
    driven.offer()
    for _ in FUSIONS[1:]:
        too_long(driven)
    while driven.error is None:
        if driven.request.phase is RequestPhase.PLANNING:
            driven.feed(PlanReceived(driven.plan, [], []))
        driven.now = max(driven.now, driven.request.wake_at)
        driven.feed(Tick())
    assert driven.error is InvalidRequest
    assert driven.now <= 10.0 + 2.0


def test_a_prompt_that_fits_no_instance_is_the_clients_error_at_once() -> None:
    driven = Driven()
    driven.offer()
    for _ in FUSIONS:
        too_long(driven)
    driven.feed(PlanReceived(driven.plan, [], []))
    outcome = driven.request.outcome
    assert isinstance(outcome, Fail)
    assert outcome.error.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert "larger than the arena" in outcome.error.message
    assert driven.now == 0.0


@pytest.mark.fault("F7")
def test_if_no_other_instance_has_room_a_request_waits_without_polling() -> None:
    """The other instances drain, or are gone but still registered. Each plan names them, and each
    of their refusals comes at once.
    """
    driven = Driven()
    driven.offer()
    too_long(driven)
    num_asked = 0
    while driven.request.phase is not RequestPhase.WAITING_PLAN:
        if driven.request.phase is RequestPhase.PLANNING:
            num_asked += 1
            assert num_asked <= 2 * len(FUSIONS)
            driven.offer()
        if driven.request.phase is RequestPhase.PREFILL_OFFERED:
            driven.feed(LegRejected(driven.key, is_final=True))
    driven.now = driven.request.wake_at
    assert driven.now > 0.0
    driven.feed(Tick())
    assert driven.excluded == ("f0",), "the others may have room again"
    driven.feed(PlanReceived(driven.plan, [], []))
    assert driven.error is NoInstance


def test_if_the_prefill_is_too_small_a_decode_computes_the_prompt_itself() -> None:
    prefill, decode = Candidate("p0", 1, "g"), Candidate("d0", 1, "g")
    driven = Driven()
    driven.feed(PlanReceived(driven.plan, [prefill], [decode]))
    too_long(driven)
    assert driven.excluded == ("p0",)
    driven.feed(PlanReceived(driven.plan, [Candidate("d0", 1, "g", is_local=True)], [decode]))
    driven.feed(LegAccepted(driven.key))
    assert driven.request.phase is RequestPhase.PREFILLING
