"""Means, rates and the terms of Phi for each scenario, bounded in number.

Phi is the throughput per instance that a ratio of prefills to decodes can carry.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pdmesh.core.model import Role
from pdmesh.core.placement.fleet import Fleet, InstanceRecorded
from pdmesh.core.placement.instance import Identity
from pdmesh.core.ratio.scenario_stats import (
    MAX_SCENARIOS,
    RequestSample,
    RoleSlots,
    Scenarios,
    slots_by_role,
)

REQUEST = RequestSample("chat", 1000, 250, 11, queue_s=0.5, ttft_s=0.7, e2e_s=1.8, transfer_s=0.1)


def fleet() -> Fleet:
    found = Fleet()
    for name, role, scenario, slots in (
        ("p0", Role.PREFILL, "chat", 2),
        ("p1", Role.PREFILL, "chat", 2),
        ("p2", Role.PREFILL, "code", 99),
        ("d0", Role.DECODE, "chat", 22),
    ):
        identity = Identity(name, 1, role, "g", scenario, "m", "f", 64, slots, 100, 4096)
        found.handle(InstanceRecorded(identity), 0.0)
    return found


@pytest.mark.req("S2", "S138")
def test_the_terms_of_phi_are_those_of_the_formula() -> None:
    scenarios = Scenarios()
    for i in range(60):
        scenarios.handle(REQUEST, now=i * 0.5)
    ((_, stats),) = scenarios.items()
    assert (stats.t_p, stats.t_d, stats.xi, stats.tpot) == pytest.approx((0.2, 1.1, 0.1, 0.1))
    assert (stats.hit_share, stats.t_p_share) == pytest.approx((0.25, 0.2 / 1.3))
    phi = scenarios.phi("chat", fleet().instances.values(), now=30.0)
    assert (phi.prefill, phi.decode) == pytest.approx((4 / 0.2, 22 / 1.1))
    assert phi.arriving == pytest.approx(2.0)
    assert phi.value == pytest.approx(2.0 / 3)
    assert phi.bottleneck == "arrivals"


@pytest.mark.req("S2")
def test_a_request_that_waits_for_a_decode_slows_no_decode() -> None:
    """Twenty requests ask for two decode slots. The 19 s that a request waits must not lower the
    capacity of a slot.
    """
    scenarios = Scenarios()
    scenarios.handle(replace(REQUEST, decode_queue_s=19.0, e2e_s=20.8), now=0.0)
    ((_, stats),) = scenarios.items()
    assert (stats.t_d, stats.tpot, stats.decode_queue) == pytest.approx((1.1, 0.1, 19.0))
    assert stats.queue + stats.t_p + stats.decode_queue + stats.t_d == pytest.approx(20.8)


@pytest.mark.req("S2")
def test_refused_requests_count_as_arrivals() -> None:
    """The formula's I_t is the rate of arrivals. Under overload, the instances bound Phi, and not
    the number of answered requests.
    """
    scenarios = Scenarios()
    scenarios.unanswered("chat", now=0.0)
    assert not scenarios.items(), "a name that no instance serves is not a scenario"
    for i in range(60):
        scenarios.handle(REQUEST, now=i * 0.5)
        for _ in range(49):
            scenarios.unanswered("chat", now=i * 0.5)
    phi = scenarios.phi("chat", fleet().instances.values(), now=30.0)
    assert phi.arriving == pytest.approx(100.0)
    assert phi.bottleneck in ("prefill", "decode")
    assert phi.value == pytest.approx(20.0 / 3)


def test_slots_are_those_of_usable_instances_of_the_scenario() -> None:
    found = slots_by_role("chat", fleet().instances.values())
    assert found == {Role.PREFILL: RoleSlots(2, 4), Role.DECODE: RoleSlots(1, 22)}


@pytest.mark.req("S4")
def test_the_numbers_of_one_scenario_do_not_affect_another() -> None:
    scenarios = Scenarios()
    scenarios.handle(REQUEST, 0.0)
    for _ in range(50):
        scenarios.handle(replace(REQUEST, scenario="code", ttft_s=5.0, e2e_s=9.0), 0.0)
    stats = dict(scenarios.items())
    assert stats["chat"].t_p == pytest.approx(0.2)
    assert stats["code"].t_p == pytest.approx(4.5)


def test_a_change_is_detected_within_a_few_dozen_requests() -> None:
    scenarios = Scenarios()
    for ttft_s in [0.7] * 500 + [1.5] * 60:
        scenarios.handle(replace(REQUEST, ttft_s=ttft_s, e2e_s=3.0), 0.0)
    assert dict(scenarios.items())["chat"].t_p == pytest.approx(1.0, rel=0.06)


def test_a_scenario_without_requests_has_no_known_bound_and_the_number_is_bounded() -> None:
    scenarios = Scenarios()
    phi = scenarios.phi("code", fleet().instances.values(), now=0.0)
    assert (phi.prefill, phi.decode, phi.value) == (math.inf, math.inf, 0.0)
    for i in range(MAX_SCENARIOS + 20):
        scenarios.handle(replace(REQUEST, scenario=f"s{i}"), 0.0)
    assert len(scenarios) == MAX_SCENARIOS
    assert "s0" not in dict(scenarios.items())
