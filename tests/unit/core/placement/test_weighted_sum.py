"""The baseline policy of the paper's formula (2): a weighted sum of prefix, latency and load."""

from __future__ import annotations

import pytest

from pdmesh.core.kv.prefix.prefix_index import PeerRuns
from pdmesh.core.placement.plan import Plan
from pdmesh.core.placement.policies import Weights
from tests.support.placements import QUERY, load, make, pair


@pytest.mark.req("S107")
def test_the_score_is_formula_2_with_the_wait_and_the_load() -> None:
    """A computed token takes 1 ms by the predictor, and prefill-0 must wait 320 ms more."""
    placement = make(*pair(fetches_from_peers=True), policy="weighted_sum")
    fit = placement.fleet.predictor.fit("f/prefill")
    for num_tokens in range(64, 4096, 64):
        num_reused = num_tokens * (num_tokens // 64 % 5) // 5
        fit.observe(num_tokens, num_reused, (num_tokens - num_reused) * 1e-3)
    placement.weights = Weights(alpha=2.0, beta=0.5, gamma=3.0, load=1.0)
    placement.fleet.handle(load("prefill-0", used=2), now=0.0)
    placement.fleet.instances["prefill-0"].available_at = 0.32
    plan = placement.plan(QUERY, {"prefill-0": 6}, 0.0, PeerRuns(((0, 8),)))
    assert isinstance(plan, Plan)
    scores = {c.instance_id: c.score for c in plan.prefills}
    worst = 0.32 + 0.128
    holder = 2.0 * 0.6 + 0.5 * 0.2 - 3.0 * (0.32 + 0.128) / worst - 1.0 * 0.25
    other = 0.5 * 0.8 - 3.0 * 0.128 / worst
    assert scores == pytest.approx({"prefill-0": holder, "prefill-1": other}, abs=0.02)


@pytest.mark.req("S107")
def test_the_remote_term_favours_no_instance_that_has_the_prefix_already() -> None:
    placement = make(*pair(fetches_from_peers=True), policy="weighted_sum")
    plan = placement.plan(QUERY, {"prefill-1": 10}, 0.0, PeerRuns(((0, 10),)))
    assert isinstance(plan, Plan)
    assert plan.prefills[0].instance_id == "prefill-1"
    first, second = (c.score for c in plan.prefills)
    assert first - second == pytest.approx(0.5)  # alpha - beta, because both have the same latency
