"""Who should exchange KV with whom: what one decode finds out, and what is made of what all decodes say."""

from __future__ import annotations

import pytest

from pdmesh.core.kv_sources import (
    Exchange,
    Fit,
    HeldSource,
    KvSource,
    KvSources,
    SourceFault,
    is_slow,
    whole_prompt_s,
)
from pdmesh.core.request_types import Candidate

P0, P0_AGAIN, P1 = KvSource("p0", 1), KvSource("p0", 2), KvSource("p1", 1)
CORRUPT, UNREACHABLE, SLOW = SourceFault.CORRUPT, SourceFault.UNREACHABLE, SourceFault.SLOW
QUICK = (0.1, 1.0)  # seconds that the KV took to come, and that its prompt takes to compute
LATE = (5.0, 1.0)


def sources() -> KvSources:
    return KvSources()


@pytest.mark.fault("F34")
def test_the_third_corrupt_pull_makes_a_decode_refuse_a_source_for_a_minute() -> None:
    record = sources()
    assert [record.failed(P0, "KV_CORRUPT", t) for t in (0.0, 1.0)] == [None, None]
    assert (
        record.succeeded(P0, *QUICK, 1.5) is None
    )  # what corrupts at times is not cleared by a good pull
    assert record.failed(P0, "KV_CORRUPT", 2.0) is CORRUPT
    assert record.refuses(P0, 61.9)
    assert not record.refuses(P0_AGAIN, 3.0), "a restarted one has a clean record"
    assert not record.refuses(P1, 3.0)
    assert record.held() == [HeldSource(P0, CORRUPT)]
    assert record.release_due(61.9) == []
    assert record.release_due(62.0) == [HeldSource(P0, CORRUPT)]
    assert record.held() == []
    record.check_invariants()


@pytest.mark.fault("F34")
def test_a_source_that_the_kv_agent_asks_no_more_is_refused_at_once() -> None:
    """It counts blocks of peers' pools too, of which the host hears nothing."""
    record = sources()
    assert record.failed(P0, "KV_SOURCE_QUARANTINED", 0.0) is CORRUPT
    assert record.failed(P0, "KV_SOURCE_QUARANTINED", 0.1) is None, "told once"
    assert record.refuses(P0, 1.0)


@pytest.mark.fault("F23")
@pytest.mark.parametrize("reason", ["KV_TRANSFER_TIMEOUT", "KV_PEER_LOST", "KV_CONNECT_FAILED"])
def test_a_source_out_of_reach_twice_in_a_row_is_avoided_and_not_refused(reason: str) -> None:
    record = sources()
    assert record.failed(P0, reason, 0.0) is None
    record.succeeded(P0, *QUICK, 0.5)
    assert record.failed(P0, reason, 1.0) is None, "not in a row"
    assert record.failed(P0, reason, 2.0) is UNREACHABLE
    assert not record.refuses(P0, 3.0)
    assert record.held() == [HeldSource(P0, UNREACHABLE)]
    assert record.release_due(32.0) == [HeldSource(P0, UNREACHABLE)]


@pytest.mark.fault("F24")
def test_a_source_that_is_slower_than_computing_three_times_in_a_row_is_avoided() -> None:
    record = sources()
    assert [record.succeeded(P0, *LATE, t) for t in (0.0, 1.0)] == [None, None]
    assert record.succeeded(P0, *QUICK, 2.0) is None
    assert [record.succeeded(P0, *LATE, t) for t in (3.0, 4.0)] == [None, None], "not in a row"
    assert record.succeeded(P0, *LATE, 5.0) is SLOW
    assert record.succeeded(P0, *LATE, 5.5) is None, "told once"
    assert record.held() == [HeldSource(P0, SLOW)]
    assert not record.refuses(P0, 6.0), "what comes late is right"
    assert record.release_due(35.0) == [HeldSource(P0, SLOW)]
    record.check_invariants()
    exchange = Exchange.of({"d0": [HeldSource(P0, SLOW)]}, {"p0": 1, "p1": 1})
    assert (exchange.fit("d0", "p0"), exchange.fit("d1", "p0")) == (Fit.AVOIDED, Fit.GOOD)


@pytest.mark.fault("F24")
def test_slow_is_what_computing_again_would_beat_and_somebody_notices() -> None:
    assert is_slow(pull_s=2.1, compute_s=1.0)
    assert not is_slow(pull_s=1.9, compute_s=1.0), "computing costs the other requests, too"
    assert not is_slow(pull_s=0.9, compute_s=0.01), "nobody notices"
    assert not is_slow(pull_s=60.0, compute_s=0.0), "not known what computing takes"
    assert whole_prompt_s(2.0, num_tokens=1000, num_cached=0) == 2.0
    assert whole_prompt_s(2.0, num_tokens=1000, num_cached=900) == 20.0
    assert whole_prompt_s(2.0, num_tokens=1000, num_cached=1000) == 2000.0


def test_failures_that_are_nobodys_fault_are_not_counted() -> None:
    record = sources()
    for reason in ("KV_TOO_MANY_PULLS", "KV_AGENT_CLOSING", "KV_REFUSED_LEASE_ENDED", ""):
        assert [record.failed(P0, reason, 0.0) for _ in range(4)] == [None] * 4
    assert record.held() == []


@pytest.mark.fault("F23", "F34")
def test_one_decode_quarrels_for_itself_and_two_condemn_a_source() -> None:
    incarnations = {"p0": 1, "p1": 1}
    one = Exchange.of({"d0": [HeldSource(P0, CORRUPT)]}, incarnations)
    assert (one.fit("d0", "p0"), one.fit("d0", "p1")) == (Fit.REFUSED, Fit.GOOD)
    assert one.fit("d1", "p0") is Fit.GOOD
    both = Exchange.of(
        {"d0": [HeldSource(P0, CORRUPT)], "d1": [HeldSource(P0, CORRUPT)]}, incarnations
    )
    assert both.fit("d2", "p0") is Fit.REFUSED, "two decodes do not fail alike by themselves"
    cut = Exchange.of({d: [HeldSource(P0, UNREACHABLE)] for d in ("d0", "d1")}, incarnations)
    assert (cut.fit("d0", "p0"), cut.fit("d2", "p0")) == (Fit.AVOIDED, Fit.GOOD)


def test_what_is_said_of_another_incarnation_counts_no_more() -> None:
    assert not Exchange.of({"d0": [HeldSource(P0, CORRUPT)]}, {"p0": 2})
    assert not Exchange.of({"d0": [HeldSource(P0, CORRUPT)]}, {})
    assert not Exchange()


@pytest.mark.fault("F23", "F34")
def test_the_takers_of_a_prefill_leave_out_who_refuses_it_and_end_with_who_avoids_it() -> None:
    exchange = Exchange.of(
        {"d0": [HeldSource(P0, UNREACHABLE)], "d1": [HeldSource(P0, CORRUPT)]}, {"p0": 1, "p1": 1}
    )
    decodes = [
        Candidate(d, 1, "g/f", quarrels=exchange.quarrels(d)) for d in ("d0", "d1", "d2")
    ] + [Candidate("d3", 1, "other/f")]
    taker_ids = {
        p: [c.instance_id for c in Candidate(p, 1, "g/f").takers(decodes)] for p in ("p0", "p1")
    }
    assert taker_ids == {"p0": ["d2", "d0"], "p1": ["d0", "d1", "d2"]}
