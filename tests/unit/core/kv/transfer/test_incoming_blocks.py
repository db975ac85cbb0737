"""Tests when the blocks of a load are written, complete or released, and when its landings are
free.

A load pulls KV into landing ranges and copies it into an engine's blocks.
"""

from __future__ import annotations

import pytest

from pdmesh.core.kv.transfer.incoming_blocks import IncomingBlocks
from pdmesh.core.kv.transfer.incoming_events import (
    AgentLandingFreed,
    BoundSilence,
    CancelPull,
    CompleteLoad,
    FirstTokenKnown,
    KeepLease,
    LoadCancelled,
    LoadFailure,
    LoadStarted,
    PullEnded,
    PullFellSilent,
    RangeScattered,
    RangeVerified,
    ReleaseBlocks,
    ReportLoad,
    Scatter,
    StartPull,
    StopRenewing,
)
from pdmesh.core.kv.transfer.receiver_events import FreeLanding
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.core.model import Tick

LOST = LoadFailure(PullFailure.PEER_LOST, "gone")
GIVEN_UP = LoadFailure(PullFailure.CLOSING, "cancelled")


def start(leg: int, *, timeout_s: float = 9.0, is_early: bool = False) -> LoadStarted:
    source = None if is_early else "prefill-0"
    return LoadStarted(leg, (100 * leg,), source, 10, timeout_s, is_early)


def came(leg: int) -> PullEnded:
    return PullEnded(leg, None, (100 * leg,))


def test_a_load_completes_with_its_last_range_and_lets_the_next_pull_begin() -> None:
    blocks = IncomingBlocks(max_pulls=1)
    assert blocks.handle(start(1), now=0.0) == [StartPull(1, False)]
    assert blocks.handle(start(2), now=1.0) == [KeepLease(2)]
    assert blocks.handle(RangeVerified(1), now=2.0) == [Scatter(1)]
    assert blocks.handle(RangeScattered(1), now=2.5) == []
    done = [ReportLoad(1, None, 3.0, 3.0), CompleteLoad(1), FreeLanding(1)]
    assert blocks.handle(came(1), now=3.0) == [*done, StartPull(2, False)]
    blocks.check_invariants()
    arrived = blocks.handle(came(2), now=5.0)
    assert arrived[0] == ReportLoad(2, None, 4.0, 2.0), (
        "its wait for bytes began when the pull started"
    )


@pytest.mark.fault("F27")
def test_a_cancelled_load_keeps_its_blocks_until_the_copy_under_way_has_ended() -> None:
    blocks = IncomingBlocks(max_pulls=1)
    blocks.handle(start(1), now=0.0)
    blocks.handle(RangeVerified(1), now=0.0)
    assert blocks.handle(LoadCancelled(1), now=0.1) == [CancelPull(1)]
    assert blocks.handle(RangeVerified(1), now=0.1) == [], "the load was cancelled"
    assert blocks.handle(PullEnded(1, GIVEN_UP, ()), now=0.1) == []
    assert blocks.handle(AgentLandingFreed(100), now=0.2) == [], "the copy still reads the landing"
    assert blocks.handle(RangeScattered(1), now=0.3) == [ReleaseBlocks(1), FreeLanding(1)]
    assert blocks.handle(LoadCancelled(1), now=0.4) == []


@pytest.mark.fault("F27")
def test_kv_that_lands_after_the_end_is_not_scattered() -> None:
    """The agent's thread learns late that the pull has ended. The engine may already reuse the
    blocks.
    """
    blocks = IncomingBlocks(max_pulls=1)
    blocks.handle(start(1), now=0.0)
    blocks.handle(LoadCancelled(1), now=0.0)
    assert blocks.handle(PullEnded(1, GIVEN_UP, ()), now=0.0) == [ReleaseBlocks(1)]
    assert blocks.handle(RangeVerified(1), now=0.1) == []
    assert blocks.handle(AgentLandingFreed(100), now=5.0) == [FreeLanding(1)]
    assert blocks.handle(RangeVerified(1), now=5.1) == []


@pytest.mark.req("S57")
@pytest.mark.fault("F3")
def test_a_landing_is_freed_once_when_its_last_piece_is() -> None:
    blocks = IncomingBlocks(max_pulls=1)
    blocks.handle(LoadStarted(7, (0, 100, 200), None, 30, 9.0), now=0.0)
    assert blocks.handle(AgentLandingFreed(200), now=0.0) == [], "the other pieces are still pulled"
    ended = blocks.handle(PullEnded(7, LOST, (0,)), now=1.0)
    assert ended == [ReportLoad(7, LOST, 1.0, 1.0), ReleaseBlocks(7)]
    assert blocks.handle(AgentLandingFreed(100), now=2.0) == [FreeLanding(7)]
    assert blocks.handle(AgentLandingFreed(100), now=2.0) == []


@pytest.mark.fault("F23", "F24")
def test_overdue_loads_leave_the_queue_together_before_another_begins() -> None:
    blocks = IncomingBlocks(max_pulls=1)
    for leg, timeout_s in ((1, 9.0), (2, 1.0), (3, 1.0), (4, 9.0)):
        blocks.handle(start(leg, timeout_s=timeout_s), now=0.0)
    effects = blocks.handle(Tick(), now=1.0)
    assert [e.leg for e in effects if isinstance(e, StopRenewing)] == [2, 3]
    failures = [e.failure for e in effects if isinstance(e, ReportLoad)]
    assert [f.reason for f in failures if f] == [PullFailure.OVERDUE] * 2
    assert effects[-2:] == [ReleaseBlocks(3), FreeLanding(3)]
    assert blocks.handle(came(1), now=2.0)[-1] == StartPull(4, False)


def test_a_load_cancelled_in_the_queue_ends_at_once_without_a_report() -> None:
    blocks = IncomingBlocks(max_pulls=1)
    blocks.handle(start(1), now=0.0)
    blocks.handle(start(2), now=0.0)
    gone = [StopRenewing(2), ReleaseBlocks(2), FreeLanding(2)]
    assert blocks.handle(LoadCancelled(2), now=0.1) == gone
    assert blocks.num_waiting == 0


def test_a_silent_pull_gives_up_its_turn_and_may_complete_later() -> None:
    blocks = IncomingBlocks(max_pulls=1)
    blocks.handle(start(1), now=0.0)
    blocks.handle(start(2), now=0.0)
    assert blocks.handle(PullFellSilent(1), now=0.5) == [StartPull(2, False)]
    assert CompleteLoad(1) in blocks.handle(came(1), now=1.0)


@pytest.mark.req("S48")
@pytest.mark.parametrize("when", ["before it starts", "before its KV", "after its KV"])
def test_an_early_load_completes_when_it_has_both_its_kv_and_token_1(when: str) -> None:
    blocks = IncomingBlocks(max_pulls=1)
    if when == "before it starts":
        assert blocks.handle(FirstTokenKnown(1), now=0.0) == []
    awaits = when != "before it starts"
    assert blocks.handle(start(1, is_early=True), now=1.0) == [StartPull(1, awaits)]
    if when == "before its KV":
        assert blocks.handle(FirstTokenKnown(1), now=2.0) == [BoundSilence(1)]
    effects = blocks.handle(came(1), now=4.0)
    if when != "after its KV":
        waited_s = 2.0 if awaits else 3.0
        assert effects == [ReportLoad(1, None, 3.0, waited_s), CompleteLoad(1), FreeLanding(1)]
        return
    assert effects == [ReportLoad(1, None, 3.0, 0.0), FreeLanding(1)]
    assert blocks.handle(FirstTokenKnown(1), now=5.0) == [CompleteLoad(1)]


def test_an_early_load_given_up_while_it_waits_for_token_1_releases_its_blocks() -> None:
    blocks = IncomingBlocks(max_pulls=1)
    blocks.handle(start(1, is_early=True), now=0.0)
    blocks.handle(came(1), now=1.0)
    assert blocks.handle(LoadCancelled(1), now=2.0) == [ReleaseBlocks(1)]
    assert blocks.handle(FirstTokenKnown(1), now=3.0) == []


def test_a_pull_that_only_acknowledges_frees_its_landing_and_no_more() -> None:
    blocks = IncomingBlocks(max_pulls=1)
    ack = LoadStarted(1, (100,), None, 10, 9.0, has_blocks=False)
    assert blocks.handle(ack, now=0.0) == [StartPull(1, False)]
    assert blocks.handle(LoadCancelled(1), now=0.1) == [], "the sender is still to be told"
    assert blocks.handle(came(1), now=0.2) == [FreeLanding(1)]


def test_a_leg_loads_only_once() -> None:
    blocks = IncomingBlocks(max_pulls=1)
    blocks.handle(start(1), now=0.0)
    with pytest.raises(ValueError, match="is already loading"):
        blocks.handle(start(1), now=0.0)
    blocks.check_invariants()
