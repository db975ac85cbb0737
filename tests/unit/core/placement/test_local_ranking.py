"""Tests how a gateway without a master ranks instances (S42).

The ranking uses regions, the gateway's own open legs, and an order that differs between gateways.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.core.model import Role
from pdmesh.core.placement.local_ranking import (
    MOST_RANKED,
    LocalInstance,
    LocalPlan,
    LocalQuery,
    LocalRanking,
)

pytestmark = pytest.mark.req("S42")

_NUM_EACH = 5
_EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 2 * _NUM_EACH - 1)), max_size=60)
_QUERY = LocalQuery("m")


def instance(
    name: str, *, pair: str = "g/f", scenario: str = "", region: str = "", group: str = "g"
) -> LocalInstance:
    """An instance, whose role is given by the first letter of its name."""
    role = {"p": Role.PREFILL, "d": Role.DECODE, "f": Role.FUSION}[name[0]]
    return LocalInstance(name, 1, role, "m", scenario, group, pair, region)


def ranking(*names: str, gateway_id: str = "") -> LocalRanking:
    made = LocalRanking(gateway_id=gateway_id)
    made.see(map(instance, names or [f"{r}-{i}" for r in "pd" for i in range(_NUM_EACH)]))
    return made


def named(plan: LocalPlan) -> str:
    text = " ".join(i.id for i in (*plan.prefills, *plan.decodes))
    return text + " colocated" * plan.is_colocated


def none_open(name: str, incarnation: int) -> int:
    return 0


@given(_EVENTS)
def test_instances_with_the_fewest_open_legs_come_first(
    events: list[tuple[bool, int]],
) -> None:
    ranked_by, num_open = ranking(), Counter[str]()
    names = [f"{role}-{i}" for role in "pd" for i in range(_NUM_EACH)]
    for is_opened, index in events:
        num_open[names[index]] += 1 if is_opened else -min(1, num_open[names[index]])
        plan = ranked_by.rank(_QUERY, lambda name, _: num_open[name])
        for role, found in zip("pd", (plan.prefills, plan.decodes), strict=True):
            ranked = [i.id for i in found]
            assert sorted(ranked) == [name for name in names if name.startswith(role)]
            assert ranked == sorted(ranked, key=lambda name: (num_open[name], name))


def test_gateways_without_a_master_begin_with_different_instances() -> None:
    """Each gateway has its own fixed order. So among two hundred gateways, each prefill is the
    first for some.
    """
    firsts = Counter[str]()
    for number in range(200):
        gateway = ranking(gateway_id=f"gateway-{number}")
        plan = gateway.rank(_QUERY, none_open)
        assert plan == gateway.rank(_QUERY, none_open)
        firsts[plan.prefills[0].id] += 1
    assert len(firsts) == _NUM_EACH
    assert max(firsts.values()) < 2 * 200 / _NUM_EACH


@pytest.mark.req("S4")
@pytest.mark.parametrize(
    ("scenario", "expected"), [("", "p-any p-plain"), ("chat", "p-any p-chat"), ("x", "p-any")]
)
def test_a_request_stays_in_its_scenario(scenario: str, expected: str) -> None:
    """A request without a scenario belongs to `default`, and gets no instances of other
    scenarios.
    """
    made = LocalRanking()
    serves = {"any": "", "chat": "chat", "plain": "default"}
    made.see(instance(f"{r}-{name}", scenario=s) for r in "pd" for name, s in serves.items())
    plan = made.rank(LocalQuery("m", scenario), none_open)
    assert named(plan) == f"{expected} {expected.replace('p-', 'd-')}"
    assert made.rank(LocalQuery("other", scenario), none_open) == LocalPlan()


@pytest.mark.req("S58")
def test_the_region_of_the_gateway_comes_first_however_busy_it_is() -> None:
    made = LocalRanking(region="us")
    made.see(instance(f"{r}-{where}", region=where) for r in "pd" for where in ("eu", "us"))
    plan = made.rank(_QUERY, lambda name, _: 5 * name.endswith("us"))
    assert named(plan) == "p-us p-eu d-us d-eu"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("p-0 d-0", "p-0 d-0"),
        # one instance that does both phases is enough, so the fusion instance comes first
        ("p-0 f-0", "f-0 p-0"),
        ("p-0 p-1", "p-0 p-1 colocated"),
        ("d-0", "d-0 colocated"),
    ],
)
def test_without_a_pair_one_role_does_both_phases(names: str, expected: str) -> None:
    assert named(ranking(*names.split()).rank(_QUERY, none_open)) == expected


def test_instances_of_different_pairs_are_not_combined() -> None:
    made = LocalRanking()
    made.see([instance("p-0"), instance("d-0", pair="g/other")])
    assert named(made.rank(_QUERY, none_open)) == "p-0 colocated"


@pytest.mark.parametrize(
    ("excluded", "avoided", "expected"),
    [
        ("p-0", "", "p-1 d-0 d-1"),
        ("", "p-0 d-1", "p-1 d-0"),
        # decodes do both phases, so that no avoided instance is needed
        ("", "p-0 p-1", "d-0 d-1 colocated"),
        ("", "p-0 p-1 d-0 d-1", "p-0 p-1 d-0 d-1"),
        ("p-0 d-0", "p-1 d-1", "p-1 d-1"),
        ("p-0 p-1 d-0 d-1", "", ""),
    ],
)
def test_avoided_instances_come_in_only_if_no_others_can_serve(
    excluded: str, avoided: str, expected: str
) -> None:
    query = LocalQuery("m", excluded=excluded.split(), avoided=avoided.split())
    assert named(ranking("p-0", "p-1", "d-0", "d-1").rank(query, none_open)) == expected


@pytest.mark.req("S24")
@pytest.mark.parametrize(
    ("is_its_turn", "excluded", "expected"),
    [
        (True, (), "p-c d-c"),
        (False, (), "p-g d-g"),
        # the canary gets more than its share, because no other group can serve
        (False, ("p-g", "d-g"), "p-c d-c"),
        (True, ("d-c",), "p-c p-g d-g"),  # the canary lacks a role, so any group serves
    ],
)
def test_a_canary_gets_its_share_and_requests_that_no_other_group_can_serve(
    is_its_turn: bool, excluded: tuple[str, ...], expected: str
) -> None:
    made = LocalRanking()
    made.see(instance(f"{r}-{g}", pair=g, group=g) for r in "pd" for g in ("c", "g"))
    query = LocalQuery("m", excluded=excluded, canary=("c", is_its_turn))
    assert named(made.rank(query, none_open)) == expected


def test_instances_with_the_adapter_come_first_and_those_without_slots_are_left_out() -> None:
    made = LocalRanking()
    slots = {"p-0": None, "p-1": (), "p-2": ("a",), "d-0": ("a", "b"), "d-1": ("b",), "d-2": None}
    made.see(
        replace(instance(name), takes_adapters=held is not None, adapters=frozenset(held or ()))
        for name, held in slots.items()
    )
    query = LocalQuery("m", adapter="a")
    busy = Counter({"p-2": 3, "d-0": 3})
    assert named(made.rank(query, lambda name, _: busy[name])) == "p-2 p-1 d-0 d-1"
    assert named(made.rank(LocalQuery("m"), none_open)) == "p-0 p-1 p-2 d-0 d-1 d-2"
    assert named(made.rank(LocalQuery("m", excluded=("p-1", "p-2"), adapter="a"), none_open)) == (
        "d-0 d-1 colocated"
    )


@pytest.mark.req("S128")
def test_images_go_to_instances_that_take_them() -> None:
    made = LocalRanking()
    takes = {"p-0": False, "p-1": True, "d-0": False, "d-1": True}
    made.see(replace(instance(name), takes_images=it) for name, it in takes.items())
    assert named(made.rank(LocalQuery("m", has_images=True), none_open)) == "p-1 d-1"
    assert named(made.rank(LocalQuery("m"), none_open)) == "p-0 p-1 d-0 d-1"


_MANY = 500


def many(**more: object) -> list[LocalInstance]:
    return [replace(instance(f"{r}-{i}"), **more) for r in "pd" for i in range(_MANY)]  # type: ignore[arg-type]


def test_of_many_instances_the_least_used_of_random_ones_come_first() -> None:
    made, legs, firsts = LocalRanking(gateway_id="g"), Counter[str](), Counter[str]()
    made.see(many())
    for _ in range(2 * _MANY):
        plan = made.rank(_QUERY, lambda name, _: legs[name])
        assert len(plan.prefills) == len(plan.decodes) == MOST_RANKED
        for ranked in (plan.prefills, plan.decodes):
            assert [legs[i.id] for i in ranked] == sorted(legs[i.id] for i in ranked)
            legs[ranked[0].id] += 1
            firsts[ranked[0].id] += 1
    assert max(firsts.values()) <= 3  # two on average, so requests are spread nearly evenly
    assert len(firsts) >= 0.98 * 2 * _MANY


def test_excluded_and_avoided_ones_of_many_are_never_named_while_others_serve() -> None:
    made = LocalRanking()
    made.see(many())
    excluded = frozenset(f"{r}-{i}" for r in "pd" for i in range(0, _MANY, 3))
    avoided = frozenset(f"{r}-{i}" for r in "pd" for i in range(1, _MANY, 3))
    for _ in range(20):
        plan = made.rank(LocalQuery("m", excluded=excluded, avoided=avoided), none_open)
        names = {i.id for i in (*plan.prefills, *plan.decodes)}
        assert names
        assert not names & (excluded | avoided)


@pytest.mark.parametrize("is_avoided", [True, False])
def test_the_few_of_many_that_can_serve_are_found(is_avoided: bool) -> None:
    made = LocalRanking()
    made.see(many())
    others = frozenset(f"{r}-{i}" for r in "pd" for i in range(3, _MANY))
    query = LocalQuery("m", **{"avoided" if is_avoided else "excluded": others})  # type: ignore[arg-type]
    assert named(made.rank(query, none_open)) == "p-0 p-1 p-2 d-0 d-1 d-2"


def test_prefills_of_many_groups_have_a_decode_of_theirs_among_the_first() -> None:
    made = LocalRanking()
    made.see(
        instance(f"{r}-{g}-{i}", pair=f"g{g}/f", group=f"g{g}")
        for g in range(40)
        for r in "pd"
        for i in range(6)
    )
    for _ in range(50):
        plan = made.rank(_QUERY, none_open)
        pairs = {d.pair for d in plan.decodes[:8]}
        assert plan.prefills
        assert {p.pair for p in plan.prefills} <= pairs


@pytest.mark.req("S58")
def test_of_many_instances_those_of_the_region_come_first() -> None:
    made = LocalRanking(region="us")
    near = [replace(i, id=f"{i.id}-us", region="us") for i in many()[::50]]
    made.see([*many(region="eu"), *near])
    plan = made.rank(_QUERY, lambda name, _: 5 * name.endswith("us"))
    for ranked in (plan.prefills, plan.decodes):
        assert [i.region for i in ranked] == ["us"] * 10 + ["eu"] * (MOST_RANKED - 10)


def test_of_many_instances_those_with_the_adapter_come_first() -> None:
    made = LocalRanking()
    loaded = [
        replace(i, id=f"{i.id}-a", takes_adapters=True, adapters=frozenset("a"))
        for i in many()[::100]
    ]
    made.see([*many(takes_adapters=True), *loaded, *(instance(f"p-{i}-x") for i in range(99))])
    plan = made.rank(LocalQuery("m", adapter="a"), none_open)
    for ranked in (plan.prefills, plan.decodes):
        assert ["a" in i.adapters for i in ranked[:6]] == [True] * 5 + [False]
        assert all(i.takes_adapters for i in ranked)


@pytest.mark.req("S24")
@pytest.mark.parametrize(("is_its_turn", "group"), [(True, "c"), (False, "g")])
def test_of_many_instances_a_canary_gets_its_turn(is_its_turn: bool, group: str) -> None:
    made = LocalRanking()
    canary = [replace(i, id=f"{i.id}-c", group_id="c", pair="c/f") for i in many()[::50]]
    made.see([*many(), *canary])
    plan = made.rank(LocalQuery("m", canary=("c", is_its_turn)), none_open)
    assert {i.group_id for i in (*plan.prefills, *plan.decodes)} == {group}
