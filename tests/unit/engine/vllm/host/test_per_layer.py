"""Hand-overs of a vLLM engine in per-layer mode: the host's reports of prefills, and token 1."""

from __future__ import annotations

from array import array

import pytest

from pdmesh.core.kv.layout.cache_groups import CacheGroups
from pdmesh.engine.base import (
    ArenaRange,
    Failed,
    FinishReason,
    Prefilled,
    PrefillJob,
    Sampling,
    Ticket,
    TicketClosed,
    TicketOpened,
)
from pdmesh.engine.vllm.connector.scheduler.handoff import HandoffPlanner, load_params, store_params
from pdmesh.engine.vllm.host.job_facts import (
    CancelRequest,
    Drawn,
    Fact,
    ReleaseAtRanks,
)
from pdmesh.engine.vllm.host.jobs import Endpoint, Jobs
from pdmesh.engine.vllm.messages import RankTicketClosed, RankTicketOpened, StageFailed

pytestmark = pytest.mark.req("S48")

ENDPOINT = Endpoint("p0", 7, "fp", ("a0", "a1"), 16, 4, 5000, 128)
JOB = PrefillJob(
    1,
    "r",
    0,
    array("I", range(9)),
    Sampling(max_tokens=5),
    "t1",
    ArenaRange(0, 4096),
    is_per_layer=True,
)
TICKET = ENDPOINT.ticket(JOB)
TOKEN = Drawn(1, [42], finish_reason=FinishReason.LENGTH, num_cached_tokens=4)
STOP = Drawn(1, [42], finish_reason=FinishReason.STOP)
PREFILLED = Prefilled(1, 42, TICKET, 4)
OPENED = TicketOpened(1, TICKET)
RELEASE = ReleaseAtRanks("t1")


def jobs() -> Jobs:
    core = Jobs(ENDPOINT, num_ranks=2)
    core.prefill(JOB)
    return core


def say(core: Jobs, *facts: Fact) -> list[object]:
    effects: list[object] = []
    for fact in facts:
        effects += core.handle(fact)
        core.check_invariants()
    return effects


def ended(reason: str = "taken") -> list[Fact]:
    return [RankTicketClosed(0, "t1", reason), RankTicketClosed(1, "t1", reason)]


def test_a_ticket_is_reported_when_all_ranks_have_opened_it() -> None:
    core = jobs()
    assert say(core, RankTicketOpened(0, "t1")) == []
    assert say(core, RankTicketOpened(1, "t1")) == [OPENED]
    assert say(core, TOKEN) == [PREFILLED]
    assert say(core, *ended()) == [TicketClosed("t1", "taken")]
    assert core.is_idle


def test_the_kv_may_be_taken_before_token_1_is_read() -> None:
    core = jobs()
    say(core, RankTicketOpened(0, "t1"), RankTicketOpened(1, "t1"))
    assert say(core, *ended()) == [TicketClosed("t1", "taken")]
    assert not core.is_idle
    assert say(core, TOKEN) == [PREFILLED]
    assert core.is_idle


def test_if_token_1_comes_first_it_is_reported_together_with_the_ticket() -> None:
    core = jobs()
    assert say(core, RankTicketOpened(0, "t1"), TOKEN) == [OPENED, PREFILLED]
    assert say(core, RankTicketOpened(1, "t1")) == []


def test_a_stop_at_token_1_releases_the_unneeded_ticket() -> None:
    core = jobs()
    say(core, RankTicketOpened(0, "t1"), RankTicketOpened(1, "t1"))
    assert say(core, STOP) == [Prefilled(1, 42, None, 0, FinishReason.STOP), RELEASE]
    assert say(core, *ended("released")) == [TicketClosed("t1", "released")]
    assert core.is_idle


@pytest.mark.fault("F27")
@pytest.mark.parametrize("when", ["at once", "opened", "drawn", "taken"])
def test_an_abort_closes_the_ticket_whenever_it_comes(when: str) -> None:
    core = jobs()
    if when != "at once":
        say(core, RankTicketOpened(0, "t1"), RankTicketOpened(1, "t1"))
    if when == "drawn":
        say(core, TOKEN)
    if when == "taken":
        say(core, *ended())
        assert core.abort(1) == [CancelRequest(1)]
        assert core.is_idle
        return
    cancel = [] if when == "drawn" else [CancelRequest(1)]
    assert core.abort(1) == [*cancel, RELEASE]
    assert say(core, RankTicketOpened(0, "t1")) == [], "an aborted leg sends no events"
    assert say(core, *ended("released")) == [TicketClosed("t1", "released")]
    assert core.is_idle


def test_a_rank_that_cannot_stage_fails_the_job_once() -> None:
    core = jobs()
    say(core, RankTicketOpened(0, "t1"), RankTicketOpened(1, "t1"))
    failed, cancel, release = say(core, StageFailed(0, "t1", "too small"))
    assert isinstance(failed, Failed)
    assert failed.reason == "KV_TRANSFER_FAILED"
    assert (cancel, release) == (CancelRequest(1), RELEASE)
    assert say(core, StageFailed(1, "t1", "too small"), TOKEN) == []
    assert say(core, RankTicketClosed(0, "t1", "released")) == []
    assert say(core, RankTicketClosed(1, "t1", "failed")) == [TicketClosed("t1", "failed")]
    assert core.is_idle


def test_a_request_that_vllm_refuses_is_failed_and_its_ticket_closed() -> None:
    core = jobs()
    refused = Failed(1, "ENGINE_FAILED", "no")
    failed, release = core.refused(refused)
    assert failed == refused
    assert release == RELEASE
    say(core, *ended("released"))
    assert core.is_idle


# --- the scheduler's half -------------------------------------------------------------------------

BLOCKS = [[10, 11, 12, 13]]


def storing(num_tokens: int = 9) -> HandoffPlanner:
    core = HandoffPlanner(CacheGroups(4))
    params = store_params("t1", 0, ArenaRange(0, 4096), 5.0, is_per_layer=True)
    core.add("a", params, num_tokens)
    return core


def parts(core: HandoffPlanner) -> list[tuple[int, tuple[int, ...], bool]]:
    found = core.take_plan().parts
    assert all(len(p.block_ids) == 1 and len(p.block_ids[0]) == p.end_block for p in found)
    return [(p.first_block, p.block_ids[0], p.is_last) for p in found]


def test_each_chunk_adds_the_blocks_it_fills_and_the_last_the_rest() -> None:
    core = storing()
    core.scheduled("a", 0, 5, lambda: BLOCKS)
    assert parts(core) == [(0, (10,), False)]
    core.scheduled("a", 5, 2, lambda: BLOCKS)
    assert parts(core) == []
    core.scheduled("a", 7, 2, lambda: BLOCKS)
    assert parts(core) == [(1, (10, 11, 12), True)]
    core.finished("a")
    assert core.take_plan().dropped_tickets == []


def test_blocks_of_a_cached_prefix_go_with_the_first_chunk() -> None:
    core = storing()
    core.scheduled("a", 8, 1, lambda: BLOCKS)
    assert parts(core) == [(0, (10, 11, 12), True)]


def test_a_preempted_prompt_continues_from_where_it_was() -> None:
    """The prompt has other blocks now. The KV gathered from the first blocks is still right,
    because the tokens are the same.
    """
    core = storing()
    core.scheduled("a", 0, 5, lambda: BLOCKS)
    parts(core)
    core.scheduled("a", 0, 9, lambda: [[20, 21, 22]])
    assert parts(core) == [(1, (20, 21, 22), True)]


def test_an_aborted_prompt_drops_its_ticket() -> None:
    core = storing()
    core.scheduled("a", 0, 5, lambda: BLOCKS)
    core.finished("a")
    assert core.take_plan().dropped_tickets == ["t1"]


def test_an_early_decode_with_nothing_to_pull_waits_for_token_1() -> None:
    """Otherwise vLLM would compute at once, with the placeholder instead of token 1."""
    core = HandoffPlanner(CacheGroups(4))
    ticket = Ticket("t1", "r", 0, "prefill-0", 7, "fp", 8, 120, ("addr",), 5000)
    core.add("b", load_params(2, ticket, ArenaRange(0, 4096), 100.0, 8, is_early=True), 9)
    assert core.num_external_tokens("b", 4) == 4
    assert core.num_external_tokens("b", 8) is None
    core.joined("b")
    assert core.num_external_tokens("b", 8) == 0
