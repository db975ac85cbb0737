"""The terms of Phi, read from a page of metrics, predict Phi for another split.

Phi is the throughput per instance that a ratio of prefills to decodes can carry.
"""

from __future__ import annotations

import pytest

from loadtests.placement.phi_mesh import exported, scenario_metrics, table
from pdmesh.core.ratio.throughput import Profile, Split

PAGE = """\
# TYPE pdmesh_scenario_t_p_seconds gauge
pdmesh_scenario_t_p_seconds{scenario="default"} 0.5
pdmesh_scenario_t_p_seconds{scenario="other"} 9.0
# TYPE pdmesh_scenario_t_d_seconds gauge
pdmesh_scenario_t_d_seconds{scenario="default"} 2.0
# TYPE pdmesh_scenario_instances_ratio gauge
pdmesh_scenario_instances_ratio{role="prefill",scenario="default"} 2.0
pdmesh_scenario_instances_ratio{role="decode",scenario="default"} 1.0
# TYPE pdmesh_scenario_slots_ratio gauge
pdmesh_scenario_slots_ratio{role="prefill",scenario="default"} 4.0
pdmesh_scenario_slots_ratio{role="decode",scenario="default"} 16.0
"""


@pytest.mark.req("S2")
def test_the_terms_of_one_scenario_are_read_and_predict_what_the_formula_predicts() -> None:
    terms = exported(PAGE)
    assert (terms.t_p, terms.t_d, terms.b_p, terms.b_d) == (0.5, 2.0, 2.0, 16.0)
    phi = Profile(terms.t_p, terms.b_p, terms.t_d, terms.b_d).phi(Split(3, 1))
    assert (phi.bottleneck, phi.value) == ("decode", 8.0 / 4)


def test_a_missing_term_is_an_error() -> None:
    assert scenario_metrics(PAGE, "nobody") == {}
    with pytest.raises(KeyError):
        exported(PAGE, "other")


def test_without_checks_the_table_is_its_heading() -> None:
    assert table([]).count("\n") == 1
