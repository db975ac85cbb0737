"""Rolling upgrades over the real group controller and pure instances: one group at a time, all new
or all old in the end (S24).
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdmesh.core.groups.desired import (
    Group,
    Scenario,
)
from pdmesh.core.groups.revisions import (
    canary_of,
    shares,
)
from pdmesh.core.model import Role
from tests.fakes.upgrading_world import (
    NEW,
    OLD,
    is_at,
    play,
    promote,
    released,
    revision,
    running,
    settled,
    told,
)


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
def test_what_an_operator_changed_besides_is_not_taken_back() -> None:
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
