"""Rolling upgrades over the real group controller and pure instances: one group at a time, all new
or all old in the end (S24).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.groups.desired import (
    Desired,
    Group,
    Scenario,
    Service,
    revision_of,
)
from pdmesh.core.groups.revisions import (
    Upgrade,
    canary_of,
    shares,
    with_canaries,
)
from pdmesh.core.groups.round import Round
from pdmesh.core.model import Phase, Role, Stage
from pdmesh.core.upgrade.controller import UpgradeController
from pdmesh.core.upgrade.events import (
    GroupsObserved,
    KeepRecord,
    MemberLost,
    Promoted,
)
from pdmesh.core.upgrade.revision_health import (
    Answers,
    LegFailureReported,
    RequestAnswered,
    Tally,
    verdict,
)
from tests.fakes.group_world import KV, UPGRADE, World

ROLES = (Role.PREFILL, Role.DECODE)


def released(release: str, num_groups: int = 3) -> Desired:
    groups = {name: Group("chat", 2, 2) for name in "abcd"[:num_groups]}
    scenarios = {"chat": Scenario("model")}
    return Desired({"model": Service(release=release)}, scenarios, groups)


def revision(release: str) -> str:
    return revision_of(Service(release=release), KV)


OLD, NEW = revision("1"), revision("2")


def settled(num_groups: int = 3, num_spare: int = 4) -> World:
    """Groups of 2P:2D that serve release 1."""
    world = World(released("1", num_groups), num=4 * num_groups + num_spare)
    world.settle()
    world.told.clear()
    return world


def running(world: World) -> dict[str, set[str]]:
    """The revisions of instances that take requests, by group."""
    found: dict[str, set[str]] = {}
    for process in world.processes.values():
        role_spec = process.life.role_spec
        if role_spec is not None and process.record().phase is Phase.READY:
            found.setdefault(role_spec.group_id, set()).add(role_spec.revision)
    return found


def told(world: World) -> list[str]:
    return [f"{t.step} {t.group_id}".strip() for t in world.told]


def check_one_at_a_time(world: World) -> None:
    """At most one group has members of two revisions, and no group more than its ratio of
    either.
    """
    turn = Round(world.observe())
    mixed = []
    for group_id, group in turn.observed.wanted.groups.items():
        staying = [m for m in turn.members(group_id) if m.stage <= Stage.SERVE]
        if len({m.revision for m in staying}) > 1:
            mixed.append(group_id)
        for each in {m.revision for m in staying}:
            for role in ROLES:
                num = sum(m.role is role and m.revision == each for m in staying)
                assert num <= group.counts[role]
    assert len(mixed) <= 1, mixed


def play(
    world: World, seconds: int, *, sick: str = "", fails: Callable[[str], bool] = lambda _: False
) -> None:
    """Everybody works; instances of the revision `sick` fail their requests, those for which
    `fails` says so cannot load.
    """
    for _ in range(seconds):
        world.now += 1
        world.round()
        world.answer(sick)
        check_one_at_a_time(world)
        for instance_id in list(world.processes):
            world.hear(instance_id)
            process = world.processes[instance_id]
            role_spec = process.life.role_spec
            is_loading = process.life.phase is Phase.LOADING and role_spec is not None
            world.work(
                instance_id,
                fails=is_loading and role_spec is not None and fails(role_spec.revision),
            )
            world.tell(instance_id)


def promote(world: World) -> None:
    for effect in world.upgrading.handle(Promoted(world.upgrades["chat"]), world.now):
        if isinstance(effect, KeepRecord):
            world.upgrades["chat"] = effect.upgrade


def is_at(world: World, revision: str) -> bool:
    groups = world.desired.groups
    return (
        world.counts() == dict.fromkeys(groups, (2, 2, 0))
        and running(world) == {g: {revision} for g in groups}
        and world.upgrades["chat"].is_idle
    )


@pytest.mark.req("S24")
@pytest.mark.parametrize("num_spare", [0, 4])
def test_groups_are_upgraded_one_after_the_other_each_after_the_last_proved_itself(
    num_spare: int,
) -> None:
    world = settled(num_spare=num_spare)
    world.apply(released("2"))
    play(world, 120)
    assert is_at(world, NEW)
    each = [f"{step} {group}" for group in "abc" for step in ("changing", "proved")]
    assert told(world) == ["begun", *each, "done"]


@pytest.mark.req("S24")
def test_a_revision_that_cannot_be_loaded_goes_back_and_the_desired_state_with_it() -> None:
    world = settled(num_spare=0)
    world.apply(released("2"))
    play(world, 120, fails=lambda revision: revision == NEW)
    assert is_at(world, OLD)
    assert world.desired == released("1")
    assert world.version == 3
    assert told(world)[:3] == ["begun", "changing a", "turned_back a"]
    assert told(world)[-1] == "went_back"
    assert "LOAD_FAILED" in world.upgrading.reports["chat"].detail


@pytest.mark.req("S24")
def test_a_revision_that_answers_errors_in_the_second_group_leaves_none_of_it_in_the_first() -> (
    None
):
    world = settled()
    world.apply(released("2"))
    while "proved a" not in told(world):
        play(world, 1)
    while "changing b" not in told(world):
        play(world, 1)
    play(world, 120, sick=NEW)
    assert is_at(world, OLD)
    assert [s for s in told(world) if s.startswith(("turned", "back", "went"))] == [
        "turned_back b", "back b", "back a", "went_back",
    ]  # fmt: skip


@pytest.mark.req("S24", "S28")
def test_a_way_back_waits_for_a_plan_that_moves_something_and_for_none_that_only_gathers() -> None:
    world = settled()
    world.apply(released("2"))
    while "changing b" not in told(world):
        play(world, 1)
    world.planning = frozenset({"chat"})
    play(world, 120, sick=NEW)
    assert "back b" in told(world)
    assert world.upgrading.reports["chat"].detail.startswith("a: a plan is under way")
    world.gathering = frozenset({"chat"})
    play(world, 120)
    assert is_at(world, OLD), (world.describe(), world.upgrading.reports)


@pytest.mark.req("S24")
def test_groups_that_the_bad_revision_has_broken_go_back_too() -> None:
    """It proved itself in two groups, and then nothing of it can be loaded again: what they lost
    stays lost until they go back.
    """
    world = settled()
    world.apply(released("2"))
    while "changing c" not in told(world):
        play(world, 1)
    for group in "ab":
        victim = world.ready(group, Role.DECODE)[0]
        world.kill(victim)
        world.start(victim)
    play(world, 200, fails=lambda revision: revision == NEW)
    assert is_at(world, OLD), (world.describe(), world.upgrading.reports)


@pytest.mark.req("S24")
def test_instances_that_are_lost_one_after_the_other_turn_it_back_one_alone_does_not() -> None:
    world = settled()
    world.apply(released("2"))
    while running(world).get("a") != {NEW}:
        play(world, 1)
    world.kill(world.ready("a", Role.PREFILL)[0])
    play(world, 3)
    assert not world.upgrades["chat"].back
    world.kill(world.ready("a", Role.DECODE)[0])
    play(world, 3)
    assert "it was lost" in world.upgrades["chat"].back


@pytest.mark.req("S24")
def test_a_canary_serves_beside_the_groups_until_it_is_promoted() -> None:
    world = settled()
    world.apply(released("2"), canary_share=0.25)
    play(world, 60)
    assert world.counts()[canary_of("chat")] == (2, 2, 0)  # a quarter of 6P:6D
    assert shares(world.upgrades.values()) == {canary_of("chat"): 0.25}
    assert {g: r for g, r in running(world).items() if g in "abc"} == {g: {OLD} for g in "abc"}
    world.elect()
    promote(world)
    play(world, 200)
    assert is_at(world, NEW)


@pytest.mark.req("S24")
@pytest.mark.parametrize("is_sick", [True, False])
def test_a_canary_goes_back_if_it_is_sick_or_an_operator_says_so(is_sick: bool) -> None:
    world = settled()
    world.apply(released("2"), canary_share=0.1)
    play(world, 30)
    if not is_sick:
        world.apply(released("1"))
    play(world, 60, sick=NEW if is_sick else "")
    assert is_at(world, OLD)
    assert world.version == 3
    assert world.upgrades["chat"].outcome


@pytest.mark.req("S24")
@pytest.mark.parametrize("is_sick", [True, False])
def test_a_canary_that_goes_back_gets_no_requests_while_it_leaves(is_sick: bool) -> None:
    """It is ready until it has heard that it is to leave: as one group among the others it would
    get more than its share was.
    """
    world = settled()
    world.apply(released("2"), canary_share=0.1)
    canary = canary_of("chat")
    while canary not in running(world):
        play(world, 1)
    if not is_sick:
        world.apply(released("1"))
    while shares(world.upgrades.values()).get(canary) == 0.1:
        play(world, 1, sick=NEW if is_sick else "")
    while canary in running(world):
        assert shares(world.upgrades.values()) == {canary: 0.0}
        play(world, 1)
    world.apply(released("3"))
    play(world, 1)
    assert canary not in shares(world.upgrades.values())


@pytest.mark.req("S24")
@pytest.mark.parametrize(
    ("num_groups", "busy", "why"),
    [
        (1, 0.1, "only 0 instances may leave; 4 more blank"),
        (3, 0.7, "4 prefill would be 105% busy"),
        (3, None, "load of a's prefills is unknown"),
    ],
)
def test_a_group_is_not_taken_out_where_the_others_could_not_do_without(
    num_groups: int, busy: float | None, why: str
) -> None:
    world = settled(num_groups, num_spare=0)
    world.busy = busy
    world.apply(released("2", num_groups))
    play(world, 30)
    assert set.union(*running(world).values()) == {OLD}
    assert why in world.upgrading.reports["chat"].detail


@pytest.mark.req("S24")
@pytest.mark.parametrize(
    ("racks", "expected"),
    [
        ((("r1",), ("r2",)), ("r1", "r2")),
        ((("r1", "r2"), ("r2", "r3")), ("r1", "r2", "r3")),
        ((("r1",), ()), ()),
    ],
)
def test_a_canary_may_be_in_any_of_its_scenarios_racks(
    racks: tuple[tuple[str, ...], ...], expected: tuple[str, ...]
) -> None:
    groups = {f"g{i}": Group("chat", 2, 2, racks=each) for i, each in enumerate(racks)}
    desired = Desired({"model": Service(release="1")}, {"chat": Scenario("model")}, groups)
    upgrade = Upgrade("chat", Service(), 1, Service(release="1"), 2, canary_share=0.1)
    canary = with_canaries(desired, {"chat": upgrade}).groups[canary_of("chat")]
    assert canary.racks == expected


@pytest.mark.req("S24")
def test_a_service_of_which_nothing_serves_yet_changes_at_once() -> None:
    """Nobody misses a revision that never came up: the mended one need not wait for it."""
    world = World(released("1"), num=16)
    play(world, 30, fails=lambda revision: revision == OLD)
    world.apply(released("2"))
    play(world, 90, fails=lambda revision: revision == OLD)
    assert is_at(world, NEW)


@pytest.mark.req("S24")
def test_a_loss_of_all_instances_does_not_spare_a_revision_its_proof() -> None:
    """They go while the first group waits for its turn (a power cut), and come back: one group
    tries it, and the rest stay.
    """
    world = settled(num_spare=0)
    world.busy = None
    world.apply(released("2"))
    play(world, 5)
    assert world.upgrading.reports["chat"].state == "waiting"
    for instance_id in sorted(world.processes):
        world.kill(instance_id)
        world.start(instance_id)
    play(world, 120, fails=lambda revision: revision == NEW)
    world.busy = 0.1
    play(world, 120, fails=lambda revision: revision == NEW)
    assert is_at(world, OLD), (world.describe(), world.upgrading.reports)


@pytest.mark.req("S24")
def test_a_version_that_is_applied_while_nothing_serves_has_to_prove_itself_too() -> None:
    """A power cut, and somebody who thinks that another release mends it: there is a revision that
    served, and they go back to it.
    """
    world = settled(num_spare=0)
    for instance_id in sorted(world.processes):
        world.kill(instance_id)
        world.start(instance_id)
    world.apply(released("2"))
    play(world, 200, fails=lambda revision: revision == NEW)
    assert is_at(world, OLD), (world.describe(), world.upgrading.reports)
    assert world.desired == released("1")


@pytest.mark.req("S24")
def test_a_version_that_is_applied_while_all_groups_are_lent_waits_for_one_to_prove_it() -> None:
    old, new = Service(release="1"), Service(release="2")
    known = {"chat": Upgrade("chat", old, 1, old, 1, is_proved=True)}
    controller = UpgradeController(KV)
    (kept,) = [
        e.upgrade
        for e in controller.handle(GroupsObserved(2, {"chat": new}, known, {}), 0.0)
        if isinstance(e, KeepRecord)
    ]
    assert (kept.settled, kept.target, kept.is_idle) == (old, new, False)
    controller.handle(GroupsObserved(2, {"chat": new}, {"chat": kept}, {}), 1.0)
    assert controller.reports["chat"].detail == "all its groups are lent or not there yet"


@pytest.mark.req("S24")
def test_a_revision_that_cannot_be_set_up_again_does_not_keep_its_successor_out() -> None:
    """Its files are gone, and one group has lost an instance: that group is not whole until it gets
    what can be loaded.
    """
    world = settled(num_spare=0)
    victim = world.ready("b", Role.DECODE)[0]
    world.kill(victim)
    world.start(victim)
    play(world, 20, fails=lambda revision: revision == OLD)
    world.apply(released("2"))
    play(world, 300, fails=lambda revision: revision == OLD)
    assert is_at(world, NEW), (world.describe(), world.upgrading.reports)
    assert told(world)[:2] == ["begun", "changing b"]


@pytest.mark.req("S24")
@pytest.mark.fault("F1")
def test_a_way_back_for_which_instances_lack_ends_all_the_same_and_says_what_lacks() -> None:
    """Hardware goes while a bad revision is left: the group that cannot be whole keeps nobody on
    the bad one.
    """
    world = settled(2, num_spare=0)
    world.apply(released("2", 2))
    while "changing b" not in told(world):
        play(world, 1)
    while "turned_back b" not in told(world):
        play(world, 1, sick=NEW)
    world.kill(world.ready("b", Role.DECODE)[0])
    play(world, 200)
    report = world.upgrading.reports["chat"]
    assert report.state == "going back"
    assert "b (1 more blank instance needed, or a smaller group)" in report.detail
    play(world, 900)
    report = world.upgrading.reports["chat"]
    assert report.state == "went back"  # other scenarios need not wait for it
    assert "not whole yet: " in report.detail
    assert world.desired == released("1", 2)
    world.start("i-6")
    play(world, 120)
    assert is_at(world, OLD), (world.describe(), world.upgrading.reports)


@pytest.mark.req("S24", "S31")
def test_without_spares_a_smaller_group_leaves_a_bad_revision_if_its_scenario_allows_it() -> None:
    """The way out where no hardware will come: an operator says that one of a role is enough for a
    while.
    """
    world = settled(2, num_spare=0)
    world.apply(released("2", 2))
    while "turned_back b" not in told(world):
        play(world, 1, sick=NEW if "changing b" in told(world) else "")
    world.kill(world.ready("b", Role.DECODE)[0])
    play(world, 30)
    world.apply(
        replace(
            world.desired,
            scenarios={"chat": Scenario("model", allow_single=True)},
            groups={"a": Group("chat", 2, 2), "b": Group("chat", 2, 1)},
        )
    )
    play(world, 300)
    assert running(world) == {"a": {OLD}, "b": {OLD}}, (world.describe(), world.upgrading.reports)


@pytest.mark.req("S24")
def test_a_version_before_that_is_not_kept_any_more_is_named() -> None:
    world = settled()
    world.lost_versions = frozenset({1})
    world.apply(released("2"))
    play(world, 120, fails=lambda revision: revision == NEW)
    assert running(world) == {g: {OLD} for g in "abc"}
    report = world.upgrading.reports["chat"]
    assert report.state == "stopped"
    assert report.detail.endswith("; version 1 is not kept any more: apply a right file")
    world.apply(released("1"))
    play(world, 30)
    assert is_at(world, OLD)


@pytest.mark.req("S24")
def test_what_somebody_changed_besides_is_not_taken_back() -> None:
    """Groups go back by themselves; the desired state is left to people if more than one version
    asked for something.
    """
    world = settled()
    world.apply(released("2"))
    while "changing a" not in told(world):
        play(world, 1)
    more = replace(released("2"), groups={**released("2").groups, "b": Group("chat", 2, 1)})
    world.apply(more)
    play(world, 120, fails=lambda revision: revision == NEW)
    assert world.desired == more
    assert running(world) == {g: {OLD} for g in "abc"}
    report = world.upgrading.reports["chat"]
    assert (report.state, "apply a right file" in report.detail) == ("stopped", True)
    world.apply(released("1"))
    play(world, 60)
    assert is_at(world, OLD)


@pytest.mark.req("S24")
def test_what_went_back_can_be_tried_again_and_is_judged_anew() -> None:
    world = settled()
    world.apply(released("2"))
    play(world, 60, sick=NEW)
    assert is_at(world, OLD)
    world.apply(released("2"))
    play(world, 120)
    assert is_at(world, NEW)


@pytest.mark.req("S24")
def test_a_third_revision_takes_over_from_where_the_second_one_is() -> None:
    world = settled()
    world.apply(released("2"))
    while "changing b" not in told(world):
        play(world, 1)
    world.apply(released("3"))
    play(world, 200)
    assert is_at(world, revision("3"))


@pytest.mark.req("S24")
def test_two_scenarios_take_turns() -> None:
    desired = {
        release: Desired(
            {"model": Service(release=release)},
            {"x": Scenario("model"), "y": Scenario("model")},
            {"a": Group("x", 2, 2), "b": Group("y", 2, 2)},
        )
        for release in ("1", "2")
    }
    world = World(desired["1"], num=12)
    world.settle()
    world.told.clear()
    world.apply(desired["2"])
    play(world, 90)
    assert set.union(*running(world).values()) == {NEW}
    steps = [s for s in told(world) if s.startswith(("changing", "proved"))]
    assert steps == ["changing a", "proved a", "changing b", "proved b"]


@pytest.mark.req("S24")
@settings(deadline=None, max_examples=20)
@given(
    num_groups=st.integers(2, 3),
    num_spare=st.sampled_from([0, 2, 4]),
    wrong=st.sampled_from(["", "errors", "load"]),
    seed=st.integers(0, 10_000),
    elections=st.sets(st.integers(0, 60), max_size=3),
    kills=st.sets(st.integers(0, 60), max_size=2),
    canary=st.sampled_from([0.0, 0.2]),
)
def test_whatever_happens_it_ends_in_all_new_or_all_old(
    num_groups: int,
    num_spare: int,
    wrong: str,
    seed: int,
    elections: set[int],
    kills: set[int],
    canary: float,
) -> None:
    """Leaders change and instances die meanwhile; those come back blank.

    A sick revision ends nowhere, and a well one everywhere.
    """
    world = settled(num_groups, num_spare)
    world.apply(released("2", num_groups), canary_share=canary)
    order = random.Random(seed)
    is_bad = {"errors": NEW}.get(wrong, "")
    for second in range(60):
        if second in elections:
            world.elect()
        if second in kills:
            victim = order.choice(sorted(world.processes))
            world.kill(victim)
            world.start(victim)
        play(world, 1, sick=is_bad, fails=lambda r: wrong == "load" and r == NEW)
    if canary and num_spare:
        promote(world)
    elif canary and not world.upgrades["chat"].is_idle:
        world.apply(released("1", num_groups))  # it waits for blank instances that never come
    for _ in range(100):
        if is_at(world, OLD) or is_at(world, NEW):
            break
        play(world, 10, sick=is_bad, fails=lambda r: wrong == "load" and r == NEW)
    ended = OLD if is_at(world, OLD) else NEW
    assert is_at(world, ended), world.describe()
    assert world.desired == released("1" if ended == OLD else "2", num_groups)
    if wrong:
        assert ended == OLD
    elif not kills and not canary:
        assert ended == NEW


def test_answers_are_compared_only_where_there_are_enough() -> None:
    well = Tally(num=100, num_tpot=100, t_p_s=10.0, tpot_s=1.0)
    assert verdict(well, well, UPGRADE) == ""
    assert verdict(replace(well, t_p_s=30.0), well, UPGRADE) == "T_p is 300 ms instead of 100 ms"
    assert (
        verdict(replace(well, tpot_s=4.0), well, UPGRADE) == "a token takes 40 ms instead of 10 ms"
    )
    assert verdict(replace(well, t_p_s=30.0), Tally(), UPGRADE) == ""
    assert verdict(replace(well, num_failed=2), well, UPGRADE) == ""
    assert verdict(replace(well, num_failed=3), well, UPGRADE) == "2.9% of its requests failed"


def test_answers_are_kept_for_ten_minutes_by_group_and_revision() -> None:
    answers = Answers()
    for second in range(0, 1200, 5):
        answers.handle(RequestAnswered(("a", NEW), 0.1, None), float(second))
    answers.handle(LegFailureReported(("a", OLD)), 1200.0)
    assert answers.of([("a", NEW)], 0.0, 1300.0).num == 120
    assert answers.of([("a", NEW), ("a", OLD)], 1190.0, 1300.0).num_failed == 1
    assert answers.of([("b", NEW)], 0.0, 1300.0) == Tally()


def test_a_loss_in_a_group_that_is_not_watched_says_nothing() -> None:
    world = settled()
    world.upgrading.handle(MemberLost(("a", OLD), "i-0"), world.now)
    world.upgrading.handle(MemberLost(("a", OLD), "i-1"), world.now)
    world.apply(released("2"))
    play(world, 120)
    assert is_at(world, NEW)
