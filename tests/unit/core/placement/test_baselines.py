"""Baseline policies, with which the default policy is compared."""

from __future__ import annotations

import pytest

from tests.support.placements import QUERY, load, make, pair, planned


@pytest.mark.req("S7")
def test_round_robin_takes_instances_in_turn_and_least_connections_takes_the_idlest() -> None:
    placement = make(*pair(), policy="round_robin")
    firsts = [planned(placement, QUERY, prefill_0=10).prefills[0].instance_id for _ in range(4)]
    assert firsts == ["prefill-0", "prefill-1", "prefill-0", "prefill-1"]
    placement = make(*pair(), policy="least_connections")
    placement.fleet.handle(load("prefill-0", used=3), now=0.0)
    placement.fleet.handle(load("decode-1", used=3), now=0.0)
    plan = planned(placement, QUERY, prefill_0=10)
    assert (plan.prefills[0].instance_id, plan.decodes[0].instance_id) == ("prefill-1", "decode-0")
