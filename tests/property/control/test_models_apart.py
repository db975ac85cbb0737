"""Plans and a gateway's own ranking send no request to an instance of another model.

All instances here have the same fingerprint, and several models may share a group or a scenario. So
only the model's name keeps them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.model import Role
from pdmesh.core.placement.instance import Identity
from pdmesh.core.placement.local_ranking import LocalInstance, LocalQuery, LocalRanking
from pdmesh.core.placement.plan import NoPlan, Plan
from pdmesh.core.placement.policies import Query
from tests.support.placements import identity, make

ROLES = (Role.PREFILL, Role.DECODE, Role.FUSION)
MODELS, SCENARIOS, GROUPS = ("a", "b", "c"), ("s", "t"), ("g", "h")
KINDS = st.tuples(
    st.sampled_from(ROLES),
    st.sampled_from(MODELS),
    st.sampled_from(SCENARIOS),
    st.sampled_from(GROUPS),
)
FLEETS = st.lists(KINDS, max_size=16)
ASKED = st.tuples(st.sampled_from((*MODELS, "d")), st.sampled_from(SCENARIOS))


def identities(kinds: Sequence[tuple[Role, str, str, str]]) -> list[Identity]:
    return [
        replace(identity(f"i{number}", role), model=model, scenario=scenario, group_id=group)
        for number, (role, model, scenario, group) in enumerate(kinds)
    ]


@given(FLEETS, ASKED, st.sets(st.integers(0, 15), max_size=6))
def test_a_plan_names_only_instances_of_its_model(
    kinds: list[tuple[Role, str, str, str]], asked: tuple[str, str], excluded: set[int]
) -> None:
    model, scenario = asked
    fleet = identities(kinds)
    placement = make(*fleet)
    out = frozenset(f"i{number}" for number in excluded)
    query = Query(model=model, scenario=scenario, num_prompt_tokens=64, excluded=out)
    able = {
        i.instance_id for i in fleet if (i.model, i.scenario) == asked and i.instance_id not in out
    }
    for turn in range(3):  # later plans use data that the first one cached
        plan = placement.plan(query, {}, float(turn))
        if isinstance(plan, NoPlan):
            assert not able
        else:
            assert {c.instance_id for c in (*plan.prefills, *plan.decodes)} <= able


@given(FLEETS, ASKED, ASKED)
def test_plans_for_two_models_share_nothing(
    kinds: list[tuple[Role, str, str, str]], first: tuple[str, str], second: tuple[str, str]
) -> None:
    placement = make(*identities(kinds))

    def named(asked: tuple[str, str]) -> set[str]:
        plan = placement.plan(Query(model=asked[0], scenario=asked[1]), {}, 0.0)
        if not isinstance(plan, Plan):
            return set()
        return {c.instance_id for c in (*plan.prefills, *plan.decodes)}

    shared = named(first) & named(second)
    assert not shared or first == second


@given(FLEETS, ASKED)
def test_a_gateways_own_ranking_names_only_instances_of_the_model(
    kinds: list[tuple[Role, str, str, str]], asked: tuple[str, str]
) -> None:
    fleet = identities(kinds)
    ranking = LocalRanking()
    ranking.see(
        LocalInstance(
            i.instance_id, 1, i.role, i.model, i.scenario, i.group_id, f"{i.group_id}/f", ""
        )
        for i in fleet
    )
    plan = ranking.rank(LocalQuery(*asked), lambda name, incarnation: 0)
    named = [*plan.prefills, *plan.decodes]
    assert {(i.model, i.scenario) for i in named} <= {asked}
    assert bool(named) == any((i.model, i.scenario) == asked for i in fleet)
