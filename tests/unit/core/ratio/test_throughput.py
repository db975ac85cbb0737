"""The performance model gives the paper's numbers.

Its best split of instances into roles is the best of all integer splits.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.sim.profile import profile
from pdmesh.core.instance.step_time_law import Law
from pdmesh.core.ratio.throughput import Profile, Split, splits
from pdmesh.engine.step_time_laws import MOCKER

# P/D-Serve 4.2: one prefill carries 0.6 of the unit, and one decode carries 0.7.
PAPER = Profile(t_p=1 / 0.6, b_p=1, t_d=1 / 0.7, b_d=1)


@pytest.mark.req("S2", "S61")
def test_more_of_one_role_alone_does_not_lift_the_other_roles_bound() -> None:
    assert PAPER.phi(Split(5, 1)).bottleneck == "decode"
    assert PAPER.phi(Split(5, 1)).value * 6 == pytest.approx(0.7)
    assert PAPER.phi(Split(1, 5)).bottleneck == "prefill"
    assert PAPER.phi(Split(1, 5)).value * 6 == pytest.approx(0.6)


@pytest.mark.req("S61")
def test_longer_outputs_slow_decode_and_leave_prefill_the_bottleneck_where_it_was() -> None:
    longer = Profile(PAPER.t_p, 1, 1.5 * PAPER.t_d, 1)
    assert longer.decode_per_s == pytest.approx(0.7 / 1.5)
    assert longer.phi(Split(1, 3)).bottleneck == "prefill"
    assert longer.best_split(9).num_decode > PAPER.best_split(9).num_decode


@pytest.mark.req("S2")
def test_the_arrival_rate_bounds_phi_and_an_empty_group_carries_nothing() -> None:
    phi = PAPER.phi(Split(2, 2), arriving=0.1)
    assert (phi.bottleneck, phi.value) == ("arrivals", pytest.approx(0.025))
    assert PAPER.phi(Split(0, 0)).value == 0.0


@pytest.mark.req("S30")
@given(
    t_p=st.floats(0.01, 100), t_d=st.floats(0.01, 100), total=st.integers(2, 40),
    b_p=st.integers(1, 64), b_d=st.integers(1, 512),
)  # fmt: skip
def test_the_chosen_split_carries_as_much_as_any(
    t_p: float, t_d: float, total: int, b_p: int, b_d: int
) -> None:
    profiled = Profile(t_p, b_p, t_d, b_d)
    best = profiled.best_split(total)
    assert best.total == total
    assert all(profiled.phi(best).value >= profiled.phi(s).value for s in splits(total))


def test_a_total_without_room_for_both_roles_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        PAPER.best_split(3, least=2)


@pytest.mark.req("S2")
def test_a_profile_is_what_the_law_says_of_full_batches() -> None:
    law = Law("linear", prefill_token_s=1e-3, step_fixed_s=0.01, step_sequence_s=0.001)
    got = profile(law, num_prompt=100, num_output=11, prefill_slots=2, decode_slots=10)
    assert (got.t_p, got.t_d) == (pytest.approx(0.2), pytest.approx(0.2))
    cached = profile(
        law, num_prompt=100, num_cached=75, num_output=11, prefill_slots=2, decode_slots=10
    )
    assert cached.t_p == pytest.approx(got.t_p / 4)
    with pytest.raises(ValueError, match="num_output"):
        profile(law, num_prompt=1, num_output=1, prefill_slots=1, decode_slots=1)


@pytest.mark.req("S61")
def test_the_share_of_prefill_falls_as_more_tokens_are_generated() -> None:
    shares = []
    for num_output in (20, 50, 200, 800):
        p = profile(
            MOCKER, num_prompt=2000, num_output=num_output, prefill_slots=4, decode_slots=64
        )
        shares.append(p.t_p / (p.t_p + p.t_d))
    assert shares == sorted(shares, reverse=True)
    assert all(math.isfinite(share) for share in shares)
