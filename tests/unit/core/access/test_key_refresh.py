"""Tests when a gateway fetches the signing keys of an identity provider."""

from __future__ import annotations

import math

from pdmesh.core.access.key_refresh import KeyRefresh


def fetched(refresh: KeyRefresh, now: float, *, is_good: bool = True) -> None:
    refresh.begin(now)
    refresh.end(now, is_good=is_good)


def test_the_keys_are_fetched_at_once_and_then_at_intervals() -> None:
    refresh = KeyRefresh(300.0, 10.0)
    assert refresh.wait_s(5.0) == 0.0
    assert math.isinf(refresh.age_s(5.0))
    fetched(refresh, 5.0)
    assert (refresh.wait_s(5.0), refresh.wait_s(304.0), refresh.wait_s(306.0)) == (300.0, 1.0, 0.0)
    assert refresh.age_s(7.0) == 2.0


def test_a_flood_of_unknown_keys_fetches_no_more_often_than_the_bound() -> None:
    refresh = KeyRefresh(300.0, 10.0)
    fetched(refresh, 0.0)
    begun = []
    for tenth in range(1000):  # a token with an unknown key every 0.1 s
        now = tenth / 10
        refresh.wants(now)
        if not refresh.wait_s(now):
            begun.append(now)
            fetched(refresh, now)
    assert begun == [float(at) for at in range(10, 100, 10)]


def test_a_flood_while_the_provider_is_away_keeps_to_the_bound_too() -> None:
    refresh = KeyRefresh(300.0, 10.0)
    fetched(refresh, 0.0)
    begun = []
    for tenth in range(1, 1000):
        now = tenth / 10
        refresh.wants(now)
        if not refresh.wait_s(now):
            begun.append(now)
            fetched(refresh, now, is_good=False)
    assert len(begun) <= 20  # a few early fetches, and retries after 1, 2, 4, ... s
    assert refresh.age_s(100.0) == 100.0


def test_while_a_fetch_runs_an_unknown_key_is_worth_waiting_for() -> None:
    refresh = KeyRefresh(300.0, 10.0)
    refresh.begin(0.0)
    assert refresh.wants(0.1)
    refresh.end(0.2, is_good=True)
    assert not refresh.wants(0.3)
    assert refresh.wait_s(0.3) > 0
    assert refresh.wants(10.0)
    assert refresh.wait_s(10.0) == 0.0


def test_failures_are_retried_after_longer_and_longer_pauses() -> None:
    refresh = KeyRefresh(60.0, 10.0)
    pauses = []
    for _ in range(10):
        fetched(refresh, 0.0, is_good=False)
        pauses.append(refresh.wait_s(0.0))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    fetched(refresh, 0.0)
    fetched(refresh, 0.0, is_good=False)
    assert refresh.wait_s(0.0) == 1.0
