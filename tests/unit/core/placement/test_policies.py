"""The default policy picks prefills by the earliest completion and decodes by free capacity."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pdmesh.core.kv.prefix.prefix_index import IndexDelta, PeerRuns, PrefixIndex
from pdmesh.core.model import Role
from pdmesh.core.placement.plan import Plan
from pdmesh.core.placement.policies import Query
from tests.support.placements import QUERY, identity, load, make, pair, planned


@pytest.mark.req("S107")
def test_the_prefill_that_holds_the_prefix_comes_first() -> None:
    placement = make(*pair())
    plan = planned(placement, QUERY, prefill_1=5)
    assert [c.instance_id for c in plan.prefills] == ["prefill-1", "prefill-0"]
    assert plan.prefills[0].num_matched_tokens == 320


@pytest.mark.req("S77", "S107")
def test_the_blocks_of_a_peer_make_the_idle_instance_the_best() -> None:
    """prefill-0 holds nine blocks and has 300 ms of other work. prefill-1 would compute these
    blocks in 576 ms, or fetch them in no time.
    """

    def first(fetches: bool, peers: PeerRuns) -> str:
        placement = make(*pair(fetches_from_peers=fetches))
        fit = placement.fleet.predictor.fit("f/prefill")
        for num_tokens in range(64, 4096, 64):
            num_reused = num_tokens * (num_tokens // 64 % 5) // 5
            fit.observe(num_tokens, num_reused, (num_tokens - num_reused) * 1e-3)
        placement.fleet.instances["prefill-0"].available_at = 0.3
        plan = placement.plan(QUERY, {"prefill-0": 9}, 0.0, peers)
        assert isinstance(plan, Plan)
        return plan.prefills[0].instance_id

    held_by_pool = PeerRuns(((0, 9),))
    assert first(fetches=True, peers=PeerRuns()) == "prefill-0"
    assert first(fetches=True, peers=held_by_pool) == "prefill-1"
    assert first(fetches=False, peers=held_by_pool) == "prefill-0", "it could not fetch them"


@pytest.mark.req("S108")
def test_a_busy_holder_of_the_prefix_yields_to_an_idle_instance() -> None:
    placement = make(*pair())
    placement.fleet.handle(load("prefill-0", used=8), now=0.0)
    assert planned(placement, QUERY, prefill_0=5).prefills[0].instance_id == "prefill-1"


@pytest.mark.req("S93")
def test_if_all_prefills_are_busy_the_one_that_is_free_soonest_comes_first() -> None:
    placement = make(*pair())
    for name, until in (("prefill-0", 5.0), ("prefill-1", 2.0)):
        placement.fleet.instances[name].available_at = until
    assert planned(placement, QUERY).prefills[0].instance_id == "prefill-1"


def test_a_decode_is_drawn_with_a_probability_proportional_to_its_free_capacity() -> None:
    placement = make(*pair())
    query = Query(model="m", num_prompt_tokens=64, max_tokens=0)
    firsts: Counter[str] = Counter()
    for i in range(2000):
        now = 2.0 * i
        placement.fleet.handle(load("decode-0", free=901), now)
        placement.fleet.handle(load("decode-1", free=301), now)
        firsts[planned(placement, query, now=now).decodes[0].instance_id] += 1
    assert firsts["decode-0"] / 2000 == pytest.approx(0.75, abs=0.05)


@pytest.mark.req("S95")
def test_a_decode_without_room_is_asked_only_if_none_has_room() -> None:
    placement = make(*pair())
    placement.fleet.handle(load("decode-0", free=3), now=0.0)
    assert [c.instance_id for c in planned(placement, QUERY).decodes] == ["decode-1"]
    placement.fleet.handle(load("decode-1", free=3), now=0.0)
    assert len(planned(placement, QUERY).decodes) == 2


@pytest.mark.req("S108")
def test_a_popular_prefix_does_not_overload_its_first_holder() -> None:
    """All requests have the same prefix, and the load is 70 %. Each instance that served a request
    holds the prefix, too.
    """
    prefills = [identity(f"prefill-{i}", Role.PREFILL, num_slots=4) for i in range(4)]
    placement = make(*prefills, identity("decode-0", Role.DECODE, num_slots=999), seed=3)
    index, served = PrefixIndex(), Counter[str]()
    prompt = [bytes([i]) * 16 for i in range(10)]
    index.apply(IndexDelta("prefill-0", 1, 1, stored=prompt))
    query = Query(model="m", block_hashes=prompt, num_prompt_tokens=640)
    running: list[tuple[float, str]] = []
    rng = random.Random(5)
    now = 0.0
    for _ in range(3000):
        now += rng.expovariate(11.2)  # 70 % of 16 slots of 1 s each
        running = [(end, name) for end, name in running if end > now]
        used = Counter(name for _, name in running)
        for each in prefills:
            placement.fleet.handle(load(each.instance_id, used[each.instance_id], slots=4), now)
        chosen = planned(placement, query, now, **{
            name.replace("-", "_"): n for name, n in index.match(prompt).items()
        }).prefills[0].instance_id  # fmt: skip
        served[chosen] += 1
        running.append((now + 1.0, chosen))
        index.apply(IndexDelta(chosen, 1, (index.version(chosen) or (1, 0))[1] + 1, stored=prompt))
    assert max(served.values()) / (3000 / 4) <= 1.5
