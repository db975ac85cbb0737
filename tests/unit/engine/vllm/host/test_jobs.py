"""Tests what a vLLM engine reports to its host.

The facts come from vLLM and from its workers, in any order.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from pdmesh.engine.base import (
    ArenaRange,
    DecodeJob,
    Failed,
    Finished,
    FinishReason,
    KvArrived,
    KvPulling,
    KvReceived,
    LandingFreed,
    Prefilled,
    PrefillJob,
    Sampling,
    Ticket,
    TicketClosed,
    Tokens,
    constraint_failed,
)
from pdmesh.engine.vllm.host.job_facts import CancelRequest, Drawn, ReleaseAtRanks
from pdmesh.engine.vllm.host.jobs import Endpoint, Jobs
from pdmesh.engine.vllm.messages import (
    Arrived,
    PullFailed,
    Pulling,
    RankLandingFreed,
    RankTicketClosed,
    Received,
    Staged,
    StageFailed,
)

ENDPOINT = Endpoint("prefill-0", 7, "fp", ("addr-0", "addr-1"), 10, 4, 5000, 100)
PROMPT = array("I", range(9))
RANGE = ArenaRange(0, 4096)


def prefill_job(max_tokens: int = 8, staging: ArenaRange | None = RANGE) -> PrefillJob:
    return PrefillJob(1, "r", 0, PROMPT, Sampling(max_tokens), "t1", staging)


def decode_job(num_ranks: int = 1) -> DecodeJob:
    addresses = tuple(f"addr-{rank}" for rank in range(num_ranks))
    ticket = Ticket("t1", "r", 0, "prefill-0", 7, "fp", 9, 120, addresses, 5000)
    return DecodeJob(2, "r", 0, PROMPT, 5, ticket, RANGE, Sampling(8), 1.0)


def jobs(num_ranks: int = 1) -> Jobs:
    return Jobs(ENDPOINT, num_ranks)


def test_a_ticket_is_announced_when_every_rank_has_staged() -> None:
    core = jobs(num_ranks=2)
    core.prefill(prefill_job())
    assert core.handle(Staged(0, "t1")) == []
    assert core.handle(Drawn(1, [42], num_cached_tokens=4, finish_reason=FinishReason.LENGTH)) == []
    (output,) = core.handle(Staged(1, "t1"))
    assert output == Prefilled(1, 42, ENDPOINT.ticket(prefill_job()), 4)
    assert core.handle(RankTicketClosed(0, "t1", "taken")) == []
    assert core.handle(RankTicketClosed(1, "t1", "taken")) == [TicketClosed("t1", "taken")]
    assert core.is_idle


def test_a_ticket_counts_whole_blocks() -> None:
    assert ENDPOINT.ticket(prefill_job()).kv_bytes == 3 * 4 * 10


def test_a_stop_token_at_once_ends_the_leg_after_its_staged_bytes_are_free() -> None:
    core = jobs()
    core.prefill(prefill_job())
    core.handle(Staged(0, "t1"))
    assert core.handle(Drawn(1, [2], finish_reason=FinishReason.STOP)) == [ReleaseAtRanks("t1")]
    assert core.handle(RankTicketClosed(0, "t1", "released")) == [
        Prefilled(1, 2, None, 0, FinishReason.STOP)
    ]
    assert core.is_idle


def test_a_job_of_one_token_stages_nothing() -> None:
    core = jobs()
    core.prefill(prefill_job(max_tokens=1))
    assert core.handle(Drawn(1, [2], finish_reason=FinishReason.LENGTH)) == [
        Prefilled(1, 2, None, 0, FinishReason.LENGTH)
    ]
    assert core.is_idle


def test_a_prompt_that_fills_the_context_ends_with_its_first_token() -> None:
    core = jobs()
    prompt = array("I", range(99))
    core.prefill(PrefillJob(1, "r", 0, prompt, Sampling(8), "t1", RANGE))
    assert core.handle(Drawn(1, [2], finish_reason=FinishReason.LENGTH)) == [
        Prefilled(1, 2, None, 0, FinishReason.LENGTH)
    ]


def test_an_aborted_job_of_one_token_gives_its_unused_range_back() -> None:
    core = jobs()
    core.prefill(prefill_job(max_tokens=1))
    assert core.abort(1) == [CancelRequest(1), TicketClosed("t1", "released")]
    assert core.handle(Drawn(1, (), is_error=True)) == []
    assert core.is_idle


def test_an_aborted_prefill_gives_its_range_back_when_no_rank_can_write_there() -> None:
    core = jobs(num_ranks=2)
    core.prefill(prefill_job())
    assert core.abort(1) == [CancelRequest(1), ReleaseAtRanks("t1")]
    assert core.abort(1) == []
    assert core.handle(RankTicketClosed(0, "t1", "released")) == []
    assert core.handle(Drawn(1, (), is_error=True)) == []
    assert core.handle(RankTicketClosed(1, "t1", "released")) == [TicketClosed("t1", "released")]
    assert core.is_idle


def test_aborting_an_announced_leg_releases_its_ticket() -> None:
    core = jobs()
    core.prefill(prefill_job())
    core.handle(Staged(0, "t1"))
    core.handle(Drawn(1, [42], finish_reason=FinishReason.LENGTH))
    assert core.num_open == 0
    assert core.abort(1) == [ReleaseAtRanks("t1")]
    assert core.handle(RankTicketClosed(0, "t1", "released")) == [TicketClosed("t1", "released")]


def test_failed_staging_fails_the_leg_once_the_range_is_free() -> None:
    core = jobs()
    core.prefill(prefill_job())
    core.handle(StageFailed(0, "t1", "no room"))
    core.handle(RankTicketClosed(0, "t1", "failed"))
    (failed,) = core.handle(Drawn(1, [42], finish_reason=FinishReason.LENGTH))
    assert failed == Failed(1, "KV_TRANSFER_FAILED", "no room")
    assert core.is_idle


def test_a_lease_that_ends_before_token_1_is_reported_is_a_failure() -> None:
    core = jobs()
    core.prefill(prefill_job())
    core.handle(Staged(0, "t1"))
    assert core.handle(RankTicketClosed(0, "t1", "expired")) == []
    (failed,) = core.handle(Drawn(1, [42], finish_reason=FinishReason.LENGTH))
    assert isinstance(failed, Failed)
    assert failed.is_retryable
    assert core.is_idle


@pytest.mark.req("S77")
def test_tokens_of_a_decode_wait_until_its_kv_is_reported_by_all_ranks() -> None:
    core = jobs(num_ranks=2)
    core.decode(decode_job(2))
    assert core.handle(Drawn(2, [43])) == []
    assert core.handle(Received(0, 2, 60, 0.1, 0, 0.0)) == []
    assert core.handle(Received(1, 2, 60, 0.2, 0, 0.0)) == [
        KvReceived(2, 120, 0.2, 0),
        Tokens(2, [43]),
    ]
    assert core.handle(RankLandingFreed(0, 2)) == []
    assert core.handle(RankLandingFreed(1, 2)) == [LandingFreed(2)]
    assert core.handle(Drawn(2, [44], finish_reason=FinishReason.STOP)) == [
        Tokens(2, [44]),
        Finished(2, FinishReason.STOP),
    ]
    assert core.is_idle


def test_recomputed_tokens_are_reported() -> None:
    core = jobs()
    core.decode(decode_job())
    assert core.handle(Received(0, 2, 60, 0.1, 3, 0.0)) == [KvReceived(2, 60, 0.1, 3)]


@pytest.mark.req("S77")
def test_a_failed_pull_fails_the_leg_once_and_frees_its_landing_last() -> None:
    core = jobs()
    core.decode(decode_job())
    assert core.handle(PullFailed(0, 2, "KV_TRANSFER_FAILED", "peer gone")) == [
        Failed(2, "KV_TRANSFER_FAILED", "peer gone")
    ]
    assert core.handle(Drawn(2, (), is_error=True)) == []
    assert not core.is_idle
    assert core.handle(RankLandingFreed(0, 2)) == [LandingFreed(2)]
    assert core.is_idle


def test_an_error_from_vllm_before_the_reason_is_known_fails_the_leg() -> None:
    core = jobs()
    core.decode(decode_job())
    (failed,) = core.handle(Drawn(2, (), is_error=True))
    assert isinstance(failed, Failed)
    assert failed.reason == "KV_TRANSFER_FAILED"
    assert core.handle(PullFailed(0, 2, "KV_TRANSFER_FAILED", "peer gone")) == []


def test_a_pull_without_end_fails_at_its_deadline() -> None:
    core = jobs()
    core.decode(decode_job())
    failed, cancel = core.overdue(2)
    assert isinstance(failed, Failed)
    assert failed.reason == "KV_TRANSFER_FAILED", "the reason of every failed pull"
    assert failed.message.startswith("KV_PULL_OVERDUE"), (
        "this cause is no strike against the source"
    )
    assert cancel == CancelRequest(2)
    assert core.overdue(2) == []
    assert core.handle(RankLandingFreed(0, 2)) == [LandingFreed(2)]
    assert core.is_idle


def test_a_deadline_has_no_effect_once_the_kv_is_there() -> None:
    core = jobs()
    core.decode(decode_job())
    core.handle(Pulling(0, 2))
    core.handle(Arrived(0, 2))
    core.handle(Received(0, 2, 60, 0.1, 0, 0.0))
    assert core.overdue(2) == []


def test_a_pull_has_started_or_arrived_when_every_rank_says_so() -> None:
    core = jobs(num_ranks=2)
    core.decode(decode_job(2))
    assert core.handle(Pulling(1, 2)) == []
    assert core.handle(Pulling(0, 2)) == [KvPulling(2)]
    assert core.handle(Arrived(0, 2)) == []
    assert core.handle(Arrived(1, 2)) == [KvArrived(2)]
    assert core.overdue(2) == [], "it waits for a place in a step, and no longer for a pull"
    core.abort(2)
    assert core.handle(Pulling(0, 2)) == core.handle(Arrived(0, 2)) == []


def test_after_abort_only_the_landing_is_given_back() -> None:
    core = jobs()
    core.decode(decode_job())
    assert core.abort(2) == [CancelRequest(2)]
    assert core.handle(Received(0, 2, 60, 0.1, 0, 0.0)) == []
    assert core.handle(Drawn(2, [43])) == []
    assert core.handle(RankLandingFreed(0, 2)) == [LandingFreed(2)]
    assert core.is_idle


def test_a_request_that_vllm_never_took_gives_everything_back_at_once() -> None:
    core = jobs()
    core.decode(decode_job())
    core.prefill(prefill_job())
    for_good = Failed(2, "ADAPTER_UNUSABLE", "no", is_retryable=False)
    assert core.refused(for_good) == [for_good, LandingFreed(2)]
    failed = Failed(1, "ENGINE_FAILED", "no")
    assert core.refused(failed) == [failed]
    assert core.is_idle


@pytest.mark.req("S72")
def test_a_local_job_streams_on_after_its_first_token() -> None:
    core = jobs()
    core.prefill(prefill_job(staging=None))
    assert core.handle(Drawn(1, [42, 43], num_cached_tokens=4)) == [
        Prefilled(1, 42, None, 4),
        Tokens(1, [43]),
    ]
    assert core.handle(Drawn(1, [44], finish_reason=FinishReason.LENGTH)) == [
        Tokens(1, [44]),
        Finished(1, FinishReason.LENGTH),
    ]
    assert core.is_idle


@pytest.mark.req("S126")
def test_a_ticket_of_other_kv_ends_the_leg_at_once_and_frees_its_landing() -> None:
    core = jobs()
    job = decode_job()
    other = replace(job, ticket=replace(job.ticket, model_fingerprint="another"))
    failed, freed = core.decode(other)
    assert isinstance(failed, Failed)
    assert failed.reason == "KV_FORMAT_MISMATCH"
    assert "prefill-0 runs another engine" in failed.message
    assert freed == LandingFreed(job.leg)
    assert core.is_idle


@pytest.mark.req("S57")
def test_a_ticket_of_ranks_that_cannot_pair_with_ours_is_refused() -> None:
    failed, _ = jobs(num_ranks=2).decode(decode_job(num_ranks=1))
    assert isinstance(failed, Failed)
    assert failed.reason == "KV_FORMAT_MISMATCH"
    assert "has 1 ranks" in failed.message


@pytest.mark.req("S57")
def test_kv_is_complete_when_every_rank_has_it_and_took_as_long_as_the_slowest_rank() -> None:
    core = jobs(num_ranks=2)
    assert core.decode(decode_job(2)) == []
    assert core.handle(Received(1, 2, 120, 0.5, 0, 0.1)) == []
    assert core.handle(Drawn(2, [7])) == []
    assert core.handle(Received(0, 2, 120, 0.4, 0, 0.3)) == [
        KvReceived(2, 240, 0.5, 0, 0.3),
        Tokens(2, [7], ()),
    ]


def constraint_error(leg: int) -> Drawn:
    return Drawn(leg, [7], is_error=True, is_constraint_error=True)


def test_a_constraint_that_allows_nothing_fails_each_kind_of_leg_without_a_retry() -> None:
    core = jobs()
    core.prefill(prefill_job())
    assert core.handle(constraint_error(1)) == [ReleaseAtRanks("t1")]
    assert core.handle(RankTicketClosed(0, "t1", "released")) == [constraint_failed(1)]
    core.prefill(prefill_job(staging=None))
    assert core.handle(constraint_error(1)) == [constraint_failed(1)]
    core.prefill(replace(prefill_job(), is_per_layer=True))
    assert core.handle(constraint_error(1)) == [constraint_failed(1), ReleaseAtRanks("t1")]
    core.handle(RankTicketClosed(0, "t1", "released"))
    for has_kv in (True, False):
        core.decode(decode_job())
        if has_kv:
            core.handle(Received(0, 2, 60, 0.1, 0, 0.0))
        assert core.handle(constraint_error(2)) == [constraint_failed(2)]
        assert core.handle(RankLandingFreed(0, 2)) == [LandingFreed(2)]
    assert core.is_idle
    assert not constraint_failed(2).is_retryable


def test_a_later_error_is_not_blamed_on_the_transfer_of_the_kv() -> None:
    core = jobs()
    core.decode(decode_job())
    core.handle(Received(0, 2, 60, 0.1, 0, 0.0))
    (failed,) = core.handle(Drawn(2, (), is_error=True))
    assert failed == Failed(2, "ENGINE_FAILED", "vLLM failed the request")
