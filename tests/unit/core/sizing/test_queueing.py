"""The formulas of queues against exact results and against a simulated queue."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from pdmesh.core.sizing.queueing import QueueWait, above, erlang_c, quantile_of, waiting


def test_erlang_c_is_that_of_the_tables() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 0.75) == pytest.approx(0.6429, abs=1e-4)
    assert erlang_c(10, 0.8) == pytest.approx(0.4092, abs=1e-4)


def test_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    services = [0.1, 0.3]
    wait = waiting(1, 3.0, services, 1.0)
    exact = 3.0 * (0.01 + 0.09) / 2 / (2 * (1 - 0.6))
    assert wait.probability * wait.mean_s == pytest.approx(exact)


def test_too_much_load_waits_for_ever_and_none_not_at_all() -> None:
    assert math.isinf(waiting(2, 10.0, [1.0], 1.0).mean_s)
    assert waiting(2, 10.0, [1.0], 1.0).exceeds(1e9) == 1.0
    assert waiting(2, 10.0, [0.0], 1.0).exceeds(0.0) == 0.0


@pytest.mark.parametrize("servers", [1, 4])
def test_the_wait_is_near_that_of_a_played_queue(servers: int) -> None:
    rng, services = random.Random(1), [0.2, 0.5, 0.6, 2.0]
    rate = 0.75 * servers / (sum(services) / 4)
    now, free, waits = 0.0, [0.0] * servers, list[float]()
    for _ in range(60_000):
        now += rng.expovariate(rate)
        begins = max(now, heapq.heappop(free))
        waits.append(begins - now)
        heapq.heappush(free, begins + rng.choice(services))
    wait = waiting(servers, rate, services, 1.0)
    assert wait.probability * wait.mean_s == pytest.approx(sum(waits) / len(waits), rel=0.15)
    late = quantile_of(wait.exceeds, 0.95, 0.1)
    assert late == pytest.approx(sorted(waits)[int(0.95 * len(waits))], rel=0.2)


def test_a_quantile_is_where_the_share_is_left() -> None:
    wait = QueueWait(1.0, 2.0)
    assert quantile_of(wait.exceeds, 0.99, 1.0) == pytest.approx(2 * math.log(100), rel=1e-3)
    assert math.isinf(quantile_of(lambda _: 1.0, 0.99, 1.0))


def test_a_skewed_value_has_the_tail_of_a_gamma() -> None:
    rng = random.Random(2)
    # these have mean 1 and skewness sqrt(2)
    drawn = [rng.gammavariate(2.0, 0.5) for _ in range(100_000)]
    for limit in (0.5, 1.0, 2.5):
        share = sum(x > limit for x in drawn) / len(drawn)
        assert above(1.0, math.sqrt(0.5), limit, math.sqrt(2)) == pytest.approx(share, abs=0.01)
    assert above(1.0, 0.0, 0.9) == 1.0


def test_a_value_that_is_seldom_large_is_never_below_its_least() -> None:
    """One event in a thousand is large, which is a skewness of 30."""
    assert above(1.0, 0.1, 0.5, 30.0) == 1.0
    assert 0.0 < above(1.0, 0.1, 1.3, 30.0) < 0.05
