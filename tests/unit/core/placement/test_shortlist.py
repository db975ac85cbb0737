"""Tests which instances are scored when there are too many to score all."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from loadtests.placement.plan import NUM_BLOCKS, build, prompt
from pdmesh.core.model import Role
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.instance import Identity, Instance, RecentWork
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
    found = shortlist(parts, 5, random.Random(1), {}, lambda name: None).instances
    assert found == [*parts[0], *parts[1]]


def test_of_many_the_best_holders_and_the_chats_home_are_listed_beside_random_ones() -> None:
    fleet = instances(1000)
    by_id = {i.id: i for i in fleet}
    matches = {f"p{i}": 1 for i in range(400)} | {"p998": 7, "p999": 9, "stranger": 9}
    found = shortlist([fleet], 40, random.Random(1), matches, by_id.get, ["p500", "gone"]).instances
    ids = {i.id for i in found}
    assert {"p500", "p998", "p999"} <= ids
    assert len(ids) == len(found) <= 40
    # a random choice of those that hold one block
    assert sum(matches.get(i, 0) == 1 for i in ids) >= 8


def test_where_all_sampled_are_full_more_are_looked_at() -> None:
    fleet = instances(2000, num_slots_used=8)
    for instance in fleet[:40]:
        instance.num_slots_used = 0
    found = shortlist([fleet], 20, random.Random(3), {}, lambda name: None).instances
    assert any(i.used_slots() < i.num_slots for i in found)
    assert len(found) <= 5 * 20


def test_a_small_cell_that_alone_can_serve_is_always_found() -> None:
    full, idle = instances(1000, num_slots_used=8), instances(4)
    for seed in range(50):
        found = shortlist([full, idle], 20, random.Random(seed), {}, lambda name: None).instances
        assert [i for i in found if i in idle]


def test_few_holders_are_found_among_many_that_are_not_asked_for() -> None:
    fleet = instances(750)
    by_id = {i.id: i for i in fleet}
    matches = {f"d{i}": 9 for i in range(500)} | {f"p{i}": 9 for i in range(3)}
    for seed in range(50):
        found = shortlist([fleet], 40, random.Random(seed), matches, by_id.get).instances
        assert {"p0", "p1", "p2"} <= {i.id for i in found}


def test_a_decode_with_a_free_slot_comes_first_however_few_have_one() -> None:
    placement, _ = build(1000)
    decodes = [i for i in placement.fleet.instances.values() if i.identity.role is Role.DECODE]
    for decode in decodes:
        decode.num_slots_used = 64
    for decode in decodes[:3]:
        decode.num_slots_used = 0
    for number in range(30):
        first = planned(placement, {}, number).decodes[0].instance_id
        assert first in {d.id for d in decodes[:3]}


def test_prefills_that_have_loaded_the_adapter_are_scored_however_few_have() -> None:
    placement, _ = build(1000)
    prefills = [i for i in placement.fleet.instances.values() if i.identity.role is Role.PREFILL]
    for number, prefill in enumerate(prefills):
        loaded = frozenset({"a"}) if number < 2 else frozenset[str]()
        prefill.identity = replace(prefill.identity, adapters=loaded, takes_adapters=True)
    own = POLICIES["default"]()

    def prefill_scores(query: Query, asked: Sequence[Instance], known: Known) -> list[float]:
        assert {"prefill-0", "prefill-1"} <= {i.id for i in asked}
        return list(own.score_prefills(query, asked, known))

    placement.policy = replace(own, score_prefills=prefill_scores)
    for number in range(20):
        query = replace(query_of(number), adapter="a")
        assert isinstance(placement.plan(query, {}, 0.001 * number), Plan)


def test_every_instance_is_sampled_sooner_or_later() -> None:
    parts, rng = [instances(30), instances(50)], random.Random(5)
    seen = set()
    for _ in range(60):
        seen |= {id(i) for i in shortlist(parts, 10, rng, {}, lambda name: None).instances}
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
    assert held >= 20  # three of hundreds of prefills hold half of each prompt, and are found


@pytest.mark.req("S94", "S107")
def test_scores_count_the_mean_work_of_all_and_not_that_of_busy_holders() -> None:
    """Forty of 500 prefills hold the common prefix, and did a hundred times the work of the
    others.
    """
    placement, _ = build(1000)
    for number, instance in enumerate(placement.fleet.instances.values()):
        instance.recent = RecentWork()
        instance.add_computed(20.0 if number < 40 else 0.2, 0.0)
    own, heard, listed = POLICIES["default"](), list[float](), list[float]()

    def prefills(query: Query, asked: Sequence[Instance], known: Known) -> Sequence[float]:
        assert known.typical is not None
        heard.append(known.typical.used_s)
        listed.append(statistics.fmean(i.recent.at(0.0)[0] for i in asked))
        return own.score_prefills(query, asked, known)

    placement.policy = replace(own, score_prefills=prefills)
    matches = {f"prefill-{i}": 8 for i in range(40)}
    for number in range(120):
        placement.plan(query_of(number), matches, 0.0)
    mean = (40 * 20.0 + 460 * 0.2) / 500
    assert statistics.fmean(heard[40:]) == pytest.approx(mean, rel=0.2)
    assert statistics.fmean(listed) > 2.5 * mean


def query_of(number: int) -> Query:
    return Query(
        block_hashes=prompt(number), num_prompt_tokens=NUM_BLOCKS * 64, max_tokens=256,
        request_id=f"r{number}",
    )  # fmt: skip


def planned(placement: Placement, matches: dict[str, int], number: int) -> Plan:
    plan = placement.plan(query_of(number), matches, 0.001 * number)
    assert isinstance(plan, Plan)
    return plan
