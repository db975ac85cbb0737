"""Placement: filter, score, pick, and what it remembers until loads tell."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from pdmesh.core.health.fault_levels import Level
from pdmesh.core.health.liveness import Health
from pdmesh.core.kv.prefix.prefix_index import IndexDelta, PeerRuns, PrefixIndex
from pdmesh.core.kv.transfer.source_exclusions import HeldSource, KvSource, SourceFault
from pdmesh.core.model import Role
from pdmesh.core.placement.baselines import POLICIES
from pdmesh.core.placement.fleet import (
    Fleet,
    HealthJudged,
    InstanceRecorded,
    InstanceUnrecorded,
    JudgeLost,
    LoadReported,
    OutOfServiceSeen,
    PrefillComputed,
)
from pdmesh.core.placement.instance import FaultJudged, Identity
from pdmesh.core.placement.plan import NoPlan, Placement, Plan
from pdmesh.core.placement.policies import Query, Weights


def identity(name: str, role: Role, **changes: object) -> Identity:
    values: dict[str, object] = {
        "incarnation": 1, "group_id": "g0", "scenario": "default", "model": "m",
        "model_fingerprint": "f",
        "block_size": 64, "num_slots": 8, "num_kv_blocks": 1000, "max_model_len": 8192,
    }  # fmt: skip
    return Identity(instance_id=name, role=role, **(values | changes))  # type: ignore[arg-type]


def make(*identities: Identity, policy: str = "default", seed: int = 1) -> Placement:
    fleet = Fleet()
    for each in identities:
        fleet.handle(InstanceRecorded(each), now=0.0)
    return Placement(fleet, random.Random(seed), POLICIES[policy]())


def pair(**changes: object) -> list[Identity]:
    return [
        identity(f"{role.value}-{i}", role, **changes)
        for role in (Role.PREFILL, Role.DECODE)
        for i in (0, 1)
    ]


def planned(placement: Placement, query: Query, now: float = 0.0, **matches: int) -> Plan:
    named = {name.replace("_", "-"): n for name, n in matches.items()}
    plan = placement.plan(query, named, now)
    placement.fleet.check_invariants()
    assert isinstance(plan, Plan), plan
    return plan


def load(name: str, used: int = 0, free: int = 1000, slots: int = 8) -> LoadReported:
    return LoadReported(name, 1, slots, used, free, is_draining=False)


QUERY = Query(model="m", num_prompt_tokens=640, max_tokens=64, block_hashes=(b"x",) * 10)


@pytest.mark.req("S107")
def test_the_prefill_that_holds_the_prefix_comes_first() -> None:
    placement = make(*pair())
    plan = planned(placement, QUERY, prefill_1=5)
    assert [c.instance_id for c in plan.prefills] == ["prefill-1", "prefill-0"]
    assert plan.prefills[0].num_matched_tokens == 320


@pytest.mark.req("S107")
def test_the_score_is_formula_2_with_the_wait_and_the_load() -> None:
    """latency: fixed by what the predictor was taught: 1 ms per computed token; prefill-0 must wait
    320 ms more.
    """
    placement = make(*pair(fetches_from_peers=True))
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
def test_the_remote_term_favours_no_one_who_has_the_prefix_already() -> None:
    placement = make(*pair(fetches_from_peers=True))
    plan = placement.plan(QUERY, {"prefill-1": 10}, 0.0, PeerRuns(((0, 10),)))
    assert isinstance(plan, Plan)
    assert plan.prefills[0].instance_id == "prefill-1"
    first, second = (c.score for c in plan.prefills)
    assert first - second == pytest.approx(0.5)  # alpha - beta: the latency of both is the same


@pytest.mark.req("S77", "S107")
def test_what_a_peer_can_give_decides_for_the_idle_instance() -> None:
    """The holder has 300 ms of work before this; to compute what it holds would take 576 ms
    elsewhere, to fetch it nothing.
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


def test_what_was_dispatched_counts_until_a_later_report_includes_it() -> None:
    """Reports are 20 ms old; without the credit a burst would all go to one instance."""
    placement = make(*pair())
    first = [planned(placement, QUERY, now=0.0).prefills[0].instance_id for _ in range(16)]
    assert Counter(first) == {"prefill-0": 8, "prefill-1": 8}
    prefill = placement.fleet.instances["prefill-0"]
    placement.fleet.handle(load("prefill-0", used=3), now=0.01)
    assert prefill.used_slots() == 3 + 8
    planned(placement, QUERY, now=5.0)  # nobody ever named them
    assert placement.fleet.instances["prefill-1"].used_slots() <= 1


@pytest.mark.req("S93")
def test_a_booking_settles_when_any_instance_names_its_request() -> None:
    """The first candidate refused, the second took it: the first is free again at once."""
    placement = make(*pair())
    query = replace(QUERY, request_id="r1")
    plan = planned(placement, query)
    first, second = (placement.fleet.instances[c.instance_id] for c in plan.prefills)
    decode = placement.fleet.instances[plan.decodes[0].instance_id]
    assert (first.used_slots(), first.num_backlog_blocks, second.used_slots()) == (1, 10, 0)
    placement.fleet.handle(replace(load(second.id, used=1), admitted=("r1",)), now=0.1)
    assert (first.used_slots(), first.num_backlog_blocks) == (0, 0)
    assert (second.used_slots(), second.num_backlog_blocks) == (1, 10)
    assert second.available_at > 0.1
    assert (decode.used_slots(), decode.free_blocks()) == (1, 1000 - 11)
    placement.fleet.handle(replace(load(decode.id, used=1, free=989), admitted=("r1",)), now=0.2)
    assert (decode.used_slots(), decode.free_blocks()) == (1, 989)
    done = PrefillComputed("r1", 640, 0, 0.05)
    placement.fleet.handle(replace(load(second.id), computed=(done,)), now=0.3)
    assert (second.used_slots(), second.num_backlog_blocks, second.available_at) == (0, 0, 0.3)
    assert not len(placement.fleet.reservations)
    placement.fleet.check_invariants()


def test_a_request_that_is_planned_again_is_booked_once() -> None:
    placement = make(*pair())
    for _ in range(5):
        planned(placement, replace(QUERY, request_id="r1"))
    used = [i.used_slots() for i in placement.fleet.instances.values() if not i.is_decode]
    assert sum(used) == 1


@pytest.mark.req("S93")
def test_when_all_are_busy_the_earliest_available_comes_first() -> None:
    placement = make(*pair())
    for name, until in (("prefill-0", 5.0), ("prefill-1", 2.0)):
        placement.fleet.instances[name].available_at = until
    assert planned(placement, QUERY).prefills[0].instance_id == "prefill-1"


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


def test_alone_an_instance_must_have_room_for_the_answer_too() -> None:
    small = identity("prefill-0", Role.PREFILL, num_kv_blocks=10)
    plan = make(small).plan(QUERY, {}, now=0.0)
    assert isinstance(plan, NoPlan)
    assert plan.reason == "NO_INSTANCE"
    assert planned(make(small), Query(model="m", num_prompt_tokens=500, max_tokens=64)).prefills


@pytest.mark.req("S34")
@pytest.mark.parametrize(
    ("level", "held_back", "is_left_out"),
    [(Level.TRANSIENT, "", False), (Level.PROCESS, "", True), (Level.LOST, "panic", False)],
)
def test_from_level_two_on_an_instance_is_left_out_unless_that_is_held_back(
    level: Level, held_back: str, is_left_out: bool
) -> None:
    placement = make(*pair())
    placement.fleet.handle(FaultJudged("prefill-0", 1, level, (), held_back), 0.0)
    placement.fleet.handle(FaultJudged("prefill-1", 99, Level.LOST), 0.0)
    ids = {c.instance_id for c in planned(placement, QUERY).prefills}
    assert ids == ({"prefill-1"} if is_left_out else {"prefill-0", "prefill-1"})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: f.handle(HealthJudged("prefill-0", 1, Health.SUSPECT), 0.0),
        lambda f: f.handle(
            InstanceRecorded(identity("prefill-0", Role.PREFILL, is_draining=True)), 0.0
        ),
        lambda f: f.handle(LoadReported("prefill-0", 1, 8, 0, 9, is_draining=True), 0.0),
        lambda f: f.handle(InstanceUnrecorded("prefill-0"), 0.0),
    ],
)
def test_only_healthy_admitting_instances_are_candidates(spoil: Callable[[Fleet], None]) -> None:
    placement = make(*pair())
    spoil(placement.fleet)
    plan = planned(placement, QUERY, prefill_0=10)
    assert [c.instance_id for c in plan.prefills] == ["prefill-1"]


def test_a_verdict_on_another_incarnation_and_one_whose_judge_is_gone_do_not_count() -> None:
    placement = make(*pair())
    placement.fleet.handle(HealthJudged("prefill-0", 99, Health.DEAD), 0.0)
    placement.fleet.handle(HealthJudged("prefill-1", 1, Health.SUSPECT), 0.0)
    placement.fleet.handle(JudgeLost(), 0.0)
    assert len(planned(placement, QUERY).prefills) == 2


def test_a_verdict_that_comes_before_the_record_counts() -> None:
    placement = make(*pair())
    placement.fleet.handle(HealthJudged("prefill-9", 1, Health.DEAD), 0.0)
    placement.fleet.handle(InstanceRecorded(identity("prefill-9", Role.PREFILL)), 0.0)
    assert len(planned(placement, QUERY).prefills) == 2


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


def held(fault: SourceFault, *sources: str) -> tuple[HeldSource, ...]:
    return tuple(HeldSource(KvSource(source, 1), fault) for source in sources)


def quarrelling(*others: Identity, **held_by: tuple[HeldSource, ...]) -> Placement:
    return make(
        *(
            replace(each, held_sources=held_by.get(each.instance_id.replace("-", "_"), ()))
            for each in pair()
        ),
        *others,
    )


@pytest.mark.fault("F23", "F34")
def test_a_pair_that_quarrels_is_not_planned_though_both_are_for_others() -> None:
    for fault in SourceFault:
        placement = quarrelling(decode_0=held(fault, "prefill-0"))
        for seed in range(20):
            placement.rng.seed(seed)
            plan = planned(placement, QUERY)
            assert {c.instance_id for c in plan.prefills} == {"prefill-0", "prefill-1"}
            if plan.prefills[0].instance_id == "prefill-0":
                assert [c.instance_id for c in plan.decodes] == ["decode-1", "decode-0"]


@pytest.mark.fault("F34")
def test_a_prefill_that_every_decode_refuses_is_no_candidate_and_one_they_avoid_is_the_last() -> (
    None
):
    refused = held(SourceFault.CORRUPT, "prefill-0")
    plan = planned(quarrelling(decode_0=refused, decode_1=refused), QUERY, prefill_0=10)
    assert [c.instance_id for c in plan.prefills] == ["prefill-1"]
    avoided = held(SourceFault.UNREACHABLE, "prefill-0")
    plan = planned(quarrelling(decode_0=avoided, decode_1=avoided), QUERY, prefill_0=10)
    assert [c.instance_id for c in plan.prefills] == ["prefill-1", "prefill-0"]


@pytest.mark.fault("F23", "F24", "F34")
def test_where_no_pair_can_exchange_kv_each_request_stays_on_one_instance() -> None:
    """Those whose link is slow or cut compute both phases; a prefill whose KV came wrong everywhere
    computes nothing.
    """
    avoided = held(SourceFault.UNREACHABLE, "prefill-0", "prefill-1")
    plan = planned(quarrelling(decode_0=avoided, decode_1=avoided), QUERY)
    assert sorted(c.instance_id for c in plan.prefills) == [
        "decode-0", "decode-1", "prefill-0", "prefill-1",
    ]  # fmt: skip
    assert all(c.is_local for c in plan.prefills)
    assert not plan.decodes
    refused = held(SourceFault.CORRUPT, "prefill-0", "prefill-1")
    plan = planned(quarrelling(decode_0=refused, decode_1=refused), QUERY)
    assert sorted(c.instance_id for c in plan.prefills) == ["decode-0", "decode-1"]
    lonely = identity("prefill-9", Role.PREFILL, group_id="g9")
    placement = quarrelling(lonely, decode_0=avoided, decode_1=avoided)
    groups = set()
    for seed in range(40):
        placement.rng.seed(seed)
        groups.add(planned(placement, QUERY).group_id)
    assert groups == {"g0", "g9"}, "a group that lost a role is not alone with the work"
    one_link = planned(quarrelling(decode_0=avoided), QUERY)
    assert one_link.decodes[0].instance_id == "decode-1", "a pair is left"
    assert not any(c.is_local for c in one_link.prefills)


@pytest.mark.req("S4")
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_request_of_one_scenario_is_planned_on_a_group_of_another(policy: str) -> None:
    """Six scenarios of two services with two groups each; whatever they share of their prompts, and
    though one is full.
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


@pytest.mark.req("S94")
def test_a_chat_returns_to_its_decode_while_that_has_room() -> None:
    placement = make(*pair())
    query = Query(model="m", num_prompt_tokens=640, max_tokens=64, chat_id="c")
    home = planned(placement, query).decodes[0].instance_id
    for i in range(20):
        plan = planned(placement, query, now=2.0 * i)
        assert plan.decodes[0].instance_id == home
    placement.fleet.handle(load(home, free=5), now=100.0)
    assert planned(placement, query, now=101.0).decodes[0].instance_id != home


@pytest.mark.req("S94")
def test_the_memory_of_chats_is_bounded_by_number_and_age() -> None:
    placement = make(*pair())
    placement.chats.max_chats = 10
    for i in range(30):
        planned(placement, Query(model="m", chat_id=f"c{i}"), now=float(i))
    assert len(placement.chats) == 10
    assert placement.chats.get("c29", now=29.0 + placement.chats.ttl_s + 1) == ()


def test_decode_is_drawn_in_proportion_to_its_free_capacity() -> None:
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
    """70 % load, every request with the same prefix; whoever served it holds it from then on."""
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
        now += rng.expovariate(11.2)  # 16 slots, 1 s each, 70 %
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


@pytest.mark.req("S7")
def test_round_robin_takes_turns_and_least_connections_takes_the_idlest() -> None:
    placement = make(*pair(), policy="round_robin")
    firsts = [planned(placement, QUERY, prefill_0=10).prefills[0].instance_id for _ in range(4)]
    assert firsts == ["prefill-0", "prefill-1", "prefill-0", "prefill-1"]
    placement = make(*pair(), policy="least_connections")
    placement.fleet.handle(load("prefill-0", used=3), now=0.0)
    placement.fleet.handle(load("decode-1", used=3), now=0.0)
    plan = planned(placement, QUERY, prefill_0=10)
    assert (plan.prefills[0].instance_id, plan.decodes[0].instance_id) == ("prefill-1", "decode-0")


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
def test_a_canary_gets_its_share_of_the_requests_and_all_of_them_only_if_nobody_else_is_there() -> (
    None
):
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


def test_one_out_of_service_gets_nothing_whatever_its_record_says() -> None:
    placement = make(*pair())
    fleet = placement.fleet
    fleet.handle(OutOfServiceSeen(frozenset({"prefill-0", "decode-0"})), 0.0)
    fleet.handle(InstanceRecorded(identity("prefill-0", Role.PREFILL, incarnation=2)), 0.0)
    plan = planned(placement, QUERY)
    assert [c.instance_id for c in (*plan.prefills, *plan.decodes)] == ["prefill-1", "decode-1"]
    fleet.handle(OutOfServiceSeen(frozenset()), 0.0)
    assert len(planned(placement, QUERY).prefills) == 2
