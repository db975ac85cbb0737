"""Rolling upgrades with the real group controller and simulated instances (S24).

Groups are upgraded one at a time. In the end all groups are new, or all are old.
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
def test_a_rollback_waits_for_a_plan_that_moves_instances_but_not_for_one_that_gathers() -> None:
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
def test_groups_that_the_bad_revision_broke_are_rolled_back_too() -> None:
    """The revision works in two groups, and then its files can no longer be loaded. So lost
    instances are not replaced until these two groups are rolled back.
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
def test_a_revision_still_needs_its_trial_after_the_loss_of_all_instances() -> None:
    """A power cut kills all instances before the first group is upgraded. When they come back, one
    group tries the revision, and the others keep the old one.
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
def test_a_version_applied_while_nothing_serves_needs_a_trial_too() -> None:
    """After a power cut, an operator applies another release as a repair. That release fails its
    trial, and the groups are rolled back to the revision that served before.
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
def test_a_revision_that_cannot_be_loaded_does_not_block_its_successor() -> None:
    """The files of the old revision are gone, and one group has lost an instance. That group is not
    whole until it gets a revision that can be loaded.
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
def test_a_rollback_with_too_few_instances_ends_and_reports_what_is_missing() -> None:
    """Hardware is lost during a rollback, so group b lacks an instance. None of its other instances
    keeps the bad revision.
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
    assert report.state == "went back"  # other scenarios need not wait for this rollback
    assert "not whole yet: " in report.detail
    assert world.desired == released("1", 2)
    world.start("i-6")
    play(world, 120)
    assert is_at(world, OLD), (world.describe(), world.upgrading.reports)


@pytest.mark.req("S24", "S31")
def test_without_spares_a_smaller_group_leaves_a_bad_revision_if_its_scenario_allows_it() -> None:
    """If no hardware can be added, an operator can reduce the scenario's minimum to one instance of
    each role.
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
def test_the_report_names_a_previous_version_that_is_no_longer_kept() -> None:
    world = settled()
    world.lost_versions = frozenset({1})
    world.apply(released("2"))
    play(world, 120, fails=lambda revision: revision == NEW)
    assert running(world) == {g: {OLD} for g in "abc"}
    report = world.upgrading.reports["chat"]
    assert report.state == "stopped"
    assert report.detail.endswith("; version 1 is not kept any more: apply a correct file")
    world.apply(released("1"))
    play(world, 30)
    assert is_at(world, OLD)


@pytest.mark.req("S24")
def test_other_changes_of_an_operator_are_not_rolled_back() -> None:
    """Only the groups are rolled back automatically. If several versions changed other settings, an
    operator must repair the desired state.
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
    assert (report.state, "apply a correct file" in report.detail) == ("stopped", True)
    world.apply(released("1"))
    play(world, 60)
    assert is_at(world, OLD)


@pytest.mark.req("S24")
def test_a_rolled_back_revision_can_be_tried_again() -> None:
    world = settled()
    world.apply(released("2"))
    play(world, 60, sick=NEW)
    assert is_at(world, OLD)
    world.apply(released("2"))
    play(world, 120)
    assert is_at(world, NEW)


@pytest.mark.req("S24")
def test_a_third_revision_takes_over_from_a_half_finished_second_one() -> None:
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
def test_every_upgrade_ends_with_all_groups_new_or_all_old(
    num_groups: int,
    num_spare: int,
    wrong: str,
    seed: int,
    elections: set[int],
    kills: set[int],
    canary: float,
) -> None:
    """Leaders change, and instances die and come back blank, while the upgrade runs.

    In the end no group has a bad revision, and every group has a good one.
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
        # The upgrade waits for blank instances that never come.
        world.apply(released("1", num_groups))
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
def test_a_canary_is_rolled_back_if_it_is_bad_or_an_operator_orders_it(is_sick: bool) -> None:
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
def test_a_canary_serves_besides_the_groups_until_it_is_promoted() -> None:
    world = settled()
    world.apply(released("2"), canary_share=0.25)
    play(world, 60)
    # a quarter of six prefills and six decodes, rounded
    assert world.counts()[canary_of("chat")] == (2, 2, 0)
    assert shares(world.upgrades.values()) == {canary_of("chat"): 0.25}
    assert {g: r for g, r in running(world).items() if g in "abc"} == {g: {OLD} for g in "abc"}
    world.elect()
    promote(world)
    play(world, 200)
    assert is_at(world, NEW)


@pytest.mark.req("S24")
def test_a_revision_that_fails_in_the_second_group_is_removed_from_the_first() -> None:
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
