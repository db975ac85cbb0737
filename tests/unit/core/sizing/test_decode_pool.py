"""The number of running sequences against exact queues, and the resulting time per token."""

from __future__ import annotations

import math
import statistics

import pytest

from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.sizing.decode_pool import averaged, contexts, next_tokens, running
from pdmesh.core.sizing.traffic import RequestLengths, mean, traffic_of

LAW = Law("l", step_fixed_s=0.01, step_sequence_s=1e-4, step_context_s=1e-7)


def test_steps_of_one_length_are_a_queue_of_endless_servers() -> None:
    """With infinitely many servers (Erlang), the number of running sequences is Poisson. Its mean
    is the number of arrivals during one sequence's life.
    """
    found = running(2.0, 100.0, [0.01] * 101, 1, 100)
    assert found.mean == pytest.approx(2.0, rel=1e-3)
    assert found.variance == pytest.approx(2.0, rel=1e-2)
    assert found.full < 1e-6


def test_an_engine_whose_speed_does_not_grow_is_one_server() -> None:
    """Sequences share one processor: n of them take n times as long. So their number is
    geometric.
    """
    found = running(5.0, 100.0, [0.001 * max(n, 1) for n in range(401)], 1, 400)
    assert found.mean == pytest.approx(0.5 / 0.5, rel=1e-2)
    assert found.variance == pytest.approx(0.5 / 0.25, rel=1e-2)


def test_too_little_room_is_told_as_full() -> None:
    assert running(10.0, 100.0, [0.01] * 6, 1, 5).full == 1.0
    assert 0.1 < running(4.0, 100.0, [0.01] * 6, 1, 5).full < 0.9


def test_many_sequences_are_taken_in_strides() -> None:
    fine = running(40.0, 100.0, [0.01] * 401, 1, 400)
    coarse = running(400.0, 100.0, [0.01] * 401, 10, 400)
    assert coarse.mean == pytest.approx(fine.mean, rel=0.01)
    assert coarse.variance == pytest.approx(fine.variance / 10, rel=0.1)


def test_long_answers_are_met_more_often_than_short_ones() -> None:
    held = contexts([RequestLengths(1000, 0, 2), RequestLengths(10, 0, 1001)], 64)
    assert held.mean == pytest.approx((1 * 1001 + 1000 * 510.5) / 1001)
    assert held.reserved == pytest.approx((1 * 16 * 64 + 1000 * 16 * 64) / 1001)


def test_tokens_are_slower_with_load_and_with_what_comes_before_them() -> None:
    traffic = traffic_of(1.0, "500", "100-300", 0.0)
    held = contexts(traffic.requests, 64)
    no_wait = [0.0] * len(traffic.requests)

    def slow(rate: float, count: int, before: list[float]) -> float:
        found = next_tokens(LAW, traffic.at(rate), count, 256, held, before)
        return found.quantile_s(0.99)

    assert slow(1, 1, no_wait) < slow(20, 1, no_wait)
    assert slow(20, 2, no_wait) < slow(20, 1, no_wait)
    later = slow(1, 1, [0.5] * len(no_wait))
    assert later - slow(1, 1, no_wait) == pytest.approx(0.5 / 100, rel=0.2)
    assert math.isinf(slow(900, 1, no_wait))


def test_littles_law_holds() -> None:
    traffic = traffic_of(20.0, "500", "100-300", 0.0)
    held = contexts(traffic.requests, 64)
    found = next_tokens(LAW, traffic, 2, 256, held, [0.0] * len(traffic.requests))
    steps = mean([r.num_steps for r in traffic.requests])
    assert found.batch * 2 == pytest.approx(20.0 * steps * found.mean_s)
    assert found.mean_s == pytest.approx(LAW.step_s(found.batch, found.batch * held.mean), rel=0.05)


def test_a_mean_over_many_lives_varies_less() -> None:
    shares = [averaged(lives) for lives in (0.0001, 0.1, 1.0, 10.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[2] == pytest.approx(2 * math.exp(-1), rel=1e-6)
    assert statistics.fmean(shares) < 1


def test_requests_of_one_token_need_no_decode() -> None:
    traffic = traffic_of(20.0, "500", "1", 0.0)
    held = contexts(traffic.requests, 64)
    found = next_tokens(LAW, traffic, 1, 8, held, [0.0] * len(traffic.requests))
    assert (found.batch, found.full) == (0.0, 0.0)
    assert next_tokens(LAW, traffic_of(1, "5", "9", 0), 1, 0, held, []).full == 1.0
