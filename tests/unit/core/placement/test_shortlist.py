"""Which instances are scored where there are too many."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from loadtests.placement.plan import NUM_BLOCKS, build, prompt
from pdmesh.core.model import Role
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.instance import Identity, Instance
from pdmesh.core.placement.plan import Placement, Plan
from pdmesh.core.placement.policies import MOST_SCORED, Known, Policy, Query
from pdmesh.core.placement.shortlist import shortlist


def instances(count: int, num_slots_used: int = 0) -> list[Instance]:
    made = []
    for i in range(count):
        name = f"p{i}"
        identity = Identity(name, 1, Role.PREFILL, "g0", "default", "m", "f", 64, 8, 100, 0)
        made.append(Instance(identity, num_slots=8, num_slots_used=num_slots_used))
    return made


def test_few_instances_are_all_listed_in_order() -> None:
    parts = [instances(3), instances(2)]
    found = shortlist(parts, 5, random.Random(1), {}, lambda name: None)
    assert found == [*parts[0], *parts[1]]


def test_of_many_the_best_holders_and_the_chats_home_are_listed_beside_random_ones() -> None:
    fleet = instances(1000)
    by_id = {i.id: i for i in fleet}
    matches = {f"p{i}": 1 for i in range(400)} | {"p998": 7, "p999": 9, "stranger": 9}
    found = shortlist([fleet], 40, random.Random(1), matches, by_id.get, ["p500", "gone"])
    ids = {i.id for i in found}
    assert {"p500", "p998", "p999"} <= ids
    assert len(ids) == len(found) <= 40
    assert sum(matches.get(i, 0) == 1 for i in ids) >= 8  # random ones of those that hold as much


def test_where_all_sampled_are_full_more_are_looked_at() -> None:
    fleet = instances(2000, num_slots_used=8)
    for instance in fleet[:40]:
        instance.num_slots_used = 0
    found = shortlist([fleet], 20, random.Random(3), {}, lambda name: None)
    assert any(i.used_slots() < i.num_slots for i in found)
    assert len(found) <= 5 * 20


def test_every_instance_is_sampled_sooner_or_later() -> None:
    parts, rng = [instances(30), instances(50)], random.Random(5)
    seen = set()
    for _ in range(60):
        seen |= {id(i) for i in shortlist(parts, 10, rng, {}, lambda name: None)}
    assert len(seen) == 80


@pytest.mark.req("S94")
@pytest.mark.parametrize("num_workers", [1000, 4000])
def test_a_decision_scores_as_many_instances_in_a_large_mesh_as_in_a_small_one(
    num_workers: int,
) -> None:
    placement, index = build(num_workers)
    own, scored = POLICIES["default"](), list[int]()

    def prefills(query: Query, asked: Sequence[Instance], known: Known) -> list[float]:
        scored.append(len(asked))
        return list(own.score_prefills(query, asked, known))

    def decodes(query: Query, asked: Sequence[Instance]) -> list[float]:
        scored.append(len(asked))
        return list(own.score_decodes(query, asked))

    placement.policy = Policy(
        own.name, prefills, own.pick_prefill, decodes, own.pick_decode, own.most_scored
    )
    held = 0
    for number in range(30):
        plan = planned(placement, index.match(prompt(number)), number)
        held += plan.prefills[0].num_matched_tokens > 0
        assert len(plan.prefills) == len(plan.decodes) == placement.max_candidates
    assert max(scored) <= MOST_SCORED
    assert held >= 20  # three prefills of hundreds hold a half of each prompt, and are found


def planned(placement: Placement, matches: dict[str, int], number: int) -> Plan:
    query = Query(
        block_hashes=prompt(number), num_prompt_tokens=NUM_BLOCKS * 64, max_tokens=256,
        request_id=f"r{number}",
    )  # fmt: skip
    plan = placement.plan(query, matches, 0.001 * number)
    assert isinstance(plan, Plan)
    return plan
