"""The histogram of the load tests, and the slope of the memory check."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from loadtests.gateway.memory import least_squares_slope
from loadtests.harness.histogram import Histogram


def filled(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


def test_a_quantile_is_right_to_one_percent_over_six_decades() -> None:
    rng = random.Random(7)
    values = sorted(10 ** rng.uniform(-5, 1) for _ in range(20_000))
    histogram = filled(values)
    for q in (0.01, 0.5, 0.9, 0.99):
        assert histogram.quantile(q) == pytest.approx(values[int(q * len(values)) - 1], rel=0.01)
    assert histogram.mean() == pytest.approx(statistics.fmean(values), rel=0.01)


@pytest.mark.parametrize("seconds", [1e-5, 0.3, 0.997, 1.003, 2.5, 90.0])
def test_a_duration_is_right_to_half_a_percent_on_both_sides_of_a_second(seconds: float) -> None:
    assert filled([seconds]).quantile(0.5) == pytest.approx(seconds, rel=0.005)


def test_an_empty_histogram_has_no_quantile_and_no_share() -> None:
    assert math.isnan(Histogram().quantile(0.5))
    assert Histogram().share_between(0.0, 1.0) == 0.0


def test_merging_two_histograms_is_recording_all_their_values_in_one() -> None:
    one, other = filled([0.001, 0.002, 0.5]), filled([0.04, 0.041])
    one.merge(Histogram.from_json(other.to_json()))
    assert one == filled([0.001, 0.002, 0.5, 0.04, 0.041])


def test_stalls_of_forty_milliseconds_are_counted_and_their_neighbours_are_not() -> None:
    histogram = filled([0.001] * 96 + [0.030, 0.040, 0.044, 0.070])
    assert histogram.share_between(0.035, 0.060) == pytest.approx(0.02)


def test_the_slope_of_a_line_is_found_through_noise() -> None:
    rng = random.Random(3)
    x = list(range(0, 100_000, 5_000))
    y = [1e8 + 12.0 * a + rng.uniform(-1e4, 1e4) for a in x]
    assert least_squares_slope(x, y) == pytest.approx(12.0, abs=1.0)
