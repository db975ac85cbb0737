"""Tests which sources of KV a decode excludes after faults, and which pairs the master excludes.

The master decides by the reports of all decodes.
"""

from __future__ import annotations

import pytest

from pdmesh.core.kv.transfer.source_exclusions import (
    ExcludedSource,
    Fit,
    KvExchange,
    KvSource,
    KvSources,
    SourceFault,
    SourceStrikes,
)
from pdmesh.core.kv.transfer.ticket import PullFailure
from pdmesh.core.request.events import Candidate

P0, P0_AGAIN, P1 = KvSource("p0", 1), KvSource("p0", 2), KvSource("p1", 1)
CORRUPT, UNREACHABLE, SLOW = SourceFault.CORRUPT, SourceFault.UNREACHABLE, SourceFault.SLOW
QUICK = (0.1, 1.0)  # seconds of waiting for the KV, and of computing it instead
LATE = (3.0, 1.0)


def sources() -> KvSources:
    return KvSources()


@pytest.mark.fault("F34")
def test_the_third_corrupt_pull_makes_a_decode_refuse_a_source_for_a_minute() -> None:
    record = sources()
    assert [record.failed(P0, "KV_CORRUPT", t) for t in (0.0, 1.0)] == [None, None]
    assert (
        record.succeeded(P0, *QUICK, 1.5) is None
    )  # a good pull does not delete the record of corruption
    assert record.failed(P0, "KV_CORRUPT", 2.0) is CORRUPT
    assert record.ejects(P0, 61.9)
    assert not record.ejects(P0_AGAIN, 3.0), "a restarted source has a clean record"
    assert not record.ejects(P1, 3.0)
    assert record.excluded() == [ExcludedSource(P0, CORRUPT)]
    assert record.release_due(61.9) == []
    assert record.release_due(62.0) == [ExcludedSource(P0, CORRUPT)]
    assert record.excluded() == []
    record.check_invariants()


@pytest.mark.fault("F23")
@pytest.mark.parametrize("reason", ["KV_TRANSFER_TIMEOUT", "KV_PEER_LOST", "KV_CONNECT_FAILED"])
def test_a_source_unreachable_twice_in_a_row_is_avoided_and_not_ejected(reason: str) -> None:
    record = sources()
    assert record.failed(P0, reason, 0.0) is None
    record.succeeded(P0, *QUICK, 0.5)
    assert record.failed(P0, reason, 1.0) is None, "not in a row"
    assert record.failed(P0, reason, 2.0) is UNREACHABLE
    assert not record.ejects(P0, 3.0)
    assert record.excluded() == [ExcludedSource(P0, UNREACHABLE)]
    assert record.release_due(32.0) == [ExcludedSource(P0, UNREACHABLE)]


@pytest.mark.fault("F24")
def test_a_source_is_avoided_after_three_pulls_in_a_row_that_took_longer_than_computing() -> None:
    record = sources()
    assert [record.succeeded(P0, *LATE, t) for t in (10.0, 20.0)] == [None, None]
    assert record.succeeded(P0, *QUICK, 25.0) is None, "a pull in time clears the strikes"
    assert [record.succeeded(P0, *LATE, t) for t in (30.0, 40.0)] == [None, None]
    assert record.succeeded(P0, *LATE, 50.0) is SLOW
    assert record.succeeded(P0, *LATE, 51.0) is None, "it is reported once"
    assert record.excluded() == [ExcludedSource(P0, SLOW)]
    assert not record.ejects(P0, 52.0), "its KV is late but correct"
    assert record.release_due(80.0) == [ExcludedSource(P0, SLOW)]
    assert record.succeeded(P0, *LATE, 82.0) is None, "this pull began while the source was avoided"
    assert record.succeeded(P0, *LATE, 84.0) is SLOW, "the first pull that began after that"
    record.release_due(114.0)
    record.succeeded(P0, *QUICK, 115.0)
    assert record.succeeded(P0, *LATE, 120.0) is None
    record.check_invariants()


@pytest.mark.fault("F24")
@pytest.mark.parametrize(
    ("waited_s", "compute_s"),
    [
        pytest.param(1.9, 1.0, id="computing costs other requests, too"),
        pytest.param(0.9, 0.01, id="too short to matter"),
        pytest.param(60.0, 0.0, id="the time of computing is unknown"),
    ],
)
def test_a_pull_that_proves_nothing_about_its_source_neither_strikes_nor_clears(
    waited_s: float, compute_s: float
) -> None:
    record = sources()
    assert [record.succeeded(P0, waited_s, compute_s, 100.0 * t) for t in range(4)] == [None] * 4
    for t in (500.0, 600.0):
        assert record.succeeded(P0, *LATE, t) is None
        assert record.succeeded(P0, waited_s, compute_s, t + 65.0) is None
    assert record.succeeded(P0, *LATE, 700.0) is SLOW


@pytest.mark.fault("F24")
def test_pulls_that_waited_together_are_one_observation() -> None:
    """A decode that was paused finds all of its sources slow at the same moment."""
    record = sources()
    assert [record.succeeded(P0, *LATE, 10.0 + t) for t in (0.0, 0.1, 0.2, 2.9)] == [None] * 4
    assert record.succeeded(P0, *LATE, 13.1) is None
    assert record.succeeded(P0, *LATE, 16.2) is SLOW


def test_a_slow_pair_is_avoided_as_a_pair() -> None:
    exchange = KvExchange.of({"d0": [ExcludedSource(P0, SLOW)]}, {"p0": 1, "p1": 1})
    assert (exchange.fit("d0", "p0"), exchange.fit("d1", "p0")) == (Fit.AVOIDED, Fit.GOOD)


def test_failures_that_blame_no_source_are_not_counted() -> None:
    record = sources()
    for reason in ("KV_TOO_MANY_PULLS", "KV_AGENT_CLOSING", "KV_REFUSED_LEASE_ENDED", ""):
        assert [record.failed(P0, reason, 0.0) for _ in range(4)] == [None] * 4
    assert record.excluded() == []


@pytest.mark.fault("F23", "F34")
def test_one_decode_ejects_a_source_for_itself_and_two_eject_it_for_all() -> None:
    incarnations = {"p0": 1, "p1": 1}
    one = KvExchange.of({"d0": [ExcludedSource(P0, CORRUPT)]}, incarnations)
    assert (one.fit("d0", "p0"), one.fit("d0", "p1")) == (Fit.EJECTED, Fit.GOOD)
    assert one.fit("d1", "p0") is Fit.GOOD
    both = KvExchange.of(
        {"d0": [ExcludedSource(P0, CORRUPT)], "d1": [ExcludedSource(P0, CORRUPT)]}, incarnations
    )
    assert both.fit("d2", "p0") is Fit.EJECTED, "the source is to blame if two decodes fail alike"
    cut = KvExchange.of({d: [ExcludedSource(P0, UNREACHABLE)] for d in ("d0", "d1")}, incarnations)
    assert (cut.fit("d0", "p0"), cut.fit("d2", "p0")) == (Fit.AVOIDED, Fit.GOOD)


def test_reports_about_another_incarnation_do_not_count() -> None:
    assert not KvExchange.of({"d0": [ExcludedSource(P0, CORRUPT)]}, {"p0": 2})
    assert not KvExchange.of({"d0": [ExcludedSource(P0, CORRUPT)]}, {})
    assert not KvExchange()


@pytest.mark.fault("F23", "F34")
def test_decodes_that_eject_a_prefill_are_left_out_and_those_that_avoid_it_come_last() -> None:
    exchange = KvExchange.of(
        {"d0": [ExcludedSource(P0, UNREACHABLE)], "d1": [ExcludedSource(P0, CORRUPT)]},
        {"p0": 1, "p1": 1},
    )
    decodes = [
        Candidate(d, 1, "g/f", exclusions=exchange.exclusions(d)) for d in ("d0", "d1", "d2")
    ] + [Candidate("d3", 1, "other/f")]
    taker_ids = {
        p: [c.instance_id for c in Candidate(p, 1, "g/f").compatible(decodes)] for p in ("p0", "p1")
    }
    assert taker_ids == {"p0": ["d2", "d0"], "p1": ["d0", "d1", "d2"]}


@pytest.mark.fault("F23", "F24")
def test_a_pull_that_was_overdue_at_the_decode_is_no_strike_against_its_source() -> None:
    record = sources()
    for n in range(9):
        assert record.failed(P0, PullFailure.OVERDUE, float(n)) is None
    assert record.excluded() == []


# --- when a source is excluded, and for how long ---


@pytest.mark.fault("F34")
def test_the_third_corruption_within_the_window_excludes_a_source_for_a_while() -> None:
    strikes: SourceStrikes[str] = SourceStrikes(limit=3, window_s=60, excluded_s=30)
    assert [strikes.record("p0", now) for now in (0.0, 61.0, 62.0)] == [False] * 3
    assert not strikes.record("p1", 63.0), "another source"
    assert strikes.record("p0", 63.0)
    assert not strikes.record("p0", 64.0), "it is reported once"
    assert strikes.is_excluded("p0", 92.9)
    assert not strikes.is_excluded("p1", 92.9)
    assert not strikes.is_excluded("p0", 93.0)
    assert strikes.release_due(92.9) == []
    assert strikes.release_due(93.0) == ["p0"]
    assert [strikes.record("p0", now) for now in (94.0, 95.0)] == [False, False]
    strikes.check_invariants()
