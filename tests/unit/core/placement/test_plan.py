"""Placement filters instances, scores them and picks some.

A booking is planned work that placement counts until load reports include it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from pdmesh.core.health.liveness import Health
from pdmesh.core.kv.transfer.source_exclusions import ExcludedSource, KvSource, SourceFault
from pdmesh.core.model import Role
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.fleet import (
    HealthJudged,
    InstanceUnrecorded,
)
from pdmesh.core.placement.instance import Identity
from pdmesh.core.placement.plan import NoPlan, Placement, Plan
from pdmesh.core.placement.policies import Query
from tests.support.placements import QUERY, identity, load, make, pair, planned


@pytest.mark.req("S13")
def test_prefill_and_decode_are_of_one_group_and_one_fingerprint() -> None:
    others = [
        identity("prefill-a", Role.PREFILL, group_id="g1"),
        identity("decode-a", Role.DECODE, group_id="g1"),
        identity("prefill-b", Role.PREFILL, model_fingerprint="f2"),
        identity("decode-b", Role.DECODE, model_fingerprint="f2"),
        identity("prefill-lonely", Role.PREFILL, group_id="g2"),
    ]
    placement = make(*pair(), *others)
    seen = set()
    for i in range(50):
        plan = planned(placement, QUERY, now=float(i * 10))
        ids = [c.instance_id for c in (*plan.prefills, *plan.decodes)]
        members = [placement.fleet.instances[name].identity for name in ids]
        assert len({m.cell for m in members}) == 1
        assert plan.decodes
        seen.add((members[0].group_id, members[0].model_fingerprint))
    assert seen == {("g0", "f"), ("g0", "f2"), ("g1", "f")}


@pytest.mark.req("S72")
def test_a_fusion_instance_needs_no_decode_and_stands_alone() -> None:
    placement = make(*pair(), identity("fusion-0", Role.FUSION))
    plan = planned(placement, QUERY, fusion_0=10)
    assert [c.instance_id for c in plan.prefills] == ["fusion-0"]
    assert plan.decodes == ()


@pytest.mark.req("S37", "S72")
@pytest.mark.parametrize(
    ("gone", "left"),
    [(Role.DECODE, "prefill"), (Role.PREFILL, "decode")],
    ids=["decodes", "prefills"],
)
def test_when_one_role_is_gone_the_other_does_both_phases_until_it_is_back(
    gone: Role, left: str
) -> None:
    placement = make(*pair())
    for i in (0, 1):
        placement.fleet.handle(HealthJudged(f"{gone.value}-{i}", 1, Health.DEAD), 0.0)
    plan = planned(placement, QUERY)
    assert {c.instance_id for c in plan.prefills} == {f"{left}-0", f"{left}-1"}
    assert all(c.is_local for c in plan.prefills)
    assert plan.decodes == ()
    placement.fleet.handle(HealthJudged(f"{gone.value}-1", 1, Health.HEALTHY), 0.0)
    plan = planned(placement, QUERY)
    assert plan.decodes
    assert not any(c.is_local for c in plan.prefills)


def test_a_whole_group_goes_before_one_that_lost_a_role() -> None:
    lonely = identity("prefill-9", Role.PREFILL, group_id="g9")
    placement = make(*pair(), lonely)
    plan = planned(placement, QUERY, prefill_9=10)
    assert plan.group_id == "g0"
    query = Query(model="m", excluded=frozenset(i.instance_id for i in pair()))
    assert [(c.instance_id, c.is_local) for c in planned(placement, query).prefills] == [
        ("prefill-9", True)
    ]


def test_an_instance_that_does_both_phases_must_have_room_for_the_answer_too() -> None:
    small = identity("prefill-0", Role.PREFILL, num_kv_blocks=10)
    plan = make(small).plan(QUERY, {}, now=0.0)
    assert isinstance(plan, NoPlan)
    assert plan.reason == "NO_INSTANCE"
    assert planned(make(small), Query(model="m", num_prompt_tokens=500, max_tokens=64)).prefills


def test_instances_that_failed_this_request_are_left_out() -> None:
    placement = make(*pair())
    query = Query(model="m", excluded=frozenset({"prefill-0", "decode-1"}))
    plan = planned(placement, query)
    assert [c.instance_id for c in plan.prefills] == ["prefill-1"]
    assert [c.instance_id for c in plan.decodes] == ["decode-0"]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (Query(model="other"), "MODEL_NOT_FOUND"),
        (Query(model="other", scenario="other"), "MODEL_NOT_FOUND"),
        (Query(model="m", scenario="other"), "SCENARIO_NOT_FOUND"),
        (Query(model="m", num_prompt_tokens=8192), "PROMPT_TOO_LONG"),
        (Query(model="m", excluded=frozenset(i.instance_id for i in pair())), "NO_INSTANCE"),
    ],
)
def test_there_is_a_reason_when_nothing_can_be_ranked(query: Query, reason: str) -> None:
    plan = make(*pair()).plan(query, {}, now=0.0)
    assert isinstance(plan, NoPlan)
    assert plan.reason == reason


def test_the_default_model_is_whatever_the_scenario_serves() -> None:
    for model in ("", "default", "m"):
        planned(make(*pair()), Query(model=model))


def held(fault: SourceFault, *sources: str) -> tuple[ExcludedSource, ...]:
    return tuple(ExcludedSource(KvSource(source, 1), fault) for source in sources)


def excluding(*others: Identity, **held_by: tuple[ExcludedSource, ...]) -> Placement:
    return make(
        *(
            replace(each, excluded_sources=held_by.get(each.instance_id.replace("-", "_"), ()))
            for each in pair()
        ),
        *others,
    )


@pytest.mark.fault("F23", "F34")
def test_a_pair_with_an_exclusion_is_not_planned_but_both_serve_in_other_pairs() -> None:
    for fault in SourceFault:
        placement = excluding(decode_0=held(fault, "prefill-0"))
        for seed in range(20):
            placement.rng.seed(seed)
            plan = planned(placement, QUERY)
            assert {c.instance_id for c in plan.prefills} == {"prefill-0", "prefill-1"}
            if plan.prefills[0].instance_id == "prefill-0":
                assert [c.instance_id for c in plan.decodes] == ["decode-1", "decode-0"]


@pytest.mark.fault("F34")
def test_a_prefill_ejected_by_every_decode_is_no_candidate_and_an_avoided_one_is_the_last() -> None:
    refused = held(SourceFault.CORRUPT, "prefill-0")
    plan = planned(excluding(decode_0=refused, decode_1=refused), QUERY, prefill_0=10)
    assert [c.instance_id for c in plan.prefills] == ["prefill-1"]
    avoided = held(SourceFault.UNREACHABLE, "prefill-0")
    plan = planned(excluding(decode_0=avoided, decode_1=avoided), QUERY, prefill_0=10)
    assert [c.instance_id for c in plan.prefills] == ["prefill-1", "prefill-0"]


@pytest.mark.fault("F23", "F24", "F34")
def test_if_no_pair_can_exchange_kv_each_request_stays_on_one_instance() -> None:
    """If the links of all pairs are slow or cut, each instance does both phases. A prefill whose KV
    was corrupt at all decodes gets no work.
    """
    avoided = held(SourceFault.UNREACHABLE, "prefill-0", "prefill-1")
    plan = planned(excluding(decode_0=avoided, decode_1=avoided), QUERY)
    assert sorted(c.instance_id for c in plan.prefills) == [
        "decode-0", "decode-1", "prefill-0", "prefill-1",
    ]  # fmt: skip
    assert all(c.is_local for c in plan.prefills)
    assert not plan.decodes
    refused = held(SourceFault.CORRUPT, "prefill-0", "prefill-1")
    plan = planned(excluding(decode_0=refused, decode_1=refused), QUERY)
    assert sorted(c.instance_id for c in plan.prefills) == ["decode-0", "decode-1"]
    lonely = identity("prefill-9", Role.PREFILL, group_id="g9")
    placement = excluding(lonely, decode_0=avoided, decode_1=avoided)
    groups = set()
    for seed in range(40):
        placement.rng.seed(seed)
        groups.add(planned(placement, QUERY).group_id)
    assert groups == {"g0", "g9"}, "a group that lost a role does not get all the work"
    one_link = planned(excluding(decode_0=avoided), QUERY)
    assert one_link.decodes[0].instance_id == "decode-1", "a pair is left"
    assert not any(c.is_local for c in one_link.prefills)


@pytest.mark.req("S4")
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_request_of_one_scenario_is_planned_on_a_group_of_another(policy: str) -> None:
    """Six scenarios of two services have two groups each. Prompts share prefixes with other
    scenarios, and one group is full.
    """
    names = [f"{service}-{n}" for service in ("assistant", "coder") for n in range(3)]
    members = [
        identity(f"{name}-{group}-{role.value}", role, scenario=name, group_id=f"{name}-{group}")
        for name in names
        for group in (0, 1)
        for role in (Role.PREFILL, Role.DECODE)
    ]
    placement, rng = make(*members, policy=policy), random.Random(4)
    placement.fleet.handle(load("coder-0-0-prefill", used=8), 0.0)
    for number in range(10_000 // len(POLICIES)):
        scenario = rng.choice(names)
        query = replace(QUERY, scenario=scenario, request_id=f"r{number}")
        matches = {f"{rng.choice(names)}-0-prefill": 10}
        plan = placement.plan(query, matches, now=number * 0.01)
        assert isinstance(plan, Plan)
        chosen = [plan.group_id, *(c.instance_id for c in (*plan.prefills, *plan.decodes))]
        assert all(each.startswith(f"{scenario}-") for each in chosen)


@pytest.mark.req("S24")
def test_instances_of_different_revisions_never_serve_a_request_together() -> None:
    prefill = identity("p", Role.PREFILL, revision="1")
    other = identity("d", Role.DECODE, revision="2")
    alone = planned(make(prefill, other), QUERY)
    assert [c.is_local for c in alone.prefills] == [True]
    assert alone.decodes == ()
    same = identity("e", Role.DECODE, revision="1")
    assert [c.instance_id for c in planned(make(prefill, other, same), QUERY).decodes] == ["e"]


@pytest.mark.req("S24")
def test_a_canary_gets_its_share_of_the_requests_and_all_of_them_only_if_it_is_alone() -> None:
    canary = [
        identity("cp", Role.PREFILL, group_id="canary-default", revision="2"),
        identity("cd", Role.DECODE, group_id="canary-default", revision="2"),
    ]
    placement = make(*pair(), *canary)
    placement.shares = {"canary-default": 0.1}
    groups = Counter(planned(placement, QUERY).group_id for _ in range(1000))
    assert 60 < groups["canary-default"] < 140
    for each in pair():
        placement.fleet.handle(InstanceUnrecorded(each.instance_id), 0.0)
    assert planned(placement, QUERY).group_id == "canary-default"


def taking(*loaded: str, **changes: object) -> dict[str, object]:
    return {"takes_adapters": True, "adapters": frozenset(loaded), **changes}


def test_a_request_for_an_adapter_goes_to_instances_that_take_adapters() -> None:
    able = [
        identity("prefill-9", Role.PREFILL, **taking()),
        identity("decode-9", Role.DECODE, **taking()),
    ]
    placement = make(*pair(), *able)
    plan = planned(placement, replace(QUERY, adapter="a"))
    assert [c.instance_id for c in plan.prefills] == ["prefill-9"]
    assert [c.instance_id for c in plan.decodes] == ["decode-9"]
    assert len(planned(placement, QUERY).prefills) == 3
    nothing = make(*pair()).plan(replace(QUERY, adapter="a"), {}, 0.0)
    assert isinstance(nothing, NoPlan)
    assert (nothing.reason, "ENABLE_LORA" in nothing.message) == ("NO_INSTANCE", True)


def test_instances_that_have_loaded_the_adapter_are_preferred_while_they_have_room() -> None:
    members = [
        identity(f"{role.value}-{i}", role, **taking(*["a"] * (i == 1)))
        for role in (Role.PREFILL, Role.DECODE)
        for i in range(3)
    ]
    wanting = replace(QUERY, adapter="a")
    firsts: Counter[str] = Counter()
    for seed in range(200):
        plan = planned(make(*members, seed=seed), wanting)
        assert len(plan.prefills) == len(plan.decodes) == 3
        firsts[plan.prefills[0].instance_id] += 1
        firsts[plan.decodes[0].instance_id] += 1
    assert firsts["prefill-1"] == 200
    assert firsts["decode-1"] > firsts["decode-0"] + firsts["decode-2"] > 10, "others get some"
    full = make(*members)
    full.fleet.handle(load("prefill-1", used=8), 0.0)
    assert planned(full, wanting).prefills[0].instance_id != "prefill-1"


@pytest.mark.req("S128")
def test_a_request_with_images_goes_to_instances_that_take_images() -> None:
    able = [
        identity("prefill-9", Role.PREFILL, takes_images=True),
        identity("decode-9", Role.DECODE, takes_images=True),
    ]
    placement = make(*pair(), *able)
    plan = planned(placement, replace(QUERY, has_images=True))
    assert [c.instance_id for c in plan.prefills] == ["prefill-9"]
    assert [c.instance_id for c in plan.decodes] == ["decode-9"]
    nothing = make(*pair()).plan(replace(QUERY, has_images=True), {}, 0.0)
    assert isinstance(nothing, NoPlan)
    assert (nothing.reason, "takes images" in nothing.message) == ("NO_INSTANCE", True)
