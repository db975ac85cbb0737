"""A round of one upgrade: the orders for a changed group, and the report for operators."""

from __future__ import annotations

from pdmesh.core.groups.desired import Service
from pdmesh.core.groups.revisions import Upgrade
from pdmesh.core.upgrade.events import AnnounceUpgradeStep, GroupSeen, GroupsObserved
from pdmesh.core.upgrade.round import UpgradeRound
from pdmesh.core.upgrade.trial import Trials

OLD, NEW = Service(release="1"), Service(release="2")
UPGRADE = Upgrade("chat", OLD, 1, NEW, 2)


def group(group_id: str, *, is_whole: bool = True) -> GroupSeen:
    return GroupSeen(group_id, "chat", "r1", {}, {}, is_whole, serves=True, detail="1 is away")


def round_of(*groups: GroupSeen) -> UpgradeRound:
    observed = GroupsObserved(2, {"chat": NEW}, {}, {g.group_id: g for g in groups})
    return UpgradeRound("kv/1", Trials(), observed, "chat", is_taken=False, now=7.0)


def test_a_changed_group_gets_the_new_revision_and_its_trial_begins() -> None:
    round_ = round_of(group("a"), group("b"))
    after = round_.change(UPGRADE, round_.groups[0])
    assert (after.current, after.service_of("a"), after.service_of("b")) == ("a", NEW, OLD)
    assert round_.effects == [AnnounceUpgradeStep("chat", "changing", 2, "a")]
    assert round_.trial("a", NEW).since == 7.0
    assert round_.report is not None
    assert (round_.report.num_changed, round_.report.num_groups) == (1, 2)


def test_groups_that_are_not_whole_are_named() -> None:
    assert round_of(group("a")).not_whole() == ""
    assert round_of(group("a"), group("b", is_whole=False)).not_whole() == (
        "; not whole yet: b: 1 is away"
    )
