"""A mesh with 96 users on the virtual clock, without noise.

The real mesh of `make bench NAME=users` must show the same results with so many users (4A).
"""

from __future__ import annotations

import pytest

from loadtests.sim.users import UsersMesh
from loadtests.users.plan import (
    CAPACITY_PER_S,
    ON_DEMAND,
    QUEUES,
    Variant,
)
from loadtests.users.report import Point, point

USERS, SLO_S, WARM_S, DURATION_S = 96, 0.5, 6.0, 12.0


def play(variant: Variant, report_s: float | None = None) -> tuple[Point, float]:
    """The result, and by how many seconds the estimates of TTFT were wrong."""
    mesh = UsersMesh(
        variant, USERS, slo_s=SLO_S, think_s=1.0, until=WARM_S + DURATION_S, report_s=report_s
    )
    answers = mesh.answers(since=WARM_S)
    mesh.fleet.check_invariants()
    for worker in mesh.workers.values():
        worker.admission.check_invariants()
    found = point(variant.name, USERS, answers, SLO_S, DURATION_S)
    return found, mesh.estimate_error_s(since=WARM_S)


@pytest.mark.req("S45", "S62")
def test_on_demand_keeps_the_slo_of_99_percent_and_accepts_what_formula_2_says() -> None:
    found, _ = play(ON_DEMAND)
    assert found.success_percent >= 99
    assert found.accepted_per_s == pytest.approx(CAPACITY_PER_S, rel=0.10)


@pytest.mark.req("S7", "S62")
def test_queues_lose_a_third_if_reports_are_100_ms_old_and_almost_nothing_if_they_are_fresh() -> (
    None
):
    """Only the age of the reports differs. All requests between two reports are sent to the prefill
    whose queue was the shortest in the first report.
    """
    old, old_error_s = play(QUEUES)
    fresh, fresh_error_s = play(QUEUES, report_s=0.0)
    assert old.success_percent < 70
    assert fresh.success_percent > 90
    assert fresh_error_s < old_error_s / 3


@pytest.mark.req("S7")
def test_bookings_predict_ttft_better_than_queue_reports_that_are_100_ms_old() -> None:
    _, ours_s = play(ON_DEMAND)
    _, queues_s = play(QUEUES)
    assert ours_s < queues_s / 5
