"""The lengths of requests are read from text, and a sample keeps their distribution."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.sizing.problem import SizingProblem
from pdmesh.core.sizing.traffic import NUM_SAMPLES, spread, traffic_of


def test_a_number_a_range_and_a_lognormal_are_sampled() -> None:
    assert set(spread("prompt", "800")) == {800}
    uniform = spread("prompt", "100-900")
    assert (min(uniform), max(uniform)) == (102, 898)
    assert sum(uniform) / len(uniform) == pytest.approx(500, rel=0.01)


@given(st.integers(50, 5000), st.floats(1.5, 10))
def test_a_lognormal_has_its_mean_and_its_p99(middle: int, ratio: float) -> None:
    high = round(middle * ratio)
    drawn = spread("prompt", f"mean={middle},p99={high}")
    assert sum(drawn) / NUM_SAMPLES == pytest.approx(middle, rel=0.03)
    assert drawn[int(0.99 * NUM_SAMPLES)] == pytest.approx(high, rel=0.2)


def test_the_cached_part_is_whole_blocks_and_leaves_a_token_to_compute() -> None:
    traffic = traffic_of(1.0, "64-2000", "1-9", 0.999)
    assert all(r.num_cached % 64 == 0 and r.num_new >= 1 for r in traffic.requests)
    assert 0.9 < traffic_of(1.0, "20000", "5", 0.95).cached_share <= 0.95


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("many", "is not a number of tokens"),
        ("0", "must be 1 to"),
        ("9-1", "less than the first"),
        ("mean=5", "is not mean=N,p99=M"),
        ("mean=500,p99=400", "p99 must be more than the mean"),
        ("mean=10,p99=9000", "p99 must be more than the mean"),
        ("99999999999", "must be 1 to"),
    ],
)
def test_wrong_lengths_are_refused_by_the_field(text: str, told: str) -> None:
    with pytest.raises(SizingProblem, match=told) as refused:
        spread("answer", text)
    assert refused.value.field == "answer"
